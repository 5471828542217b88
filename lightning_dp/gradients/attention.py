"""``nn.MultiheadAttention``: run once more by itself, to see what its projections see."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp._generators import generator_state
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import Rows, Use, Uses
from lightning_dp.gradients.matrices import OuterProduct
from lightning_dp.gradients.surroundings import Surroundings

__all__ = [
    "AttentionCall",
    "multihead_attention",
    "parameters_of",
    "random_state",
    "refuse_attention",
]


_PARAMETERS = {
    *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"),
    *("bias_k", "bias_v"),
}
_CURE = "Use DPMultiheadAttention of Opacus, or change the layer."
_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


@dataclass(frozen=True)
class AttentionCall:
    """The settings of a call of ``nn.MultiheadAttention``, without the tensors that went in.

    Args:
        dtypes: of the tensors, by the names of the arguments of ``forward``.
        sources: for query, key and value the first of the three that is the same tensor.
        needs_weights: whether the weights were asked for; they are computed in another way then.
        is_causal: as it was given.
        dropout: probability, 0 in eval mode.
        surroundings: its random numbers and its precision.
        output: what came out.
        is_along: what comes out of a rule carries a derivative along a direction.
    """

    dtypes: Mapping[str, torch.dtype]
    sources: tuple[int, int, int]
    needs_weights: bool
    is_causal: bool
    dropout: float
    surroundings: Surroundings
    output: Tensor
    is_along: bool

    @classmethod
    def of(
        cls,
        layer: nn.MultiheadAttention,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
        random_state: Tensor | None,
        is_along: bool,
    ) -> tuple[AttentionCall, tuple[Tensor, ...]]:
        """Return the call, and the tensors that went in.

        Raises:
            UnsupportedModelError: if they have no dimension of the records.
        """
        bound = _SIGNATURE.bind(layer, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        three = [given["query"], given["key"], given["value"]]
        if any(each.dim() != 3 for each in three):
            raise UnsupportedModelError(
                f"{type(layer).__name__} was called with tensors of {three[0].dim()} dimensions. "
                "Use it with (records, positions, features).",
                topic="attention",
            )
        call = cls(
            dtypes={name: each.dtype for name, each in tensors.items()},
            sources=tuple(next(j for j in range(3) if three[j] is each) for each in three),  # type: ignore[arg-type]
            needs_weights=given["need_weights"],
            is_causal=given["is_causal"],
            dropout=layer.dropout if layer.training else 0.0,
            surroundings=Surroundings.now(output.device, random_state),
            output=output.detach(),
            is_along=is_along,
        )
        return call, tuple(tensors.values())


def random_state(layer: nn.MultiheadAttention) -> Tensor | None:
    """Return the state of the generator that the layer will draw from; None if it draws nothing."""
    if not layer.training or not layer.dropout > 0:
        return None
    return generator_state(layer.out_proj.weight.device)


def parameters_of(layer: nn.MultiheadAttention) -> list[nn.Parameter]:
    """Return every parameter that the forward pass uses: ``out_proj`` is not called as a module."""
    return [part for each in (layer, layer.out_proj) for part in each.parameters(recurse=False)]


def refuse_attention(name: str, layer: nn.MultiheadAttention) -> None:
    """Refuse options under which the rule does not hold. Raises UnsupportedModelError."""
    if not layer.batch_first:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) has batch_first=False, which hides its records in the "
            f"second dimension. Make it with batch_first=True. {_CURE}",
            topic="attention",
        )
    found = {key for key, _ in layer.named_parameters(recurse=False)}
    if not found <= _PARAMETERS:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) has parameters that its type does not: "
            f"{sorted(found - _PARAMETERS)}. {_CURE}",
            topic="changed-layer",
        )


def multihead_attention(
    layer: nn.MultiheadAttention, *tensors: Tensor, call: AttentionCall
) -> Uses:
    """Return every parameter with its use in one call.

    The layer hands its parameters to one function, so what its linear maps see has to be made
    again: the projections q, k, v of the inputs, the same attention with the same dropout, and
    from its output back to q, k, v. The parameters are then those of linear maps on sequences.

    Whether the output made again is the one that was recorded is checked for all finite records.
    It depends on the layer, on hooks and on torch, which runs the same operations on the same
    numbers, and not on the records; the error says nothing about them.

    Args:
        tensors: those that went in, with records first, and the gradient of the output.

    Raises:
        UnsupportedModelError: if another output comes out.
    """
    *inputs, gradient = tensors
    context, back = _run_again(layer, inputs, gradient, call)
    dtype = gradient.dtype
    u, of_extra = [each.to(dtype) for each in back[:3]], back[3:]
    uses: Uses = [
        (layer.out_proj.weight, Use(OuterProduct(), context.to(dtype), gradient)),
        (layer.out_proj.bias, Rows.use(gradient.sum(1))),
        (layer.in_proj_bias, Rows.use(torch.cat([each.sum(1) for each in u], 1))),
    ]
    for param, each in zip(_extra(layer), of_extra, strict=True):
        uses.append((param, Rows.use(each.to(dtype).unsqueeze(1))))
    if layer.in_proj_weight is None:
        calls = [Use(OuterProduct(), *pair) for pair in zip(inputs[:3], u, strict=True)]
        return uses + list(zip(_weights(layer), calls, strict=True))
    # in_proj_weight stacks the three projections. Those that saw the same tensor are one outer
    # product; the rows of the others are zero in it.
    for source in set(call.sources):
        zero = torch.zeros_like(u[source])
        parts = [each if call.sources[i] == source else zero for i, each in enumerate(u)]
        packed = Use(OuterProduct(), inputs[source], torch.cat(parts, 2))
        uses.append((layer.in_proj_weight, packed))
    return uses


def _run_again(
    layer: nn.MultiheadAttention, inputs: list[Tensor], gradient: Tensor, call: AttentionCall
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the input of ``out_proj``, and the gradients of q, k, v and of added keys and values."""
    dtypes = call.dtypes.items()
    named = {name: each.to(dtype) for (name, dtype), each in zip(dtypes, inputs, strict=True)}
    sources = named["query"], named["key"], named["value"]
    bias = layer.in_proj_bias
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    with call.surroundings.again():
        with torch.no_grad():
            projected = zip(sources, _weights(layer), biases, strict=True)
            leaves = [F.linear(*each) for each in projected]
            leaves += [each.expand(len(gradient), -1, -1).clone() for each in _extra(layer)]
        with torch.enable_grad():
            for leaf in leaves:
                leaf.requires_grad_()
            context = _attend(layer, leaves, _mask(layer, named, call), call)
            output = F.linear(context, layer.out_proj.weight, layer.out_proj.bias)
            _check(layer, call.output, output)
            back = torch.autograd.grad(
                output, leaves, gradient.to(output.dtype), create_graph=call.is_along
            )
    return context if call.is_along else context.detach(), back


