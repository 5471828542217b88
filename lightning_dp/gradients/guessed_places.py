"""Guesses of where the arguments of a function hold records, and how it shows that one is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_dp._precision import has_float64
from lightning_dp.gradients.function_call import FunctionCall
from lightning_dp.gradients.layouts import Layout

__all__ = ["guesses", "share_of_each"]


def guesses(call: FunctionCall) -> Iterator[dict[int, Layout]]:
    """Yield guesses of which parts and constants hold entries for each record, none first.

    Of a guess that is wrong something else than the recorded output comes out.
    """
    yield {}
    first = next((each for each in call.given if each.layout is not None), None)
    if first is None or first.layout is None:
        return
    layout, dims = first.layout, first.tensor.dim()
    # Not a parameter itself: its rows would belong to places in the batch, and to no record.
    others = [
        each
        for each in call.given
        if each.layout is None and (each.part is None or each.part.param is None)
    ]
    tried: list[dict[int, Layout]] = []
    for rows in dict.fromkeys((layout, replace(layout, outer=1, inner=1))):
        # Aligned from the last dimension, as entries meet; from the first; then any one.
        aligned = {
            each.place: replace(rows, dim=rows.dim + each.tensor.dim() - dims)
            for each in others
            if rows.dim + each.tensor.dim() - dims >= 0
        }
        tried.append(aligned)
        for dim in range(max((each.tensor.dim() for each in others), default=0)):
            tried.append({each.place: replace(rows, dim=dim) for each in others})
    for guess in tried:
        fitting = {
            each.place: guess[each.place]
            for each in others
            if each.place in guess and guess[each.place].fits(each.tensor, call.n)
        }
        if fitting:
            yield fitting
        if len(fitting) > 1:
            yield from ({place: layout} for place, layout in fitting.items())


def share_of_each(
    call: FunctionCall, wanted: Sequence[int], outputs: Sequence[Tensor]
) -> float | None:
    """Return the share of its outputs that each record has in the recorded ones; None if they differ.

    1 where an output holds the records, or their sum; 1/n of a mean over them. Up to rounding, and
    without regard to records with non-finite outputs; it depends on the function and the guess.
    """
    shares = set()
    for i, output in zip(wanted, outputs, strict=True):
        layout, recorded = call.layouts[i], call.outputs[i]
        if layout is None:
            rows = recorded.reshape(1, -1)
            total = _wide(output).sum(0).reshape(1, -1).to(recorded.dtype)
            if _agree(rows, total / call.n):
                shares.add(1 / call.n)
            elif _agree(rows, total):
                shares.add(1.0)
            else:
                return None
            continue
        rows = layout.records_first(recorded, call.n)
        if rows.shape != output.shape or not _agree(rows.flatten(1), output.flatten(1)):
            return None
        shares.add(1.0)
    return shares.pop() if len(shares) == 1 else None


def _wide(tensor: Tensor) -> Tensor:
    """Return float64 where the device has that: what is compared is compared by few digits."""
    if not has_float64(tensor.device.type):
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _agree(recorded: Tensor, found: Tensor) -> bool:
    """True if the entries of all finite rows are equal, relative to the largest of their row."""
    if not recorded.numel():
        return True
    has_digits = recorded.is_floating_point() or recorded.is_complex()
    tolerance = torch.finfo(recorded.dtype).eps ** 0.5 if has_digits else 0.0
    recorded, found = _wide(recorded), _wide(found)
    largest = recorded.abs().amax(1, keepdim=True)
    is_equal = (recorded - found).abs() <= tolerance * largest
    return bool((is_equal | ~torch.isfinite(largest)).all())
