"""A guard that lets the private optimizer step with released gradients only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dp._refusals import RefusedRun

__all__ = ["StepGuard"]

_NOT_PRIVATE = (
    "optimizer.step() was called with gradients that were not made private. Call it through "
    "Lightning: automatic optimization, or self.optimizers().step() in training_step."
)


class StepGuard:
    """Raises at an optimizer step that :meth:`allow` did not allow, before it moves anything.

    Args:
        optimizer: whose steps are watched.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_allowed = self._is_off = False
        self._check: Callable[[], None] | None = None  # before the step that is allowed
        self._depth = 0  # of step() calls: a subclass that calls super().step() has two
        self._exit: RemovableHandle = optimizer.register_step_post_hook(self._leave)
        self._entry: RemovableHandle = optimizer.register_step_pre_hook(self._enter)

    def expect(self) -> None:
        """Stand after all other hooks of the optimizer, which may exchange its closure."""
        self._entry.remove()
        self._entry = self._optimizer.register_step_pre_hook(self._enter)
        self._depth = 0  # also after a step that ended in an error

    def allow(self, check: Callable[[], None] | None = None) -> None:
        """Let the next step pass: the gradients are private now.

        Args:
            check: is called once, after everything else that runs before the optimizer reads them.
        """
        self._is_allowed, self._check = True, check

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let any step pass, inside, as if the optimizer were not watched."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def remove(self) -> None:
        """Take the guard's hooks off."""
        self._entry.remove()
        self._exit.remove()

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
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
        if not self._is_allowed:
            raise RefusedRun(_NOT_PRIVATE, topic="raw-gradients")
        check, self._check = self._check, None
        if check is not None:
            self._is_allowed = False  # if it raises
            check()
            self._is_allowed = True

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_off:
            return
        self._depth -= 1
        if not self._is_allowed:  # a closure was given and not called
            raise RefusedRun(_NOT_PRIVATE, topic="raw-gradients")
        self._is_allowed = self._depth > 0
