"""Arguments of calls that several groups of samples made, as those of one call for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dp.gradients.batches import map_leaves

__all__ = ["OfSamples", "joined", "over_records", "whole"]

_OVER = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@dataclass(frozen=True, slots=True)
class OfSamples:
    """A value that each sample has its own of, shape (n, ...)."""

    rows: Tensor


def joined(parts: Sequence[Any], places: Sequence[Tensor]) -> Any:
    """Return arguments of several groups as those of the batch.

    A list holds an entry for each row, whatever is in it; other containers are looked into.
    """
    first = parts[0]
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts], places) for key in first}
    if isinstance(first, tuple):
        return tuple(joined(column, places) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        lists = [
            [map_leaves(each, partial(_own, i=i)) for each in part]
            for part, at in zip(parts, places, strict=True)
            for i in range(len(at))
        ]
        return [each for i in _order(places) for each in lists[i]]
    if not any(isinstance(part, OfSamples) for part in parts):
        is_number = isinstance(first, int | float | Tensor)
        if not is_number or all(_is_same(first, part) for part in parts):
            return first
    if len(parts) == 1:
        return first
    of_each = [
        row for part, at in zip(parts, places, strict=True) for row in _rows_of(part, len(at))
    ]
    ordered = [of_each[i] for i in _order(places)]
    if len({row.shape for row in ordered}) == 1:
        return OfSamples(torch.stack(ordered))
    return OfSamples(torch.cat(ordered).unsqueeze(1))


def _order(places: Sequence[Tensor]) -> list[int]:
    order: list[int] = torch.cat(list(places)).argsort().tolist()
    return order


def _rows_of(part: Any, n: int) -> Tensor:
    if isinstance(part, OfSamples):
        return part.rows
    value = torch.as_tensor(part)
    return value.expand(n, *value.shape)


def _own(value: Any, i: int) -> Any:
    return value.rows[i] if isinstance(value, OfSamples) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def whole(value: Any) -> Any:
    """Return the rows of all samples: (n, b, ...) as (n · b, ...), and numbers as (n,)."""
    if not isinstance(value, OfSamples):
        return value
    return value.rows.flatten(0, 1) if value.rows.dim() > 1 else value.rows


def over_records(values: Tensor, reduce_fx: Any) -> Tensor:
    """Return the one value that is logged of those of records, shape (n,), as ``reduce_fx`` says."""
    values = values if values.is_floating_point() else values.float()
    name = getattr(reduce_fx, "__name__", reduce_fx)
    return _OVER.get(name, torch.mean)(values, 0)
