"""Raw gradients are dropped the moment they appear, so nobody can see or use one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["RawGradientGuard"]


class RawGradientGuard:
    """Keeps un-noised gradients away from ``p.grad`` and from the optimizer.

    - The gradient that autograd accumulates into a trainable parameter is dropped at once.
    - An optimizer step that was not allowed by :meth:`allow_step` raises.

    Args:
        parameters: name and parameter, every one that can get a gradient.
        optimizer: whose steps are watched.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer
    ) -> None:
        self._touched: dict[str, nn.Parameter] = {}
        self._step_allowed = False
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._dropper(name, parameter)
            )
            for name, parameter in parameters
            if parameter.requires_grad
        ]
        self._handles.append(optimizer.register_step_post_hook(self._check_step))

    def _dropper(self, name: str, parameter: nn.Parameter) -> Any:
        def drop(_: Tensor) -> None:
            self._touched[name] = parameter
            parameter.grad = None

        return drop

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._step_allowed:
            raise RuntimeError(
                "optimizer.step() ran with gradients that were not made private. Call it through "
                "Lightning: automatic optimization, or self.optimizers().step() in training_step."
            )
        self._step_allowed = False

    def allow_step(self) -> None:
        """The gradients are private now: let the next optimizer step pass."""
        self._step_allowed = True

    def touched(self) -> dict[str, nn.Parameter]:
        """The parameters that got a raw gradient since the last call, by name."""
        touched, self._touched = self._touched, {}
        return touched

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
