"""Copies of a Trainer's learning rate schedulers, which act on copies of its optimizers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

__all__ = ["LiveSchedulers"]

_DEPTH = 4  # of schedulers inside schedulers, and of lists in them


class LiveSchedulers:
    """Steps copies of schedulers as Lightning steps the real ones, so that what they read is seen.

    A scheduler's functions may read the model, its callbacks or the Trainer: in its copy they read the
    copies of these.

    Args:
        real: whose schedulers they are; None if there is no Trainer.
        memo: of ``copy.deepcopy``: what has its copy already. The optimizers must be among it.
    """

    def __init__(self, real: Trainer | None, memo: dict[int, Any]) -> None:
        self._copies: list[tuple[str, Any]] = []
        for config in () if real is None else real.lr_scheduler_configs:
            if config.reduce_on_plateau:
                continue  # it steps by a metric, which is another check's concern
            with contextlib.suppress(Exception):  # it holds a file, or a lock
                twin = copy.deepcopy(config.scheduler, memo)
                if isinstance(getattr(twin, "optimizer", None), Optimizer):
                    _rebind_in(twin, memo, _DEPTH)
                    self._copies.append((config.interval, twin))

    def step(self, interval: str | None = None) -> None:
        """Step those of an interval, "step" or "epoch"; all if none is named."""
        for of_each, scheduler in self._copies:
            if interval in (None, of_each):
                with contextlib.suppress(Exception):  # it needs a real Trainer
                    scheduler.step()


def _rebind_in(thing: Any, memo: Mapping[int, Any], depth: int) -> None:
    """Let the functions that a copied object holds see copies, where their closures hold originals."""
    own = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    for name, value in list(own.items()):
        own[name] = _rebound(value, memo, depth)


def _rebound(value: Any, memo: Mapping[int, Any], depth: int) -> Any:
    if isinstance(value, FunctionType):
        return _function(value, memo)
    if isinstance(value, partial):
        return partial(_rebound(value.func, memo, depth), *value.args, **value.keywords)
    if isinstance(value, list) and depth:
        return [_rebound(each, memo, depth - 1) for each in value]
    if hasattr(value, "step") and not isinstance(value, Optimizer) and depth:
        _rebind_in(value, memo, depth - 1)
    return value


def _function(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    cells = function.__closure__ or ()
    new = tuple(_cell(cell, memo) for cell in cells)
    if all(a is b for a, b in zip(cells, new, strict=True)):
        return function
    found = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, new
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _cell(cell: CellType, memo: Mapping[int, Any]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # nothing was put into it yet
        return cell
    return CellType(memo[id(content)]) if id(content) in memo else cell
