"""Outcomes of the passes of a spot check, and the evidence that they are together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dp.gradients.random_state import RandomState
from lightning_dp.isolation.answers import Call
from lightning_dp.isolation.coupling import Pair, mixing_module
from lightning_dp.isolation.module_state import Difference, ModuleState
from lightning_dp.isolation.record_gradients import Glimpse, Movement
from lightning_dp.isolation.spot_plan import Exchange

__all__ = ["Check", "Evidence", "Seen", "first_that_mixes", "is_table"]

_THROUGH = ", first in the outputs of {}"


@dataclass(frozen=True)
class Seen:
    """The outcome of one pass; sensitive.

    Args:
        gradients: None if it gave none.
        drawn: the random states when its loss was there.
        state: what the module kept then.
        calls: of modules, if they were watched.
    """

    gradients: Glimpse | None
    drawn: RandomState
    state: ModuleState
    calls: tuple[Call, ...] = field(default=(), repr=False)

    def draws_as(self, other: Seen) -> bool:
        """Tell whether another pass drew as many random numbers, of each generator."""
        return self.drawn.is_same(other.drawn) and not self.state.drew(other.state)


@dataclass
class Evidence:
    """The evidence that the passes of one check have given so far.

    Args:
        is_open: it may be a fault.
        kept: names of tensors that differed with other records, and never in a control pass.
        changed: how many exchanges changed tensors, by their names.
        movements: how often gradients moved in each way.
        where: the module in whose outputs that began, in words.
    """

    is_open: bool
    kept: set[str]
    changed: Counter[str] = field(default_factory=Counter)
    movements: Counter[Movement] = field(default_factory=Counter)
    where: str | None = None

    @property
    def moved(self) -> int:
        """The number of exchanges that moved gradients."""
        orders = self.movements[Movement.ORDER] > 0
        return self.movements[Movement.MOVED] + (not orders) * self.movements[Movement.UNCLEAR]


@dataclass
class Check:
    """One check, from the pass with exchanged records to the end of the step.

    Args:
        args: of ``training_step``.
        exchange: the batch of the first pass; None if there is nothing to compare.
        start, randomness: the state of everything before it.
        size: the number of records; 1 for a stand-in.
        seen: by it; None if it could not be made.
        real: the gradients of the real records; None before.
        real_state: the state when the real loss was there; None before.
        kept: names of tensors that differ then.
        is_suspect: True if something moved.
    """

    args: tuple[Any, ...]
    exchange: Exchange | None
    start: ModuleState
    randomness: RandomState
    size: int
    seen: Seen | None = None
    real: Glimpse | None = None
    real_state: ModuleState | None = None
    kept: tuple[str, ...] = ()
    is_suspect: bool = False


def is_table(module: LightningModule, each: Difference) -> bool:
    """Tell whether a buffer is a table of the batch's length: of another shape, and never saved."""
    where, _, name = each.name.rpartition(".")
    try:
        owner = module.get_submodule(where)
    except AttributeError:
        return False
    return each.is_resized and name in owner._non_persistent_buffers_set


def first_that_mixes(before: Seen, after: Seen, others: tuple[int, ...]) -> str:
    """Name the first module that gave the others other outputs for the same inputs, if one did."""
    try:
        n = 0 if before.gradients is None else len(before.gradients.norms)
        call = mixing_module(Pair(before.calls, after.calls, others, others, (n, n)))
    except Exception:  # outputs of any kind
        return ""
    if call is None or not call.name:
        return ""
    return _THROUGH.format(f"{call.name} ({call.kind})")
