"""The table of layer types: the rule that tells how each of them uses its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp._norms import FixedNorm
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.convolution import convolution
from lightning_dp.gradients.forms import Uses
from lightning_dp.gradients.layers import (
    embedding,
    fixed_norm,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    rms_norm,
)

__all__ = ["RULES", "Rule", "own_parameters", "refuse_options", "rule_of"]

_CURE = "Use engine='hooks', or change the layer."

# (layer, its input, the gradient of its output) -> every parameter with its use in this call;
# the tensors have records first.
Rule = Callable[..., Uses]

RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.RMSNorm: rms_norm,
    FixedNorm: fixed_norm,
}


def rule_of(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer's type, or of the one whose forward pass it inherits; else None."""
    for kind in type(layer).__mro__:
        if kind in RULES and type(layer).forward is getattr(kind, "forward", None):
            return RULES[kind]
    return None


def own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that its own calls use, without those of layers inside that it lists.

    A head lists its decoder's bias.
    """
    own = list(layer.parameters(recurse=False))
    if not own:  # most modules with others inside: what all of those hold need not be looked up
        return []
    inside = {id(param) for each in layer.children() for param in each.parameters()}
    return [param for param in own if id(param) not in inside]


def refuse_options(name: str, layer: nn.Module, *, has_rule: bool, has_own: bool) -> None:
    """Refuse a layer whose gradient no rule tells, or under whose options it is not what its rule says.

    Args:
        name: of the layer in the model.
        layer: has trained parameters, in itself or in layers inside.
        has_rule: there is one for its type.
        has_own: its own calls use some of them.
    """
    what, topic = f"{name or 'The module'} ({type(layer).__name__})", "unsupported-layer"
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(layer, option):
                raise UnsupportedModelError(f"{what} has {option} set. {_CURE}", topic=topic)
    if is_parametrized(layer):
        raise UnsupportedModelError(f"{what} is parametrized. {_CURE}", topic="changed-layer")
    if (has_own and not has_rule) or _hides_records(layer):
        raise UnsupportedModelError(f"{what}: no rule is known of its type. {_CURE}", topic=topic)
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if has_rule and rule_of(layer) and not names <= {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{what} has parameters that its type does not: {sorted(names - {'weight', 'bias'})}. "
            f"{_CURE}",
            topic="changed-layer",
        )


def _hides_records(layer: nn.Module) -> bool:
    """Return whether layers inside may see rows that are not the records: positions, or fewer of them."""
    is_of_opacus = any(kind.__module__.startswith("opacus.layers") for kind in type(layer).__mro__)
    return is_of_opacus or isinstance(layer, nn.RNNBase | nn.MultiheadAttention)
