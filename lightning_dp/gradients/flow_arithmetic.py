"""The flow of records through sums, products and other arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from lightning_dp.gradients.record_flow import (
    MOVED,
    NOTHING,
    ROWS,
    Flow,
    Given,
    Meeting,
    Mixed,
    OneRecord,
    SomeRows,
)

__all__ = [
    "Outcome",
    "Rule",
    "along",
    "anything",
    "attention",
    "batch_norm",
    "by_more_than_sums",
    "distances",
    "interpolated",
    "layer_norm",
    "linear",
    "loss_function",
    "matrix_function",
    "matrix_product",
    "mean",
    "norm",
    "power",
    "product",
    "quotient",
    "running_sum",
    "together",
    "total",
]

Outcome: TypeAlias = Flow | list[Flow]  # a list for nodes with several outputs
Rule: TypeAlias = Callable[[Meeting], Outcome]


def together(meeting: Meeting, *, is_linear: bool = False) -> Flow:
    """Return what an entry of the output holds, if it is made of one entry of each input."""
    flows = {each.flow for each in meeting.given}
    if not flows:
        return NOTHING
    if len(flows) == 1:
        return flows.pop()
    if any(isinstance(flow, SomeRows) and flow.size is None for flow in flows):
        return SomeRows()
    if any(isinstance(flow, OneRecord) for flow in flows) or flows == {ROWS, MOVED}:
        if is_linear:
            return Mixed(meeting.node)
        meeting.refuse_over_records()
    return ROWS if flows & {ROWS, MOVED} and meeting.has_rows else SomeRows()


def anything(meeting: Meeting) -> Outcome:
    """Follow a node of which nothing is known: a function of rows, and of nothing that is mixed."""
    meeting.refuse_mixture()
    flow = together(meeting)
    if flow is not ROWS or meeting.has_rows:
        return flow
    for each in meeting.given:
        place, rank = meeting.record_place(each), len(meeting.shape)
        if place is not None and (rank < len(each.shape) or meeting.shape[place] == 1):
            meeting.refuse_over_records()
    return SomeRows()


# -- entry by entry --------------------------------------------------------------------------


def linear(meeting: Meeting) -> Outcome:
    """Follow a sum, a constant factor, a cast or a change of shape."""
    if meeting.mixture is not None:
        return meeting.mixture
    if _stands_crosswise(meeting):
        return Mixed(meeting.node)
    return together(meeting, is_linear=True)


def _stands_crosswise(meeting: Meeting) -> bool:
    """Tell whether rows of the inputs stand in different dimensions: entries are of pairs."""
    rows = [each for each in meeting.given if each.is_rows]
    if len(rows) < 2:
        return False
    from_the_right = set()
    for each in rows:
        if (place := meeting.record_place(each)) is None:
            return False
        from_the_right.add(place - len(each.shape))
    return len(from_the_right) > 1


def product(meeting: Meeting) -> Outcome:
    """Follow a product of two: linear in one, if the other one is nothing of the records."""
    if meeting.mixture is not None:
        return _of_mixture(meeting, meeting.mixture, meeting.inputs)
    if _stands_crosswise(meeting):
        meeting.refuse_over_records()
    return together(meeting)


def _of_mixture(meeting: Meeting, mixture: Mixed, factors: Sequence[Given | None]) -> Outcome:
    """Follow a mixture that is multiplied by a constant, or by a parameter outside of layers."""
    others = [each for each in factors if each is not None and each.flow is not mixture]
    mixed = [each for each in factors if each is not None and each.flow is mixture]
    if len(mixed) != 1 or any(each.flow is not NOTHING for each in others):
        meeting.refuse_mixture()
    if others and meeting.places(mixed[0].shape):
        meeting.refuse_mixture()  # a layer's gradient in one row would be of several records
    return mixture


def quotient(meeting: Meeting) -> Outcome:
    """Follow a quotient: linear in what stands above."""
    below = meeting.inputs[1] if len(meeting.inputs) > 1 else None
    if below is not None and isinstance(below.flow, Mixed):
        meeting.refuse_mixture()
    return product(meeting)


def power(meeting: Meeting) -> Outcome:
    """Follow a power, of which the first is linear."""
    return linear(meeting) if meeting.saved("exponent") == 1 else anything(meeting)


def interpolated(meeting: Meeting) -> Outcome:
    """Follow ``lerp``: linear in its ends if its weight is a constant."""
    is_constant = all(each is None for each in meeting.inputs[2:])
    return linear(meeting) if is_constant else anything(meeting)


# -- over dimensions -------------------------------------------------------------------------


def total(meeting: Meeting) -> Outcome:
    """Follow a sum over dimensions."""
    if meeting.mixture is not None:
        return meeting.mixture
    if any(meeting.goes_over(each) for each in meeting.given):
        return Mixed(meeting.node)
    return _kept(meeting)


def _kept(meeting: Meeting) -> Flow:
    """Return what is left of rows where nothing surely goes over several records."""
    for each in meeting.given:
        if isinstance(each.flow, SomeRows) and meeting.place_in(each) is None:
            return SomeRows()
    return together(meeting)


def mean(meeting: Meeting) -> Outcome:
    """Follow a mean over dimensions: the number of rows must not be chosen by the data."""
    for each in meeting.given:
        if isinstance(each.flow, SomeRows) and each.flow.is_chosen and meeting.goes_over(each):
            meeting.refuse_number()
    return total(meeting)


def by_more_than_sums(meeting: Meeting) -> Outcome:
    """Follow a maximum, a log-sum-exp, a variance …: over other dimensions than the records'."""
    meeting.refuse_mixture()
    if any(meeting.goes_over(each) for each in meeting.given):
        meeting.refuse_over_records()
    return _kept(meeting)


