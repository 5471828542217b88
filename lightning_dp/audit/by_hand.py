"""Manual optimization, watched: what training_step goes back from, without a step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ByHand"]


class ByHand:
    """Stands for the optimizer and the backward pass of a copy of a module.

    Args:
        module: a copy; what it calls to optimize is replaced on it.
    """

    def __init__(self, module: LightningModule) -> None:
        self._losses: list[Tensor] = []
        still = _Still(module.parameters(), {"lr": 0.1})
        module.optimizers = lambda use_pl_optimizer=True: still  # type: ignore[method-assign,assignment]
        module.lr_schedulers = lambda: _Nothing()  # type: ignore[method-assign,assignment,return-value]
        module.manual_backward = self._note  # type: ignore[method-assign]
        for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
            setattr(module, name, _ignore)

    def _note(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._losses.append(loss)

    @property
    def loss(self) -> Tensor | None:
        """The loss that was given to ``manual_backward``; None if none was."""
        return sum(self._losses[1:], self._losses[0]) if self._losses else None


class _Still(Optimizer):
    """An optimizer whose steps change nothing."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside, where LightningOptimizer has it."""
        return self

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()

    def toggle_model(self, *args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing()


class _Nothing:
    """A learning rate scheduler, or a context, that does nothing."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *unused: object) -> None: ...


def _ignore(*args: Any, **kwargs: Any) -> None: ...
