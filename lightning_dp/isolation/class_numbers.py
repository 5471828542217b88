"""Numbers of classes that a model's losses take, seen as they are called: hints, which are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_dp.isolation.synthetic import leaves_of

__all__ = ["ClassNumbers"]


class ClassNumbers(TorchFunctionMode):
    """Notes the number of classes of each loss over class numbers that is called inside.

    Example:
        >>> labels = torch.tensor([0, 1, 4])
        >>> with ClassNumbers() as seen:
        ...     _ = F.cross_entropy(torch.zeros(3, 5), labels)
        >>> seen.of([labels, torch.tensor([1, 1, 1])])
        {0: 5}
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[int, Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            named = dict(zip(("input", "target"), args, strict=False)) | (kwargs or {})
            self._note(named.get("input"), named.get("target"))
        return func(*args, **(kwargs or {}))

    def _note(self, outputs: Any, target: Any) -> None:
        if not (isinstance(outputs, Tensor) and isinstance(target, Tensor) and outputs.dim()):
            return
        if not target.is_floating_point():
            self._calls.append((outputs.shape[min(outputs.dim() - 1, 1)], target.detach().clone()))

    @property
    def least(self) -> int | None:
        """The least number of classes of any loss; None if none was called."""
        return min((classes for classes, _ in self._calls), default=None)

    def of(self, batch: Any) -> dict[int, int]:
        """Return the numbers of classes by the places of tensors that hold just what a loss was given."""
        leaves, found = leaves_of(batch), dict[int, int]()
        for classes, target in self._calls:
            for place, leaf in enumerate(leaves):
                if leaf.shape == target.shape and torch.equal(leaf, target.to(leaf)):
                    found[place] = min(classes, found.get(place, classes))
        return found
