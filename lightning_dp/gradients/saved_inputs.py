"""Inputs of layers, held as autograd holds what a backward pass needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SavedInputs"]


class _Save(torch.autograd.Function):
    """A node that saves tensors; no backward pass comes to it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return output.new_empty(0)


class SavedInputs:
    """The inputs of a call, saved by autograd next to what the layer saves itself.

    Where an activation checkpoint drops what a layer saves, it drops these as well, and runs its part
    of the model again when they are asked for; where hooks on saved tensors move them to the host, they
    move these. The same must be saved again while the part runs again, since a checkpoint counts.

    Args:
        inputs: of the call.
        output: of the call, which requires a gradient.
    """

    def __init__(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        # Older torch frees what a node saved with the tensor that it made, so that is held.
        self._made: Any = _Save.apply(output, *inputs)  # type: ignore[no-untyped-call]

    def take(self, *, keep: bool) -> tuple[Tensor, ...] | None:
        """Return the inputs, as often as they are kept; None if one was overwritten since."""
        made = self._made
        if not keep:
            self._made = None
        try:
            return tuple(each.detach() for each in made.grad_fn.saved_tensors)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            return None
