"""Batches with the shapes and dtypes of the user's, and none of the values of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_dp.isolation.collated import CollatedPool
from lightning_dp.isolation.nesting import leaves, map_leaves, map_rows, number_of_rows

__all__ = [
    "NoHalfPrecision",
    "NoSyntheticBatch",
    "ValidLabels",
    "has_other_rows",
    "leaves_of",
    "replace_leaf",
    "synthetic_pool",
    "take_rows",
]

_SEED = 20_230_515  # any; the values mean nothing


class NoSyntheticBatch(ValueError):
    """The batch holds something that cannot be imitated from shapes and dtypes."""


def leaves_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order in which they are found."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def _map_tensors(batch: Any, function: Callable[[int, Tensor], Tensor]) -> Any:
    """Return the same structure with each tensor replaced by a function of its place and itself."""
    place = iter(range(len(leaves_of(batch))))

    def replaced(leaf: Any) -> Any:
        return function(next(place), leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(batch, replaced)


def replace_leaf(batch: Any, place: int, value: Tensor) -> Any:
    """Return the same batch with another tensor at one place."""
    return _map_tensors(batch, lambda at, leaf: value if at == place else leaf)


def take_rows(pool: Any, rows: Sequence[int]) -> Any:
    """Return the batch of some records of a pool, in this order; what has no rows stays whole."""
    if isinstance(pool, CollatedPool):
        return pool.take(rows)
    index = torch.tensor(list(rows), dtype=torch.int64)

    def take(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[index]
        if isinstance(part, np.ndarray):
            return part[index.numpy()]
        return type(part)(part[row] for row in rows)

    return map_rows(pool, number_of_rows(pool), take, lambda leaf: leaf)


def has_other_rows(batch: Any) -> bool:
    """Tell whether there is a tensor without one row for each record."""
    n = number_of_rows(batch)
    found: list[bool] = []

    def note(leaf: Any) -> Any:
        found.append(isinstance(leaf, Tensor | np.ndarray))
        return leaf

    map_rows(batch, n, lambda part: part, note)
    return any(found)


def synthetic_pool(batch: Any, records: int, classes: int, first_class: int = 0) -> Any:
    """Make so many records like those of a batch, from its shapes, dtypes and nesting.

    No value of a tensor, an array or a number per record is read, so this also works for a model
    whose data is private. Real numbers are uniform in (0, 1): legal as pixels, probabilities, and
    arguments of a logarithm. Whole numbers with one entry per record are class numbers (or
    lengths) from ``first_class``, ``classes`` of them; with several they are 0 or 1, which every
    vocabulary and every mask knows, and never all 0. Record i and record i + records/2 differ in
    every tensor, if there are two classes.

    Texts and other leaves that are no numbers (None, paths, objects) cannot be made up: they are
    passed through, those of the records in turn, so that a record's partner has another one.

    Args:
        batch: tensors with one row per record and lists of one thing per record, in dicts, lists,
            tuples, dataclasses or other objects. Other tensors are imitated as they are, once.
        records: rows to make, an even number.
        classes: how many class numbers.
        first_class: the least.

    Raises:
        NoSyntheticBatch: if nothing tells how many records there are; the message names types only.
    """
    n = number_of_rows(batch)
    if not n:
        raise NoSyntheticBatch("the batch holds no tensor")
    make = _Made(records, classes, first_class, torch.Generator().manual_seed(_SEED))
    return map_rows(batch, n, make.rows, make.once)


@dataclass(frozen=True)
class _Made:
    """Maker of parts of a batch."""

    records: int
    classes: int
    first_class: int
    generator: torch.Generator

    def rows(self, part: Any) -> Any:
        """Make one thing per record, for as many records as are wanted."""
        if isinstance(part, Tensor):
            return self._tensor(part, (self.records, *part.shape[1:]))
        if isinstance(part, np.ndarray):
            if part.dtype.kind in "OSUMm":  # no numbers
                return part[[self._giver(i, len(part)) for i in range(self.records)]]
            like = torch.from_numpy(np.empty((1, *part.shape[1:]), part.dtype))
            return self._tensor(like, (self.records, *part.shape[1:])).numpy().astype(part.dtype)
        rows = (part[self._giver(i, len(part))] for i in range(self.records))
        return type(part)(self._row(row, i) for i, row in enumerate(rows))

    def _giver(self, i: int, n: int) -> int:
        """Return whose text the i-th record gets: not its partner's, if there are two."""
        return (i + (i >= self.records // 2)) % n

    def _row(self, thing: Any, i: int) -> Any:
        """Make the i-th of a list of one thing per record."""
        if isinstance(thing, bool):
            return i % 2 == 0
        if isinstance(thing, int):
            return self.first_class + i % self.classes
        if isinstance(thing, float):
            return 0.5 + 0.4 * (i / self.records)
        return map_leaves(thing, self.once)

    def once(self, leaf: Any) -> Any:
        """Return what the records share, or a part of one record."""
        if isinstance(leaf, Tensor):
            return self._tensor(leaf, tuple(leaf.shape))
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUMm":
            like = torch.from_numpy(np.empty(leaf.shape, leaf.dtype))
            return self._tensor(like, leaf.shape).numpy().astype(leaf.dtype)
        return leaf

    def _tensor(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if like.is_floating_point():
            dtype = torch.promote_types(like.dtype, torch.float32)
            return torch.rand(shape, generator=self.generator, dtype=dtype).clamp_(min=1e-3)
        if like.is_complex():
            return torch.randn(shape, generator=self.generator, dtype=like.dtype)
        if not shape:
            return torch.ones(shape, dtype=like.dtype)
        half = shape[0] // 2
        if len(shape) == 1:
            if shape[0] != self.records:
                return torch.randint(2, shape, generator=self.generator).to(like.dtype)
            first = torch.arange(half) % self.classes
            numbers = torch.cat([first, (first + half) % self.classes])
            return (self.first_class + numbers).to(like.dtype)
        values = torch.randint(2, shape, generator=self.generator)
        values[half : 2 * half] = 1 - values[:half]
        if values[:1].numel() > 1:
            values.flatten(1)[:, 0] = 1
        return values.to(like.dtype)


_NAMES = ("log_probs", "targets", "input_lengths", "target_lengths", "blank")


class ValidLabels(TorchFunctionMode):
    """Inside, ``ctc_loss`` gets labels and lengths that it can take, made from what it is given.

    It checks nothing on the CPU, and made-up labels end the process: run models on them inside.
    The loss stays one of single records: the labels of record i are made from its own, or from none
    where all are in one row. Whole input lengths, labels of at most half of it, no blanks among them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.ctc_loss and func is not torch.ctc_loss:
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        named.update(zip(_NAMES, args, strict=False))
        rest = args[len(_NAMES) :]
        given = _valid(named["log_probs"], named["targets"], int(named.pop("blank", 0)))
        for name in _NAMES[:4]:
            named.pop(name, None)
        return func(*given, *rest, **named)


_HALF = (torch.float16, torch.bfloat16)


class NoHalfPrecision(TorchFunctionMode):
    """Inside, what would become half precision becomes float32, as the copies of such models are.

    Gradients of half precision move by a per cent by rounding alone.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.half, Tensor.bfloat16):
            return args[0].float()
        named = {name: _single(each) for name, each in (kwargs or {}).items()}
        return func(*map(_single, args), **named)


def _single(argument: Any) -> Any:
    is_half = isinstance(argument, torch.dtype) and argument in _HALF
    return torch.float32 if is_half else argument


def _valid(log_probs: Tensor, targets: Tensor, blank: int) -> tuple[Any, ...]:
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    if not (classes > 1 and steps and 0 <= blank < classes):
        raise ValueError("ctc_loss needs a time step, a blank and another class.")
    records = log_probs.shape[1] if log_probs.dim() == 3 else 1
    device = log_probs.device
    # Whose a label in one row is, records decide.
    rows = torch.zeros(records, 1, dtype=torch.int64, device=device)
    if targets.dim() == 2 and len(targets) == records and targets.shape[1]:
        rows = targets.detach().to(device, torch.int64)
    length = min(rows.shape[1], (steps + 1) // 2)
    labels = (blank + 1 + rows[:, :length] % (classes - 1)) % classes
    if log_probs.dim() == 2:
        return log_probs, labels[0], torch.tensor(steps), torch.tensor(length), blank
    ones = torch.ones(records, dtype=torch.int64)
    return log_probs, labels, ones * steps, ones * length, blank
