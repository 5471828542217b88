"""Hooks on the modules of a model that no copy of it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["ModuleHooks"]

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
