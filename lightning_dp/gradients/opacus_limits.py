"""Assumptions of Opacus' rules about a layer and its calls, refused where they do not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_rnn import DPRNNBase
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from lightning_dp._precision import has_float64, in_float64
from lightning_dp.functional import as_rows, squared_row_norms
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.row_owners import folding_in_force
from lightning_dp.gradients.unsupported import refuse_script, refuse_without_records

__all__ = [
    "is_trained",
    "refuse_call",
    "refuse_layers",
    "refuse_output",
    "refuse_overwritten",
    "refuse_packed",
    "refuse_wrong_sums",
]


def is_trained(layer: nn.Module) -> bool:
    """Tell whether a parameter in it is trained."""
    return any(param.requires_grad for param in layer.parameters())


def refuse_layers(module: nn.Module) -> None:
    """Refuse a model with layers of which Opacus' hooks give no gradient or a wrong one.

    Raises:
        UnsupportedModelError: naming all of them, why, and the cures.
    """
    for name, part in module.named_modules():
        if is_trained(part):
            refuse_script(name, part)
    reasons = [why for name, part in module.named_modules() for why in _hides_records(name, part)]
    reasons += _wrong_or_none(module)
    if reasons:
        raise UnsupportedModelError(
            "Opacus cannot compute per-sample gradients for these layers: "
            + " ".join(reasons)
            + " lightning_dp.fix(model, attention=True) puts opacus.layers.DPLSTM, DPGRU, DPRNN and "
            "DPMultiheadAttention in their place; engine='auto' trains torch's layers as they are, only "
            "slower.",
            topic="opacus-hooks",
        )


def _hides_records(name: str, part: nn.Module) -> Iterator[str]:
    """Find why the records of a layer cannot be told apart by hooks, by Opacus' own list and ours."""
    own = [*part.parameters(recurse=False)]
    own += part.parameters() if is_parametrized(part) else []
    if any(param.requires_grad for param in own):
        errors = ModuleValidator.VALIDATORS.get(type(part), lambda _: [])(part)
        if not errors and is_parametrized(part):
            errors = ["its weight is computed from others (parametrized)."]
        if not errors and isinstance(part, nn.RNNBase | nn.MultiheadAttention):  # nn.RNN as well
            errors = ["its records are not told apart."]
        yield from (f"{name} ({type(part).__name__}): {error}" for error in errors)
    is_attention = isinstance(part, DPMultiheadAttention) and is_trained(part)
    if is_attention and (part.add_bias_kv or not part.batch_first):
        yield (
            f"{name} ({type(part).__name__}): its records are in the second dimension. Use "
            "engine='bookkeeping', or batch_first=True and add_bias_kv=False."
        )


def _has_rule(layer: nn.Module) -> bool:
    return type(layer) in GradSampleHooks.GRAD_SAMPLERS


def _wrong_or_none(module: nn.Module) -> Iterator[str]:
    """Name each layer that Opacus would give a wrong gradient, or none, with the reason and the cure."""
    for name, layer in module.named_modules():
        if any(param.requires_grad for param in layer.parameters(recurse=False)):
            for reason in _reasons(layer):
                yield f"{name or 'The module'} ({type(layer).__name__}) {reason}"
    yield from _listed_twice(module)


def _reasons(layer: nn.Module) -> Iterator[str]:
    if not _has_rule(layer):
        return
    unknown = sorted(
        {name for name, _ in layer.named_parameters(recurse=False)} - {"weight", "bias"}
    )
    if unknown:
        yield (
            f"has parameters that its type does not: {unknown} (weight_norm, or set on it). Keep them "
            "in a separate module, and the layer as it is."
        )
    if isinstance(layer, _ConvNd) and layer.padding_mode != "zeros":
        yield (
            f"has padding_mode={layer.padding_mode!r}, which Opacus takes for zeros. Use "
            "engine='bookkeeping'."
        )


def _listed_twice(module: nn.Module) -> Iterator[str]:
    """Name each layer of which Opacus would count a parameter twice, or once too little."""
    places: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, DPRNNBase):
            continue  # lists the parameters of its cells as its own
        for _, param in layer.named_parameters(recurse=False, remove_duplicate=False):
            if param.requires_grad:
                places.setdefault(param, []).append((path, layer))
    for found in places.values():
        for i, (path, layer) in enumerate(found):
            for inner, other in found[i + 1 :]:
                if layer is other or not path or inner.startswith(f"{path}."):
                    yield (
                        f"{path or 'The module'} ({type(layer).__name__}) has a parameter under two "
                        f"names (also in {inner or 'the module'}). Use engine='bookkeeping'."
                    )


