r"""The privacy boundary: query, bounded sum, release. The proof is on this page.

**Claim.** What one step lets out of the data is the Gaussian mechanism with noise multiplier z on
the records of its batch: :math:`\sum_i v_i + N(0, z^2 C^2 I)` with :math:`\|v_i\| \le C` for every
record i. Accounting turns that, and how batches are drawn, into ε.

**Argument.**

1. A :class:`Query` is public. It is formed from released values before data are touched, and it
   fixes C and z.
2. :func:`bounded_sum` is the only function that makes a :class:`BoundedSum` from data. It scales
   each record's vector by a factor that depends on that vector's norm alone, so one record more or
   less moves the sum by a vector of norm at most C, whatever the other records are. (That a
   record's vector depends on that record alone is for the isolation check to find out.)
3. A bounded sum also begins with no records (:meth:`BoundedSum.empty`), or from a party that is
   trusted to have bounded it (:meth:`BoundedSum.received`). :meth:`BoundedSum.plus` adds sums over
   disjoint records, so each record has one part in the result.
4. :func:`add_noise` is the only function that turns a bounded sum into a :class:`Release`. It draws
   the noise, with C from the sum itself, so that the noise is never scaled to a bound that was not
   enforced. A sum may begin with its noise, and must where parameters are sharded: then
   :func:`begin_with_noise` has drawn it, with C from the empty sum, and :func:`add_noise` compares
   and draws none. No other function draws noise.
5. All else (estimators, schedules, post-processing, the optimizer) sees queries and releases only,
   and what is computed from a release is as private as the release.

A test reads the whole package and fails if anything outside this module constructs a sum or a
release by other means, or draws noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import above_0, finite, normalise, not_negative
from lightning_dp._world import World
from lightning_dp.functional import (
    check_coordinates,
    clip_factors_and_unit,
    flat_dtype,
    flat_zeros,
    number_of_entries,
)

__all__ = [
    "BoundedSum",
    "PerSampleGradients",
    "Query",
    "Release",
    "State",
    "Term",
    "add_noise",
    "begin_with_noise",
    "bounded_sum",
]

# Of an estimator, schedule or post-processor, from step to step: tensors, numbers, strings, and lists
# and dicts of them, made of released values only. It goes into checkpoints.
State: TypeAlias = dict[str, Any]

_SMALLEST = 1e-30  # a clip norm that leaves float32 room for a sum of millions of records


@dataclass(frozen=True)
class Term:
    """``weight`` times a record's gradient at ``point``, or its Hessian there times ``direction``.

    Args:
        weight: w_k, any finite number.
        point: x_k, public, as a flat vector of length d (``parameters()`` order, concatenated);
            ``None`` for the parameters the model has now.
        direction: u_k, public, flat of length d; ``None`` for the gradient.
    """

    weight: float = 1.0
    point: Tensor | None = field(default=None, repr=False)
    direction: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        normalise(self, finite, "weight", of="Term")


@dataclass(frozen=True)
class Query:
    r"""A question to the data: :math:`\sum_i \mathrm{clip}_C(P_c \sum_k w_k\, h_{ik})` plus noise.

    h_ik is the gradient of record i at parameters x_k, or its Hessian there times a direction,
    P_c keeps the coordinates in c, clip_C scales vectors longer than C down to L2 norm C, and the sum
    gets Gaussian noise of standard deviation z·C in each coordinate. The combination is taken, and
    restricted to c, per record *before* clipping.

    Args:
        terms: the (w_k, x_k, u_k).
        clip_norm: C > 0: the L2 sensitivity of the sum under add/remove of one record.
            Infinite only without noise.
        noise_multiplier: z >= 0.
        coordinates: c, int64, sorted and distinct; the answer has one entry for each. ``None`` for
            all. Public: not chosen by looking at data.
        count_weight: κ >= 0. Above 0 the answer has one entry more, the number of clipped records
            (:class:`~lightning_dp.clipping.CountedGradients`), and the noise is z·C·√(1 + κ²).
    """

    terms: tuple[Term, ...]
    clip_norm: float
    noise_multiplier: float
    coordinates: Tensor | None = field(default=None, repr=False)
    count_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.coordinates is not None:
            check_coordinates("Query(coordinates=...)", self.coordinates)
        normalise(self, above_0, "clip_norm", of="Query")
        normalise(self, not_negative, "noise_multiplier", of="Query")
        normalise(self, not_negative, "count_weight", of="Query")
        if not self.terms:
            raise ValueError("Query(terms=()) asks nothing; give at least one Term.")
        if math.isinf(self.clip_norm) and self.noise_multiplier > 0:
            raise ValueError(
                f"An infinite clip norm bounds nothing, so noise_multiplier="
                f"{self.noise_multiplier} has no meaning: set a finite max_grad_norm, "
                "or noise_multiplier=0 for training without privacy."
            )
        if self.count_weight > 0 and not (self.coordinates is None and self.clip_norm < math.inf):
            raise ValueError(
                f"Query(count_weight={self.count_weight}) counts clipped records next to a whole "
                "gradient of finite clip norm; leave out coordinates, or the count."
            )

    def size(self, all_coordinates: int) -> int:
        """Return the length of the answer, given d."""
        entries = all_coordinates if self.coordinates is None else len(self.coordinates)
        return entries + (self.count_weight > 0)

    @cached_property
    def sensitivity(self) -> float:
        """C·√(1 + κ²), the L2 bound of one record's part in the answer; C without a count."""
        return self.clip_norm * math.hypot(1.0, self.count_weight)

    @property
    def is_gradient(self) -> bool:
        """True if each record's whole gradient at one point is asked for, not a combination."""
        return self.coordinates is None and len(self.terms) == 1 and self.terms[0].direction is None

    @cached_property
    def runs_again(self) -> bool:
        """True if more is asked for than the gradient at the present parameters."""
        return any(t.point is not None or t.direction is not None for t in self.terms)


