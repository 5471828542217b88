"""The table of gradient engines: for each name a ladder, of which the first engine that works is used."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_dp.config import known_engine
from lightning_dp.gradients.base import (
    ALONE,
    AbstractGradientEngine,
    UnsupportedModelError,
    without_alone,
)
from lightning_dp.gradients.batches import Layout
from lightning_dp.gradients.graph import CoupledLossError
from lightning_dp.gradients.sharded import refuse_other_shards
from lightning_dp.gradients.unsupported import refuse_sharded, refuse_special

__all__ = ["EngineChoice", "Rung", "attach_engine"]

_WHOLE = (
    "With manual optimization or several optimizers, training_step runs with the whole batch, which "
    "engine={!r} does not. Leave the engine at 'auto'."
)
_LONGEST = 300  # characters of a reason that is told in short


@dataclass(frozen=True)
class Rung:
    """One engine of a ladder.

    Args:
        name: in reports and refusals.
        make: makes the engine.
        takes_shards: it knows parameters of which each process holds a part.
        runs_whole_batch: ``training_step`` runs once, with all records.
    """

    name: str
    make: Callable[[], AbstractGradientEngine]
    takes_shards: bool = False
    runs_whole_batch: bool = True


# Opacus takes a second to import, and a command that only reads a report needs no engine.
def _layers() -> AbstractGradientEngine:
    from lightning_dp.gradients.layer_calls import LayerCalls

    return LayerCalls()


def _layers_of_shards() -> AbstractGradientEngine:
    from lightning_dp.gradients.layer_calls import LayerCalls

    return LayerCalls(units=True)


def _ghost() -> AbstractGradientEngine:
    from lightning_dp.gradients.ghost import GhostClipping

    return GhostClipping()


def _records() -> AbstractGradientEngine:
    from lightning_dp.gradients.records import Records

    return Records()


def _hooks() -> AbstractGradientEngine:
    from lightning_dp.gradients.opacus_hooks import OpacusHooks

    return OpacusHooks()


def _one_by_one() -> AbstractGradientEngine:
    from lightning_dp.gradients.one_by_one import OneByOne

    return OneByOne()


_LAYERS = Rung("layers", _layers, takes_shards=True)
_RECORDS = Rung("records", _records, runs_whole_batch=False)
_ONE_BY_ONE = Rung("one_by_one", _one_by_one, runs_whole_batch=False)
_LADDERS: Mapping[str, tuple[Rung, ...]] = {
    "auto": (_LAYERS, _RECORDS, _ONE_BY_ONE),
    "records": (_RECORDS, _ONE_BY_ONE),
    "layers": (_LAYERS,),
    "bookkeeping": (_LAYERS,),  # its old name
    "ghost": (Rung("ghost", _ghost), _LAYERS, _RECORDS, _ONE_BY_ONE),
    "hooks": (Rung("hooks", _hooks),),
    "one_by_one": (_ONE_BY_ONE,),
}


class EngineChoice:
    """The engine that a name stands for: the first of its ladder that can handle the model.

    Whether one can is decided by the model, the shapes of a batch and the graph of its loss. It shows
    when the engine is attached, on a synthetic batch, or on a real one. The choice only ever goes
    down, and all who share it go on with the engine that it has come to.

    Args:
        name: as in ``PrivacyConfig``.

    Raises:
        ValueError: for a name that is not known.

    Example:
        >>> choice = EngineChoice("ghost")
        >>> choice.description
        'ghost'
        >>> choice.fall(UnsupportedModelError("net.scale was called with rows of (3, 4). Cure."))
        True
        >>> EngineChoice("hooks").fall(UnsupportedModelError("There is no other one."))
        False
    """

    def __init__(self, name: str) -> None:
        self._last_cure = ALONE
        self._rungs = _LADDERS[known_engine("engine", name)]
        self._reasons: tuple[UnsupportedModelError, ...] = ()  # of the engines above
        self.layout: Layout | None = None
        """The places of samples in a batch, once they are known."""

    @property
    def can_fall(self) -> bool:
        """True if there is another engine below."""
        return len(self._reasons) + 1 < len(self._rungs)

    @property
    def reasons(self) -> tuple[UnsupportedModelError, ...]:
        """The reasons for which the engines above are not in use."""
        return self._reasons

    @property
    def isolates(self) -> bool:
        """True if the engine in use runs records alone, so that they cannot mix in the model."""
        return not self._rung.runs_whole_batch

    @property
    def is_last(self) -> bool:
        """True if records run one after the other, which everything else is below."""
        return self._rung is _ONE_BY_ONE

    @property
    def _rung(self) -> Rung:
        return self._rungs[len(self._reasons)]

    @property
    def description(self) -> str:
        """The engine in use, and why it is not the one before, as a sentence for the report."""
        if not self._reasons:
            return self._rung.name
        above = self._rungs[len(self._reasons) - 1]
        why = _in_short(self._reasons[-1].text)
        return f"{self._rung.name}, since {above.name} does not cover this model: {why}"

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> AbstractGradientEngine:
        """Return the first engine from here on that can handle the model, watching it.

        Raises:
            UnsupportedModelError: if there is none.
        """
        refuse_special(module, params)
        refuse_other_shards(module, params)
        while True:
            engine = self._rung.make()
            try:
                if not self._rung.takes_shards:
                    refuse_sharded(module)
                engine.attach(module, params)
            except UnsupportedModelError as reason:
                if not self.fall(reason):
                    raise self.refusal(reason) from reason
            else:
                return engine

    def fall(self, reason: UnsupportedModelError) -> bool:
        """Go on to the next engine, if there is one that may do better.

        A loss that mixes records is no matter of engines.
        """
        is_of_all = isinstance(reason, CoupledLossError) or reason.topic == "checkpointing"
        if is_of_all or not self.can_fall:
            return False
        self._reasons = (*self._reasons, reason.plain())
        return True

    def here(self) -> EngineChoice:
        """Return a choice of the engine in use alone."""
        alone = copy.copy(self)
        alone._rungs, alone._reasons = (self._rung,), ()
        return alone

    def whole_batch(self) -> EngineChoice:
        """Return a choice among the engines from here on that run the whole batch at once.

        Raises:
            UnsupportedModelError: if there is none.
        """
        able, place = copy.copy(self), len(self._reasons)
        below = tuple(rung for rung in self._rungs[place:] if rung.runs_whole_batch)
        if not below:
            raise UnsupportedModelError(_WHOLE.format(self._rung.name), topic="engines")
        able._last_cure, able._rungs = "", (*self._rungs[:place], *below)
        return able

    def over_shards(self) -> EngineChoice:
        """Return a choice among the engines from here on that know shards, if there are any."""
        able, place = copy.copy(self), len(self._reasons)
        able._last_cure = ""  # where all processes run together, no record runs alone
        below = tuple(rung for rung in self._rungs[place:] if rung.takes_shards)
        units = tuple(replace(rung, make=_layers_of_shards) for rung in below)
        able._rungs = (*self._rungs[:place], *(units or (self._rung,)))
        return able

    def stay(self, reasons: Sequence[UnsupportedModelError]) -> None:
        """Go down as far as another choice did, for its reasons, and never again."""
        self._reasons = tuple(reason.plain() for reason in reasons)
        self._rungs = self._rungs[: len(reasons) + 1]

    def refusal(self, last: UnsupportedModelError) -> UnsupportedModelError:
        """Return the refusal by the last engine, with the reasons of those above in short."""
        reasons = [*self._reasons, last]
        rungs = self._rungs[: len(reasons)]
        parts = [without_alone(last.text)]
        for rung, reason in zip(rungs, self._reasons, strict=False):
            short = _in_short(reason.text)
            if not any(short in part for part in parts):
                parts.append(f"The engine {rung.name!r} does not cover it either: {short}")
        text = f"{' '.join(parts)} {self._last_cure}".rstrip()
        return UnsupportedModelError(text, topic=last.topic)


def attach_engine(
    name: str, module: nn.Module, params: Sequence[nn.Parameter]
) -> tuple[AbstractGradientEngine, str]:
    """Return the engine of that name, watching the module, and a sentence about it for the report.

    Raises:
        ValueError: for a name that is not known.
        UnsupportedModelError: if no engine of that name can handle the model.
    """
    choice = EngineChoice(name)
    return choice.attach(module, params), choice.description


def _in_short(reason: str) -> str:
    """Return the first sentence of a reason."""
    first = re.split(r"(?<=[.])\s+(?=[A-Z])", reason, maxsplit=1)[0]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]} …"
