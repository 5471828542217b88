"""A module's own overrides around a step, rehearsed in its copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_dp._training_step import is_differentiable

__all__ = [
    "Deadline",
    "backward_loss",
    "configure_clipping",
    "modes_of",
    "moves_weights",
    "optimize",
    "schedule",
    "zero_gradients",
]

_PLAIN = (bool, int, float, str, type(None))


def backward_loss(module: LightningModule, loss: Tensor) -> Tensor:
    """Return the loss that the module's own ``backward`` goes back from; by default the loss itself.

    Example:
        >>> import torch
        >>> class Doubled(LightningModule):
        ...     def backward(self, loss):
        ...         (2 * loss).backward()
        >>> backward_loss(Doubled(), torch.ones((), requires_grad=True)).item()
        2.0
    """
    if not is_overridden("backward", module):
        return loss
    with _Backward() as seen, contextlib.suppress(Exception):
        module.backward(loss)
    total = sum(seen.losses)
    return total if isinstance(total, Tensor) and is_differentiable(total) else loss


class _Backward(TorchFunctionMode):
    """Inside, ``loss.backward()`` is noted and not done."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not Tensor.backward:
            return func(*args, **(kwargs or {}))
        weight = args[1] if len(args) > 1 else (kwargs or {}).get("gradient")
        self.losses.append(args[0] if weight is None else (args[0] * weight).sum())
        return None


class Deadline(TorchFunctionMode):
    """Inside, what calls torch after so many seconds is ended by an exception.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.perf_counter() + seconds

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if time.perf_counter() > self._end:
            raise TimeoutError
        return func(*args, **(kwargs or {}))


def moves_weights(module: LightningModule) -> bool:
    """Tell whether the module may undo, or add to, what an optimizer did."""
    return is_overridden("optimizer_step", module)


def optimize(
    module: LightningModule,
    trainer: Any,
    batch_idx: int,
    optimizer: Optimizer,
    run: Callable[[], Any],
) -> Any:
    """Return what ``run`` returns, called once by the module's own ``optimizer_step``, or after it.

    Args:
        trainer: is asked for the epoch only if there is somebody to tell it, since it notes what is
            read of it.
        run: makes the forward and backward pass.

    Raises:
        Exception: what ``run`` raises; what only the override raises, for lack of a Trainer, is
            no fault.
    """
    outputs: list[Any] = []
    failed: list[Exception] = []

    def closure() -> None:
        if outputs or failed:
            return
        try:
            outputs.append(run())
        except Exception as error:
            failed.append(error)
            raise

    if moves_weights(module):
        with contextlib.suppress(Exception):
            module.optimizer_step(trainer.current_epoch, batch_idx, optimizer, closure)
    closure()
    if failed:
        raise failed[0]
    return outputs[0]


def configure_clipping(module: LightningModule, optimizer: Optimizer, trainer: Any) -> None:
    """Call the module's own ``configure_gradient_clipping``."""
    if is_overridden("configure_gradient_clipping", module):
        with contextlib.suppress(Exception):
            clipping = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            module.configure_gradient_clipping(optimizer, *clipping)


def schedule(module: LightningModule, trainer: Any) -> None:
    """Call the module's own ``lr_scheduler_step`` for each scheduler."""
    if is_overridden("lr_scheduler_step", module):
        with contextlib.suppress(Exception):
            for config in trainer.lr_scheduler_configs:
                metric = trainer.callback_metrics.get(config.monitor)
                module.lr_scheduler_step(config.scheduler, metric)


def zero_gradients(
    module: LightningModule, trainer: Any, batch_idx: int, optimizer: Optimizer
) -> None:
    """Call the module's own ``optimizer_zero_grad``; what it does to gradients is done anyway."""
    if is_overridden("optimizer_zero_grad", module):
        with contextlib.suppress(Exception):
            module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)


def modes_of(module: nn.Module) -> list[Any]:
    """Return the modes of all parts, and of torch's own layers the settings, to be compared.

    Example:
        >>> modes_of(nn.Dropout(0.25))
        [(True, 0.25, False)]
    """
    return [(part.training, *_settings_of(part)) for part in module.modules()]


def _settings_of(part: nn.Module) -> list[Any]:
    if not type(part).__module__.startswith("torch."):
        return []
    return [
        value
        for name, value in vars(part).items()
        if isinstance(value, _PLAIN) and name[0] != "_" and name != "training"
    ]
