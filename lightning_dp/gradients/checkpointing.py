"""Reentrant activation checkpoints: nodes that run a part of the model, and its backward pass, inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dp.gradients.base import ALONE
from lightning_dp.gradients.graph import Checkpoint

__all__ = ["REENTRANT", "calling", "gradients_of", "has_checkpoints", "joined"]

REENTRANT = (
    "A parameter is used outside of the known layers, and the model has reentrant activation "
    "checkpoints, inside of which such uses are not followed. Give torch.utils.checkpoint "
    "use_reentrant=False; with Hugging Face, gradient_checkpointing_enable("
    f"gradient_checkpointing_kwargs={{'use_reentrant': False}}). {ALONE}"
)


def has_checkpoints(root: Any) -> bool:
    """Tell whether a graph has such nodes."""
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, Checkpoint):
            return True
        seen.add(node)
        stack.extend(child for child, _ in node.next_functions)
    return False


def calling(node: Any, function: Callable[..., Any]) -> Callable[[], None]:
    """Let a checkpoint call a function in the place of the one that it is going to run again.

    Args:
        node: of one checkpoint in one graph, which nobody else has.
        function: is called with the checkpoint's own one, and its arguments.

    Returns:
        A function that undoes it.
    """
    own = node.run_function
    node.run_function = partial(function, own)
    return partial(setattr, node, "run_function", own)


def joined(outputs: Any) -> Tensor | None:
    """Return a scalar whose graph has all that the outputs of a function depend on; None if nothing."""
    many = outputs if isinstance(outputs, tuple) else (outputs,)
    sums = [each.sum() for each in many if isinstance(each, Tensor) and each.requires_grad]
    return reduce(torch.add, sums) if sums else None


def gradients_of(
    loss: Tensor, params: Sequence[nn.Parameter], *, keep_graph: bool
) -> list[Tensor | None]:
    """Return the gradients of a loss that has reentrant checkpoints, which ``autograd.grad`` refuses.

    They go back into the parameters by separate passes. Each one's part is taken on the way.
    """
    found: list[Tensor | None] = [None] * len(params)

    def add(place: int, gradient: Tensor) -> None:
        before = found[place]
        found[place] = gradient.detach().clone() if before is None else before + gradient.detach()

    hooks: list[RemovableHandle] = [
        param.register_hook(partial(add, place))  # type: ignore[no-untyped-call]
        for place, param in enumerate(params)
    ]
    try:
        torch.autograd.backward(loss, retain_graph=keep_graph)
    finally:
        for hook in hooks:
            hook.remove()
    return found
