"""Batches of very large data sets take the memory of a batch, not of the data set."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
from torch.utils.data import Dataset

from lightning_dp.sampling import Poisson
from lightning_dp.sampling.repeats import find_repeat

RECORDS = 10**8


class Large(Dataset[int]):
    """So many records that a number for each would take 800 MB."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> int:
        return index


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy had at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_batch_of_many_records_takes_memory_for_the_batch():
    rng = np.random.default_rng(0)
    batches = []
    peak = peak_of(lambda: batches.append(Poisson().draw(RECORDS, 256 / RECORDS, rng)))
    assert 150 < len(batches[0]) < 400
    assert len(np.unique(batches[0])) == len(batches[0])
    assert peak < 64 * 1024


def test_looking_for_repeated_records_takes_none():
    assert peak_of(lambda: find_repeat(Large())) < 64 * 1024
