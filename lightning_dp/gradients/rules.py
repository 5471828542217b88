"""Rules that tell how layers and functions use their parameters, and a table of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp._norms import FixedNorm
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import Rows, Use, Uses
from lightning_dp.gradients.convolution import Convolution
from lightning_dp.gradients.matrices import Lookup, OuterProduct, Scale

__all__ = [
    "BY_POSITION",
    "FUNCTIONS",
    "RULES",
    "FunctionLayer",
    "FunctionUse",
    "Rule",
    "convolution",
    "embedding",
    "fixed_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "own_parameters",
    "product",
    "refuse_options",
    "rms_norm",
    "rule_of",
]


_CURE = "Leave the engine at 'auto', or change the layer."
_FIX = "lightning_dp.fix(model) puts a layer of Opacus in its place."

# (layer, its input, the gradient of its output) -> every parameter with its use in this call;
# the tensors have records first.
Rule: TypeAlias = Callable[..., Uses]


@dataclass(frozen=True, eq=False)
class FunctionLayer:
    """Holds what a rule reads of a layer, where a function was called without one."""

    weight: Tensor
    bias: Tensor | None = None
    padding_idx: int | None = None
    stride: tuple[int, ...] = ()
    padding: str | tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "zeros"
    normalized_shape: tuple[int, ...] = ()
    num_groups: int = 1
    eps: Any = None  # a number; None, by which rms_norm takes that of the precision


def linear(layer: nn.Linear | FunctionLayer, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; middle dimensions are positions."""
    v, u = _vectors(inputs), _vectors(gradient)
    uses: Uses = [(layer.weight, Use(OuterProduct(), v, u))]
    return [*uses, *_of_bias(layer.bias, u)]


