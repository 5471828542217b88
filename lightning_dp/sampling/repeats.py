"""Records that a data set names, through whatever it is nested of: one twice, or not as elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, TensorDataset

Integers: TypeAlias = NDArray[np.int64]

_ROWS = 64  # of a tensor, that are compared between processes


@dataclass(frozen=True)
class Repeat:
    """A record that several rows of a training set are made of."""

    source: str  # the class of the innermost data set that holds it
    index: object  # in it
    count: int  # rows of the training set that reach it


def find_repeat(dataset: object) -> Repeat | None:
    """Return the first record that more than one row of a data set is made of, or None.

    - ``Subset``, ``ConcatDataset`` and ``StackDataset`` are followed to any depth, and so are data
      sets that users write: one with ``dataset`` and as many ``indices`` as it has rows, and one that
      wraps data sets as long as itself (row i is taken to be made of their row i).
    - Records are the same if they have one index in one object or, in tensors, one place in memory.
    - Equal content at two places is not looked for, and what a ``__getitem__`` does with its index
      cannot be seen.

    Takes O(N log N), a second or less for a million rows, and reads no record.

    Example:
        >>> from torch.utils.data import ConcatDataset, Subset
        >>> records = list("abcde")
        >>> find_repeat(ConcatDataset([Subset(records, [0, 1]), Subset(records, [2, 3])])) is None
        True
        >>> find_repeat(ConcatDataset([Subset(records, [0, 1]), Subset(records, [-4, 3])]))
        Repeat(source='list', index=1, count=2)
    """
    if _is_innermost(dataset):
        return None  # without memory for each row, of which there may be 10^9
    rows = np.arange(len(dataset))  # type: ignore[arg-type]
    sources: dict[object, _Source] = {}
    for leaf, places, of_rows in _follow(dataset, rows, rows, ()):
        key, source, keys = _identify(leaf, places)
        sources.setdefault(key, _Source(source)).add(keys, places, of_rows)
    repeats = (source.find() for source in sources.values())
    return next((repeat for repeat in repeats if repeat is not None), None)


def digest_of_rows(dataset: object) -> str:
    """Name which records the rows are made of, the same in every process that chose the same ones.

    Data sets are followed as in :func:`find_repeat`; of what is innermost, indices are seen, and some
    rows of tensors, which may have been shuffled before.

    Example:
        >>> from torch.utils.data import Subset
        >>> records = list("abcde")
        >>> digest_of_rows(Subset(records, [0, 1])) == digest_of_rows(Subset(records, [1, 0]))
        False
    """
    if _is_innermost(dataset):
        return ""
    rows, found = np.arange(len(dataset)), hashlib.blake2b(digest_size=16)  # type: ignore[arg-type]
    for leaf, places, of_rows in _follow(dataset, rows, rows, ()):
        found.update(repr(places.tolist()).encode() if places.dtype == object else places.tobytes())
        found.update(of_rows.tobytes())
        tensors = leaf.tensors if isinstance(leaf, TensorDataset) else [leaf]
        for each in (t for t in tensors if isinstance(t, Tensor) and t.layout is torch.strided):
            some = each.detach()[:: 1 + len(each) // _ROWS].cpu().contiguous().reshape(-1)
            found.update(some.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass
class _Source:
    """The reached part of one innermost data set, or of the memory of all tensors."""

    name: str
    keys: list[Integers] = field(default_factory=list)
    places: list[NDArray[Any]] = field(default_factory=list)
    rows: list[Integers] = field(default_factory=list)

    def add(self, keys: Integers, places: NDArray[Any], rows: Integers) -> None:
        self.keys.append(keys)
        self.places.append(places)
        self.rows.append(rows)

    def find(self) -> Repeat | None:
        """Return a record that two different rows reach, after sorting by record."""
        keys, rows = np.concatenate(self.keys), np.concatenate(self.rows)
        if (keys[1:] > keys[:-1]).all():  # increasing, as nearly always: no need to sort
            return None
        order = np.lexsort((rows, keys))
        sorted_keys, sorted_rows = keys[order], rows[order]
        again = (sorted_keys[1:] == sorted_keys[:-1]) & (sorted_rows[1:] != sorted_rows[:-1])
        if not again.any():
            return None
        at = order[int(np.argmax(again))]
        place = np.concatenate([part.astype(object) for part in self.places])[at]
        return Repeat(self.name, place, len(np.unique(rows[keys == keys[at]])))


def _follow(
    dataset: Any, places: Integers, rows: Integers, above: tuple[object, ...]
) -> Iterator[tuple[Any, NDArray[Any], Integers]]:
    """Yield the innermost data sets, which of their indices are reached, and by which rows."""
    above = (*above, dataset)
    if isinstance(dataset, ConcatDataset):
        ends = np.asarray(dataset.cumulative_sizes)
        part_of = np.searchsorted(ends, places, side="right")
        order = np.argsort(part_of, kind="stable")
        cuts = np.searchsorted(part_of[order], np.arange(len(ends) + 1))
        for i, part in enumerate(dataset.datasets):
            mine = order[cuts[i] : cuts[i + 1]]
            if len(mine):
                start = ends[i - 1] if i else 0
                yield from _follow(part, places[mine] - start, rows[mine], above)
        return
    if _chooses(dataset):
        chosen = _as_array(dataset.indices)
        if chosen.dtype == np.int64:
            inner = chosen[places]
            inner = np.where(inner < 0, inner + (_length(dataset.dataset) or 0), inner)
            yield from _follow(dataset.dataset, inner, rows, above)
        else:
            yield dataset.dataset, chosen[places], rows
        return
    parts = [part for part in _parts(dataset) if not any(part is each for each in above)]
    for part in parts:
        yield from _follow(part, places, rows, above)
    if not parts:
        yield dataset, places, rows


def _is_innermost(dataset: object) -> bool:
    """Tell whether a data set is made of no others, and its rows of no memory that can be compared."""
    nested = isinstance(dataset, ConcatDataset | Tensor | TensorDataset) or _chooses(dataset)
    return not nested and not any(part is not dataset for part in _parts(dataset))


def _chooses(dataset: Any) -> bool:
    """Tell whether it is a ``Subset``, of whatever library."""
    if not hasattr(dataset, "dataset") or not hasattr(dataset, "indices"):
        return False
    return _length(dataset.indices) == _length(dataset) is not None


def _as_array(indices: Any) -> NDArray[Any]:
    """Indices as integers, or whatever else a data set is indexed with, as objects."""
    try:
        array = np.asarray(indices)
    except ValueError:  # of different lengths
        array = np.empty(0, dtype=object)
    if array.ndim == 1 and array.dtype.kind in "iub":
        return array.astype(np.int64)
    objects = np.empty(len(indices), dtype=object)
    objects[:] = list(indices)
    return objects


def _parts(dataset: Any) -> Iterable[Any]:
    """Return the data sets whose row i goes into row i of this one."""
    if isinstance(dataset, StackDataset):
        stacked = dataset.datasets
        return stacked.values() if isinstance(stacked, dict) else stacked
    if not isinstance(dataset, Dataset) or isinstance(dataset, TensorDataset):
        return ()
    held = getattr(dataset, "__dict__", {}).values()
    return [v for v in held if isinstance(v, Dataset) and _length(v) == _length(dataset)]


def _identify(leaf: Any, places: NDArray[Any]) -> tuple[object, str, Integers]:
    """Return the key of records that are told apart, a name, and a number for each of them."""
    name = type(leaf).__name__
    if places.dtype == object:
        known: dict[str, int] = {}
        numbers = [known.setdefault(repr(place), len(known)) for place in places]
        return (id(leaf), "keys"), name, np.array(numbers, dtype=np.int64)
    if isinstance(leaf, Tensor | TensorDataset):
        rows = _rows_in_memory((leaf,) if isinstance(leaf, Tensor) else leaf.tensors)
        if rows is not None:
            return rows[0], name, rows[1] + rows[2] * places
    return id(leaf), name, places


def _rows_in_memory(tensors: Sequence[Tensor]) -> tuple[object, int, int] | None:
    """Return device, address of the first row and distance of rows of the tensor to tell them by."""
    plain = [t for t in tensors if t.layout is torch.strided and t.ndim and t[:1].numel()]
    plain = [tensor for tensor in plain if tensor.data_ptr()]
    plain.sort(key=lambda tensor: tensor.stride(0) == 0)  # one row expanded comes last
    if not plain:
        return None
    return str(plain[0].device), plain[0].data_ptr(), plain[0].stride(0) * plain[0].element_size()


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None
