"""Rules that tell how layers and functions use their parameters, in one table of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import (
    Convolution,
    Lookup,
    OuterProduct,
    Rows,
    Scale,
    Use,
    Uses,
)
from lightning_dp.gradients.fix import FixedNorm
from lightning_dp.gradients.module_hooks import runs_forward_of

__all__ = [
    "BY_POSITION",
    "FUNCTIONS",
    "RULES",
    "FunctionLayer",
    "FunctionUse",
    "Rule",
    "linear",
    "own_parameters",
    "refuse_options",
    "rule_of",
]


_CURE = "Leave the engine at 'auto', or change the layer."

# (layer, its input, the gradient of its output) -> every parameter with its use in this call;
# the tensors have records first. In the place of a layer stands what has the same attributes.
Rule: TypeAlias = Callable[..., Uses]


class FunctionLayer:
    """The arguments of a function, which torch names as the attributes of a layer; else its defaults."""

    padding_idx = max_norm = running_mean = None
    scale_grad_by_freq = False
    stride = dilation = groups = 1
    padding, padding_mode = 0, "zeros"
    use_input_stats, eps = True, 1e-5

    def __init__(self, weight: Any = None, bias: Tensor | None = None, **options: Any) -> None:
        self.weight, self.bias = weight, bias
        vars(self).update(options)


_OUTER_PRODUCT = OuterProduct()


# -- rules ----------------------------------------------------------------------------------------


def linear(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return weight and bias with their uses in one call; middle dimensions are positions."""
    use = Use(_OUTER_PRODUCT, _vectors(inputs), _vectors(gradient))
    return [(layer.weight, use), *_of_bias(layer, gradient)]


