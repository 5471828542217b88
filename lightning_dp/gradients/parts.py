"""Tensors that are computed from parameters and constants alone, and the way back from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.layouts import Layout

__all__ = ["Part", "PartGradients"]


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter, or a tensor that is computed from parameters and constants and from no record.

    Args:
        tensor: as the model made it, with its graph.
        names: of the parameters that it was made of.
        param: if it is one itself; along a direction, a dual number stands for it.
        repeated: the part that it repeats for each record (``cls.expand(n, -1, -1)``), in the same
            dimensions except for new first ones; or None.
        has_rows: constants with as many rows as there are records went in: noise drawn for each, say.
    """

    tensor: Tensor
    names: frozenset[str]
    param: nn.Parameter | None = None
    repeated: Part | None = None
    has_rows: bool = False

    @property
    def is_linear(self) -> bool:
        """True if it is known to be linear in the parameters, as a transpose and a slice are."""
        stack = [get_gradient_edge(self.tensor).node]
        while stack:
            node = stack.pop()
            if type(node).__name__.removesuffix("Backward0") not in _LINEAR:
                return False
            stack += [child for child, _ in node.next_functions if child is not None]
        return True


_LINEAR = {
    *("AccumulateGrad", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias"),
    *("Expand", "Slice", "Select", "Index", "IndexSelect", "Embedding", "Cat", "Stack"),
    *("Unsqueeze", "Squeeze", "Repeat", "Clone", "Alias", "Split", "SplitWithSizes", "Unbind"),
    *("ToCopy", "Neg", "AsStrided"),
}
_ENTRIES = 1 << 24  # of cotangents with a row for each record that are in memory at once


class PartGradients:
    """Gradients per record with respect to parts, until they are pulled back to parameters.

    A part is h(θ) of parameters θ alone, so that a record's gradient is Jᵀ c_i, with J the derivative
    of h and c_i what comes back from the record's own use of it: one linear map for all records.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}
        self._found: dict[int, list[Tensor]] = {}

    def add(self, part: Part, gradients: Tensor) -> None:
        """Count in c_i of one use, of shape (n, *part's shape)."""
        self._parts[id(part.tensor)] = part
        self._found.setdefault(id(part.tensor), []).append(gradients)

    def add_rows(self, part: Part, own: Layout, gradients: Tensor) -> None:
        """Count in c_i of a use in which each record has its own entries.

        Args:
            part: repeats a smaller one for each record, or has other values for each.
            own: where each record has them.
            gradients: shape (n, *part's shape with the record's entries only).
        """
        source = part.repeated
        if source is not None:
            self.add(source, sum_to(gradients, source.tensor.shape))
        else:
            self.add(part, own.in_whole(gradients))

    def pull_back(
        self, leaves: Sequence[tuple[Tensor, nn.Parameter]]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters with their gradients per record, shape (n, *parameter's shape).

        Args:
            leaves: what graphs end in, with the trained parameter that it is, or stands for.
        """
        found: list[tuple[nn.Parameter, Tensor]] = []
        for key, part in self._parts.items():
            self._refuse_saved_shards(part, leaves)
            gradients = reduce(torch.add, self._found[key])
            if part.param is not None:
                found.append((part.param, gradients))
            else:
                found += _through_graph(part.tensor, gradients, leaves)
        return found

    def _refuse_saved_shards(
        self, part: Part, leaves: Sequence[tuple[Tensor, nn.Parameter]]
    ) -> None:
        """Refuse a graph that holds whole parameters of shards: torch has let go of their memory."""
        stand_for_shards = any(leaf is not param for leaf, param in leaves)
        if stand_for_shards and part.param is None and not part.is_linear:
            raise UnsupportedModelError(
                f"{', '.join(sorted(part.names)[:3])}: another tensor is computed from a sharded "
                "parameter before records meet it (a parametrization, a norm of weights), by more "
                "than transposing, slicing or joining. Remove the parametrization, or use "
                "strategy='ddp'.",
                topic="sharded",
            )


def sum_to(gradients: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum each record's gradient over the dimensions in which a tensor of a shape was repeated."""
    extra = gradients.dim() - 1 - len(shape)
    if extra > 0:
        gradients = gradients.sum(list(range(1, extra + 1)))
    dims = [d + 1 for d, size in enumerate(shape) if size == 1 and gradients.shape[d + 1] != 1]
    return gradients.sum(dims, keepdim=True) if dims else gradients


def _through_graph(
    tensor: Tensor, gradients: Tensor, leaves: Sequence[tuple[Tensor, nn.Parameter]]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return Jᵀ c_i with respect to each parameter that the tensor was computed from."""
    gradients = gradients.to(tensor.dtype)
    size = max(1, _ENTRIES // max(1, tensor.numel()))
    of = [leaf for leaf, _ in leaves]
    parts = [_batched(tensor, each, of) for each in torch.split(gradients, size)]
    found = []
    for (_, param), *rows in zip(leaves, *parts, strict=True):
        if rows[0] is not None:
            found.append((param, torch.cat(rows)))
    return found


def _batched(
    tensor: Tensor, gradients: Tensor, leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(
            tensor, leaves, gradients, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except RuntimeError:  # a backward function that cannot run for many gradients at once
        each = [
            torch.autograd.grad(tensor, leaves, one, retain_graph=True, allow_unused=True)
            for one in gradients
        ]
        return [None if rows[0] is None else torch.stack(rows) for rows in zip(*each, strict=True)]
