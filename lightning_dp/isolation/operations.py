"""The operations of a forward pass, counted by torch's own table, quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["OperationCounter"]


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of matrix products, convolutions and attention inside, by shapes.

    The numbers are those of torch's ``FlopCounterMode``, which takes longer: it follows modules, and
    asks at every call what an operation is made of. Here that is asked once for each.

    Example:
        >>> import torch
        >>> with OperationCounter() as counter:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> counter.total
        60
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._whole: set[Any] = set()  # operations that are not made of others

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        count = flop_registry.get(packet)
        if count is None and packet is not None and func not in self._whole:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
            self._whole.add(func)
        found = func(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=found)
        return found
