"""The first module that gives the same samples other outputs when other samples are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_dp.gradients.module_hooks import ModuleHooks

__all__ = ["Call", "first_that_mixes", "watch_calls"]

_ROUNDING = 1e-3


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Args:
        name, kind: of the module; "" is the LightningModule itself.
        inputs, outputs: tensors only.
    """

    name: str
    kind: str
    inputs: list[Tensor] = field(repr=False)
    outputs: list[Tensor] = field(repr=False)


def watch_calls(module: nn.Module, calls: list[Call]) -> ModuleHooks:
    """Note every call of every module, until the hooks are taken off."""

    def tensors(values: Any) -> list[Tensor]:
        if isinstance(values, Mapping):
            values = list(values.values())
        values = values if isinstance(values, list | tuple) else [values]
        return [each.detach().clone() for each in values if isinstance(each, Tensor)]

    def hook(name: str) -> Callable[..., None]:
        def note(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(
                Call(name, type(part).__name__, tensors(args) + tensors(kwargs), tensors(output))
            )

        return note

    hooks = ModuleHooks()  # copies that training_step makes are other modules
    for name, part in module.named_modules():
        hooks.add(part, partial(part.register_forward_hook, with_kwargs=True), hook(name))
    return hooks


def first_that_mixes(
    before: Sequence[Call],
    after: Sequence[Call],
    rows: tuple[Sequence[int], Sequence[int]],
    sizes: tuple[int, int],
) -> str:
    """Return the dotted name and the class of that module, in words; "" if none is found.

    Args:
        before, after: the calls in two runs.
        rows: of the same samples in each.
        sizes: the number of samples in each.
    """

    def moved(a: Tensor, b: Tensor) -> bool:
        if a.dim() and b.dim() and (len(a), len(b)) == sizes:
            a, b = a[list(rows[0])], b[list(rows[1])]
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if not a.is_floating_point():
            return not bool((a == b).all())
        scale = a.abs().amax() if a.numel() else a.new_zeros(())
        return not bool(((a - b).abs() <= _ROUNDING * scale).all())

    for a, b in zip(before, after, strict=False):
        if a.name != b.name:
            return ""
        results = [pair for pair in zip(a.outputs, b.outputs, strict=False) if pair[0].dim()]
        given = zip(a.inputs, b.inputs, strict=False)
        if (
            a.name
            and any(moved(*pair) for pair in results)
            and not any(moved(*pair) for pair in given)
        ):
            return f"the outputs of {a.name} ({a.kind})"
    return ""
