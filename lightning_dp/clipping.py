r"""Clipping rules: how each record's gradient is scaled to a norm of at most C before the sum.

A rule is public, and its factors for a record depend on the norms of that record's gradient alone.
:func:`~lightning_dp.boundary.bounded_sum` clips gradients times factors to C once more, so the
sensitivity does not depend on the factors. A gradient that is not finite becomes zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_dp._validate import between, normalise, positive
from lightning_dp.boundary import PerSampleGradients, Query, Release
from lightning_dp.functional import LARGEST_NORM, clip_factors, has_float64

__all__ = [
    "AdaptiveQuantile",
    "Automatic",
    "Clipping",
    "CountedGradients",
    "Flat",
    "ParameterGroups",
    "PerGroup",
    "Rescaling",
    "check_clipping",
    "split_count",
]

_LARGEST_CHANGE = 50.0  # of the logarithm of C in one step: noise alone goes no further


class GradientsByParameter(PerSampleGradients, Protocol):
    """Gradients whose norms are known for each parameter, too."""

    def norms_by_parameter(self) -> Tensor:
        """L2 norm of each record's gradient of each parameter, shape (n, parameters)."""


class Rescaling(ABC):
    """A rule for known parameters: a factor for each norm of a record's gradient."""

    is_constant: ClassVar[bool] = True
    """True if C is the same at every step."""

    def bind(self, names: Sequence[str]) -> Rescaling:
        """Return the rule for the trained parameters of these names, in the order of flat vectors."""
        return self

    @abstractmethod
    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Return the factor of each record's gradient, of the shape of its norms."""

    @abstractmethod
    def relative_norms(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Return norms in units of the one from which on the rule bends, shape (n,)."""

    def norms(self, gradients: GradientsByParameter) -> Tensor:
        """Return the norms that the rule takes: of whole gradients, shape (n,)."""
        return gradients.norms()

    def rescale(self, gradients: GradientsByParameter, clip_norm: float) -> PerSampleGradients:
        """Return the gradients by this rule, whose norms are at most C."""
        norms = self.norms(gradients)
        return _RescaledGradients(gradients, norms, self.factors(norms, clip_norm))


class _RescaledGradients(PerSampleGradients):
    """Gradients times factors, of shape (n,) or (n, parameters) as their norms are."""

    def __init__(self, gradients: GradientsByParameter, norms: Tensor, factors: Tensor) -> None:
        self._gradients, self._factors = gradients, factors
        rescaled, is_lost = norms * factors, ~(norms <= LARGEST_NORM)
        if norms.dim() > 1:
            rescaled, is_lost = torch.linalg.vector_norm(rescaled, dim=1), is_lost.any(1)
        self._norms = rescaled.masked_fill(is_lost, math.inf)

    def norms(self) -> Tensor:
        return self._norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._gradients.weighted_sum(self._weights(weights))

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        self._gradients.add_weighted_sum(self._weights(weights), onto)

    def _weights(self, weights: Tensor) -> Tensor:
        return (weights if self._factors.dim() == 1 else weights.unsqueeze(1)) * self._factors


@dataclass(frozen=True)
class Flat(Rescaling):
    r"""clip(g) = g · min(1, C / ‖g‖): the whole gradient at one norm (Abadi et al., arXiv:1607.00133).

    Sensitivity C, the run's ``max_grad_norm``.

    Example:
        >>> Flat().factors(torch.tensor([0.5, 2.0]), clip_norm=1.0)
        tensor([1.0000, 0.5000])
    """

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        return clip_factors(norms, clip_norm)

    def relative_norms(self, norms: Tensor, clip_norm: float) -> Tensor:
        return norms if clip_norm == math.inf else norms / clip_norm

    def rescale(self, gradients: GradientsByParameter, clip_norm: float) -> PerSampleGradients:
        return gradients  # the bounded sum does no more


@dataclass(frozen=True)
class Automatic(Rescaling):
    r"""clip(g) = g · C / (‖g‖ + γ): gradients of every norm count alike, and none is clipped.

    Sensitivity C, the run's ``max_grad_norm``, since ‖g‖ / (‖g‖ + γ) < 1. C only scales the private
    gradient: choose the learning rate for C = 1 instead of tuning both. γ is the norm at which a record
    counts half; smaller gradients fade out, as they must near an optimum (Bu, Wang, Zha and Karypis,
    Automatic Clipping, 2023, arXiv:2206.07136, AUTO-S).

    Args:
        gamma: γ >= 1e-6, in units of a gradient's norm. Public.

    Raises:
        ValueError: if ``gamma`` is outside of its range.

    Example:
        >>> Automatic(gamma=0.01).factors(torch.tensor([0.01, 0.99]), clip_norm=1.0)
        tensor([50.,  1.])
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        normalise(self, between("[1e-6, inf)"), "gamma", of="Automatic")

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        factors = clip_norm / (_wide(norms) + self.gamma)  # 0 or NaN where the norm is not finite
        return torch.nan_to_num(factors, nan=0.0).to(norms.dtype)

    def relative_norms(self, norms: Tensor, clip_norm: float) -> Tensor:
        return norms / self.gamma


@dataclass(frozen=True)
class PerGroup:
    r"""Each group of parameters clipped by itself: clip(g)_k = g_k · min(1, C_k / ‖g_k‖).

    Sensitivity :math:`C = \sqrt{\sum_k C_k^2}`, which every entry's noise is scaled to: a norm that is
    larger than its group needs costs noise everywhere. It pays where the norms of groups differ by far
    and each C_k is near its own (McMahan et al., Learning Differentially Private Recurrent Language
    Models, 2018, arXiv:1710.06963, "per-layer clipping").

    Args:
        groups: the clip norm C_k > 0 of each pattern over dotted parameter names (``fnmatch``: ``*``
            stands for any characters). A parameter is in the group of the first pattern that matches
            it; each trained parameter must match one, and each pattern one of them.

    Raises:
        ValueError: naming the pattern whose norm is out of its range.

    Example:
        >>> rule = PerGroup({"head.*": 3.0, "*": 4.0})
        >>> rule.sensitivity
        5.0
        >>> rule.bind(["body.weight", "head.weight", "head.bias"]).of_parameter
        (1, 0, 0)
    """

    groups: Mapping[str, float]
    is_constant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping) or not self.groups:
            raise ValueError(
                f"PerGroup(groups={self.groups!r}) must be a dict of at least one pattern over parameter "
                "names with its clip norm, such as PerGroup({'head.*': 1.0, '*': 0.5})."
            )
        norms = {
            str(name): positive(f"groups[{name!r}]", norm) for name, norm in self.groups.items()
        }
        object.__setattr__(self, "groups", norms)

    @property
    def sensitivity(self) -> float:
        """C, the root of the sum of the groups' squares."""
        return math.hypot(*self.groups.values())

    def bind(self, names: Sequence[str]) -> ParameterGroups:
        """Return the groups of the trained parameters of these names, in the order of flat vectors.

        Raises:
            ValueError: naming a parameter that no pattern matches, or a pattern without a parameter.
        """
        patterns, found = list(self.groups), list[int]()
        for name in names:
            at = next((i for i, each in enumerate(patterns) if fnmatchcase(name, each)), None)
            if at is None:
                raise ValueError(
                    f"clipping={self}: no pattern matches the trained parameter {name!r}, so nothing "
                    "would bound it. Give it a group ('*' matches all that is left), or freeze it."
                )
            found.append(at)
        if unused := [each for i, each in enumerate(patterns) if i not in found]:
            raise ValueError(
                f"clipping={self}: the pattern {unused[0]!r} matches no trained parameter that an "
                "earlier one leaves, and its norm would only add noise. Leave it out."
            )
        norms = tuple(norm / self.sensitivity for norm in self.groups.values())
        return ParameterGroups(tuple(found), norms)


