"""The user's functions that read the training data themselves, by their code."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable, Iterator
from types import CodeType

from torch import nn

from lightning_dp._user_code import is_library, plain_function

__all__ = ["readers_of_training_data"]

_DATA = re.compile(r"train(ing)?_?(data_?)?(loader|set|ds|dl|data|samples)s?")
_MAKE_IT = ("train_dataloader", "setup", "prepare_data", "__init__", "configure_model")
_TAKE = ("iter", "list", "tuple", "next", "sorted")
_CALLS = ("PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD", "PUSH_NULL", "CACHE", "KW_NAMES")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_LOCALS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_CHECK")


def readers_of_training_data(module: nn.Module, callbacks: Iterable[object]) -> tuple[str, ...]:
    """Name the functions of the user's classes that iterate what is named for the training data.

    Functions that make it are left out, and so are those that only ask how much there is.
    """
    kinds = [kind for each in (*module.modules(), *callbacks) for kind in type(each).__mro__]
    found: dict[str, None] = {}
    for kind in dict.fromkeys(kinds):
        for name, value in () if is_library(kind) else list(vars(kind).items()):
            function = None if name in _MAKE_IT else plain_function(value)
            if function is not None and _reads(function.__code__):
                found[f"{kind.__name__}.{name}"] = None
    return tuple(found)


def _reads(code: CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return any(_iterated(code)) or any(map(_reads, inner))


def _iterated(code: CodeType) -> Iterator[bool]:
    """Yield True where training data are iterated, or given to what takes all of it."""
    aliases: set[str] = set()  # variables that hold them
    before = ""  # the name of what an attribute is asked of
    is_data = False  # what stands on the stack
    takes: bool | None = False  # whether it goes to what takes all of it; None if to len()
    for each in dis.get_instructions(code):
        operation = each.opname
        if operation in _ATTRIBUTES:
            is_data = is_data or _names_data(before, str(each.argval))
            before = str(each.argval)
        elif operation in _LOCALS:
            yield is_data and takes is True
            before = str(each.argval)
            is_data = each.argval in aliases
        elif operation == "LOAD_GLOBAL":
            is_data = False
            takes = None if each.argval == "len" else takes or (each.argval in _TAKE)
        elif operation == "GET_ITER":
            yield is_data and takes is not None
            is_data = False
        elif operation.startswith("STORE") or operation in ("POP_TOP", "RETURN_VALUE"):
            yield is_data and takes is True
            if is_data and takes is not None and operation == "STORE_FAST":
                aliases.add(each.argval)
            is_data, takes = False, False
        elif operation not in _CALLS:
            is_data = False


def _names_data(owner: str, name: str) -> bool:
    """Tell whether an attribute is training data; the Trainer's own loader refuses to be read."""
    if name == "train_dataloader" and owner == "trainer":
        return False
    return _DATA.fullmatch(name) is not None or (owner, name) == ("train_dataloader", "dataset")
