"""Weights and buffers in which a model keeps what it saw of its records."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dp._held import same_tensor
from lightning_dp.isolation.comparison import Batch, Comparisons
from lightning_dp.isolation.model_copies import same_elsewhere, state_of
from lightning_dp.isolation.outcome import ISOLATED, Isolation
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.randomness import seed
from lightning_dp.isolation.synthetic import take_rows

__all__ = ["probe_state"]

_KEPT = (
    "training_step writes what it sees of the records into weights or buffers (running statistics, a "
    "codebook, a centre, counts of tokens), without noise: they are in every checkpoint, and steer "
    "later steps. Leave them fixed, compute them from weights, or make them parameters that are trained"
)


def probe_state(comparisons: Comparisons, pool: Any, n: int) -> Isolation:
    """Compare the weights and buffers that steps leave behind, after other records.

    Args:
        pool: with at least 2n records.
    """
    if _writes_nothing(comparisons, pool, n):
        return ISOLATED
    names = _tensors_that_keep_records(comparisons.passes, pool, n)
    return Isolation("kept", f"{_KEPT}: {', '.join(names[:5])}", names) if names else ISOLATED


def _writes_nothing(comparisons: Comparisons, pool: Any, n: int) -> bool:
    """Tell whether passes that were made already left all weights and buffers as they were."""
    others = [n + i if i % 2 == 0 else i for i in range(n)]
    batches = Batch.of(pool, range(n)), Batch.of(pool, others)
    return not any(comparisons.answer(each).may_write for each in batches)


def _tensors_that_keep_records(passes: Passes, pool: Any, n: int) -> tuple[str, ...]:
    """Name the weights and buffers whose values after n records depend on the records.

    All passes begin with the same state and the same random numbers. A record n times over shows
    what is the same on average, as counts may be.

    Args:
        pool: with at least 2n records.
    """
    first, second = (_written(passes, take_rows(pool, range(i, i + n))) for i in (0, n))
    if not first and not second:
        return ()
    others = (_written(passes, take_rows(pool, [row] * n)) for row in range(n))
    found: set[str] = set()
    for other in (second, *others):
        in_one_only = first.keys() ^ other.keys()
        in_both = first.keys() & other.keys()
        found |= in_one_only | {
            name for name in in_both if not same_tensor(first[name], other[name])
        }
    return tuple(sorted(found))


def _written(passes: Passes, batch: Any) -> dict[str, Tensor]:
    """Return the weights and buffers that a forward pass changes, as they are after it."""
    own = dict(state_of(passes.module))
    with passes.on_copy() as module:
        seed()
        passes.forward(module, batch)
        return {
            name: after.detach().clone()
            for name, after in state_of(module)
            if name not in own or not same_elsewhere(own[name].detach(), after)
        }
