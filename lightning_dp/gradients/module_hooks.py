"""Hooks on the modules of a model that no copy of it keeps, and compiled parts, which hide them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["CompiledParts", "ModuleHooks", "as_written", "runs_forward_of"]

Register: TypeAlias = Callable[[Callable[..., Any]], RemovableHandle]


class _Hook:
    """A hook of one module, which does nothing on any other: a shallow copy shares the hooks.

    A deep copy, and one that was unpickled, is a hook of no module.
    """

    def __init__(
        self,
        owner: nn.Module | None = None,
        function: Callable[..., Any] | None = None,
        copies: list[RemovableHandle] | None = None,
    ) -> None:
        self._owner, self._function, self._copies = owner, function, copies
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._function is None or module is not self._owner:
            return None
        return self._function(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        twin = _Hook(copies=self._copies)
        if self.handle is not None and self._copies is not None:
            # A handle that is copied with its module belongs to the copy.
            twin.handle = copy.deepcopy(self.handle, memo)
            self._copies.append(twin.handle)
        return twin

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class ModuleHooks:
    """Hooks of an engine, which are on the modules for a while.

    A context in which they are registered, to the end of the outermost one if it is entered again.

    - Each fires for the module that it was added for, and for no shallow copy of it.
    - A deep copy or a pickle of the module, made while they are on, has hooks that do nothing; from
      a deep copy they are removed when these hooks are taken off.

    Example:
        >>> import copy
        >>> layer, hooks, seen = nn.Linear(2, 2), ModuleHooks(), []
        >>> hooks.add(layer, layer.register_forward_pre_hook, lambda module, args: seen.append(module))
        >>> with hooks:
        ...     twin = copy.deepcopy(layer)
        >>> len(twin._forward_pre_hooks), len(layer._forward_pre_hooks)
        (0, 0)
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[_Hook, Register]] = []
        self._copies: list[RemovableHandle] = []
        self._depth = 0  # of contexts

    def add(self, owner: nn.Module, register: Register, function: Callable[..., Any]) -> None:
        """Add a function as a hook of a module, by the method that registers its kind."""
        self._hooks.append((_Hook(owner, function, self._copies), register))

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        try:
            for hook, register in self._hooks:
                hook.handle = register(hook)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for hook, _ in self._hooks:
            if hook.handle is not None:
                hook.handle.remove()
                hook.handle = None
        for handle in self._copies:
            handle.remove()
        self._copies.clear()


_METHODS = MethodType, staticmethod, classmethod
_NOTE = "{}: compiled, and run as written in private steps, since hooks do not see into a compiled graph"


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, all that ``torch.compile`` compiled runs its own code; afterwards the compiled one again.

    Example:
        >>> double = torch.compile(lambda x: 2 * x, backend="eager")
        >>> with as_written():
        ...     double(torch.ones(2))
        tensor([2., 2.])
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes long
        yield
        return
    with _stance("force_eager"):
        yield


