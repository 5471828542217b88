"""The privacy boundary as three types: what is asked, what was bounded, what may be seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["BoundedSum", "Query", "Release", "Term"]


@dataclass(frozen=True)
class Term:
    """One gradient inside a query: ``weight`` times the record's gradient at ``point``.

    Args:
        weight: w_k, any finite number.
        point: x_k as a flat vector of length d (``parameters()`` order, concatenated), or ``None``
            for the parameters the model has now. Public: made from released values only.
    """

    weight: float = 1.0
    point: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"Term(weight={self.weight}) must be a finite number.")


@dataclass(frozen=True)
class Query:
    r"""A question to the data: :math:`\sum_i \mathrm{clip}_C(\sum_k w_k\, g_i(x_k))` plus noise.

    g_i(x) is the gradient of record i at parameters x, clip_C scales a vector down to L2 norm C
    (and leaves shorter ones alone), and the sum gets Gaussian noise of standard deviation z·C.
    The combination is taken per record *before* clipping.

    Args:
        terms: the (w_k, x_k).
        clip_norm: C > 0: the L2 sensitivity of the sum under add/remove of one record.
            Infinite only without noise.
        noise_multiplier: z >= 0.

    Raises:
        ValueError: for values outside these bounds (NaN included).

    Example:
        >>> Query(terms=(Term(),), clip_norm=1.0, noise_multiplier=1.1).clip_norm
        1.0
    """

    terms: tuple[Term, ...]
    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("Query(terms=()) asks nothing; give at least one Term.")
        if not self.clip_norm > 0:
            raise ValueError(f"Query(clip_norm={self.clip_norm}) must be greater than 0.")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(
                f"Query(noise_multiplier={self.noise_multiplier}) must be a finite number >= 0."
            )
        if math.isinf(self.clip_norm) and self.noise_multiplier > 0:
            raise ValueError(
                f"An infinite clip norm bounds nothing, so noise_multiplier="
                f"{self.noise_multiplier} has no meaning: set a finite max_grad_norm, "
                "or noise_multiplier=0 for training without privacy."
            )

    @property
    def weight_here(self) -> float:
        """The weight of the gradient at the model's present parameters."""
        return sum(term.weight for term in self.terms if term.point is None)

    @property
    def other_points(self) -> int:
        """How many further passes over the batch the query needs."""
        return sum(term.point is not None for term in self.terms)


@dataclass(frozen=True)
class BoundedSum:
    """A sum over records in which each record's part has L2 norm at most ``clip_norm``.

    Sensitive: it must not be logged, saved or compared. Only
    :func:`lightning_dp.clipping.bounded_sum` makes one from data, and only
    :func:`lightning_dp.noise.add_noise` turns one into something that may be seen.

    Args:
        value: flat vector of length d.
        clip_norm: C, the L2 sensitivity under add/remove of one record.
    """

    value: Tensor = field(repr=False)
    clip_norm: float

    def plus(self, other: BoundedSum) -> BoundedSum:
        """The sum over both sets of records, which must be disjoint (chunks of one batch)."""
        if self.clip_norm != other.clip_norm:
            raise ValueError(
                f"Sums bounded by different clip norms ({self.clip_norm} and {other.clip_norm}) "
                "belong to different queries and cannot be added."
            )
        return BoundedSum(self.value + other.value, self.clip_norm)


@dataclass(frozen=True)
class Release:
    """A noised sum or mean: the only thing about the data that leaves the mechanism.

    Args:
        value: flat vector of length d.
        noise_std: standard deviation of the noise in each coordinate.
    """

    value: Tensor
    noise_std: float

    def mean(self, expected_batch_size: float) -> Release:
        """The sum over B, the *expected* batch size: the realised one is private."""
        if not expected_batch_size > 0:
            raise ValueError(f"expected_batch_size={expected_batch_size} must be greater than 0.")
        return Release(self.value / expected_batch_size, self.noise_std / expected_batch_size)
