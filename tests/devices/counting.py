"""Counts what a device pays for: waits for it, copies to and from it, and float64 on it."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from device import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Counting", "Event"]

_WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
}
_INDEXES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


@dataclass(frozen=True)
class Event:
    """Something that a device pays for.

    Args:
        kind: "wait" (the host waits for the device), "copy" (from one to the other), "float64" (made on
            the device), or "loss" (one more run of a model).
        what: the operator.
        where: the line of the package that causes it, or of whoever does.
        entries: of the largest tensor.
    """

    kind: str
    what: str
    where: str
    entries: int


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, events are counted; each is one of the phase that it happened in."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "start"
        self._seen: SimpleQueue[tuple[str, Event]] = SimpleQueue()  # spot checks undo lists
        self._found: Counter[tuple[str, Event]] = Counter()

    def of(self, kind: str, phase: str | None = None, *, at_least: int = 0) -> Counter[Event]:
        """Return the events of a kind with their numbers.

        Args:
            kind: of the events.
            phase: when they happened; None for all.
            at_least: entries of the tensor.
        """
        while not self._seen.empty():
            self._found[self._seen.get()] += 1
        chosen: Counter[Event] = Counter()
        for (when, event), count in self._found.items():
            if phase in (None, when) and event.kind == kind and event.entries >= at_least:
                chosen[event] += count
        return chosen

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._look(func, args, kwargs)
        result = func(*args, **kwargs)
        for made in tree_leaves(result):
            if _is_there(made) and made.dtype == torch.float64:
                self._note("float64", func, [made])
        return result

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = [each for each in given if _is_there(each)]
        here = [each for each in given if not _is_there(each)]
        name, overload = func._schema.name, func._schema.overload_name
        if name == "aten::nll_loss_forward":
            self._note("loss", func, given)
        to = kwargs.get("device")
        if name == "aten::_to_copy" and to is not None:
            if torch.device(to).type != given[0].device.type:
                self._note("copy", func, given)
                if there:
                    self._note("wait", func, given)
        elif name == "aten::copy_" and there and here:
            self._note("copy", func, given)
            if not _is_there(args[0]):
                self._note("wait", func, given)
        elif not there:
            return
        elif name in _WAITS or f"{name}.{overload}" in _WAITS:
            self._note("wait", func, there)
        elif name in _INDEXES:
            index = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
            if any(each.dtype in (torch.bool, torch.uint8) for each in index):
                self._note("wait", func, there)
            elif any(not _is_there(each) for each in index):
                self._note("copy", func, index)

    def _note(self, kind: str, func: Any, tensors: Sequence[Tensor]) -> None:
        entries = max(each.numel() for each in tensors)
        self._seen.put((self.phase, Event(kind, func._schema.name, _where(), entries)))


def _is_there(thing: object) -> bool:
    return isinstance(thing, Tensor) and thing.device.type == DEVICE


def _where() -> str:
    """Return the innermost line of the package; without one, of the libraries that call it."""
    frames = [f for f in reversed(traceback.extract_stack()) if "/torch/" not in f.filename]
    ours = [f for f in frames if "/lightning_dp/" in f.filename or "/callbacks/" in f.filename]
    frame = (ours or [f for f in frames if not f.filename.endswith("counting.py")])[0]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"