class PerSampleGradients(Protocol):
    """The vectors of n records, one each, of which only norms and weighted sums are asked for."""

    def norms(self) -> Tensor:
        """L2 norm of each record's vector, shape (n,)."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_i weights[i] * g_i``, flat; exactly 0 from a record of weight 0, even if NaN."""

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        """Add that to a flat vector."""


@dataclass(frozen=True)
class BoundedSum:
    """A sum over records in which each record's part has L2 norm at most ``clip_norm``.

    Sensitive: it must not be logged, saved or compared. It is made by :func:`bounded_sum`,
    :meth:`empty` or :meth:`received`, never by its constructor.
    """

    value: Tensor = field(repr=False)  # flat, of length d or of the query's coordinates
    clip_norm: float  # C, the L2 sensitivity under add/remove of one record
    noise_std: float | None = None  # of the noise that it began with; None if it began empty

    @classmethod
    def empty(cls, query: Query, params: Sequence[Tensor]) -> BoundedSum:
        """Return the answer of no records: zeros, in at least float32."""
        size = query.size(number_of_entries(params))
        return cls(flat_zeros(params, size), query.sensitivity)

    @classmethod
    def received(cls, value: Tensor, query: Query) -> BoundedSum:
        """Return another party's sum, trusting it to be of :func:`bounded_sum` for this query."""
        return cls(value, query.sensitivity)

    def plus(self, other: BoundedSum) -> BoundedSum:
        """Return the sum over both sets of records, which must be disjoint, in the memory of this one."""
        self.check_bound(other.clip_norm)
        if other.value is not self.value:  # else the other was summed onto this one
            self.value.add_(other.value)
        return self

    def check_bound(self, clip_norm: float) -> None:
        """Refuse to add records of another bound."""
        if self.clip_norm != clip_norm:
            raise ValueError(
                f"Sums bounded by different clip norms ({self.clip_norm} and {clip_norm}) "
                "belong to different queries and cannot be added."
            )


def bounded_sum(
    gradients: PerSampleGradients, clip_norm: float, onto: BoundedSum | None = None
) -> BoundedSum:
    r"""Return :math:`\sum_i g_i \min(1, C/\|g_i\|)`: one record moves it by at most C.

    Each record contributes a vector of L2 norm at most ``clip_norm`` (up to rounding), and affects no
    other's part; one whose gradient is not finite, or scaled down is too small for float32,
    contributes zero. ``onto``, a sum over other records for the same C, is added to in its own memory.
    """
    if not clip_norm >= _SMALLEST:
        raise ValueError(
            f"clip_norm={clip_norm} must be at least {_SMALLEST:g}: float32 has no room for the sum of "
            "records that small."
        )
    if onto is not None:
        onto.check_bound(clip_norm)
    factors, unit = clip_factors_and_unit(gradients.norms(), clip_norm)
    if onto is None:
        total = gradients.weighted_sum(factors)
    else:
        total = onto.value if unit == 1 else onto.value.div_(unit)
        gradients.add_weighted_sum(factors, total)
    noise_std = None if onto is None else onto.noise_std
    return BoundedSum(total if unit == 1 else total.mul_(unit), clip_norm, noise_std)


