"""The flow of records through parts of tensors, and through wholes made of parts."""

from __future__ import annotations

import torch

from lightning_dp.gradients.flow_arithmetic import Outcome, linear, together
from lightning_dp.gradients.record_flow import (
    MOVED,
    ROWS,
    Flow,
    Meeting,
    Mixed,
    OneRecord,
    SomeRows,
    kind_of,
    signed,
)

__all__ = [
    "added_at",
    "chosen",
    "moved",
    "packed",
    "part",
    "parts",
    "reduced_at",
    "whole",
    "written",
]


def part(meeting: Meeting) -> Outcome:
    """Follow ``x[i]`` and ``x[i:j]``."""
    if not meeting.given or meeting.mixture is not None:
        return linear(meeting)
    if kind_of(meeting.node) == "Select":
        start, size = meeting.saved("index"), 1
    else:
        start, size = meeting.saved("start"), meeting.shape[meeting.dim]
    return _piece(meeting, meeting.shape, signed(start or 0), size)


def parts(meeting: Meeting) -> Outcome:
    """Follow ``unbind``, ``split`` and ``chunk``."""
    if not meeting.given or meeting.mixture is not None:
        return linear(meeting)
    pieces: list[Flow] = []
    start = 0
    for each in meeting.node._input_metadata:
        size = 1 if kind_of(meeting.node) == "Unbind" else each.shape[meeting.dim]
        pieces.append(_piece(meeting, each.shape, start, size))
        start += size
    return pieces


def _piece(meeting: Meeting, shape: torch.Size, start: int, size: int) -> Flow:
    """Return what a piece of the input holds: ``size`` entries from ``start`` on."""
    (given,) = meeting.given
    if isinstance(given.flow, OneRecord):
        return given.flow
    is_of_rows = meeting.place_in(given) == meeting.dim
    if given.flow is ROWS and is_of_rows and given.shape[meeting.dim] == meeting.n > size:
        return OneRecord(start % meeting.n) if size == 1 else SomeRows(size)
    # Where the dimension might be that of the rows, another one might be taken for it afterwards.
    is_across = meeting.dim not in meeting.places(given.shape) or is_of_rows
    if given.is_rows and is_across and meeting.places(shape):
        return given.flow
    is_whole = isinstance(given.flow, SomeRows) and not is_of_rows
    return given.flow if is_whole and meeting.place_in(given) is not None else SomeRows()


def whole(meeting: Meeting) -> Outcome:
    """Follow ``stack``, ``cat`` and what writes parts into a whole."""
    if meeting.mixture is not None:
        return meeting.mixture
    flows = {each.flow for each in meeting.given}
    if not flows or (len(flows) == 1 and not isinstance(meeting.given[0].flow, SomeRows)):
        return together(meeting)
    if meeting.has_rows:
        return ROWS
    if all(isinstance(flow, OneRecord) for flow in flows):
        return SomeRows(len(meeting.given), is_chosen=True)
    return SomeRows()


def written(meeting: Meeting) -> Outcome:
    """Follow what is written into a view; done to a mixture alone, it need not be linear."""
    if len(meeting.inputs) == 1:
        meeting.refuse_mixture()
    return whole(meeting)


def added_at(meeting: Meeting) -> Outcome:
    """Follow ``index_add`` and its like: if rows go to fewer places, they are summed there."""
    flow = whole(meeting)
    return Mixed(meeting.node) if flow is ROWS and not meeting.has_rows else flow


def reduced_at(meeting: Meeting) -> Outcome:
    """Follow ``scatter_reduce`` and its like: means and maxima of the rows that go to one place."""
    meeting.refuse_mixture()
    flow = whole(meeting)
    if flow is ROWS and not meeting.has_rows:
        meeting.refuse_over_records()
    return flow


def chosen(meeting: Meeting) -> Outcome:
    """Follow ``x[mask]`` and ``x[index]``: rows that the data may choose."""
    if not meeting.given or meeting.mixture is not None:
        return linear(meeting)
    (given,) = meeting.given
    place = meeting.place_in(given)
    if isinstance(given.flow, OneRecord):
        return given.flow
    if not given.is_rows or place is None:
        return SomeRows()
    if kind_of(meeting.node) == "Gather" and not meeting.has_rows and meeting.goes_along():
        meeting.refuse_over_records()  # torch's quantiles are made of it
    if meeting.has_rows and not _has_mask_at(meeting, place):
        return given.flow
    size = meeting.shape[min(place, len(meeting.shape) - 1)] if meeting.shape else 1
    # Of folded rows, all that were chosen may be of one record, if it has as many.
    is_of_several = size > given.shape[place] // meeting.n
    return SomeRows(size, is_chosen=True) if is_of_several else SomeRows()


def _has_mask_at(meeting: Meeting, place: int) -> bool:
    """Tell whether the rows are chosen by a mask; of it, only its type is looked at."""
    if kind_of(meeting.node) == "MaskedSelect":
        return True
    dim = 0
    for each in meeting.saved("indices") or ():
        is_mask = each is not None and each.dtype in (torch.bool, torch.uint8)
        if is_mask and dim <= place < dim + each.dim():
            return True
        dim += each.dim() if is_mask else 1
    return False


def packed(meeting: Meeting) -> Outcome:
    """Follow ``pack_padded_sequence``: rows of all records, as many as their lengths say."""
    if not meeting.given or meeting.mixture is not None:
        return linear(meeting)
    return SomeRows(meeting.shape[0], is_chosen=True)


def moved(meeting: Meeting) -> Outcome:
    """Follow ``roll`` and ``flip``, which put records into the places of others."""
    if not meeting.given or meeting.mixture is not None:
        return linear(meeting)
    (given,) = meeting.given
    dims = [signed(d) % max(1, len(given.shape)) for d in meeting.saved("dims") or ()]
    return MOVED if given.flow is ROWS and meeting.record_place(given) in dims else given.flow
