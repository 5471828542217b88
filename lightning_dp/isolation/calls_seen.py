"""Calls of torch that a pass makes: of two passes, they tell whether one takes another branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["CallsSeen"]


class CallsSeen(TorchFunctionMode):
    """Notes the functions of torch that are called inside, with the numbers that they are given.

    Example:
        >>> import torch
        >>> with CallsSeen() as one:
        ...     _ = torch.ones(2) * 3.5
        >>> with CallsSeen() as other:
        ...     _ = torch.ones(3) * 2.5
        >>> one.signature == other.signature
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Any] = []

    @property
    def signature(self) -> int:
        """A number that is another one for other calls."""
        return hash(tuple(self._calls))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        numbers = tuple(_rough(a) for a in (*args, *(kwargs or {}).values()) if _is_number(a))
        self._calls.append((getattr(func, "__name__", ""), numbers))
        return func(*args, **(kwargs or {}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _rough(value: float) -> float | str:
    """Return small whole numbers as they are (0 and 1 switch terms off and on), others by sign."""
    return value if value in (0, 1) else "+" if value > 0 else "-"
