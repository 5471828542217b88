"""Kinds of synthetic records: which values stand in them, in the place of rows of any batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dp.isolation.nesting import map_leaves, map_rows, number_of_rows

__all__ = [
    "EITHER",
    "NO_KINDS",
    "REAL_LABELS",
    "Part",
    "SyntheticKind",
    "SyntheticKinds",
    "Values",
    "base_kind",
    "exchange_in_turn",
    "exchange_rows",
    "parts_of",
    "real_labels",
]

_LEAST = 1e-3  # of numbers between 0 and 1, so that their logarithm is finite
_NO_NUMBERS = "OSUMm"  # kinds of NumPy's dtypes: objects, texts, times


@dataclass(frozen=True)
class Values:
    """The kind of values in one tensor of a synthetic record.

    Args:
        low, high: real numbers between them, drawn uniformly.
        steps: if not 0, one of so many evenly spaced numbers from ``low`` to ``high``, both
            included; with 1 always ``low``.

    Example:
        >>> Values(0, 7, 8).draw((1000,), torch.Generator()).unique().tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        >>> Values(-100, -100, 1).draw((2,), torch.Generator()).tolist()
        [-100.0, -100.0]
    """

    low: float = 0.0
    high: float = 1.0
    steps: int = 0

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Draw numbers of a shape, in float64 on the CPU."""
        drawn = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
        if not self.steps:
            return self.low + (self.high - self.low) * drawn.clamp_(min=_LEAST)
        if self.steps == 1:
            return torch.full_like(drawn, self.low)
        width = (self.high - self.low) / (self.steps - 1)
        return self.low + width * (drawn * self.steps).floor_()

    def fit(self, dtype: torch.dtype) -> bool:
        """Tell whether a tensor of this dtype can hold them."""
        if dtype.is_floating_point:
            return True
        least, largest = (0, 1) if dtype == torch.bool else _range(dtype)
        return self.steps > 0 and least <= self.low <= self.high <= largest


def _range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype.is_complex:
        return 0, -1
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


UNIT = Values()
EITHER = Values(0, 1, 2)
REAL_LABELS = (EITHER, Values(-1, 1, 2))


