"""Numbers and texts that a model's code compares its records with: markers, thresholds, codes."""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_dp._user_code import is_library, own_functions

__all__ = ["ComparedWith", "compared_in_code"]

_NAMES = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPARES = {f"__{name}__" for name in _NAMES} | set(_NAMES) | {"greater", "less", "not_equal"}
_USUAL = (0, 1, -1)


class ComparedWith(TorchFunctionMode):
    """Notes the numbers that tensors are compared with inside, in their order.

    Example:
        >>> import torch
        >>> with ComparedWith() as seen:
        ...     _ = (torch.ones(2) == -999).any(), torch.ones(2) > 0
        >>> list(seen.numbers)
        [-999]
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[float, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _COMPARES:
            given = (*args, *(kwargs or {}).values())  # as torch.eq(input=x, other=3)
            self.numbers |= dict.fromkeys(filter(_is_telling, given))
        return func(*args, **(kwargs or {}))


def compared_in_code(module: nn.Module) -> tuple[list[float], list[str]]:
    """Return the constants that the user's classes compare something with: numbers, and texts."""
    found: dict[Any, None] = {}
    for kind in {kind: None for part in module.modules() for kind in type(part).__mro__}:
        for function in () if is_library(kind) else own_functions(kind):
            found |= dict.fromkeys(_compared(function.__code__))
    numbers = [each for each in found if _is_telling(each)]
    return numbers, [each for each in found if isinstance(each, str)]


def _compared(code: CodeType) -> Iterator[Any]:
    before: list[Any] = []  # constants since the last comparison, with nothing between
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            before.append(each.argval)
        elif each.opname in ("COMPARE_OP", "CONTAINS_OP"):
            for constant in before:
                yield from constant if isinstance(constant, tuple | frozenset) else (constant,)
            before = []
        elif each.opname != "PRECALL":
            before = [] if each.opname.startswith(("STORE", "POP", "RETURN", "CALL")) else before
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compared(constant)


def _is_telling(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value not in _USUAL