def _product(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    """Return the same for a weight of shape (in, out)."""
    use = Use(_OUTER_PRODUCT, _vectors(gradient), _vectors(inputs))
    return [(layer.weight, use), *_of_bias(layer, gradient)]


def _vectors(tensor: Tensor) -> Tensor:
    """Return shape (n, positions, features)."""
    if tensor.dim() == 2:
        return tensor.unsqueeze(1)
    return tensor.reshape(len(tensor), -1, tensor.shape[-1])


def _of_bias(layer: Any, gradient: Tensor) -> Uses:
    if layer.bias is None:
        return []
    rows = gradient if gradient.dim() == 2 else _vectors(gradient).sum(1)
    return [(layer.bias, Rows.use(rows))]


def _embedding(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    rows, width = layer.weight.shape
    v = inputs.reshape(len(inputs), -1)
    u = gradient.reshape(*v.shape, width)
    if layer.padding_idx is not None:
        u = u.masked_fill((v == layer.padding_idx % rows).unsqueeze(2), 0.0)
    return [(layer.weight, Use(Lookup(rows), v, u))]


def _convolution(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    shape, mode = tuple(layer.weight.shape), layer.padding_mode

    def each(option: int | Sequence[int]) -> tuple[int, ...]:
        given = (option,) if isinstance(option, int) else tuple(option)
        return given * (len(shape) - 2) if len(given) == 1 else given

    stride, dilation, padding = each(layer.stride), each(layer.dilation), layer.padding
    if isinstance(padding, str) or mode != "zeros":
        around = _around(padding, shape[2:], dilation)
        inputs = F.pad(inputs, around, mode="constant" if mode == "zeros" else mode)
        padding = 0
    form = Convolution(shape, stride, each(padding), dilation, layer.groups)
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


def _layer_norm(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    v = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return _scaled(layer, v, gradient, 1, v.dim() - len(layer.normalized_shape))


def _rms_norm(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    v = F.rms_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return _scaled(layer, v, gradient, 1, v.dim() - len(layer.normalized_shape))


def _group_norm(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    return _scaled(layer, F.group_norm(inputs, layer.num_groups, eps=layer.eps), gradient)


def _instance_norm(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    return _scaled(layer, F.instance_norm(inputs, eps=layer.eps), gradient)


def _fixed_norm(layer: Any, inputs: Tensor, gradient: Tensor) -> Uses:
    return _scaled(layer, layer.normalised(inputs), gradient)


def _scaled(layer: Any, v: Tensor, u: Tensor, begin: int = 2, end: int | None = None) -> Uses:
    """Return the uses where normalised inputs are scaled; dimensions from one to another are summed."""
    dimensions = tuple(range(begin, v.dim() if end is None else end))
    uses: Uses = [(layer.weight, Use(Scale(dimensions), v, u))]
    if getattr(layer, "bias", None) is not None:
        uses.append((layer.bias, Rows.use(u.sum(dimensions) if dimensions else u)))
    return uses


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """One row of the table: a rule, and the layers and functions that it is for."""

    rule: Rule
    layers: Sequence[type[nn.Module]]
    # The names of a function's arguments in order. A call that names others goes without a rule, as with
    # ``out``.
    functions: Mapping[str, str]
    holds: Callable[[FunctionLayer, Tensor], bool] = lambda layer, input: True  # for one call
    # Dimensions between the records and what the rule is about are positions of a record. Other rules
    # take one row each: what stands there belongs into the rows, whose records a folding holds.
    by_position: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # other than a FunctionLayer's


def _has_bias_of(outputs: int, layer: FunctionLayer, input: Tensor) -> bool:
    """Return whether the weight is a matrix, and the bias has an entry for each of its outputs."""
    weight, bias = layer.weight, layer.bias
    is_matrix = weight.dim() == 2  # a shorter bias is repeated
    return is_matrix and (bias is None or bias.shape == weight.shape[outputs : outputs + 1])


def _is_lookup(layer: FunctionLayer, input: Tensor) -> bool:
    is_changed = layer.max_norm is not None or layer.scale_grad_by_freq
    return not is_changed and not input.is_floating_point()  # torch.embedding has the table first


_CONV = "input weight bias stride padding dilation groups"
_TABLE = (
    _Entry(
        linear,
        [nn.Linear],
        {"linear": "input weight bias"},
        partial(_has_bias_of, 0),
        by_position=True,
    ),
    _Entry(
        _product,
        [],
        {
            "addmm": "bias input weight",
            **dict.fromkeys(("mm", "matmul", "__matmul__"), "input weight"),
        },
        partial(_has_bias_of, 1),
        by_position=True,
    ),
    _Entry(
        _embedding,
        [nn.Embedding],
        {"embedding": "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"},
        _is_lookup,
        by_position=True,
    ),
    _Entry(
        _convolution,
        [nn.Conv1d, nn.Conv2d, nn.Conv3d],
        dict.fromkeys(("conv1d", "conv2d", "conv3d"), _CONV),
    ),
    _Entry(
        _layer_norm,
        [nn.LayerNorm],
        {"layer_norm": "input normalized_shape weight bias eps"},
        by_position=True,
    ),
    _Entry(
        _rms_norm,
        [nn.RMSNorm],
        {"rms_norm": "input normalized_shape weight eps"},
        by_position=True,
        defaults={"eps": None},
    ),
    _Entry(_group_norm, [nn.GroupNorm], {"group_norm": "input num_groups weight bias eps"}),
    _Entry(
        _instance_norm,
        [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d],
        {
            "instance_norm": "input running_mean running_var weight bias use_input_stats momentum eps"
        },
        lambda layer, _: layer.running_mean is None and layer.use_input_stats,
    ),
    _Entry(_fixed_norm, [FixedNorm], {}),
)


@dataclass(frozen=True, eq=False)
class FunctionUse:
    """A call of a function that uses parameters as a layer does: its rule, and what that reads."""

    rule: Rule
    layer: FunctionLayer
    input: Tensor


def _use_of(entry: _Entry, names: Sequence[str], *args: Any, **kwargs: Any) -> FunctionUse | None:
    """Return what a call uses by its own arguments; None where no rule holds."""
    if len(args) > len(names) or not all(name in names for name in kwargs):
        return None
    given = {**entry.defaults, **dict(zip(names, args, strict=False)), **kwargs}
    input, layer = given.pop("input", None), FunctionLayer(**given)
    # Gradients of complex products take conjugates, which no rule does.
    is_usual = input is not None and layer.weight is not None and not layer.weight.is_complex()
    return FunctionUse(entry.rule, layer, input) if is_usual and entry.holds(layer, input) else None


BY_POSITION = frozenset(entry.rule for entry in _TABLE if entry.by_position)
RULES: Mapping[type[nn.Module], Rule] = {
    layer: entry.rule for entry in _TABLE for layer in entry.layers
}
FUNCTIONS: Mapping[str, Callable[..., FunctionUse | None]] = {
    name: partial(_use_of, entry, names.split())
    for entry in _TABLE
    for name, names in entry.functions.items()
}
"""By the name of a function: takes its own arguments."""


# -- layers ---------------------------------------------------------------------------------------


def rule_of(layer: nn.Module) -> Rule | None:
    """Return the rule of the layer's type whose forward pass it runs; else None."""
    kinds = (kind for kind in type(layer).__mro__ if kind in RULES)
    return next((RULES[kind] for kind in kinds if runs_forward_of(layer, kind)), None)


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
    """Refuse a layer with trained parameters, ``has_own`` in its own calls, that no rule is right for."""
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
