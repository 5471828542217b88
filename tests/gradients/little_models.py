"""Little models, made of parts and a function: the form of the tables of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "Batch",
    "Little",
    "N",
    "Net",
    "features",
    "head",
    "images",
    "linear",
    "net",
    "tokens",
    "weight",
]

N = 3
Batch = Mapping[str, Any]


class Net(nn.Module):
    """A module of parts and a forward function that is given with them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def net(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], Net]:
    """Make a module whenever it is called."""
    return lambda: Net(forward, **{name: make() for name, make in parts.items()})


def features() -> Batch:
    return {"x": torch.randn(N, 6), "y": torch.arange(N)}


def tokens() -> Batch:
    return {"x": torch.randint(1, 7, (N, 5)), "y": torch.arange(N)}


def images() -> Batch:
    return {"x": torch.randn(N, 2, 8, 8), "y": torch.arange(N)}


def scores(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


@dataclass(frozen=True)
class Little:
    """A model with its batch.

    Args:
        make: the model.
        batch: each tensor in it has a row for each record.
        loss: of the model and a batch, the mean over its records.
        tolerance: relative.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch] = features
    loss: Callable[[nn.Module, Batch], Tensor] = scores
    tolerance: float = 1e-5


def linear(*, bias: bool = True) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(6, 6, bias=bias)


def head() -> nn.Linear:
    return nn.Linear(6, 4)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) / 2)


class Called(nn.Module):
    """A layer and the way in which it is called."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.call = nn.Linear(6, 6), layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, self.first(x))
