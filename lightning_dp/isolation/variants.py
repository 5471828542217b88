"""Variants of a batch: its samples together, some exchanged for copies of others, the others alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dp.gradients.batches import RowOwners
from lightning_dp.gradients.batches import leaves as leaves_of

__all__ = [
    "UnitRows",
    "Variants",
    "are_given_the_same",
    "are_same_rows",
    "have_same_shapes",
    "own_copies",
    "paired_rows",
]


class UnitRows(tuple[Any, ...]):
    """The rows of one unit, as one of several samples."""

    __slots__ = ()


def rows_in(samples: Sequence[Any]) -> list[Any]:
    """Return the rows of samples, one unit's after the other's."""
    found = (each if isinstance(each, UnitRows) else (each,) for each in samples)
    return [row for rows in found for row in rows]


def owners_in(samples: Sequence[Any]) -> RowOwners | None:
    """Return the sample of each row; None where each row is one."""
    if not any(isinstance(each, UnitRows) for each in samples):
        return None
    counts = torch.tensor([len(each) for each in samples])
    return RowOwners(len(samples), torch.arange(len(samples)).repeat_interleave(counts))


def places_in(samples: Sequence[Any], kept: Sequence[int]) -> list[int]:
    """Return the places of the rows of some samples among those of all.

    Example:
        >>> places_in([UnitRows("ab"), UnitRows("c"), UnitRows("de")], [0, 2])
        [0, 1, 3, 4]
    """
    owners = owners_in(samples)
    places = None if owners is None else owners.places()
    return list(kept) if places is None else [int(row) for i in kept for row in places[i]]


def _like(place: Any, given: Any) -> Any:
    """Return a sample for a place; of a unit as many rows as are there, so that all rows stay."""
    if not isinstance(place, UnitRows):
        return given
    return UnitRows(given[i % len(given)] for i in range(len(place)))


@dataclass(frozen=True)
class Variants:
    """Lists of samples to be compared; sensitive.

    Args:
        together: n samples.
        kept: the places of k of them, in their order; at least one.
        exchanged: the kept ones at their places, copies of them at the others.
    """

    together: list[Any] = field(repr=False)
    kept: list[int] = field(repr=False)
    exchanged: list[Any] = field(repr=False)

    @classmethod
    def of(cls, samples: Sequence[Any], kept: Sequence[int], turn: int = 0) -> Variants:
        """Make the variants; each kept sample is copied as often as any other, or once more.

        Args:
            samples: n samples.
            kept: places.
            turn: the kept sample whose copy is put first.

        Example:
            >>> variants = Variants.of("abcdef", [1, 4])
            >>> "".join(variants.exchanged), "".join(variants.alone)
            ('bbebee', 'be')
            >>> Variants.of([UnitRows("ab"), UnitRows("c")], [1]).exchanged
            [('c', 'c'), ('c',)]
        """
        exchanged, given = list(samples), turn
        for place in range(len(samples)):
            if place not in kept:
                exchanged[place] = _like(samples[place], samples[kept[given % len(kept)]])
                given += 1
        return cls(list(samples), list(kept), exchanged)

    @property
    def alone(self) -> list[Any]:
        """The kept samples and no others."""
        return [self.together[place] for place in self.kept]


def own_copies(samples: Sequence[Any]) -> list[Any]:
    """Return copies of samples, of which a ``collate_fn`` may do what it likes."""
    try:
        return [copy.deepcopy(sample, _rows_cloned(sample)) for sample in samples]
    except Exception:  # objects of the user's that cannot be copied: views of a file
        return list(samples)


def _rows_cloned(sample: Any) -> dict[int, Any]:
    """Return clones of tensors, by identity: ``deepcopy`` would copy all rows of their storage."""
    tensors = (each for each in leaves_of(sample, rows=True) if isinstance(each, Tensor))
    return {id(each): each.detach().clone() for each in tensors}


def paired_rows(
    before: Any, after: Any, sizes: tuple[int, int], kept: Sequence[int], places: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the rows of the kept samples in two batches.

    They are where they were put, as a rule. Where they are not, and all rows of the second batch are
    in the first, up to padding, samples were ordered; then rows that are equal are paired.

    Args:
        before, after: the two batches.
        sizes: the samples in each.
        kept, places: of the kept samples in the first and in the second list.

    Returns:
        the rows in the first batch, and those in the second.
    """
    rows = list(kept), list(places)
    leaves = _leaves_of_samples(before, after, sizes)
    if not leaves or all(_are_equal(leaves, i, j) for i, j in zip(*rows, strict=True)):
        return rows
    pairs: dict[int, int] = {}
    for j in range(sizes[1]):
        here = next((i for i in range(sizes[0]) if _are_equal(leaves, i, j)), None)
        if here is None:
            return rows  # a row of other samples' making: let the gradients show it
        pairs.setdefault(here, j)
    return list(pairs), list(pairs.values())


def are_same_rows(before: Any, after: Any, sizes: tuple[int, int], kept: Sequence[int]) -> bool:
    """Return True if two batches hold the same of some samples, up to padding."""
    leaves = _leaves_of_samples(before, after, sizes)
    return all(_are_equal(leaves, i, i) for i in kept)


def are_given_the_same(before: Any, after: Any, size: int, kept: Sequence[int]) -> bool:
    """Return True if two batches hold the same for some samples, and in what all of them share."""
    mine, its = leaves_of(before, rows=True), leaves_of(after, rows=True)
    if len(mine) != len(its):
        return False
    return all(_are_the_same(a, b, size, kept) for a, b in zip(mine, its, strict=True))


def _are_the_same(a: Any, b: Any, size: int, kept: Sequence[int]) -> bool:
    if isinstance(a, Tensor | np.ndarray) and isinstance(b, Tensor | np.ndarray):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dim() and len(a) == size:
            a, b = a[list(kept)], b[list(kept)]
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b) == size:
        return all(a[i] == b[i] for i in kept)
    return type(a) is type(b) and bool(a == b)


def have_same_shapes(before: Any, after: Any) -> bool:
    """Return True if the tensors of both batches have the same shapes: dropout is drawn by shape."""
    shapes = [
        [getattr(leaf, "shape", None) for leaf in leaves_of(batch, rows=True)]
        for batch in (before, after)
    ]
    return shapes[0] == shapes[1]


def _leaves_of_samples(
    before: Any, after: Any, sizes: tuple[int, int]
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of both batches that have a row for each sample, on the host."""
    of_both = [
        (torch.as_tensor(a).detach().cpu(), torch.as_tensor(b).detach().cpu())
        for a, b in zip(leaves_of(before, rows=True), leaves_of(after, rows=True), strict=False)
        if isinstance(a, Tensor | np.ndarray) and isinstance(b, Tensor | np.ndarray)
    ]
    return [
        (a, b) for a, b in of_both if a.dim() and a.dim() == b.dim() and (len(a), len(b)) == sizes
    ]


def _are_equal(leaves: Sequence[tuple[Tensor, Tensor]], i: int, j: int) -> bool:
    """Compare two rows, as far as both reach: one may be padded further."""
    for a, b in leaves:
        both = [slice(0, min(x, y)) for x, y in zip(a.shape[1:], b.shape[1:], strict=True)]
        one, other = a[i][tuple(both)], b[j][tuple(both)]
        if not bool(((one == other) | ((one != one) & (other != other))).all()):
            return False
    return True