def norm(meeting: Meeting) -> Outcome:
    """Follow a norm: that of order 1 is a sum; others are not, even if they are squared.

    A record that is not finite would make all gradients so.
    """
    is_sum = 1 in (meeting.saved("ord"), meeting.saved("p"))
    return total(meeting) if is_sum and meeting.mixture is None else by_more_than_sums(meeting)


def along(meeting: Meeting) -> Outcome:
    """Follow a softmax, a sorting …, which keep the shape: along other dimensions."""
    meeting.refuse_mixture()
    if meeting.goes_along():
        meeting.refuse_over_records()
    return together(meeting)


def running_sum(meeting: Meeting) -> Outcome:
    """Follow a cumulative sum or a Fourier transform: linear, and mixing along the records."""
    if meeting.mixture is not None:
        return meeting.mixture
    return Mixed(meeting.node) if meeting.goes_along() else together(meeting)


def loss_function(meeting: Meeting) -> Outcome:
    """Follow a fused loss: of rows, with a mean or a sum over them in it."""
    meeting.refuse_mixture()
    reduction, flow = meeting.saved("reduction"), together(meeting)
    is_reduced = bool(reduction) if isinstance(reduction, int) else not meeting.shape
    if not is_reduced:
        return flow
    if isinstance(flow, SomeRows) and (flow.size or 0) > 1:
        if flow.is_chosen and reduction == 1:
            meeting.refuse_number()
        return Mixed(meeting.node)
    return Mixed(meeting.node) if flow in (ROWS, MOVED) else flow


# -- layers and matrices ---------------------------------------------------------------------


def layer_norm(meeting: Meeting) -> Outcome:
    """Follow a layer norm: over the last dimensions, none of which may be the records'."""
    meeting.refuse_mixture()
    last = len(meeting.saved("normalized_shape") or ())
    for each in meeting.given:
        place = meeting.place_in(each)
        if place is not None and place >= len(each.shape) - last:
            meeting.refuse_over_records()
    return together(meeting)


def batch_norm(meeting: Meeting) -> Outcome:
    """Follow batch statistics; instance norm is one with the records among the channels."""
    meeting.refuse_mixture()
    first, uses_batch = meeting.inputs[0], meeting.saved("training") is not False
    if uses_batch and first is not None and first.is_rows and meeting.place(first.shape) == 0:
        meeting.refuse_over_records()
    return together(meeting)


def attention(meeting: Meeting) -> Outcome:
    """Follow ``scaled_dot_product_attention``: the records must not be the sequence."""
    meeting.refuse_mixture()
    if any(meeting.place_in(each) == len(each.shape) - 2 for each in meeting.given):
        meeting.refuse_over_records()
    return together(meeting)


def matrix_function(meeting: Meeting) -> Outcome:
    """Follow singular values, an inverse …: the records must not be rows or columns."""
    meeting.refuse_mixture()
    for each in meeting.given:
        place = meeting.place_in(each)
        if place is not None and place >= len(each.shape) - 2:
            meeting.refuse_over_records()
    return together(meeting)


def distances(meeting: Meeting) -> Outcome:
    """Follow ``cdist`` and ``pdist``: of rows of one record, not of records."""
    meeting.refuse_mixture()
    at_rows = [meeting.place_in(each) == len(each.shape) - 2 for each in meeting.given]
    if len(at_rows) == len(meeting.inputs) and all(at_rows):
        meeting.refuse_over_records()
    return together(meeting)


def matrix_product(meeting: Meeting) -> Outcome:
    """Follow a matrix product: what it sums over, and what it pairs."""
    *_, a, b = meeting.inputs  # the first one may be added
    if (mixture := meeting.mixture) is not None:
        is_multiplied = any(e is not None and isinstance(e.flow, Mixed) for e in (a, b))
        return _of_mixture(meeting, mixture, [a, b]) if is_multiplied else mixture
    kinds = {_side(meeting, each, dim) for each, dim in ((a, -1), (b, -2))} - {None}
    if kinds == {"summed"}:
        return Mixed(meeting.node)
    if kinds == {"paired"} and all(each is not None and each.is_rows for each in (a, b)):
        meeting.refuse_over_records()
    return together(meeting)


def _side(meeting: Meeting, factor: Given | None, summed: int) -> str | None:
    """Return which part the rows' dimension takes in a matrix product.

    Args:
        summed: the dimension that the product sums over, from the right.
    """
    if factor is None or not factor.is_rows:
        return None
    place, rank = meeting.place(factor.shape), len(factor.shape)
    if place is None:
        return "unknown"
    if place == (rank + summed if rank > 1 else 0):
        return "summed"
    return "batched" if rank == 3 and place == 0 else "paired"
