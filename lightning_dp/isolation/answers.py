"""The answer of a gradient engine about each record of a batch, in little memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.materialised import MaterialisedGradients
from lightning_dp.gradients.module_hooks import ModuleHooks

__all__ = ["Answer", "Call", "answer_about", "watch_calls"]

_CORNER = 8  # rows and columns of a weight whose entries are told: first labels, first tokens
_ANYWHERE = 64  # entries at random places


@dataclass(frozen=True)
class Call:
    """One call of a module, with what went in and came out of it.

    Args:
        name, kind: of the module; "" is the LightningModule itself.
        inputs, outputs: tensors only.
    """

    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def watch_calls(module: nn.Module, calls: list[Call]) -> ModuleHooks:
    """Note every call of every module, until the hooks are taken off."""

    def tensors(values: Any) -> list[Tensor]:
        if isinstance(values, Mapping):
            values = list(values.values())
        values = values if isinstance(values, list | tuple) else [values]
        return [each.detach().clone() for each in values if isinstance(each, Tensor)]

    def hook(name: str) -> Callable[..., None]:
        def keep(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(
                Call(name, type(part).__name__, tensors(args) + tensors(kwargs), tensors(output))
            )

        return keep

    hooks = ModuleHooks()  # copies that training_step makes are other modules
    for name, part in module.named_modules():
        hooks.add(part, partial(part.register_forward_hook, with_kwargs=True), hook(name))
    return hooks


@dataclass(frozen=True)
class Answer:
    """The answer of the gradient engine to one batch.

    Args:
        count: rows that the layers saw.
        norms: of each record's gradient, shape (n,).
        parts: for each parameter some entries of each record's gradient, shape (n, k): always the
            same ones, up to 128 of each parameter.
        is_random: True if the pass drew random numbers.
        calls: of all modules in the order in which they ended, if they were asked for.
        means: number of means over targets that the loss is made from
            (:mod:`lightning_dp.isolation.ignored`).
        has_class_weights: True if one of them weighs its classes.
        ignored: for each of them, how many targets every record ignores; None where that differs.
        may_write: False if the forward pass left weights and buffers as they were.
    """

    count: int
    norms: Tensor = field(repr=False)
    parts: tuple[Tensor, ...] = field(repr=False)
    is_random: bool = False
    calls: tuple[Call, ...] = field(default=(), repr=False)
    means: int = 0
    has_class_weights: bool = False
    ignored: tuple[int | None, ...] = ()
    may_write: bool = True

    def about(self, records: Sequence[int]) -> Answer:
        """Return the answer about some of the records."""
        index = list(records)
        return replace(self, norms=self.norms[index], parts=tuple(p[index] for p in self.parts))


def answer_about(
    gradients: AbstractPerSampleGradients | None, params: Sequence[Tensor], n: int
) -> Answer:
    """Return what the engine says about n records; nothing of any if it saw other rows.

    Args:
        gradients: of the whole batch; None if there are none.
        params: the trained parameters.
        n: how many records there were.
    """
    count = 0 if gradients is None else gradients.count
    if gradients is None or count != n:
        return Answer(count, torch.zeros(0), ())
    norms = gradients.norms().detach()
    places, sizes = _places(tuple(param.shape for param in params))
    rows = _rows(gradients.restrict(places), torch.eye(n, dtype=norms.dtype))
    return Answer(count, norms, torch.split(rows, sizes, dim=1))


def _rows(some: AbstractPerSampleGradients, ones: Tensor) -> Tensor:
    """Return each record's gradient at some places, shape (n, k)."""
    if isinstance(some, MaterialisedGradients):
        return some.entries().detach()
    return torch.stack([some.weighted_sum(one).detach() for one in ones])


@lru_cache(maxsize=8)
def _places(shapes: tuple[torch.Size, ...]) -> tuple[Tensor, list[int]]:
    """Return places in the flat vector of all parameters, and how many there are in each."""
    generator = torch.Generator().manual_seed(0)
    found, start = [], 0
    for shape in shapes:
        size = shape.numel()
        width = size // shape[0] if shape else 1
        rows, columns = torch.arange(_CORNER)[:, None], torch.arange(min(_CORNER, width))
        corner = (rows * width + columns).flatten()
        anywhere = torch.randint(max(size, 1), (_ANYWHERE,), generator=generator)
        places = torch.unique(torch.cat([corner, anywhere]))
        found.append(places[places < size] + start)
        start += size
    return torch.cat(found), [len(places) for places in found]