def product(layer: FunctionLayer, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return the same for a weight of shape (in, out)."""
    v, u = _vectors(inputs), _vectors(gradient)
    uses: Uses = [(layer.weight, Use(OuterProduct(), u, v))]
    return [*uses, *_of_bias(layer.bias, u)]


def _vectors(tensor: Tensor) -> Tensor:
    """Return shape (n, positions, features)."""
    if tensor.dim() == 2:
        return tensor.unsqueeze(1)
    return tensor.reshape(len(tensor), -1, tensor.shape[-1])


def _of_bias(bias: Tensor | None, u: Tensor) -> Uses:
    if bias is None:
        return []
    return [(bias, Rows.use(u[:, 0] if u.shape[1] == 1 else u.sum(1)))]


def embedding(layer: nn.Embedding | FunctionLayer, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return the table with its use in one call."""
    rows, width = layer.weight.shape
    v = inputs.reshape(len(inputs), -1)
    u = gradient.reshape(*v.shape, width)
    if layer.padding_idx is not None:
        u = u.masked_fill((v == layer.padding_idx).unsqueeze(2), 0.0)
    return [(layer.weight, Use(Lookup(rows), v, u))]


def convolution(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d | FunctionLayer, inputs: Tensor, gradient: Tensor
) -> Uses:
    """Return weight and bias with their uses in one call."""
    padding = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        around = _around(padding, layer.weight.shape[2:], layer.dilation)
        inputs, padding = F.pad(inputs, around, mode=mode), (0,) * len(layer.stride)
    form = Convolution(
        tuple(layer.weight.shape), layer.stride, padding, layer.dilation, layer.groups
    )
    uses: Uses = [(layer.weight, Use(form, inputs, gradient))]
    if layer.bias is not None:
        uses.append((layer.bias, Rows.use(gradient.flatten(2).sum(2))))
    return uses


def _around(
    padding: str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Return what is put before and after each dimension, the last one first."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(padding, str):
        sides = [(0, 0)] * len(kernel)
    else:
        sides = [(each, each) for each in padding]
    return [side for each in reversed(sides) for side in each]


def layer_norm(layer: nn.LayerNorm | FunctionLayer, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; middle dimensions are positions."""
    shape = list(layer.normalized_shape)
    v = F.layer_norm(inputs, shape, eps=layer.eps)
    return _uses_of_scale(layer, v, gradient, range(1, gradient.dim() - len(shape)))


def rms_norm(layer: nn.RMSNorm | FunctionLayer, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return the weight with its use in one call; middle dimensions are positions."""
    shape = list(layer.normalized_shape)
    v = F.rms_norm(inputs, shape, eps=layer.eps)
    return _uses_of_scale(layer, v, gradient, range(1, gradient.dim() - len(shape)))[:1]


def group_norm(layer: nn.GroupNorm | FunctionLayer, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; one entry for each channel."""
    v = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _uses_of_scale(layer, v, gradient, range(2, gradient.dim()))


def instance_norm(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d | FunctionLayer,
    inputs: Tensor,
    gradient: Tensor,
) -> Uses:
    """Return weight and bias with their uses in one call; one entry for each channel."""
    v = F.instance_norm(inputs, eps=layer.eps)
    return _uses_of_scale(layer, v, gradient, range(2, gradient.dim()))


def fixed_norm(layer: FixedNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; one entry for each channel."""
    return _uses_of_scale(layer, layer.normalised(inputs), gradient, range(2, gradient.dim()))


def _uses_of_scale(layer: Any, v: Tensor, u: Tensor, sum_over: range) -> Uses:
    dimensions = tuple(sum_over)
    bias = u.sum(dimensions) if dimensions else u
    scale = Use(Scale(dimensions), v, u)
    return [(layer.weight, scale), (getattr(layer, "bias", None), Rows.use(bias))]


# Dimensions between the records and what the rule is about are positions of a record. The other rules
# take one row each: what stands there belongs into the rows, whose records a folding tells.
BY_POSITION = frozenset({linear, product, embedding, layer_norm, rms_norm})

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


@dataclass(frozen=True, eq=False)
class FunctionUse:
    """A call of a function that uses parameters as a layer does.

    Args:
        rule: tells the uses.
        layer: what the rule reads of a layer.
        input: the activations.
    """

    rule: Rule
    layer: FunctionLayer
    input: Tensor


_Entry: TypeAlias = Callable[..., "FunctionUse | None"]


def _as_declared(entry: _Entry) -> _Entry:
    """Return an entry that is None for arguments it does not declare: ``out``, or factors."""

    @wraps(entry)
    def use(*args: Any, **kwargs: Any) -> FunctionUse | None:
        try:
            found = entry(*args, **kwargs)
        except TypeError:
            return None
        # Gradients of complex products take conjugates, which no rule does.
        return None if found is None or found.layer.weight.is_complex() else found

    return use


@_as_declared
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> FunctionUse | None:
    if weight.dim() != 2 or not _is_vector(bias, weight.shape[0]):
        return None
    return FunctionUse(linear, FunctionLayer(weight, bias), input)


@_as_declared
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> FunctionUse | None:
    if not _is_vector(input, mat2.shape[1]):
        return None
    return FunctionUse(product, FunctionLayer(mat2, input), mat1)


@_as_declared
def _mm(input: Tensor, mat2: Tensor) -> FunctionUse | None:
    return FunctionUse(product, FunctionLayer(mat2), input)


@_as_declared
def _matmul(input: Tensor, other: Tensor) -> FunctionUse | None:
    return FunctionUse(product, FunctionLayer(other), input) if other.dim() == 2 else None


def _is_vector(bias: Tensor | None, size: int) -> bool:
    """Return whether a bias has an entry for each output: a shorter one is repeated."""
    return bias is None or bias.shape == (size,)


@_as_declared
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> FunctionUse | None:
    if input.is_floating_point() or max_norm is not None or scale_grad_by_freq or sparse:
        return None  # torch.embedding has the table first
    place = None if padding_idx is None else padding_idx % len(weight)
    return FunctionUse(embedding, FunctionLayer(weight, padding_idx=place), input)


@_as_declared
def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> FunctionUse:
    def each(option: int | Sequence[int]) -> tuple[int, ...]:
        given = (option,) if isinstance(option, int) else tuple(option)
        return given * (weight.dim() - 2) if len(given) == 1 else given

    layer = FunctionLayer(
        weight,
        bias,
        stride=each(stride),
        padding=padding if isinstance(padding, str) else each(padding),
        dilation=each(dilation),
        groups=groups,
    )
    return FunctionUse(convolution, layer, input)


@_as_declared
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> FunctionUse | None:
    if weight is None:
        return None
    layer = FunctionLayer(weight, bias, normalized_shape=tuple(normalized_shape), eps=eps)
    return FunctionUse(layer_norm, layer, input)


@_as_declared
def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> FunctionUse | None:
    if weight is None:
        return None
    layer = FunctionLayer(weight, normalized_shape=tuple(normalized_shape), eps=eps)
    return FunctionUse(rms_norm, layer, input)


@_as_declared
def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> FunctionUse | None:
    if weight is None:
        return None
    return FunctionUse(
        group_norm, FunctionLayer(weight, bias, num_groups=num_groups, eps=eps), input
    )


@_as_declared
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> FunctionUse | None:
    if weight is None or running_mean is not None or not use_input_stats:
        return None
    return FunctionUse(instance_norm, FunctionLayer(weight, bias, eps=eps), input)


# Name of a function -> what its own arguments tell; None where no rule holds.
FUNCTIONS: Mapping[str, _Entry] = {
    "linear": _linear,
    "addmm": _addmm,
    "mm": _mm,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "embedding": _embedding,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
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