def refuse_call(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of which Opacus would see a part only.

    Args:
        name: of the layer, which itself has trained parameters, in the model.
        layer: is called.
        args, kwargs: with them.

    Raises:
        UnsupportedModelError: naming the layer and the cure.
    """
    if not torch.is_grad_enabled():
        return
    if not layer.training:
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) is trained and in eval mode, and Opacus' "
            "hooks see layers in training mode only. Use engine='bookkeeping', call model.train() "
            "before fit, or freeze it with requires_grad_(False).",
            topic="opacus-hooks",
        )
    if folding_in_force() is not None:
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) was called inside rows_of_records(), and "
            "Opacus' hooks take rows for records. Use engine='bookkeeping'.",
            topic="opacus-hooks",
        )
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) itself has parameters and was called "
            "with something else than one tensor by position, of which Opacus sees nothing. Use "
            "engine='bookkeeping', or give the parameters to a layer that is called with one tensor.",
            topic="opacus-hooks",
        )
    refuse_without_records(name, layer, args[0])


def refuse_output(name: str, layer: nn.Module, output: Any) -> None:
    """Refuse a layer whose gradient comes back in several parts.

    Raises:
        UnsupportedModelError: naming the layer and the cure.
    """
    if not isinstance(output, Tensor):
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) itself has parameters and returned a "
            f"{type(output).__name__}, of which Opacus sees nothing. Give its parameters to a layer "
            "that returns one tensor.",
            topic="opacus-hooks",
        )


def refuse_overwritten(name: str, layer: nn.Module, given: Tensor, version: int) -> None:
    """Refuse a call whose input is not what it was.

    Args:
        version: of the input, when the layer was called.

    Raises:
        UnsupportedModelError: naming the layer and the cure.
    """
    if given._version != version:
        raise UnsupportedModelError(
            f"The input of {name or 'the module'} ({type(layer).__name__}) was overwritten after the "
            "layer had used it. Do not change tensors in place between layers (inplace=True, +=).",
            topic="overwritten-tensors",
        )


def refuse_wrong_sums(
    names: Mapping[nn.Parameter, str],
    found: Mapping[nn.Parameter, Tensor],
    plain: Mapping[nn.Parameter, Tensor | None],
) -> None:
    """Refuse gradients per record whose mean is not the ordinary gradient.

    Tolerances are public: far above what rounding does, and far below what a use that was not seen
    does. Gradients that are not finite are left out.

    Args:
        names: of the parameters in the model.
        found: each record's gradients, shape (n, *parameter shape).
        plain: the gradients of the mean loss.

    Raises:
        UnsupportedModelError: naming the parameters and the cure.
    """
    pairs = [
        (name, *_distance_and_length(rows, ordinary))
        for param, rows in found.items()
        if len(rows) and (ordinary := plain.get(param)) is not None
        for name in [names[param]]
    ]
    if not pairs:
        return
    is_rough = any(_is_rough(rows) for rows in found.values())
    part, whole = (5e-2, 1e-3) if is_rough else (1e-3, 1e-5)
    total = torch.stack([length for _, _, length in pairs]).nan_to_num(0.0).norm()
    is_far = torch.stack([d > part * length + whole * total for _, d, length in pairs]).tolist()
    wrong = [name for (name, _, _), far in zip(pairs, is_far, strict=True) if far]
    if wrong:
        raise UnsupportedModelError(
            f"Opacus' hooks see a part only of what is done with the parameters {wrong[:5]}: they are "
            "also used outside of calls of their layers, or something changes what comes out of these. "
            "Use each parameter in calls of its layer alone.",
            topic="opacus-hooks",
        )


def _distance_and_length(rows: Tensor, ordinary: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far the rows' mean is from the ordinary gradient, and how long they are."""
    rows, dense = as_rows(rows), ordinary.to_dense() if ordinary.is_sparse else ordinary
    wide = torch.float64 if has_float64(rows.device.type) else torch.float32
    distance = torch.linalg.vector_norm(rows.mean(0, dtype=wide) - dense.flatten())
    return in_float64(distance), squared_row_norms(rows).sqrt_().mean()


def _is_rough(rows: Tensor) -> bool:
    """Tell whether products may be rounded to fewer digits than float32 has."""
    kind = rows.device.type
    return rows.dtype.itemsize < 4 or kind != "cpu" or torch.is_autocast_enabled(kind)


def refuse_packed(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse packed sequences, whose rows Opacus takes for records in the order of the batch."""
    if torch.is_grad_enabled() and isinstance((*args, *kwargs.values())[0], PackedSequence):
        raise UnsupportedModelError(
            f"{type(layer).__name__} was called with packed sequences, which have the records in "
            "another order than the rest of the model. Use engine='bookkeeping', or tensors.",
            topic="packed-sequences",
        )
