"""Two answers about the same records: which of their gradients moved?"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from lightning_dp._precision import in_float64
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.materialised import MaterialisedGradients

__all__ = ["Glimpse", "Movement", "Tolerance", "glimpse", "moved"]


@dataclass(frozen=True)
class Glimpse:
    """The part of each record's gradient that is kept to compare it; sensitive.

    Args:
        norms: of whole gradients, shape (n,), float64; on the host if the device has no float64.
        entries: at some places, shape (n, k), as the norms.
        share: k over the number of all entries.
    """

    norms: Tensor = field(repr=False)
    entries: Tensor = field(repr=False)
    share: float


@dataclass(frozen=True)
class Tolerance:
    """The distance that a gradient may move without being said to have moved; public.

    Args:
        relative: to the record's own gradient. Rounding moves it by 1e-6 where batches of other
            records have other shapes inside the model, and by 1e-2 in half precision.
        scale: C. What moves by less than a thousandth of it, or of the largest gradient where
            that is smaller, is not looked at: tiny gradients are differences of large numbers.
        share: of the records may move: a tie that rounding decides another way (a route, a
            maximum) changes the gradient of a single record among many.
    """

    relative: float = 0.005
    scale: float = 1.0
    share: float = 1 / 64

    _FLOOR = 1e-3

    def floor(self, a: Glimpse, b: Glimpse) -> Tensor:
        """Return the difference that is not looked at between gradients like these."""
        finite = a.norms.isfinite() & b.norms.isfinite()
        largest = torch.where(finite, torch.maximum(a.norms, b.norms), 0.0).max()
        return self._FLOOR * largest.clamp(max=self.scale)


def glimpse(gradients: AbstractPerSampleGradients, places: Tensor, size: int) -> Glimpse:
    """Look at each record's gradient before it is clipped.

    Args:
        gradients: of n records; their sum was not taken yet.
        places: k places of flat gradients: sorted, distinct.
        size: the number of all entries.
    """
    norms = in_float64(gradients.norms().detach())  # first: what is made for them may be kept
    few = gradients.restrict(places)
    if not isinstance(few, MaterialisedGradients):
        raise TypeError(f"{type(few).__name__} has no entries to look at.")
    entries = in_float64(few.entries().detach())
    return Glimpse(norms, entries, entries.shape[1] / size)


class Movement(IntEnum):
    """The difference between two answers, in the gradients of the records that stayed."""

    NONE = 0
    """They are equal up to rounding."""
    ORDER = 1
    """They are there, in other rows: the model sorts or shuffles its records."""
    UNCLEAR = 2
    """They moved, or the model orders records and those elsewhere have no gradient."""
    MOVED = 3


def moved(before: Glimpse, after: Glimpse, rows: tuple[int, ...], tolerance: Tolerance) -> Movement:
    """Tell whether gradients of these records moved by more than rounding.

    Gradients that are not finite are equal to each other: such records are left out of the sum. Of f
    of the rows that differ, f records are elsewhere if a model orders its records, in one answer or
    in both. So f gradients must be found at places where only an order can bring them.
    """
    if len(before.norms) != len(after.norms):
        return Movement.MOVED
    if not rows:
        return Movement.NONE
    after = _at(after, before.norms.device)
    stays = torch.zeros(len(before.norms), dtype=torch.bool, device=before.norms.device)
    stays[list(rows)] = True
    floor = tolerance.floor(_rows(before, stays), _rows(after, stays))
    far = _far(before, after, tolerance.relative, floor)
    f, slack = int((far & stays).sum()), tolerance.share * len(rows)
    if f <= slack:
        return Movement.NONE
    elsewhere = (~stays | far).nonzero()[:, 0].tolist()
    is_small = (before.norms <= 2 * floor).tolist()
    closely = tolerance.relative / 4
    found = sum(
        _is_there(_rows(before, [i]), after, closely, floor) for i in elsewhere if not is_small[i]
    )
    if found + sum(is_small[i] for i in elsewhere) < f - slack:
        return Movement.MOVED
    return Movement.ORDER if found else Movement.UNCLEAR


def _far(a: Glimpse, b: Glimpse, relative: float, floor: Tensor) -> Tensor:
    """Tell for each row whether two gradients differ."""
    finite = a.norms.isfinite() & b.norms.isfinite()
    largest = torch.where(finite, torch.maximum(a.norms, b.norms), 0.0)
    far = (a.norms - b.norms).abs() > relative * largest + floor
    lengths = torch.maximum(a.entries.norm(dim=1), b.entries.norm(dim=1))
    # A gradient has about this part of its length at the places looked at.
    part = a.share**0.5 * (floor + Tolerance._FLOOR * largest)
    far |= (a.entries - b.entries).norm(dim=1) > relative * lengths + part
    return (finite & far) | (a.norms.isfinite() != b.norms.isfinite())


def _is_there(row: Glimpse, after: Glimpse, relative: float, floor: Tensor) -> bool:
    """Tell whether the gradient of one record is among others."""
    norm, norms = row.norms, after.norms
    largest = torch.maximum(norm, norms)
    near = (norm - norms).abs() <= relative * largest + floor
    near |= ~norm.isfinite() & ~norms.isfinite()
    candidates = _rows(after, near.nonzero()[:, 0])
    return bool((~_far(row, candidates, relative, floor)).any())


def _rows(glimpse: Glimpse, index: Tensor | list[int]) -> Glimpse:
    return Glimpse(glimpse.norms[index], glimpse.entries[index], glimpse.share)


def _at(glimpse: Glimpse, device: torch.device) -> Glimpse:
    return Glimpse(glimpse.norms.to(device), glimpse.entries.to(device), glimpse.share)