@dataclass(frozen=True)
class ParameterGroups(Rescaling):
    r"""A :class:`PerGroup` rule for the parameters of one fit, whatever their names.

    Group k has the clip norm :math:`C s_k` with :math:`\sum_k s_k^2 = 1`, so that all groups together
    have norm at most C.

    Args:
        of_parameter: the group of each trained parameter, in the order of flat vectors.
        shares: s_k of each group.

    Raises:
        ValueError: if the squares of the shares sum to more than 1.
    """

    of_parameter: tuple[int, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (min(self.shares) > 0 and math.hypot(*self.shares) <= 1 + 1e-12):
            raise ValueError(
                f"The squares of {self} must sum to 1, or the sum is not bounded by C."
            )

    def norms(self, gradients: GradientsByParameter) -> Tensor:
        return gradients.norms_by_parameter()

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        lengths = self._lengths(norms, clip_norm)
        factors = clip_factors(lengths, 1.0)
        factors = factors.masked_fill(~lengths.isfinite().all(1, keepdim=True), 0.0)
        return factors[:, self._group(norms)].to(norms.dtype)

    def relative_norms(self, norms: Tensor, clip_norm: float) -> Tensor:
        return self._lengths(norms, clip_norm).square().sum(1).sqrt()

    def _lengths(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Return the norm of each group in units of its bound, shape (n, groups)."""
        group, wide = self._group(norms), _wide(norms)
        bounds = clip_norm * torch.tensor(self.shares, dtype=wide.dtype, device=wide.device)
        squares = wide.new_zeros(len(wide), len(self.shares))
        return squares.index_add_(1, group, (wide / bounds[group]).square()).sqrt()

    def _group(self, norms: Tensor) -> Tensor:
        return torch.tensor(self.of_parameter, device=norms.device)


@dataclass(frozen=True)
class AdaptiveQuantile:
    r"""Flat clipping at a norm that follows a quantile of the records' norms:

    C ← C · exp(-η (b̃ - target)), b̃ the noised share of records with ‖g‖ <= C in the batch of the
    step.

    The share comes from the count of clipped records that is released with each gradient
    (``count_clipped``), as one event with it; its price is 0.5 % more noise in the gradient. So C is a
    function of released values alone, and so is the sensitivity of each step. It begins at the run's
    ``max_grad_norm``, stays between two public bounds, and goes on where it was when a run is resumed
    (Andrew, Thakkar, McMahan and Ramaswamy, Differentially Private Learning with Adaptive Clipping,
    2021, arXiv:1905.03871, Algorithm 1). The noise in the gradient moves with C.

    Args:
        target: the quantile in (0, 1); 0.5 for the median.
        rate: η > 0.
        least: C is never below. Public.
        most: C is never above. Public.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> rule = AdaptiveQuantile(target=0.5, rate=0.2)
        >>> round(rule.next_norm(1.0, share_clipped=1.0), 4)        # all are longer than C
        1.1052
    """

    target: float = 0.5
    rate: float = 0.2
    least: float = 1e-3
    most: float = 1e3
    is_constant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        normalise(self, between("(0, 1)"), "target", of="AdaptiveQuantile")
        normalise(self, positive, "rate", "least", "most", of="AdaptiveQuantile")
        if not self.least <= self.most:
            raise ValueError(
                f"AdaptiveQuantile(least={self.least}) must be at most most={self.most}."
            )

    def bind(self, names: Sequence[str]) -> Flat:
        """Return the rule within one step: flat clipping."""
        return Flat()

    def next_norm(self, clip_norm: float, share_clipped: float) -> float:
        """Return C of the next step, from that of this one and its noised share of clipped records."""
        change = -self.rate * (1.0 - share_clipped - self.target)
        change = min(max(change, -_LARGEST_CHANGE), _LARGEST_CHANGE)
        return min(max(clip_norm * math.exp(change), self.least), self.most)


# -- the number of clipped records ------------------------------------------------------------------


class CountedGradients(PerSampleGradients):
    r"""Clipped gradients with one entry more, which counts the records that were clipped.

    Record i has the vector of d + 1 entries

    .. math:: v_i = (\mathrm{clip}_C(g_i),\; κ C c_i), \qquad
        c_i = 1 \text{ if } \|g_i\| > C, \text{ else } -1.

    Both parts depend on record i alone, and
    :math:`\|v_i\|^2 = \|\mathrm{clip}_C(g_i)\|^2 + κ^2 C^2 \le C^2 (1 + κ^2)`, so clipping v_i to
    C' = C√(1 + κ²) leaves it as it is: :func:`~lightning_dp.boundary.bounded_sum` for C' is the sum of
    the v_i, whose norms are told as those of any gradients. :func:`~lightning_dp.boundary.add_noise`
    adds N(0, z²C'²I) to all d + 1 entries: that is the Gaussian mechanism with multiplier z, one event,
    for add/remove (and zero-out) of a record. Replacing one moves the sum by at most 2C', as it moves a
    sum of gradients by at most 2C. So the charge for z is honest, and the price of the count is noise
    that is √(1 + κ²) times as long in the gradient. A c_i of ±1 instead of 1 and 0 halves the noise
    of the share: with B expected records it is (1 + Σ c_i / B) / 2, since their number is B on average.

    A record whose gradient is not finite, or longer than float32 can scale down, counts for nothing.

    Args:
        gradients: the g_i.
        clip_norm: C, finite.
        count_weight: κ > 0.
    """

    def __init__(
        self, gradients: PerSampleGradients, clip_norm: float, count_weight: float
    ) -> None:
        norms = gradients.norms()
        norms = norms.masked_fill(~(norms <= LARGEST_NORM), math.inf)
        self._gradients = gradients
        self._factors = clip_factors(norms, clip_norm)
        self._counts = torch.where(norms > clip_norm, 1.0, -1.0) * (count_weight * clip_norm)
        clipped = norms.clamp(max=clip_norm)
        longer = torch.hypot(clipped, clipped.new_tensor(count_weight * clip_norm))
        self._norms = longer.masked_fill(norms == math.inf, math.inf)

    def norms(self) -> Tensor:
        return self._norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._gradients.weighted_sum(weights * self._factors)
        return torch.cat([total, self._count(weights, total).unsqueeze(0)])

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        self._gradients.add_weighted_sum(weights * self._factors, onto[:-1])
        onto[-1] += self._count(weights, onto)

    def _count(self, weights: Tensor, like: Tensor) -> Tensor:
        return (weights * self._counts).sum().to(like)


def split_count(released: Release, query: Query) -> tuple[Release, Release | None]:
    """Return the gradient of a release, and Σ c_i in units of records if the query counts them."""
    if not query.count_weight > 0:
        return released, None
    count = released.part(slice(-1, None)).mean(query.count_weight * query.clip_norm)
    return released.part(slice(-1)), count


# -- the rules ---------------------------------------------------------------------------------------

Clipping: TypeAlias = Flat | Automatic | PerGroup | AdaptiveQuantile


def check_clipping(name: str, value: Any, *, of: str | None = None) -> Clipping:
    """Return a rule of this module; the bound of another class would have no proof.

    Raises:
        TypeError: for anything else.
    """
    if type(value) not in (Flat, Automatic, PerGroup, AdaptiveQuantile):
        raise TypeError(
            f"{name}={value!r} must be Flat(), Automatic(), PerGroup({{...}}) or AdaptiveQuantile()."
        )
    rule: Clipping = value
    return rule


def _wide(norms: Tensor) -> Tensor:
    return norms.double() if has_float64(norms.device.type) else norms
