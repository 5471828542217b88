"""The rows that samples of a user's data set are made of: is one row in several samples?"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dp._user_code import is_library
from lightning_dp.isolation.copies import Copies, quiet

__all__ = ["Shared", "chosen_rows", "shared_rows"]

_TIMES = 32  # a table with fewer rows for a sample holds constants: names of classes, centres
_DEPTH = 8  # of data sets in data sets
_PART = 1 << 16  # indices that are looked at together


@dataclass(frozen=True)
class Shared:
    """Rows of which some are in several samples.

    Args:
        name: of the attribute that holds them.
        rows: how many there are.
        samples: how many are made of them.
        each: how many rows a sample asks for.
    """

    name: str
    rows: int
    samples: int
    each: int = 1


def shared_rows(dataset: Any, records: Sequence[int]) -> Shared | None:
    """Return rows that make several samples of a data set; None if none do, or nobody can tell.

    Some samples are read from a copy that notes which rows of its lists, arrays and data sets are
    asked for by their number: if all samples together ask for more than there are, some row is in
    two. No value is looked at but those of tables of such numbers, and none of them is told.

    Args:
        dataset: of a class of the user's.
        records: indices of some samples.
    """
    if is_library(type(dataset)) or not hasattr(dataset, "__dict__"):
        return None
    try:
        with quiet():
            found = [_of_sample(dataset, record) for record in records]
    except Exception:  # a data set that needs the real thing
        return None
    sure = [each for each in found if each is not None]
    if len(sure) < len(found) or len({each.name for each in sure}) != 1:
        return None
    return min(sure, key=lambda shared: shared.each)


def _of_sample(dataset: Any, record: int) -> Shared | None:
    samples, twin = len(dataset), copy.copy(Copies(dataset).fresh())
    reads: dict[str, dict[int, Any]] = {}
    for name, value in list(vars(dataset).items()):
        if isinstance(value, list | tuple | Tensor | np.ndarray | Dataset) and _length(value) > 1:
            object.__setattr__(twin, name, _Noting(value, reads.setdefault(name, {})))
    twin[record]
    lengths = {name: _length(getattr(dataset, name)) for name, asked in reads.items() if asked}
    for name in [name for name, length in lengths.items() if length == samples]:
        if (found := _through(dataset, name, reads, samples)) is not None:
            return found
    if not lengths:
        return None
    name = max(lengths, key=lengths.__getitem__)
    found = Shared(name, lengths[name], samples, len(reads[name]))
    is_table = found.rows * _TIMES < samples
    return found if found.each * samples > found.rows and not is_table else None


def _through(
    dataset: Any, table: str, reads: dict[str, dict[int, Any]], samples: int
) -> Shared | None:
    """Tell of a table of row numbers, one for each sample, whether it names a row twice."""
    (given, *more) = reads[table].values()
    if more or not isinstance(given, int | np.integer | Tensor):
        return None
    numbers = np.asarray(getattr(dataset, table))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        return None
    rows = len(np.unique(numbers))
    others = [name for name in reads if name != table and int(given) in reads[name]]
    if not others or not rows < samples <= rows * _TIMES:
        return None
    return Shared(others[0], _length(getattr(dataset, others[0])), samples)


class _Noting:
    """A list, an array or a data set that notes which rows are asked for by number."""

    def __init__(self, real: Any, asked: dict[int, Any]) -> None:
        self._real, self._asked = real, asked

    def __getitem__(self, index: Any) -> Any:
        value = self._real[index]
        first = index[0] if isinstance(index, tuple) and index else index
        rows = len(self._real)
        if isinstance(first, slice):
            among = range(*first.indices(rows))
            self._asked |= dict.fromkeys(among if len(among) < rows else ())
        elif isinstance(first, int | np.integer) or (isinstance(first, Tensor) and not first.dim()):
            self._asked[int(first) % rows] = value
        return value

    def __len__(self) -> int:
        return len(self._real)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real, name)


def _length(value: Any) -> int:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return 0


def chosen_rows(dataset: Any) -> object:
    """Return what tells which rows a ``Subset`` chooses, to be compared; its length for others.

    Example:
        >>> from torch.utils.data import Subset
        >>> chosen_rows(Subset("abc", [0, 1])) == chosen_rows(Subset("abc", [0, 2]))
        False
    """
    found: list[object] = [_length(dataset)]
    for _ in range(_DEPTH):
        indices, inner = getattr(dataset, "indices", None), getattr(dataset, "dataset", None)
        if inner is None:
            break
        if indices is not None and _length(indices) == _length(dataset):
            with contextlib.suppress(Exception):  # a sequence of a kind that has no parts
                found.append(_fingerprint(indices))
        dataset = inner
    return tuple(found)


def _fingerprint(indices: Any) -> int:
    """Return a number that depends on which indices there are, and not on their order.

    It is the sum of a bijection of 64 bits (the end of SplitMix64), taken in parts: there may be many.
    """
    total = 0
    for start in range(0, _length(indices), _PART):
        mixed = np.asarray(indices[start : start + _PART]).astype(np.int64).view(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))
    return total % 2**64
