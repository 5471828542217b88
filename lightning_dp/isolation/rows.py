"""The records of two batches that a user's code made, compared row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from lightning_dp.isolation.samples import is_container

__all__ = ["Difference", "Layout", "OtherRows", "layout_of", "normal_form", "same_parts"]


class OtherRows(ValueError):
    """A batch has not one row for each record."""


@dataclass(frozen=True)
class Difference:
    """Something that moved although its record did not.

    Args:
        kind: "rows": the rows of other records; "shared": a value that has no row per record.
        where: its place in the batch, as code; "" for rows.
    """

    kind: str
    where: str = ""


@dataclass(frozen=True)
class _Leaf:
    """A part of a batch.

    Args:
        path: keys and indices that lead to it.
        dim: the dimension that grows with the number of records; None if it does not double.
        per_record: entries of that dimension for a record.
        is_fixed: True if its size is the same for every number of records.
    """

    path: tuple[Any, ...]
    dim: int | None
    per_record: int = 0
    is_fixed: bool = True


@dataclass(frozen=True)
class Layout:
    """The places of the records in the batches of one function: found from two sizes, n and 2n.

    A tensor or list has the records along the dimension that doubles with their number.
    """

    leaves: tuple[_Leaf, ...]

    @property
    def has_rows(self) -> bool:
        """True if something has one row for each record, or several."""
        return any(leaf.dim is not None for leaf in self.leaves)

    @property
    def is_folded(self) -> bool:
        """True if some part has another number of rows than there are records."""
        return any(leaf.per_record > 1 or not leaf.is_fixed for leaf in self.leaves)

    def difference(
        self,
        a: Any,
        b: Any,
        sizes: tuple[int, int],
        *,
        exchanged: int,
        ragged: bool = False,
        of_lengths: bool = False,
    ) -> Difference | None:
        """Return what differs between two batches besides the rows of some records; in any order.

        Args:
            a, b: batches.
            sizes: their numbers of records.
            exchanged: records of each whose rows may differ.
            ragged: the longest record is another one, so that padding may differ: rows are compared
                where both are.
            of_lengths: records differ in length, so that rows and records may not be told apart
                where records have several rows.

        Raises:
            OtherRows: if a batch has other rows than it should.
        """
        a, b = normal_form(a), normal_form(b)
        skips = of_lengths and self.is_folded
        rows = [self._rows(part, n, skips) for part, n in zip((a, b), sizes, strict=True)]
        if _unmatched(*rows, ragged=ragged) > exchanged:
            return Difference("rows")
        if ragged or (of_lengths and self.is_folded):
            return None
        for leaf in self.leaves:
            one, other = _at(a, leaf.path), _at(b, leaf.path)
            if leaf.dim is None:
                if sizes[0] == sizes[1] and not same_parts(one, other):
                    return Difference("shared", "".join(f"[{key!r}]" for key in leaf.path))
            elif leaf.per_record > 1:
                folded = [[(row,) for row in _along(part, leaf.dim)] for part in (one, other)]
                if _unmatched(*folded, ragged=False) > exchanged * leaf.per_record:
                    return Difference("rows")
        return None

    def _rows(self, batch: Any, n: int, skips_starts: bool) -> list[tuple[Any, ...]]:
        columns = [
            _along(_at(batch, leaf.path), leaf.dim)
            for leaf in self.leaves
            if leaf.dim is not None
            and leaf.per_record == 1
            and not (skips_starts and _may_be_starts(_at(batch, leaf.path)))
        ]
        if any(len(column) != n for column in columns):
            raise OtherRows
        return list(zip(*columns, strict=True))


def layout_of(a: Any, b: Any, n: int) -> Layout:
    """Find where the records are, in a batch of n and one of 2n.

    Raises:
        OtherRows: if some part has rows, and they cannot be dealt out to the records.
    """
    return Layout(tuple(_leaves(normal_form(a), normal_form(b), n, ())))


def normal_form(batch: Any) -> Any:
    """Return a batch without tensors of special kinds: packed, nested and sparse ones spread out."""
    if isinstance(batch, PackedSequence):
        padded, lengths = pad_packed_sequence(batch, batch_first=True)
        return {"data": padded, "lengths": lengths}
    if isinstance(batch, Tensor):
        if batch.is_nested:
            return list(batch.unbind())
        return batch.to_dense() if batch.layout != torch.strided else batch
    if isinstance(batch, np.ndarray):
        return torch.from_numpy(batch) if batch.dtype.kind in "biuf" else batch.tolist()
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return [normal_form(each) for each in batch]
    if not is_container(batch):
        return batch
    fields = getattr(batch, "_asdict", None)  # of a named tuple
    parts = fields() if fields else batch if isinstance(batch, Mapping) else vars(batch)
    return {name: normal_form(parts[name]) for name in parts}


def _leaves(a: Any, b: Any, n: int, path: tuple[Any, ...]) -> Iterator[_Leaf]:
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        for key in a:
            yield from _leaves(a[key], b[key], n, (*path, key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _leaves(one, other, n, (*path, place))
    else:
        yield _leaf(a, b, n, path)


def _leaf(a: Any, b: Any, n: int, path: tuple[Any, ...]) -> _Leaf:
    sizes, doubled = _shape(a), _shape(b)
    if len(sizes) != len(doubled):
        return _Leaf(path, None, is_fixed=False)
    for dim, (size, twice) in enumerate(zip(sizes, doubled, strict=True)):
        if size and twice == 2 * size:
            if size % n:
                raise OtherRows
            return _Leaf(path, dim, size // n)
    return _Leaf(path, None, is_fixed=sizes == doubled)


def _shape(part: Any) -> tuple[int, ...]:
    if isinstance(part, Tensor):
        return tuple(part.shape)
    return (len(part),) if isinstance(part, list) else ()


def _at(batch: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        batch = batch[key]
    return batch


def _may_be_starts(part: Any) -> bool:
    """Tell whether numbers may say where each record's rows begin: they grow with those before it."""
    if not isinstance(part, Tensor) or part.dim() != 1 or part.is_floating_point():
        return False
    return not part.is_complex() and bool((part[:1] == 0).all() and (part.diff() >= 0).all())