class CompiledParts:
    """The compiled parts of a model, and the code that they run while an engine watches it.

    Parts with trained parameters run as they are written, and so do compiled functions. Frozen
    modules that were wrapped (``torch.compile(module)``), or whose ``forward`` was, stay compiled if
    the engine lets them; those compiled in place (``module.compile()``) do if no trained module and
    no other method of the model is compiled.

    Args:
        module: the whole model.
        params: the trained parameters.
        keeps_frozen: frozen parts may run compiled; under vmap they cannot.
    """

    def __init__(
        self, module: nn.Module, params: Sequence[nn.Parameter], *, keeps_frozen: bool
    ) -> None:
        trained = {id(param) for param in params}
        compiled = [(name, part) for name, part in module.named_modules() if _is_compiled(part)]
        frozen = [part for _, part in compiled if trained.isdisjoint(map(id, part.parameters()))]
        self.names = [name or "the model" for name, part in compiled if part not in frozen]
        self.names += _methods(module)
        in_place = any(not _is_inside_hooks(part) for part in frozen)
        self._leaves_all = keeps_frozen and in_place and not self.names
        self._hooks, self._inside = ModuleHooks(), list[Any]()
        self._before: Any = None  # the compiler's stance outside; not None while as_written
        for part in frozen if keeps_frozen else ():
            if _is_inside_hooks(part):
                after = partial(part.register_forward_hook, always_call=True)
                self._hooks.add(part, part.register_forward_pre_hook, self._enter)
                self._hooks.add(part, after, self._leave)

    @property
    def note(self) -> str | None:
        """The names of the parts that run as written, in words; None if there are none."""
        return _NOTE.format(", ".join(self.names)) if self.names else None

    def as_written(self) -> AbstractContextManager[None]:
        """Inside, what the engine must see runs its own code. May be entered again inside."""
        is_so = self._before is not None or self._leaves_all or "torch._dynamo" not in sys.modules
        return nullcontext() if is_so else self._eagerly()

    @contextmanager
    def _eagerly(self) -> Iterator[None]:
        stance = _stance("force_eager")
        self._before = stance.prev
        try:
            with stance, self._hooks:
                yield
        finally:
            self._before = None

    def _enter(self, part: nn.Module, args: Any) -> None:
        was = self._before
        self._inside.append(_stance(was.stance, was.skip_guard_eval_unsafe, was.backend))

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        if self._inside:  # else another hook ended the call before ours
            self._inside.pop().__exit__(None, None, None)


def _stance(kind: str, skips_guards: bool = False, backend: Any = None) -> Any:
    """Set the compiler's stance at once, until the object that is returned is left."""
    set_stance: Any = torch.compiler.set_stance
    return set_stance(kind, skip_guard_eval_unsafe=skips_guards, force_backend=backend)


def _is_compiled(part: nn.Module) -> bool:
    return _is_inside_hooks(part) or getattr(part, "_compiled_call_impl", None) is not None


def _is_inside_hooks(part: nn.Module) -> bool:
    """Tell whether what is compiled begins after the module's forward hooks."""
    return type(part).__name__ == "OptimizedModule" or _is_function(part.forward)


def _is_function(value: Any) -> bool:
    """Tell whether a function or a method is what ``torch.compile`` returned."""
    if isinstance(value, _METHODS):
        value = value.__func__
    # Of nothing but functions: some attributes raise when they are asked for what they lack.
    if not (isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable")):
        return False
    return not getattr(value, "_torchdynamo_disable", False)


def _methods(module: nn.Module) -> list[str]:
    """Return the dotted names of compiled functions that are attributes of modules or their classes."""
    kinds = {type(part) for part in module.modules()}  # few, where a model has many parts
    of_class = {
        kind: [name for each in kind.__mro__ for name in _compiled_in(each)] for kind in kinds
    }
    found = [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if not _is_compiled(part)
        for name in (*_compiled_in(part), *of_class[type(part)])
    ]
    return list(dict.fromkeys(found))


def _compiled_in(owner: object) -> list[str]:
    return [name for name, value in vars(owner).items() if _is_function(value)]


def runs_forward_of(layer: nn.Module, kind: Any) -> bool:
    """Return whether a layer has a type's own methods, compiled or not, wherever forward comes to them.

    Example:
        >>> class Scaled(nn.Conv2d):
        ...     def _conv_forward(self, *args):
        ...         return 2 * super()._conv_forward(*args)
        >>> runs_forward_of(nn.Conv2d(1, 1, 1), nn.Conv2d), runs_forward_of(Scaled(1, 1, 1), nn.Conv2d)
        (True, False)
    """
    return all(
        _as_written(getattr(layer, name)) is getattr(kind, name) for name in _methods_of(kind)
    )


def _as_written(method: Any) -> Any:
    """Return the function of a method, of the type or of one layer alone, before it was compiled."""
    if hasattr(method, "_torchdynamo_orig_callable"):
        method = unwrap(method)
    return getattr(method, "__func__", method)


@cache
def _methods_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of a type's methods that its forward pass may come to.

    Those that every module has are called by others, and those that reset parameters before training.
    """
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    names = {name for base in bases for name, value in vars(base).items() if callable(value)}
    return ("forward", *(name for name in names - vars(nn.Module).keys() if "reset" not in name))
