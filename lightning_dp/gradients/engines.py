"""The table of gradient engines: for each name a ladder, of which the first engine that works is used."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from lightning_dp.config import check_engine_name
from lightning_dp.gradients.base import (
    ALONE,
    AbstractGradientEngine,
    UnsupportedModelError,
    refuse_sharded,
    refuse_special,
    without_alone,
)
from lightning_dp.gradients.batches import Layout
from lightning_dp.gradients.ghost import GhostClipping
from lightning_dp.gradients.graph import CoupledLossError
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.one_by_one import OneByOne
from lightning_dp.gradients.records import Records
from lightning_dp.gradients.sharded import refuse_other_shards

__all__ = ["EngineChoice"]

_WHOLE = (
    "With manual optimization or several optimizers, training_step runs with the whole batch, which "
    "engine={!r} does not. Leave the engine at 'auto'."
)
_LONGEST = 300  # characters of a reason in short


Kind: TypeAlias = type[AbstractGradientEngine]
_LADDERS: Mapping[str, tuple[Kind, ...]] = {
    "auto": (LayerCalls, Records, OneByOne),
    "records": (Records, OneByOne),
    "layers": (LayerCalls,),
    "bookkeeping": (LayerCalls,),  # its old name
    "ghost": (GhostClipping, LayerCalls, Records, OneByOne),
    "one_by_one": (OneByOne,),
}


def _ladder(name: str) -> tuple[Kind, ...]:
    if name != "hooks":
        return _LADDERS[name]
    from lightning_dp.gradients.opacus_hooks import OpacusHooks  # Opacus takes a second to import

    return (OpacusHooks,)


class EngineChoice:
    """The engine that a name stands for: the first of its ladder that can handle the model.

    Whether one can is decided by the model, the shapes of a batch and the graph of its loss. It shows
    when the engine is made, on a synthetic batch, or on a real one. All who share the choice go on
    with the engine that it has come to.

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
        self._rungs = _ladder(check_engine_name("engine", name))
        self._is_over_shards = False
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
    def _rung(self) -> Kind:
        return self._rungs[len(self._reasons)]

    @property
    def description(self) -> str:
        """The engine in use, and why it is not the one before, as a sentence for the report."""
        if not self._reasons:
            return self._rung.name
        above = self._rungs[len(self._reasons) - 1]
        why = _in_short(self._reasons[-1].text)
        return f"{self._rung.name}, since {above.name} does not cover this model: {why}"

    def make(self, module: nn.Module, params: Sequence[nn.Parameter]) -> AbstractGradientEngine:
        """Return the first engine from here on that can handle the model, or refuse it."""
        refuse_special(module, params)
        refuse_other_shards(module, params)
        while True:
            rung = self._rung
            options: Any = {"units": self._is_over_shards} if rung.takes_shards else {}
            try:
                if not rung.takes_shards:
                    refuse_sharded(module)
                return rung(module, params, **options)
            except UnsupportedModelError as reason:
                if not self.fall(reason):
                    raise self.refusal(reason) from reason

    def fall(self, reason: UnsupportedModelError) -> bool:
        """Go on to the next engine, if there is one that may do better.

        A loss that mixes records is no matter of engines.
        """
        is_of_all = isinstance(reason, CoupledLossError) or reason.topic == "checkpointing"
        if is_of_all or not self.can_fall:
            return False
        self._reasons = (*self._reasons, reason.plain())
        return True

    def climb(self) -> None:
        """Take the latest fall back: the engine below fails at the same values."""
        self._reasons = self._reasons[:-1]

    def whole_batch(self) -> EngineChoice:
        """Return a choice among the engines from here on that run the whole batch, or refuse it."""
        able = [rung for rung in self._from_here if not rung.isolates]
        if not able:
            raise UnsupportedModelError(_WHOLE.format(self._rung.name), topic="engines")
        return self._among(able)

    def over_shards(self) -> EngineChoice:
        """Return a choice among the engines from here on that know shards, if there are any."""
        able = [rung for rung in self._from_here if rung.takes_shards]
        choice = self._among(able or [self._rung])
        choice._is_over_shards = True
        return choice

    @property
    def _from_here(self) -> tuple[Kind, ...]:
        return self._rungs[len(self._reasons) :]

    def _among(self, able: Sequence[Kind]) -> EngineChoice:
        """Return a choice that goes on with these engines, none of which runs a record alone."""
        choice = copy.copy(self)
        choice._last_cure = ""
        choice._rungs = (*self._rungs[: len(self._reasons)], *able)
        return choice

    def stay(self, reasons: Sequence[UnsupportedModelError]) -> None:
        """Go down as far as another choice did, for its reasons, and never again."""
        self._reasons = tuple(reason.plain() for reason in reasons)
        self._rungs = self._rungs[: len(reasons) + 1]

    def refusal(self, last: UnsupportedModelError) -> UnsupportedModelError:
        """Return the refusal by the last engine; those above tell their reasons where they are named."""
        above = [
            f"engine={rung.name!r}"
            for rung, reason in zip(self._rungs, self._reasons, strict=False)
            if _in_short(reason.text) not in last.text
        ]
        other = f" Another cure may be easier: {' or '.join(above)} names it." if above else ""
        text = f"{without_alone(last.text)}{other} {self._last_cure}".rstrip()
        return UnsupportedModelError(text, topic=last.topic)


def _in_short(reason: str) -> str:
    """Return the first sentence of a reason."""
    first = re.split(r"(?<=[.])\s+(?=[A-Z])", reason, maxsplit=1)[0]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]} …"
