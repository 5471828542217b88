"""Vectors of which only some coordinates are sent: a public random choice, known by its seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightning_dp import _validate
from lightning_dp._validate import normalise, whole

__all__ = ["SparseVector", "random_k", "shared_mask"]

_DTYPES = (torch.float32, torch.float64)


def shared_mask(seed: int, round_: int, size: int, keep: int) -> Tensor:
    """Choose ``keep`` of ``size`` coordinates, all sets equally likely: int64, sorted, distinct.

    A function of its arguments only, so everyone who knows the seed has the same set, on any
    machine and with any version of NumPy: each coordinate gets one raw 64-bit word of the Philox
    4x64 stream with key (seed, round), and those with the smallest words are kept. No global
    random state is read or changed. The choice is public and costs no privacy.

    Args:
        seed: shared by all, 0 <= seed < 2^64.
        round_: 0 <= round < 2^64; each has its own set.
        size: d, the number of coordinates.
        keep: k, 1 <= k <= d.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> shared_mask(seed=7, round_=0, size=10, keep=3)
        tensor([1, 4, 8])
    """
    seed, round_, size, keep = _check_mask(seed, round_, size, keep)
    # Raw words, and no method of a Generator: NumPy keeps the stream of a bit generator the same in
    # all versions, but not what its methods make of it.
    stream = np.random.Philox(key=np.array([seed, round_], dtype=np.uint64))
    words = stream.random_raw(size)
    last = np.partition(words, keep - 1)[keep - 1]
    below = np.flatnonzero(words < last)
    ties = np.flatnonzero(words == last)[: keep - below.size]  # of equal words the first ones
    return torch.from_numpy(np.sort(np.concatenate([below, ties])).astype(np.int64))


def _check_mask(
    seed: object, round_: object, size: object, keep: object
) -> tuple[int, int, int, int]:
    """Return the four as plain numbers, or raise."""
    length = whole("size", size, 1, 2**62)
    return (
        _validate.seed("seed", seed),
        _validate.seed("round_", round_),
        length,
        whole("keep", keep, 1, length),
    )


@dataclass(frozen=True)
class SparseVector:
    """A vector with few known coordinates, the others 0: their values, and a public seed.

    The coordinates are ``shared_mask(seed, round_, size, len(values))``: who knows seed and round
    needs to be sent the values only.

    Args:
        values: float32 or float64, at the coordinates in increasing order.
        size: d, the length of the vector.
        seed, round_: as in :func:`shared_mask`.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> sent = random_k(torch.ones(1000), keep=100, seed=7, round_=0)
        >>> sent.keep, SparseVector(sent.values, size=1000, seed=7, round_=0).dense().sum()
        (100, tensor(1000.))
    """

    values: Tensor = field(repr=False)
    size: int
    seed: int
    round_: int

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.dtype not in _DTYPES:
            raise ValueError(
                f"values of shape {tuple(self.values.shape)} and {self.values.dtype} must be a "
                "vector of float32 or float64."
            )
        normalise(self, _validate.seed, "seed", "round_")
        normalise(self, whole, "size")
        _check_mask(self.seed, self.round_, self.size, self.keep)

    @property
    def keep(self) -> int:
        """k, the number of known coordinates."""
        return len(self.values)

    def coordinates(self) -> Tensor:
        """Return the sorted coordinates at which the values belong."""
        return shared_mask(self.seed, self.round_, self.size, self.keep)

    def dense(self) -> Tensor:
        """Return all d entries."""
        if self.keep == self.size:
            return self.values.clone()
        full = torch.zeros(self.size, dtype=self.values.dtype)
        full[self.coordinates()] = self.values.cpu()
        return full


def random_k(u: Tensor, keep: int, seed: int, round_: int) -> SparseVector:
    """Return S(u): d/k times ``keep`` = k of the d entries of ``u``, the rest 0.

    Unbiased over a random seed, E S(u) = u, with E‖S(u) - u‖² = (d/k - 1) ‖u‖². The set does not
    depend on u: only the values say anything about the data.

    Args:
        u: flat, float32 or float64, of length d.
        keep: k, 1 <= k <= d; k = d sends u itself.
        seed, round_: as in :func:`shared_mask`.

    Raises:
        ValueError: naming the argument that is out of its range.

    Definition 3 of the paper that :class:`~lightning_dp.CubicNewton` names.

    Example:
        >>> random_k(torch.arange(10.0), keep=5, seed=7, round_=0).dense()
        tensor([ 0.,  2.,  0.,  6.,  8.,  0., 12.,  0., 16.,  0.])
    """
    if u.dim() != 1 or u.dtype not in _DTYPES:
        raise ValueError(
            f"u has shape {tuple(u.shape)} and {u.dtype}; it must be flat, float32 or float64."
        )
    seed, round_, _, keep = _check_mask(seed, round_, len(u), keep)
    if keep == len(u):
        return SparseVector(u.detach().clone(), keep, seed, round_)
    coordinates = shared_mask(seed, round_, len(u), keep)
    values = u.detach()[coordinates.to(u.device)] * (len(u) / keep)
    return SparseVector(values, len(u), seed, round_)
