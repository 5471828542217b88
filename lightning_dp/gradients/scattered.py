"""Rows that are records in any order and number, and whose they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dp.gradients.layouts import Layout, by_shape, layouts_after

__all__ = [
    "NOBODY",
    "Place",
    "Scattered",
    "common_owners",
    "is_lost",
    "owners_of",
    "places_after",
    "regular",
]


@dataclass(frozen=True, eq=False)
class Scattered:
    """Entries of one dimension that belong to any records, in any order and number.

    Args:
        dim: the dimension; None if the whole tensor belongs to one record.
        owners: shape (N,), the record of each entry; -1 where a constant stands, -2 where several
            records have met, or it is not known which one it is.
    """

    dim: int | None
    owners: Tensor

    def fits(self, tensor: Tensor, n: int) -> bool:
        """Tell whether a tensor can hold these entries."""
        if self.dim is None:
            return True
        return self.dim < tensor.dim() and tensor.shape[self.dim] == len(self.owners)

    @property
    def is_whole(self) -> bool:
        """True if every entry is known to belong to a record."""
        return bool((self.owners >= 0).all())


Place: TypeAlias = Layout | Scattered
NOBODY = Scattered(None, torch.full((1,), -2))
"""The place of entries in which several records have met."""


def owners_of(place: Place, n: int, device: torch.device) -> Tensor:
    """Return the record of each entry in the dimension of the records."""
    if isinstance(place, Scattered):
        return place.owners.to(device)
    return torch.arange(n, device=device).repeat_interleave(place.inner).repeat(place.outer)


def regular(place: Place, n: int) -> Place:
    """Return the layout of entries in the order of the records, and one place for all of one record."""
    if isinstance(place, Layout) or place.dim is None:
        return place
    owners = place.owners
    if n > 1 and len(owners) and int(owners[0]) >= 0 and bool((owners == owners[0]).all()):
        return Scattered(None, owners[:1])
    if not len(owners) or len(owners) % n or int(owners[0]) != 0:
        return place
    changes = (owners != 0).nonzero()
    inner = int(changes[0]) if len(changes) else len(owners)
    if (len(owners) // n) % inner:
        return place
    layout = Layout(place.dim, len(owners) // n // inner, inner)
    return layout if torch.equal(owners_of(layout, n, owners.device), owners) else place


def is_lost(place: Place) -> bool:
    """Tell whether several records have met in some entry, or its record is not known."""
    return isinstance(place, Scattered) and bool((place.owners < -1).any())


def common_owners(places: Sequence[Place], n: int, device: torch.device) -> Tensor | None:
    """Return the owners on which all places agree; None if they do not. A constant may be anybody's."""
    if any(is_lost(place) for place in places):
        return None
    if any(place.dim is None for place in places):
        return _only_owner([owners_of(place, n, device) for place in places])
    found, *others = (owners_of(place, n, device) for place in places)
    for each in others:
        if each.shape != found.shape or bool(((each != found) & (each >= 0) & (found >= 0)).any()):
            return None
        found = torch.maximum(each, found)
    return found


def _only_owner(owners: Sequence[Tensor]) -> Tensor | None:
    """Return the one record to which everything belongs, shape (1,); None if there are several."""
    found = torch.cat(list(owners))
    found = found[found >= 0]
    is_one = len(found) > 0 and bool((found == found[0]).all())
    return found[:1] if is_one else None


def places_after(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    places: Sequence[tuple[Tensor, Place]],
    outputs: Sequence[Tensor],
    n: int,
    *,
    in_place: bool = False,
) -> list[Place]:
    """Return the same of a function that treats scattered rows alike, as the records of a batch.

    Args:
        function: was called with ``args`` and ``kwargs``; the other arguments are those of
            :func:`places_after_choice`.
        in_place: it changed its output, which is among the ``places`` if it held records.
    """
    device = outputs[0].device
    owners = common_owners([place for _, place in places], n, device)
    if n == 1:
        return [Scattered(None, torch.zeros(1, dtype=torch.long, device=device))] * len(outputs)
    if owners is None:
        return [NOBODY] * len(outputs)
    if any(place.dim is None for _, place in places):
        return [Scattered(None, owners)] * len(outputs)
    rows = [(each, Layout(place.dim)) for each, place in places if place.dim is not None]
    found: list[Layout | None]
    if in_place:  # entry by entry, aligned from the last dimension
        found = [by_shape(rows, outputs[0])]
    else:
        found = layouts_after(function, args, kwargs, rows, outputs, len(owners))
    return [NOBODY if each is None else regular(_spread(each, owners), n) for each in found]


def _spread(layout: Layout, owners: Tensor) -> Scattered:
    """Return the place of rows that were repeated, or that other dimensions were folded into."""
    return Scattered(layout.dim, owners.repeat_interleave(layout.inner).repeat(layout.outer))