@dataclass(frozen=True)
class Part:
    """A tensor, or an array of numbers, with one row per record.

    Args:
        dtype: of its numbers.
        shape: of one row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def is_real(self) -> bool:
        """True if it holds real numbers."""
        return self.dtype.is_floating_point

    @property
    def is_single(self) -> bool:
        """True if it holds one number per record."""
        return math.prod(self.shape) == 1


@dataclass(frozen=True)
class SyntheticKind:
    """One kind of synthetic records.

    Args:
        values: what stands in each part of a batch, in the order of :func:`parts_of`. In parts
            beyond them, and in those whose dtype cannot hold them, what fits all models: real
            numbers between 0 and 1, whole numbers 0 and 1.
    """

    values: tuple[Values, ...] = ()

    def of(self, place: int, dtype: torch.dtype) -> Values:
        """Return what stands in the part at a place."""
        if place < len(self.values) and self.values[place].fit(dtype):
            return self.values[place]
        return UNIT if dtype.is_floating_point else EITHER

    def at(self, place: int, values: Values) -> SyntheticKind:
        """Return the same kind with other values in one part."""
        return replace(self, values=(*self.values[:place], values, *self.values[place + 1 :]))

    def everywhere(self, places: Sequence[int], values: Values) -> SyntheticKind:
        """Return the same kind with other values in some parts."""
        kind = self
        for place in places:
            kind = kind.at(place, values)
        return kind


@dataclass(frozen=True)
class SyntheticKinds:
    """The kinds of synthetic records that a model took without an error, and that moved no others.

    Args:
        ran: with the tamest first.
    """

    ran: tuple[SyntheticKind, ...] = ()


NO_KINDS = SyntheticKinds()


def real_labels(parts: Sequence[Part]) -> list[int]:
    """Return the places of real numbers that may be labels: all but the largest part, and single ones."""
    reals = [place for place, part in enumerate(parts) if part.is_real]
    largest = max(reals, key=lambda place: math.prod(parts[place].shape), default=-1)
    return [place for place in reals if parts[place].is_single or place != largest]


def base_kind(parts: Sequence[Part], classes: int, first_class: int = 0) -> SyntheticKind:
    """Return the tamest kind, with so many class numbers in whole numbers that stand alone."""
    labels = Values(first_class, first_class + classes - 1, classes)

    def of(part: Part) -> Values:
        is_label = part.is_single and not part.shape and labels.fit(part.dtype)
        return UNIT if part.is_real else labels if is_label else EITHER

    return SyntheticKind(tuple(of(part) for part in parts))


def parts_of(batch: Any) -> tuple[Part, ...]:
    """Return the parts of a batch that hold numbers, one row per record, in the order of the nesting."""
    found: list[Part] = []

    def note(part: Any) -> Any:
        if (like := _like(part)) is not None:
            found.append(Part(like.dtype, tuple(like.shape[1:])))
        return part

    map_rows(batch, max(number_of_rows(batch), 1), note, lambda leaf: leaf)
    return tuple(found)


def _like(part: Any) -> Tensor | None:
    """Return a tensor with the dtype and the shape of a part that holds numbers, else None."""
    if isinstance(part, Tensor):
        return part
    if isinstance(part, np.ndarray) and part.dtype.kind not in _NO_NUMBERS:
        return torch.from_numpy(np.empty((0, *part.shape[1:]), part.dtype))
    return None


def exchange_rows(
    batch: Any, rows: Sequence[int], kind: SyntheticKind, generator: torch.Generator
) -> Any:
    """Return a batch with synthetic records of one kind in some rows; the batch itself is unchanged.

    No value of a number is read. Devices, dtypes, shapes and nesting stay as they are. Texts and
    other objects cannot be made up: a row gets those of the next row that is not exchanged, or where
    all are, of the next row. Parts without one row per record are shared, and stay.

    Args:
        batch: with one row per record in its tensors, arrays and lists.
        rows: whose records are replaced.
        kind: what stands in them.
        generator: on the CPU; what is drawn depends on it, on the shapes and on the kind alone.

    Example:
        >>> x, y = exchange_rows((torch.ones(3, 2), torch.ones(3)), [1],
        ...                      SyntheticKind((Values(-1, -1, 1),)), torch.Generator())
        >>> x.tolist()
        [[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]]
    """
    n = number_of_rows(batch)
    given = _givers(n, rows)
    places = itertools.count()

    def of_rows(part: Any) -> Any:
        if isinstance(part, Tensor):
            return _exchanged(part, rows, kind.of(next(places), part.dtype), generator)
        if isinstance(part, np.ndarray):
            if (like := _like(part)) is None:
                return part[[given.get(row, row) for row in range(n)]]
            values = kind.of(next(places), like.dtype)
            new = part.copy()
            new[list(rows)] = values.draw((len(rows), *part.shape[1:]), generator).numpy()
            return new
        return type(part)(
            _made_up(part[given[row]], generator) if row in given else thing
            for row, thing in enumerate(part)
        )

    return map_rows(batch, max(n, 1), of_rows, lambda leaf: leaf)


def exchange_in_turn(
    batch: Any, rows: Sequence[int], kinds: Sequence[SyntheticKind], seed: int
) -> Any:
    """Do the same with one kind after the other, row by row."""
    generator = torch.Generator().manual_seed(seed)
    for place, kind in enumerate(kinds):
        batch = exchange_rows(batch, rows[place :: len(kinds)], kind, generator)
    return batch


def _givers(n: int, rows: Sequence[int]) -> dict[int, int]:
    """Return for each exchanged row the one whose texts it gets."""
    others = [row for row in range(n) if row not in rows] or list(range(n))
    return {row: next((other for other in others if other > row), others[0]) for row in rows}


def _exchanged(
    part: Tensor, rows: Sequence[int], values: Values, generator: torch.Generator
) -> Tensor:
    shape = (len(rows), *part.shape[1:])
    if part.is_complex():
        drawn = torch.randn(shape, generator=generator, dtype=part.dtype)
    else:
        drawn = values.draw(shape, generator)
    new = part.detach().clone()
    new[torch.tensor(list(rows), dtype=torch.int64, device=new.device)] = drawn.to(
        new.device, new.dtype
    )
    return new


def _made_up(thing: Any, generator: torch.Generator) -> Any:
    """Return what a record of a list becomes: its numbers are made up, its texts are kept."""

    def made(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not leaf.is_complex():
            values = UNIT if leaf.is_floating_point() else EITHER
            return values.draw(leaf.shape, generator).to(leaf.device, leaf.dtype)
        if isinstance(leaf, bool | int):
            return type(leaf)(EITHER.draw((), generator).item())
        if isinstance(leaf, float):
            return UNIT.draw((), generator).item()
        return leaf

    return map_leaves(thing, made)