def _along(part: Any, dim: int | None) -> Sequence[Any]:
    if isinstance(part, Tensor) and dim is not None:
        return list(part.movedim(dim, 0))
    return list(part)


def _unmatched(a: Sequence[Any], b: Sequence[Any], *, ragged: bool) -> int:
    """Return how many of the more numerous rows have no equal one in the other batch."""
    left, others = [], list(range(len(b)))
    for place, row in enumerate(a):  # most rows stay at their places
        if place < len(b) and same_parts(row, b[place], ragged):
            others.remove(place)
        else:
            left.append(row)
    unmatched = 0
    for row in left:
        found = next((place for place in others if same_parts(row, b[place], ragged)), None)
        if found is None:
            unmatched += 1
        else:
            others.remove(found)
    return max(unmatched, len(others)) if len(a) == len(b) else min(unmatched, len(others))


def same_parts(a: Any, b: Any, ragged: bool = False) -> bool:
    """Compare two parts, NaN equal to itself; what cannot be compared counts as equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensors(a, b, ragged)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_parts(a[key], b[key], ragged) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if ragged and len(a) != len(b):
            short, long = sorted((list(a), list(b)), key=len)
            ends = (long[: len(short)], long[len(long) - len(short) :])
            return any(same_parts(short, end) for end in ends)
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(same_parts(one, other, ragged) for one, other in pairs)
    if type(a) is not type(b):
        return False
    if hasattr(a, "tobytes") and hasattr(a, "size"):  # images
        return bool(a.size == b.size and a.tobytes() == b.tobytes())
    try:
        return bool(a == b) or (a != a and b != b) or _is_equal_to_itself_only(a)
    except Exception:
        return True


def _is_equal_to_itself_only(thing: Any) -> bool:
    own: object = type(thing).__eq__
    return own is object.__eq__


def _same_tensors(a: Tensor, b: Tensor, ragged: bool) -> bool:
    if a.dim() != b.dim() or a.dtype != b.dtype:
        return False
    if a.shape == b.shape:
        return _close(a, b)
    if not ragged:
        return False
    common = [min(sizes) for sizes in zip(a.shape, b.shape, strict=True)]
    # Padding follows, or it leads.
    return any(_close(_end(a, common, end), _end(b, common, end)) for end in (False, True))


def _end(tensor: Tensor, sizes: Sequence[int], at_end: bool) -> Tensor:
    for dim, size in enumerate(sizes):
        tensor = tensor.narrow(dim, (tensor.shape[dim] - size) * at_end, size)
    return tensor


def _close(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() or a.is_complex():
        return bool(torch.isclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True).all())
    return bool((a == b).all())
