"""The table of layer types: the rule that tells how each of them uses its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp._norms import FixedNorm
from lightning_dp.gradients import opacus_layers
from lightning_dp.gradients.attention import multihead_attention, refuse_attention
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import Rows, Use, Uses
from lightning_dp.gradients.convolution import Convolution
from lightning_dp.gradients.embedding_bag import embedding_bag
from lightning_dp.gradients.matrices import Lookup, OuterProduct, Scale, SharedFactor

__all__ = [
    "RULES",
    "Rule",
    "convolution",
    "embedding",
    "fixed_norm",
    "group_norm",
    "instance_norm",
    "is_by_position",
    "layer_norm",
    "linear",
    "refuse_options",
    "rms_norm",
    "rule_of",
    "sequence_bias",
    "uses_of_positions",
]


_CURE = "Use engine='hooks', or change the layer."
_FIX = "lightning_dp.fix(model) puts a layer of Opacus in its place."

# (layer, its input, the gradient of its output) -> every parameter with its use in this call;
# the tensors have records first. That of nn.MultiheadAttention is also told of the call.
Rule = Callable[..., Uses]


def linear(layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; middle dimensions are positions."""
    if inputs.dim() == 2:
        use = Use(OuterProduct(), inputs.unsqueeze(1), gradient.unsqueeze(1))
        return [(layer.weight, use), (layer.bias, Rows.use(gradient))]
    v = inputs.reshape(len(inputs), -1, inputs.shape[-1])
    u = gradient.reshape(len(gradient), -1, gradient.shape[-1])
    return uses_of_positions(layer, v, u, None if layer.bias is None else u.sum(1))


def uses_of_positions(
    layer: nn.Linear, v: Tensor, u: Tensor, total: Tensor | None, shared: SharedFactor | None = None
) -> Uses:
    """Return the same for inputs v and output gradients u of shape (n, T, width).

    Args:
        layer: the layer.
        v, u: of it.
        total: Σ_t u_it, for a layer with a bias.
        shared: u, where other layers have the same.
    """
    uses: Uses = [(layer.weight, Use(OuterProduct(shared), v, u))]
    if total is not None:
        uses.append((layer.bias, Rows.use(total)))
    return uses


def embedding(layer: nn.Embedding, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return the table with its use in one call."""
    v = inputs.reshape(len(inputs), -1)
    u = gradient.reshape(*v.shape, layer.embedding_dim)
    if layer.padding_idx is not None:
        u = u.masked_fill((v == layer.padding_idx).unsqueeze(2), 0.0)
    return [(layer.weight, Use(Lookup(layer.num_embeddings), v, u))]


def convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call."""
    padding, around = layer.padding, layer._reversed_padding_repeated_twice
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs, padding = F.pad(inputs, around, mode=mode), (0,) * len(layer.stride)
    form = Convolution(
        tuple(layer.weight.shape), layer.stride, padding, layer.dilation, layer.groups
    )
    uses: Uses = [(layer.weight, Use(form, inputs, gradient))]
    if layer.bias is not None:
        uses.append((layer.bias, Rows.use(gradient.flatten(2).sum(2))))
    return uses


def layer_norm(layer: nn.LayerNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call."""
    v = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return _uses_of_scale(
        layer, v, gradient, range(1, gradient.dim() - len(layer.normalized_shape))
    )


def rms_norm(layer: nn.RMSNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return the weight with its use in one call."""
    shape = list(layer.normalized_shape)
    v = F.rms_norm(inputs, shape, eps=layer.eps)
    return _uses_of_scale(layer, v, gradient, range(1, gradient.dim() - len(shape)))[:1]


def group_norm(layer: nn.GroupNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; one entry for each channel."""
    v = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _uses_of_scale(layer, v, gradient, range(2, gradient.dim()))


def instance_norm(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    inputs: Tensor,
    gradient: Tensor,
) -> Uses:
    """Return weight and bias with their uses in one call; one entry for each channel."""
    return _uses_of_scale(
        layer, F.instance_norm(inputs, eps=layer.eps), gradient, range(2, gradient.dim())
    )


def fixed_norm(layer: FixedNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; one entry for each channel."""
    return _uses_of_scale(layer, layer.normalised(inputs), gradient, range(2, gradient.dim()))


def _uses_of_scale(layer: Any, v: Tensor, u: Tensor, sum_over: range) -> Uses:
    dimensions = tuple(sum_over)
    bias = u.sum(dimensions) if dimensions else u
    scale = Use(Scale(dimensions), v, u)
    return [(layer.weight, scale), (getattr(layer, "bias", None), Rows.use(bias))]


def sequence_bias(layer: SequenceBias, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return the bias with its use in one call: it is the last position."""
    return [(layer.bias, Rows.use(gradient[:, -1]))]


RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.RMSNorm: rms_norm,
    FixedNorm: fixed_norm,
    nn.MultiheadAttention: multihead_attention,
    SequenceBias: sequence_bias,
}


def rule_of(layer: nn.Module, rules: Mapping[type[nn.Module], Rule] = RULES) -> Rule | None:
    """Return the rule of a layer's type, or of the one whose forward pass it inherits; else None."""
    for kind in type(layer).__mro__:
        if kind in rules and type(layer).forward is getattr(kind, "forward", None):
            return rules[kind]
    return None


def is_by_position(layer: nn.Module, dim: int, dimensions: int) -> bool:
    """Tell whether a layer treats each entry of a dimension of its input alike.

    Args:
        layer: has a rule.
        dim: the dimension.
        dimensions: how many the input has.
    """
    if isinstance(layer, nn.Embedding):
        return True
    if isinstance(layer, nn.Linear):
        return dim < dimensions - 1
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return dim < dimensions - len(layer.normalized_shape)
    return False


def refuse_options(name: str, layer: nn.Module, rule: Rule | None) -> None:
    """Refuse options under which a layer's gradient is not what its rule says.

    Args:
        name: of the layer in the model.
        layer: any layer.
        rule: of its type, if there is one.
    """
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(layer, option):
                raise UnsupportedModelError(
                    f"{name} ({type(layer).__name__}) has {option} set. {_CURE}",
                    topic="unsupported-layer",
                )
    opacus_layers.refuse(name, layer, rule is not None)
    hides_records = isinstance(layer, nn.RNNBase | nn.MultiheadAttention)
    if hides_records and rule is not multihead_attention:
        cure = _FIX if isinstance(layer, nn.RNNBase) else _CURE
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) hides its records. {cure}", topic="attention"
        )
    if is_parametrized(layer):
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) is parametrized. {_CURE}", topic="changed-layer"
        )
    if rule is multihead_attention:
        refuse_attention(name, cast(nn.MultiheadAttention, layer))
        return
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if rule is None and own_parameters_are_trained(layer):
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) has own parameters "
            f"({sorted(names)}) and no rule is known of its type.",
            topic="unsupported-layer",
        )
    if rule is not None and not names <= {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) has parameters that its type does not: "
            f"{sorted(names - {'weight', 'bias'})}. {_CURE}",
            topic="changed-layer",
        )


def own_parameters_are_trained(layer: nn.Module) -> bool:
    """Tell whether calls of the layer itself use trained parameters."""
    return any(param.requires_grad for param in opacus_layers.own_parameters(layer))
