"""A guard that drops raw gradients the moment they appear, so that nobody can see or use one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dp._refusals import Refusal, RefusedRun

__all__ = ["RawGradientGuard", "RawGradientHookError"]


_NOT_PRIVATE = (
    "optimizer.step() was called with gradients that were not made private. Call it through "
    "Lightning: automatic optimization, or self.optimizers().step() in training_step."
)


class RawGradientHookError(Refusal, RuntimeError):
    """A hook that is not ours would be shown un-noised gradients."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="gradient-hooks")


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


class RawGradientGuard:
    """Keeps un-noised gradients away from ``p.grad`` and from the optimizer.

    - The gradient that autograd accumulates into a trainable parameter is dropped at once.
    - An optimizer step that was not allowed by :meth:`allow_step` raises, before it moves anything.

    Args:
        parameters: name and parameter, every one that can get a gradient from records.
        optimizer: whose steps are watched; None where nobody steps.

    Raises:
        RawGradientHookError: if somebody else's hook on a parameter would see raw gradients.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        optimizer: Optimizer | None = None,
    ) -> None:
        self._touched: dict[str, nn.Parameter] = {}
        self._optimizer = optimizer
        self._step_allowed = False
        self._is_off = False
        self._check: Callable[[], None] | None = None  # before the step that is allowed
        self._depth = 0  # of step() calls: a subclass that calls super().step() has two
        self._entry: RemovableHandle | None = None
        parameters = list(parameters)
        _refuse_foreign_hooks(parameters)
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._dropper(name, parameter)
            )
            for name, parameter in parameters
            if parameter.requires_grad
        ]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(self._leave_step))
            self.expect_step()

    def _dropper(self, name: str, parameter: nn.Parameter) -> Any:
        def drop(_: Tensor) -> None:
            self._touched[name] = parameter
            parameter.grad = None

        return drop

    def expect_step(self) -> None:
        """Stand after all other hooks of the optimizer, which may exchange its closure."""
        if self._optimizer is not None:
            self._take_entry_off()
            self._entry = self._optimizer.register_step_pre_hook(self._enter_step)
            self._depth = 0  # also after a step that ended in an error

    def _take_entry_off(self) -> None:
        if self._entry is not None:
            self._entry.remove()
            self._entry = None

    def _enter_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at the gradients when the optimizer is about to use them: after its closure ran."""
        if self._is_off:
            return None
        self._depth += 1
        is_positional = len(args) > 1  # the first one is the optimizer
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None:
            self._before_update()
            return None

        def looked_at() -> Any:
            result = closure()
            self._before_update()
            return result

        if is_positional:
            return (args[0], looked_at, *args[2:]), kwargs
        return args, {**kwargs, "closure": looked_at}

    def _before_update(self) -> None:
        if not self._step_allowed:
            raise RefusedRun(_NOT_PRIVATE, topic="raw-gradients")
        check, self._check = self._check, None
        if check is not None:
            self._step_allowed = False  # if it raises
            check()
            self._step_allowed = True

    def _leave_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_off:
            return
        self._depth -= 1
        if not self._step_allowed:  # a closure was given and not called
            raise RefusedRun(_NOT_PRIVATE, topic="raw-gradients")
        self._step_allowed = self._depth > 0

    def allow_step(self, check: Callable[[], None] | None = None) -> None:
        """Let the next optimizer step pass: the gradients are private now.

        Args:
            check: is called once, after everything else that runs before the optimizer reads them.
        """
        self._step_allowed, self._check = True, check

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let any step of the optimizer pass, inside, as if it were not watched."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def touched(self) -> dict[str, nn.Parameter]:
        """Return the parameters that got a raw gradient since the last call, by name."""
        touched, self._touched = self._touched, {}
        return touched

    def remove(self) -> None:
        """Take the guard's hooks off."""
        self._take_entry_off()
        for handle in self._handles:
            handle.remove()
        self._handles = []
