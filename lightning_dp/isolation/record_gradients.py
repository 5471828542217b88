"""Two answers about the same records: which of their gradients moved?"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.materialised import MaterialisedGradients

__all__ = ["Glimpse", "Tolerance", "glimpse", "moved"]


@dataclass(frozen=True)
class Glimpse:
    """The part of each record's gradient that is kept to compare it; sensitive.

    Args:
        norms: of whole gradients, shape (n,), float64.
        entries: at some places, shape (n, k), float64.
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


def glimpse(gradients: AbstractPerSampleGradients, places: Tensor, size: int) -> Glimpse:
    """Look at each record's gradient before it is clipped.

    Args:
        gradients: of n records; their sum was not taken yet.
        places: k places of flat gradients: sorted, distinct.
        size: the number of all entries.
    """
    norms = gradients.norms().detach().double()  # first: what is made for them may be kept
    few = gradients.restrict(places)
    if not isinstance(few, MaterialisedGradients):
        raise TypeError(f"{type(few).__name__} has no entries to look at.")
    entries = few.entries().detach().double()
    return Glimpse(norms, entries, entries.shape[1] / size)


def moved(before: Glimpse, after: Glimpse, rows: tuple[int, ...], tolerance: Tolerance) -> bool:
    """Tell whether gradients of these records moved by more than rounding.

    Gradients that are not finite are equal to each other: such records are left out of the sum.
    """
    if len(before.norms) != len(after.norms):
        return True
    if not rows:
        return False
    index = torch.tensor(rows, dtype=torch.int64, device=before.norms.device)
    a, b = before.norms[index], after.norms[index].to(before.norms.device)
    finite = a.isfinite() & b.isfinite()
    largest = torch.where(finite, torch.maximum(a, b), 0.0)
    floor = tolerance._FLOOR * largest.max().clamp(max=tolerance.scale)
    far = (a - b).abs() > tolerance.relative * largest + floor
    x, y = before.entries[index], after.entries[index].to(before.entries.device)
    lengths = torch.maximum(x.norm(dim=1), y.norm(dim=1))
    # A gradient has about this part of its length at the places looked at.
    part = before.share**0.5 * (floor + tolerance._FLOOR * largest)
    far |= (x - y).norm(dim=1) > tolerance.relative * lengths + part
    found = (finite & far) | (a.isfinite() != b.isfinite())
    return bool(found.sum() > tolerance.share * len(rows))
