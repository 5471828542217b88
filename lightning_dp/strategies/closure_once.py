"""An optimizer's closure that uses the data: it may be evaluated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["evaluated_once"]


def evaluated_once(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """Return the closure, which raises when the optimizer calls it a second time.

    Raises:
        RuntimeError: (the closure) naming the optimizer.
    """
    evaluated = False

    def once() -> Any:
        nonlocal evaluated
        if evaluated:
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluated its closure twice; each evaluation would "
                "use the data again. Use an optimizer that evaluates it once."
            )
        evaluated = True
        return closure()

    return once
