"""``nn.EmbeddingBag``: sums, means and maxima of looked-up rows, of bags of any length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import Owned, Use, Uses
from lightning_dp.gradients.matrices import Lookup

__all__ = ["embedding_bag", "tensors_of_bags"]

_SIGNATURE = inspect.signature(nn.EmbeddingBag.forward)


def tensors_of_bags(
    layer: nn.EmbeddingBag, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Return the tensors of a call, however they were named: input, offsets, weights of samples."""
    given = _SIGNATURE.bind(layer, *args, **kwargs).arguments
    names = ("input", "offsets", "per_sample_weights")
    return tuple(given[name] for name in names if given.get(name) is not None)


def embedding_bag(layer: nn.EmbeddingBag, *tensors: Tensor) -> Uses:
    """Return the table with its use in one call; each bag is a row.

    Args:
        layer: in any mode.
        tensors: as :func:`tensors_of_bags` returns them, and the gradient of the output.
    """
    tokens, *others, gradient = tensors
    weights = next((each for each in others if each.is_floating_point()), None)
    if tokens.dim() == 1:
        bags = _Bags(layer, others[0], len(tokens), len(gradient))
        tokens, is_token, weights = bags.apart(tokens, weights)
    else:
        is_token = torch.ones_like(tokens, dtype=torch.bool)
    if layer.padding_idx is not None:
        is_token = is_token & (tokens != layer.padding_idx)
    u = _of_tokens(layer, tokens, is_token, gradient)
    if weights is not None:
        u = u * weights.unsqueeze(2)
    u = u.masked_fill(~is_token.unsqueeze(2), 0.0)
    return [(layer.weight, Use(Lookup(layer.num_embeddings), tokens, u))]


class _Bags:
    """The bags of tokens in one long row.

    Args:
        layer: says whether the last offset is an end.
        offsets: where each bag begins.
        length: of the row.
        count: of the bags.
    """

    def __init__(self, layer: nn.EmbeddingBag, offsets: Tensor, length: int, count: int) -> None:
        starts = offsets[:-1] if layer.include_last_offset else offsets
        if layer.include_last_offset and int(offsets[-1]) != length:
            raise UnsupportedModelError(
                "was called with include_last_offset=True and a last offset that is not the length "
                "of the input, for which torch has no gradient. End the offsets with that length.",
                topic="unsupported-layer",
            )
        places = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
        owners = torch.searchsorted(starts.contiguous(), places, right=True) - 1
        self._owned = Owned(count, owners)

    def apart(self, tokens: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return tokens, which places hold one, and weights: shape (bags, longest)."""
        is_token = self._owned.apart(torch.ones_like(tokens, dtype=torch.bool))
        parted = None if weights is None else self._owned.apart(weights)
        return self._owned.apart(tokens), is_token, parted


def _of_tokens(
    layer: nn.EmbeddingBag, tokens: Tensor, is_token: Tensor, gradient: Tensor
) -> Tensor:
    """Return the gradient of each token's row: shape (bags, longest, width)."""
    u = gradient.unsqueeze(1).expand(-1, tokens.shape[1], -1)
    if layer.mode == "mean":
        return u / is_token.sum(1).clamp(min=1).view(-1, 1, 1)
    if layer.mode == "max":
        rows = layer.weight.detach()[tokens].masked_fill(~is_token.unsqueeze(2), -math.inf)
        largest = rows.argmax(1, keepdim=True)  # the first of several, as torch does
        places = torch.arange(tokens.shape[1], device=tokens.device).view(1, -1, 1)
        return u.masked_fill(places != largest, 0.0)
    return u
