r"""The comparison of two runs: how far the clipped sum of the kept samples moves, in units of C.

Some samples of a batch are kept, the others exchanged for copies of them. With :math:`a_i` and
:math:`b_i` the gradients of the k kept ones in the two runs, of n in the whole batch, the movement is

.. math:: \frac{n}{kC} \Bigl\| \sum_i \mathrm{clip}_C(a_i) - \mathrm{clip}_C(b_i) \Bigr\|,
    \qquad \frac1C \sqrt{\frac nk \sum_i \| \mathrm{clip}_C(a_i) - \mathrm{clip}_C(b_i) \|^2},
    \qquad \frac nk \Bigl| \sum_i \frac{\|a_i\| - \|b_i\|}{\max(C, \|a_i\|)} \Bigr|,

whichever is largest: what clipping should bound by C is the sum, and the first is an estimate of what
the exchanged samples did to that of the whole batch. The second sees movements that cancel in this sum
and would not in others. The third sees a common factor, such as another denominator of the loss, which
clipping hides while all gradients are longer than C, and would not later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dp.functional import clip_factors, in_float64
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.parameter_sum import BookkeptGradients, MaterialisedGradients

__all__ = [
    "TOLERANCE",
    "GradientSample",
    "are_in_other_rows",
    "movement",
    "resolution",
    "take_sample",
]

TOLERANCE = 0.05
"""C that the sum of the whole batch may move by: rounding, and no coupling worth the name."""

_ROUNDING = 1e-4  # of a gradient's length
_SKETCH = 1 << 16  # entries that are kept of a longer sum
_PARAMETERS, _ENTRIES = 8, 32  # of so many parameters, so many entries of each gradient


@dataclass(frozen=True)
class GradientSample:
    """The part that is kept of the gradients of some samples of one run; sensitive.

    Args:
        total: their clipped sum in units of C, or a sketch of it that keeps its length.
        norms: of each gradient before it is clipped, in units of C, shape (k,); 0 if it is not finite.
        entries: of each clipped gradient, some, in units of C, shape (k, m), weighted so that their
            square is on average that of all; None where the engine keeps norms alone.
    """

    total: Tensor = field(repr=False)
    norms: Tensor = field(repr=False)
    entries: Tensor | None = field(repr=False)


def take_sample(
    gradients: AbstractPerSampleGradients,
    rows: list[int],
    clip_norm: float,
    sizes: list[int],
    generator: torch.Generator,
) -> GradientSample:
    """Return what is compared of the gradients of some samples.

    They cannot be used afterwards, unless they are never made (:class:`BookkeptGradients`).

    Args:
        gradients: of all samples of the run.
        rows: the places of the samples.
        clip_norm: C; where it is infinite, the unit is 1.
        sizes: of the trained parameters, in the order of flat vectors.
        generator: public; the same state gives the same entries.
    """
    if isinstance(gradients, BookkeptGradients):
        gradients = gradients.of(torch.tensor(rows))
        rows = list(range(len(rows)))
    norms = gradients.norms().detach()  # first: what is made for them may be used again
    unit = clip_norm if clip_norm < math.inf else 1.0
    factors = clip_factors(norms, clip_norm) / unit
    at = torch.tensor(rows, device=norms.device)
    weights = torch.zeros_like(factors).index_copy_(0, at, factors[at])
    places, importance = _places(sizes, generator)
    try:
        few = gradients.restrict(places)
    except NotImplementedError:
        few = None
    entries = None
    if isinstance(few, MaterialisedGradients):
        found = in_float64(few.entries().detach()[at])
        found = found * in_float64(factors[at]).unsqueeze(1) * importance.to(found)
        entries = torch.where(found.isfinite(), found, 0.0)
    total = _sketch(gradients.weighted_sum(weights).detach(), generator)
    lengths = in_float64(norms[at]) / unit
    return GradientSample(in_float64(total), lengths.where(lengths.isfinite(), 0.0), entries)


def movement(before: GradientSample, after: GradientSample, n: int, k: int) -> Tensor:
    """Return the estimate, in C, of how far the sum of the whole batch moved.

    Args:
        before, after: the same k samples, in the same order.
        n: the samples of the whole batch.
        k: those that were kept.
    """
    moved: Tensor = (before.total - after.total).norm() * (n / k)
    longer = ((before.norms - after.norms) / before.norms.clamp(min=1.0)).sum().abs() * (n / k)
    moved = torch.maximum(moved, longer)
    if before.entries is None or after.entries is None:
        return moved
    apart = (before.entries - after.entries).norm() * (n / k) ** 0.5
    return torch.maximum(moved, apart)


def are_in_other_rows(before: GradientSample, after: GradientSample) -> bool:
    """Return True if all gradients of the second run are among those of the first, up to rounding.

    By some of their entries, and their norms; each row of the first run stands for one of the second.
    """
    if before.entries is None or after.entries is None:
        return False
    rows = torch.cat([before.entries, before.norms.unsqueeze(1)], dim=1)
    others = torch.cat([after.entries, after.norms.unsqueeze(1)], dim=1)
    left = list(range(len(rows)))
    for row in others:
        distances = (rows[left] - row).norm(dim=1)
        nearest = int(distances.argmin())
        if not float(distances[nearest]) <= _ROUNDING * (float(row.norm()) + _ROUNDING):
            return False
        left.pop(nearest)
    return True


def resolution(eps: float, n: int, k: int) -> float:
    """Return the movement, in C, that rounding alone may show.

    Where two runs have other shapes inside the model, gradients differ by some ``eps`` of their length,
    each in another direction.

    Args:
        eps: of the type in which the model computes.
        n, k: see :func:`movement`.

    Example:
        >>> resolution(torch.finfo(torch.float32).eps, 512, 128) < TOLERANCE
        True
        >>> resolution(torch.finfo(torch.bfloat16).eps, 512, 128) < TOLERANCE
        False
    """
    return (256.0 if eps < 1e-5 else 8.0) * eps * n / math.sqrt(k)


def _places(sizes: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return places in flat gradients, sorted and distinct, and the weight of each."""
    starts = torch.tensor([0, *sizes]).cumsum(0)
    chosen = sorted(torch.randperm(len(sizes), generator=generator)[:_PARAMETERS].tolist())
    chosen = [i for i in chosen if sizes[i]]
    places, weights = [], []
    for i in chosen:
        drawn = torch.randint(sizes[i], (min(_ENTRIES, sizes[i]),), generator=generator)
        here = drawn.unique()  # type: ignore[no-untyped-call]
        places.append(starts[i] + here)
        share = len(here) * len(chosen) / (sizes[i] * len(sizes))
        weights.append(torch.full((len(here),), share**-0.5, dtype=torch.float64))
    none = torch.zeros(0)
    return torch.cat([*places, none.long()]), torch.cat([*weights, none.double()])


def _sketch(vector: Tensor, generator: torch.Generator) -> Tensor:
    """Add up signed, shifted rows of a long vector: a linear map that keeps its length on average."""
    if len(vector) <= _SKETCH:
        return vector.clone()
    rows = -(-len(vector) // _SKETCH)
    signs = torch.randint(2, (rows,), generator=generator) * 2 - 1
    shifts = torch.randint(_SKETCH, (rows,), generator=generator)
    found = vector.new_zeros(_SKETCH)
    for row, (sign, shift) in enumerate(zip(signs.tolist(), shifts.tolist(), strict=True)):
        part = vector[row * _SKETCH : (row + 1) * _SKETCH]
        if len(part) < _SKETCH:
            part = torch.nn.functional.pad(part, (0, _SKETCH - len(part)))
        found.add_(part.roll(shift), alpha=sign)
    return found