@dataclass(frozen=True)
class Release:
    """A noised sum or mean: the only thing about the data that leaves the mechanism."""

    value: Tensor  # flat, of length d or of the query's coordinates
    noise_std: float  # standard deviation of the noise in each coordinate

    @classmethod
    def of_nothing(cls, params: Sequence[Tensor]) -> Release:
        """Return zeros without noise, the release of a step without a query."""
        return cls(flat_zeros(params), 0.0)

    @classmethod
    def received(cls, value: Tensor, noise_std: float) -> Release:
        """Return other parties' noised sums, trusting them to have added the noise."""
        return cls(value, noise_std)

    def part(self, entries: slice) -> Release:
        """Return some entries, in the same memory."""
        return Release(self.value[entries], self.noise_std)

    def mean(self, expected_batch_size: float) -> Release:
        """Return the sum over the *expected* batch size, in the same memory; the realised is private."""
        expected_batch_size = above_0("expected_batch_size", expected_batch_size)
        return Release(self.value.div_(expected_batch_size), self.noise_std / expected_batch_size)


def begin_with_noise(
    query: Query, params: Sequence[Tensor], source: NoiseSource, world: World
) -> Callable[[], BoundedSum]:
    """Begin a query's sum with its noise, drawn in the background: :func:`add_noise` then adds none.

    Each process draws the noise of its share, as in :func:`add_noise`. Where parameters are sharded,
    ``params`` are the shards that this process holds, and so is the sum: that over all processes is
    added up as it is made, onto the noise, so an un-noised total exists nowhere.

    Returns:
        A function that waits until all noise is there, and gives the sum.
    """
    if world.is_sharded and (query.count_weight > 0 or query.coordinates is not None):
        raise RefusedSetting(
            "count_clipped and coordinates are not supported with sharded parameters: leave them out.",
            topic="out-of-order",
        )
    size = query.size(number_of_entries(params))
    memory = params[0].new_empty(size, dtype=source.dtype(flat_dtype(params)))
    total = BoundedSum(memory, query.sensitivity)
    noise_std = _noise_std(total, query.noise_multiplier)
    finish = source.begin_share(memory, world.share(size), noise_std)

    def begun() -> BoundedSum:
        finish()
        return replace(total, noise_std=noise_std)

    return begun


def add_noise(
    total: BoundedSum, noise_multiplier: float, source: NoiseSource, world: World
) -> Release:
    """Noise the sum over all ranks once: ``sum_ranks total + N(0, (z C)^2 I)``.

    Each rank adds the noise of its share of the entries to its own sum, from its own source, *before*
    the ranks' sums are added up, and every rank gets the same release: each entry has the noise of one
    rank, and the un-noised total exists nowhere. The noise is added in the memory of the sum (a secure
    source takes a float64 vector besides). A sum that began with its noise gets no more.
    """
    noise_std = _noise_std(total, noise_multiplier)
    has_begun = total.noise_std is not None
    if (has_begun or world.is_sharded) and total.noise_std != noise_std:
        raise RefusedSetting(
            f"A sum began with noise of standard deviation {total.noise_std}, and {noise_std} is to be "
            "released: begin_with_noise() is for the same query, and must come first over shards.",
            topic="out-of-order",
        )
    if world.is_sharded:
        return Release(total.value, noise_std)
    value = total.value.to(source.dtype(total.value.dtype))
    if noise_std > 0 and not has_begun:
        # Shares are disjoint: an entry with noise from every rank would have n times the variance.
        source.add_normal(value[world.share(len(value))], noise_std)
    return Release(source.released(world.all_reduce(value), noise_std), noise_std)


def _noise_std(total: BoundedSum, noise_multiplier: float) -> float:
    """Return z·C, with C from the sum itself."""
    noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
    if noise_multiplier == 0:  # explicitly not private; keeps an infinite clip norm meaningful
        return 0.0
    noise_std = noise_multiplier * total.clip_norm
    if not math.isfinite(noise_std):
        raise RefusedSetting(
            f"The sum is not bounded (clip norm {total.clip_norm}); refusing to noise it.",
            topic="out-of-order",
        )
    return noise_std
