"""Copies of a user's callables and data sets, whose random draws begin alike."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_dp._generators import OWN_GENERATORS, accelerator_kept, as_text, seed_own, state_of

__all__ = ["Copies", "ReadsDataset", "quiet", "random_state", "seeded"]

_LARGE, _LONG = 100_000, 1000  # bytes of data, things in a list: of more, it holds records
_MOST = 2**20  # bytes of a copy
_DEPTH = 6  # of objects inside objects that are looked into for a generator

_SHARED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    nn.Module,
    Trainer,
)


class Copies:
    """Makes copies that begin with the same state, without copying the data.

    Whatever a call keeps (in attributes, closures, defaults, random generators) it keeps in its own
    copy. Shared are modules, classes, globals, and large tensors, arrays, texts and lists; of what
    cannot be copied (an open file, a lock) everything is.

    Args:
        original: an object or a function.
        closes_datasets: share the data sets too, and let no record of them be read.
    """

    def __init__(self, original: Any, *, closes_datasets: bool = False) -> None:
        self._original, self._closes_datasets = original, closes_datasets

    def fresh(self) -> Any:
        """Return a new copy; the original itself if it cannot be copied."""
        return self._copied(self._original, top=True)

    def _copied(self, thing: Any, *, top: bool = False) -> Any:
        if isinstance(thing, types.FunctionType):
            return self._function(thing) if thing.__closure__ else thing
        if isinstance(thing, types.MethodType):
            owner = self._copied(thing.__self__, top=True)
            return types.MethodType(thing.__func__, self._closed(owner))
        if top and hasattr(thing, "__dict__") and not isinstance(thing, _SHARED):
            return self._object(thing)
        return self._state(thing)

    def _closed(self, thing: Any) -> Any:
        is_closed = self._closes_datasets and isinstance(thing, Dataset)
        return _ClosedDataset(thing) if is_closed else thing

    def _object(self, thing: Any) -> Any:
        try:
            new = copy.copy(thing)
            for name, value in vars(thing).items():
                object.__setattr__(new, name, self._copied(value))
        except Exception:
            return thing
        return new

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(_cell(cell, self._copied) for cell in function.__closure__ or ())
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        new.__kwdefaults__ = function.__kwdefaults__
        return new

    def _state(self, thing: Any) -> Any:
        """Return a copy of all that is small."""
        stream, shared = _Bounded(), _Shared(self._closes_datasets)
        try:
            _Pickler(stream, shared).dump(thing)
            stream.seek(0)
            return _Unpickler(stream, shared).load()
        except Exception:  # a lock, an open file
            return thing


def _cell(cell: types.CellType, copied: Callable[[Any], Any]) -> types.CellType:
    try:
        return types.CellType(copied(cell.cell_contents))
    except ValueError:  # nothing was put into it yet
        return types.CellType()


class ReadsDataset(RuntimeError):
    """Somebody asked a closed data set for a record."""


class _ClosedDataset:
    """A data set with everything but its records."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_real" not in vars(self):  # under construction
            raise AttributeError(name)
        return getattr(self._real, name)

    def __len__(self) -> int:
        return len(self._real)

    def __getitem__(self, index: Any) -> Any:
        raise ReadsDataset

    __getitems__ = __iter__ = __getitem__


class _Bounded(io.BytesIO):
    """A stream for what is small."""

    def write(self, data: Any) -> int:
        if self.tell() > _MOST:
            raise OverflowError("too large to be copied")
        return super().write(data)


class _Shared(list[Any]):
    """The things that a copy shares with its original."""

    def __init__(self, closes_datasets: bool) -> None:
        super().__init__()
        self._closes_datasets = closes_datasets

    def add(self, thing: Any) -> int:
        """Return the number of a thing that is to be shared."""
        is_closed = self._closes_datasets and isinstance(thing, Dataset)
        self.append(_ClosedDataset(thing) if is_closed else thing)
        return len(self) - 1

    def holds(self, thing: Any) -> bool:
        if isinstance(thing, (*_SHARED, Dataset) if self._closes_datasets else _SHARED):
            return True
        if isinstance(thing, Tensor | np.ndarray):
            return thing.nbytes > _LARGE
        if isinstance(thing, str | bytes):
            return len(thing) > _LARGE
        return isinstance(thing, list | tuple | dict | set) and len(thing) > _LONG


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, shared: _Shared) -> None:
        super().__init__(stream)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        return self._shared.add(obj) if self._shared.holds(obj) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, shared: _Shared) -> None:
        super().__init__(stream)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what is inside from printing, and put the global random states back after it.

    What is inside must catch its exceptions, or they keep the random states as they are.
    """
    with (
        isolate_rng(),
        accelerator_kept(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def seeded(seed: int, *owners: Any) -> Iterator[None]:
    """Begin with the same random numbers inside: the global ones, and those that the owners hold.

    The global random states are not put back; CUDA's are not touched.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for owner in owners:
        for generator in _generators(owner, _DEPTH):
            seed_own(generator, seed)
    yield


def random_state(owner: Any) -> tuple[Any, ...]:
    """Return the global random states of the CPU, and those of an object's generators, to compare."""
    numpy: Any = np.random.get_state()
    own = [as_text(state_of(generator)) for generator in _generators(owner, _DEPTH)]
    state = random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()
    return (*state, *own)


def _generators(owner: Any, depth: int) -> Iterator[Any]:
    """Find generators in an object's attributes, and in what those hold."""
    if isinstance(owner, OWN_GENERATORS):
        yield owner
    elif depth:
        for part in _held(owner):
            yield from _generators(part, depth - 1)


def _held(owner: Any) -> list[Any]:
    if isinstance(owner, types.MethodType):
        return [owner.__self__]
    if isinstance(owner, types.FunctionType):
        full = [cell for cell in owner.__closure__ or () if cell != types.CellType()]
        return [cell.cell_contents for cell in full]
    if isinstance(owner, Mapping):
        return list(owner.values()) if len(owner) < 100 else []
    if isinstance(owner, list | tuple):
        return list(owner) if len(owner) < 100 else []
    if isinstance(owner, Tensor | np.ndarray | types.ModuleType | type | Trainer):
        return []
    return list(vars(owner).values()) if hasattr(owner, "__dict__") else []
