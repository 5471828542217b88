"""The code of a user's classes: which variables outside its objects it can reach."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper, cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["Variables", "is_library", "own_functions", "plain_function"]

# Their classes and functions are no user's: what they keep in classes and global variables is
# theirs. (Everything else counts as the user's.)
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "_pytest",  # an assert of a test's module leads there
    "accelerate",
    "diffusers",
    "einops",
    "huggingface_hub",
    "lightning",
    "lightning_dp",
    "lightning_fabric",
    "lightning_utilities",
    "matplotlib",
    "numpy",
    "omegaconf",
    "opacus",
    "pandas",
    "peft",
    "PIL",
    "pluggy",
    "pytest",
    "pytorch_lightning",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
    "tokenizers",
    "torch",
    "torchaudio",
    "torchmetrics",
    "torchvision",
    "tqdm",
    "transformers",
    "wandb",
}


def is_library(thing: Any) -> bool:
    """Tell whether a class, a function or a module belongs to Python or to a known library."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return not isinstance(name, str) or name.partition(".")[0] in _LIBRARIES


def plain_function(thing: Any) -> FunctionType | None:
    """Return the function with the code in a method, a property, a partial or a wrapper."""
    for _ in range(8):
        if isinstance(thing, FunctionType):
            return thing
        if isinstance(thing, staticmethod | classmethod | MethodType):
            thing = thing.__func__
        elif isinstance(thing, property):
            thing = thing.fget
        elif isinstance(thing, partial):
            thing = thing.func
        elif isinstance(thing, _lru_cache_wrapper):
            thing = thing.__wrapped__
        else:
            return None
    return None


def own_functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions that a class defines itself."""
    for value in list(vars(kind).values()):
        if (function := plain_function(value)) is not None:
            yield function


class Variables:
    """The variables outside of a function that it can read or change, and its default arguments.

    Global variables of its module that are no functions, classes or modules of libraries; in a
    module of the user's that it names, those that it names; variables of closures.

    Args:
        function: of the user's.

    Example:
        >>> def make():
        ...     count = 0
        ...     def step():
        ...         nonlocal count
        ...         count += 1
        ...     return step
        >>> step = make()
        >>> Variables(step).read()["count"]
        0
    """

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._names = _names_in(function.__code__)
        self._cells = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )

    def read(self) -> dict[str, Any]:
        """Return their values; those in other modules under "module.name"."""
        found: dict[str, Any] = {}
        for name in self._names & self._function.__globals__.keys():
            value = self._function.__globals__[name]
            if isinstance(value, ModuleType):
                found |= {f"{name}.{key}": each for key, each in self._of(value).items()}
            elif not _is_code_of_library(value):
                found[name] = value
        for name, cell in self._cells.items():
            with contextlib.suppress(ValueError):  # an empty one
                found[name] = cell.cell_contents
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            if value := getattr(self._function, name):
                found[name] = value
        return found

    def write(self, name: str, value: Any) -> None:
        """Give a variable another value."""
        module, _, inner = name.rpartition(".")
        if name in self._cells:
            self._cells[name].cell_contents = value
        elif module:
            setattr(self._function.__globals__[module], inner, value)
        elif not name.startswith("__"):
            self._function.__globals__[name] = value

    def delete(self, name: str) -> None:
        """Delete a global variable."""
        module, _, inner = name.rpartition(".")
        if module:
            delattr(self._function.__globals__[module], inner)
        elif name not in self._cells:
            self._function.__globals__.pop(name, None)

    def _of(self, module: ModuleType) -> dict[str, Any]:
        if is_library(module):
            return {}
        own = vars(module)
        inside = (name for name in self._names & own.keys() if not name.startswith("__"))
        return {name: own[name] for name in inside if not _is_code_of_library(own[name])}


def _is_code_of_library(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return True  # a module in a module
    return isinstance(value, type | FunctionType | BuiltinFunctionType) and is_library(value)


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    """Return all names of global variables and attributes in a function, and in functions inside it."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inner)
