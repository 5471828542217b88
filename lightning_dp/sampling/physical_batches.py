"""Physical batches for a logical one: the same q in smaller pieces."""

from __future__ import annotations

import math

from scipy.stats import binom

from lightning_dp._validate import positive, probability, whole
from lightning_dp.sampling.base import check_sizes

__all__ = ["factorisations", "largest_chunk"]


def factorisations(logical_batch_size: int) -> list[tuple[int, int]]:
    """All ``(batch_size, accumulate_grad_batches)`` whose product is the logical batch size.

    Each gives exactly the same q = batch_size · accumulate_grad_batches · world_size / N.

    Args:
        logical_batch_size: at least 1; of one process.

    Returns:
        The pairs, the largest ``batch_size`` first.

    Raises:
        ValueError: if the size is not a whole number of at least 1.

    Example:
        >>> factorisations(12)
        [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    """
    size = whole("logical_batch_size", logical_batch_size)
    return [(size // each, each) for each in range(1, size + 1) if size % each == 0]


def largest_chunk(
    logical_batch_size: int,
    accumulate: int,
    world_size: int,
    num_records: int,
    *,
    relative_rate: float = 1.0,
    chance: float = 1e-9,
) -> int:
    """Records in the largest physical batch, but for a small chance at each step.

    A Poisson batch of a process has a binomial number n of records; it is cut into ``accumulate``
    chunks of at most ⌈n / accumulate⌉.

    Args:
        logical_batch_size: batch_size · accumulate of one process, its mean.
        accumulate: chunks of a logical batch.
        world_size: number of processes.
        num_records: N over all of them.
        relative_rate: how much larger than q the largest rate of a step is (restarts of ``Diff2``).
        chance: the probability, at one step, of a larger one.

    Raises:
        ValueError: if an argument is out of range or NaN.

    Example:
        >>> largest_chunk(256, 1, 1, 60_000), largest_chunk(256, 8, 1, 60_000)
        (357, 45)
    """
    num_records = whole("num_records", num_records, 0)
    check_sizes(num_records, positive("logical_batch_size", logical_batch_size))
    accumulate, world_size = whole("accumulate", accumulate), whole("world_size", world_size)
    chance = probability("chance", chance)
    relative_rate = positive("relative_rate", relative_rate)
    rate = min(1.0, logical_batch_size * world_size * relative_rate / num_records)
    count = binom.isf(chance, math.ceil(num_records / world_size), rate)
    return max(1, math.ceil(int(count) / accumulate))
