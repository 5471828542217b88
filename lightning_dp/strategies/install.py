"""Make the strategy of a Trainer private, in place."""

from __future__ import annotations

from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_dp.run import PrivateRun
from lightning_dp.strategies.checks import check_trainer_and_strategy
from lightning_dp.strategies.hooks import PrivacyCallback
from lightning_dp.strategies.strategy import DifferentialPrivacyStrategy

__all__ = ["install"]

_Kind = TypeVar("_Kind", bound=DifferentialPrivacyStrategy)


def install(
    trainer: Trainer,
    run: PrivateRun,
    *callbacks: PrivacyCallback,
    kind: type[_Kind] = DifferentialPrivacyStrategy,  # type: ignore[assignment]
) -> _Kind:
    """Make a Trainer train privately; call it in a callback's ``setup``, before data is asked for.

    Args:
        trainer: whose fit is about to begin.
        run: configuration and ledger.
        callbacks: hear of the run without being among the Trainer's callbacks.
        kind: the mixin.

    Raises:
        MisconfigurationException: if its strategy cannot be made private.
    """
    check_trainer_and_strategy(trainer)
    strategy = _private(trainer.strategy, kind)
    strategy.use_privacy(run, *callbacks)
    return strategy


def _private(strategy: Strategy, kind: type[_Kind]) -> _Kind:
    """Make the strategy a private one, in place: the Trainer keeps the object it chose.

    Its class becomes a subclass of the mixin and the class it had. Replacing the object would
    lose what the Trainer has connected to it already.
    """
    if not isinstance(strategy, DifferentialPrivacyStrategy):
        strategy.__class__ = _private_class(kind, type(strategy))
    assert isinstance(strategy, kind)
    return strategy


def _private_class(kind: type, base: type) -> Any:
    return type(f"Private{base.__name__}", (kind, base), {"__reduce_ex__": _reduce})


def _reduce(strategy: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle an object whose class has no name to import as what the class is made from."""
    reduced: Any = object.__reduce_ex__(strategy, max(2, protocol))  # (constructor, class, state)
    return _new, type(strategy).__bases__, *reduced[2:]


def _new(kind: type, base: type) -> Any:
    made = _private_class(kind, base)
    return made.__new__(made)
