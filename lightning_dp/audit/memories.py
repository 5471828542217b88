"""Whether a model keeps what it saw of its records, in buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dp.audit.passes import Passes
from lightning_dp.audit.synthetic import take_rows

__all__ = ["KEPT", "buffers_that_keep_records"]

KEPT = (
    "training_step writes what it sees of the records into buffers (running statistics, a codebook, "
    "a centre, counts of tokens), without noise: they are in every checkpoint, and steer later steps. "
    "Leave them fixed, compute them from weights, or make them parameters that are trained"
)


def buffers_that_keep_records(passes: Passes, pool: Any, n: int) -> tuple[str, ...]:
    """Names of the buffers that are not the same after passes of n records, whichever they are.

    All passes begin with the same state and the same random numbers. A record n times over shows
    what is the same on average, as counts may be.

    Args:
        pool: with at least 2n records.
    """
    if not passes.has_buffers:
        return ()
    first = passes.buffers_after(take_rows(pool, range(n)))
    found: set[str] = set()
    for rows in (range(n, 2 * n), *([row] * n for row in range(n))):
        other = passes.buffers_after(take_rows(pool, rows))
        names = first.keys() | other.keys()
        found.update(name for name in names if not _same(first.get(name), other.get(name)))
    return tuple(sorted(found))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return bool(((a == b) | ((a != a) & (b != b))).all())
