"""A guard that drops raw gradients the moment they appear, so that nobody can see or use one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_dp._refusals import Refusal

__all__ = ["RawGradientGuard", "RawGradientHookError"]


class RawGradientHookError(Refusal, RuntimeError):
    """A hook that is not ours would be shown un-noised gradients."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="gradient-hooks")


class RawGradientGuard:
    """Drops the gradient that autograd accumulates into a trainable parameter, at once.

    Args:
        parameters: name and parameter, every one that can get a gradient from records.

    Raises:
        RawGradientHookError: if somebody else's hook on a parameter would see raw gradients.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._touched: dict[str, nn.Parameter] = {}
        parameters = list(parameters)
        _refuse_foreign_hooks(parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._dropper(name, parameter)
            )
            for name, parameter in parameters
            if parameter.requires_grad
        ]

    def _dropper(self, name: str, parameter: nn.Parameter) -> Any:
        def drop(_: Tensor) -> None:
            self._touched[name] = parameter
            parameter.grad = None

        return drop

    def touched(self) -> dict[str, nn.Parameter]:
        """Return the parameters that got a raw gradient since the last call, by name."""
        touched, self._touched = self._touched, {}
        return touched

    def remove(self) -> None:
        """Take the guard's hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _refuse_foreign_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks on parameters: they run before a gradient can be dropped."""
    hooked = [
        name
        for name, parameter in parameters
        if getattr(parameter, "_backward_hooks", None)
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise RawGradientHookError(
            f"Parameters {hooked[:5]} carry gradient hooks, which would see gradients without noise "
            "(WandbLogger.watch() sets such hooks by default). Remove them before fit; "
            "watch(log='parameters') is fine."
        )
