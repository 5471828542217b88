"""Hooks on the modules of a model that no copy of it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["ModuleHooks"]

Register = Callable[[Callable[..., Any]], RemovableHandle]


class _Inert:
    """The stand-in for a hook in a copy of a module: it does nothing, and is taken off later.

    Args:
        copies: handles of all that copying left behind; None for one that was unpickled.
    """

    def __init__(self, copies: list[RemovableHandle] | None = None) -> None:
        self.handle: RemovableHandle | None = None
        self._copies = copies

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        twin = _Inert(self._copies)
        if self.handle is not None and self._copies is not None:
            # A handle that is copied with its module belongs to the copy.
            twin.handle = copy.deepcopy(self.handle, memo)
            self._copies.append(twin.handle)
        return twin

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


class _Hook(_Inert):
    """A hook of one module, which does nothing on any other.

    A shallow copy of a module shares the dictionary in which its hooks are.
    """

    def __init__(
        self,
        owner: nn.Module,
        register: Register,
        function: Callable[..., Any],
        copies: list[RemovableHandle],
    ) -> None:
        super().__init__(copies)
        self._owner, self._register, self._function = owner, register, function

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._function(module, *args, **kwargs) if module is self._owner else None

    def put_on(self) -> None:
        if self.handle is None:
            self.handle = self._register(self)

    def take_off(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = None


class ModuleHooks:
    """Hooks of an engine, which can be taken off and put on again.

    - Each fires for the module that it was registered on, and for no shallow copy of it.
    - A deep copy or a pickle of the module, made while they are on, has hooks that do nothing; from
      a deep copy they are removed when these hooks are taken off.

    Example:
        >>> import copy
        >>> layer, hooks, seen = nn.Linear(2, 2), ModuleHooks(), []
        >>> hooks.add(layer, layer.register_forward_pre_hook, lambda module, args: seen.append(module))
        >>> twin = copy.deepcopy(layer)
        >>> hooks.take_off()
        >>> len(twin._forward_pre_hooks), len(layer._forward_pre_hooks)
        (0, 0)
    """

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []
        self._copies: list[RemovableHandle] = []

    def add(self, owner: nn.Module, register: Register, function: Callable[..., Any]) -> None:
        """Register a hook on a module.

        Args:
            owner: the module.
            register: its method that registers the kind of hook.
            function: called as torch calls hooks of that kind.
        """
        hook = _Hook(owner, register, function, self._copies)
        hook.put_on()
        self._hooks.append(hook)

    @property
    def are_on(self) -> bool:
        """True if they are registered."""
        return any(hook.handle is not None for hook in self._hooks)

    def put_on(self) -> None:
        """Register again those that were taken off."""
        for hook in self._hooks:
            hook.put_on()

    def take_off(self) -> None:
        """Leave the modules, and all copies that were made of them, without these hooks."""
        for hook in self._hooks:
            hook.take_off()
        for handle in self._copies:
            handle.remove()
        self._copies.clear()
