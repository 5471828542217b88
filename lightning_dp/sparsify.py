"""Which coordinates are kept when only some of them are sent: public random choices."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import Tensor

__all__ = ["shared_mask"]


def shared_mask(seed: int, round_: int, size: int, keep: int) -> Tensor:
    """``keep`` of ``size`` coordinates, all sets equally likely: int64, sorted, distinct.

    A function of its arguments only, so everyone who knows the seed has the same set, on any
    machine and with any version of NumPy: each coordinate gets one raw 64-bit word of the Philox
    4x64 stream with key (seed, round), and those with the smallest words are kept. No global
    random state is read or changed. The choice is public and costs no privacy.

    Args:
        seed: shared by all, 0 <= seed < 2^64.
        round_: 0 <= round < 2^64; each has a set of its own.
        size: d, the number of coordinates.
        keep: k, 1 <= k <= d.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> shared_mask(seed=7, round_=0, size=10, keep=3)
        tensor([1, 4, 8])
    """
    for name, value, low, high in (
        ("seed", seed, 0, 2**64 - 1),
        ("round_", round_, 0, 2**64 - 1),
        ("size", size, 1, 2**62),
        ("keep", keep, 1, size),
    ):
        if not (_is_whole(value) and low <= value <= high):
            raise ValueError(f"{name}={value!r} must be a whole number from {low} to {high}.")
    stream = np.random.Philox(key=np.array([seed, round_], dtype=np.uint64))
    words = stream.random_raw(size)
    last = np.partition(words, keep - 1)[keep - 1]
    below = np.flatnonzero(words < last)
    ties = np.flatnonzero(words == last)[: keep - below.size]  # of equal words the first ones
    return torch.from_numpy(np.sort(np.concatenate([below, ties])).astype(np.int64))


def _is_whole(value: object) -> bool:
    """Whether a value is an integer, of any library, and no truth value."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