def _extra(layer: nn.MultiheadAttention) -> list[Tensor]:
    """Return the key and the value that ``add_bias_kv=True`` adds to those of the records."""
    return [each for each in (layer.bias_k, layer.bias_v) if each is not None]


def _weights(layer: nn.MultiheadAttention) -> list[Tensor]:
    """Return the weights of the projections of query, key and value."""
    if layer.in_proj_weight is not None:
        return list(layer.in_proj_weight.chunk(3))
    return [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]


def _mask(
    layer: nn.MultiheadAttention, named: Mapping[str, Tensor], call: AttentionCall
) -> Tensor | None:
    """Return the mask that is added to the scores, of shape (n or 1, heads or 1, L or 1, S)."""
    query, padding, mask = (named.get(k) for k in ("query", "key_padding_mask", "attn_mask"))
    assert query is not None
    if mask is not None and _hints_at_causal(named, call):
        mask = None
    heads = layer.num_heads
    parts = []
    if mask is not None:
        shape = (1, 1) if mask.dim() == 2 else (len(query), heads)
        parts.append(mask.reshape(*shape, *mask.shape[-2:]))
    if padding is not None:
        parts.append(padding[:, None, None, :].expand(-1, heads, -1, -1))
    if not parts:
        return None
    total = reduce(torch.add, (_added(each, query.dtype) for each in parts))
    return F.pad(total, (0, int(layer.bias_k is not None) + int(layer.add_zero_attn)))


def _hints_at_causal(named: Mapping[str, Tensor], call: AttentionCall) -> bool:
    return call.is_causal and "key_padding_mask" not in named and not call.needs_weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _attend(
    layer: nn.MultiheadAttention, leaves: list[Tensor], mask: Tensor | None, call: AttentionCall
) -> Tensor:
    """Return softmax(q kᵀ/√width + mask) v of all heads: shape (n, L, features)."""
    q, k, v, *extra = leaves
    if extra:
        k, v = torch.cat([k, extra[0]], 1), torch.cat([v, extra[1]], 1)
    heads, width = layer.num_heads, layer.head_dim
    q, k, v = (each.reshape(*each.shape[:2], heads, width).transpose(1, 2) for each in (q, k, v))
    if layer.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if not call.needs_weights:
        causal = mask is None and call.is_causal
        found = F.scaled_dot_product_attention(q, k, v, mask, call.dropout, causal)
        return found.transpose(1, 2).flatten(2)
    # torch takes this way if the weights are asked for. It scales q before the product, not the scores
    # after it; the same order gives the same rounding, which the check below relies on.
    shape, scaled = (*q.shape[:3], k.shape[2]), q.flatten(0, 1) * math.sqrt(1 / width)
    products = scaled, k.flatten(0, 1).transpose(1, 2)
    if mask is None:
        scores = torch.bmm(*products)
    else:
        scores = torch.baddbmm(mask.expand(shape).flatten(0, 1), *products)
    shares = F.dropout(F.softmax(scores, dim=-1), call.dropout)
    found = torch.bmm(shares, v.flatten(0, 1)).view(q.shape)
    return found.transpose(1, 2).flatten(2)


def _check(layer: nn.Module, recorded: Tensor, replayed: Tensor) -> None:
    """Refuse outputs that differ by more than rounding; records with non-finite output are ignored.

    Mostly such a record has no finite gradient and contributes nothing. If it has one, it is clipped
    as any other, and a replay that goes wrong is seen from the finite records.
    """
    is_alike = (recorded.shape, recorded.dtype) == (replayed.shape, replayed.dtype)
    if is_alike and not recorded.numel():
        return
    if not is_alike or not _agree(recorded.flatten(1), replayed.detach().flatten(1)):
        raise UnsupportedModelError(
            f"{type(layer).__name__} was run once more, which must give the same output and does "
            "not: a hook changes what goes in or draws random numbers, or this version of torch "
            f"computes something else. {_CURE}",
            topic="changed-layer",
        )


def _agree(recorded: Tensor, replayed: Tensor) -> bool:
    """True if the entries of all finite rows are equal, relative to the largest of their row."""
    size = recorded.abs().amax(1)
    tolerance = torch.finfo(recorded.dtype).eps ** 0.5
    is_equal = (recorded - replayed).abs().amax(1) <= tolerance * size
    return not bool((~is_equal & size.isfinite()).any())
