"""Opacus' own per-sample gradients, for comparison: its hooks and rules, on a model left as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from opacus.grad_sample.functorch import prepare_layer
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS as OF_PARAMETERS
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn

from lightning_dp.functional import as_rows, full_precision
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    UncoveredParameterError,
    UnsupportedModelError,
    as_unsupported,
    number_of_records,
    refuse_complex,
    refuse_without_records,
)
from lightning_dp.gradients.batches import folding_in_force
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.parameter_sum import MaterialisedGradients

__all__ = ["OpacusHooks"]

_ATTRIBUTES = {"activations", "max_batch_len", "ft_compute_sample_grad", *OF_PARAMETERS}


class _Hooks(GradSampleHooks):  # type: ignore[misc]
    """Opacus' hooks, of which model and copies hold nothing while none of them runs."""

    def __init__(self, module: nn.Module) -> None:
        self.hooks, self.is_live, self.rows = ModuleHooks(), False, list[int]()
        self.kept = dict[Any, dict[str, Any]]()  # what stands on layers and parameters otherwise
        self.names = {layer: name for name, layer in module.named_modules()}
        try:
            super().__init__(module, strict=False)
        finally:
            self._take_off(*module.modules(), *module.parameters())
        self.fresh = _copied(self.kept)

    def add_hooks(self, *, force_functorch: bool = False, **how: Any) -> None:
        found = dict.fromkeys(self.iterate_submodules(self._module))
        layers = [each for each in found if type(each) not in (DPRNN, DPLSTM, DPGRU)]
        for layer in layers:
            try:
                if type(layer) not in self.GRAD_SAMPLERS:
                    prepare_layer(layer)
            except Exception as error:
                raise as_unsupported(error, self.names[layer], layer) from None
        for layer in layers:
            self.hooks.add(layer, layer.register_forward_hook, self.capture_activations_hook)
            back = partial(self.capture_backprops_hook, **how)
            self.hooks.add(layer, layer.register_full_backward_hook, back)
        self.enable_hooks()

    def capture_activations_hook(self, module: nn.Module, given: Any, output: Any) -> None:
        is_packed = vars(module).pop("max_batch_len", None) is not None  # as Opacus' layers tell
        if not torch.is_grad_enabled():
            return
        if is_packed or folding_in_force() is not None:
            raise UnsupportedModelError(
                f"{self.names[module] or type(module).__name__} was called inside rows_of_records() or "
                "with packed sequences: Opacus takes rows for records. Use engine='auto'.",
                topic="opacus-hooks",
            )
        with self._on(module):
            refuse_without_records(self.names[module], module, next(iter(given), None))
            super().capture_activations_hook(module, given, output)

    def capture_backprops_hook(self, module: nn.Module, given: Any, back: Any, **how: Any) -> None:
        if self.is_live:
            with self._on(module):
                super().capture_backprops_hook(module, given, back, **how)

    def rearrange_grad_samples(self, **how: Any) -> tuple[list[Tensor], Tensor]:
        activations, backprops = super().rearrange_grad_samples(**how)
        self.rows.append(len(activations[-1]))  # to calls with fewer, Opacus adds rows of zeros
        return [each.contiguous() for each in activations], backprops.contiguous()  # as rules want

    @contextmanager
    def _on(self, layer: nn.Module) -> Iterator[None]:
        for owner in (owners := (layer, *layer.parameters())):
            vars(owner).update(self.kept[owner])
        try:
            yield
        except Exception as error:
            raise as_unsupported(error, self.names[layer], layer) from None
        finally:
            self._take_off(*owners)

    def _take_off(self, *owners: Any) -> None:
        for owner in owners:
            has = vars(owner)
            self.kept[owner] = {name: has.pop(name) for name in _ATTRIBUTES & has.keys()}


class OpacusHooks(AbstractGradientEngine):
    """The hooks of Opacus' ``GradSampleModule``: one gradient per record and parameter in memory.

    Refused is what its validators refuse; gradients whose mean over the records is not the ordinary
    gradient; and records in another dimension or order, which no mean shows.
    """

    name = "hooks"

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        super().__init__(module, params)
        _refuse_layers(module)
        refuse_complex(module, params)
        names = {param: name for name, param in module.named_parameters()}
        self._opacus, self._names = _Hooks(module), [names[param] for param in params]

    def watching(self) -> AbstractContextManager[None]:
        return self._opacus.hooks

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        opacus, params = self._opacus, self._params
        opacus.is_live, opacus.rows = True, []
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                plain = torch.autograd.grad(loss, params, None, keep_graph, allow_unused=True)
            rows = [opacus.kept[param].get("grad_sample") for param in params]
            pairs = dict(zip(self._names, zip(rows, plain, strict=True), strict=True))
            self._found = partial(self._checked, pairs)
        finally:
            opacus.is_live, opacus.kept = False, _copied(opacus.fresh)

    def _checked(self, found: Mapping[str, tuple[Any, Any]], scale: float) -> MaterialisedGradients:
        """Return the rows, whose means must be the ordinary gradients."""
        used = {name: pair for name, pair in found.items() if pair[1] is not None}
        if missing := [name for name, (rows, _) in used.items() if not isinstance(rows, Tensor)]:
            raise UncoveredParameterError(missing)
        if number_of_records(self._opacus.rows):
            _refuse_wrong_means(used)
        return MaterialisedGradients(self._params, [rows for rows, _ in found.values()], scale)

    def drop(self) -> None:
        super().drop()
        self._opacus.kept = _copied(self._opacus.fresh)


def _copied(kept: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {each: {name: copy(value) for name, value in has.items()} for each, has in kept.items()}


def _refuse_layers(module: nn.Module) -> None:
    """Refuse what Opacus' validators do, and records in the second dimension."""
    reasons = [str(error) for error in GradSampleHooks.validate(module, strict=False)]
    for name, layer in module.named_modules():
        if not any(param.requires_grad for param in layer.parameters()):
            continue
        errors = ModuleValidator.VALIDATORS.get(type(layer), lambda _: [])(layer)
        if isinstance(layer, DPMultiheadAttention) and (layer.add_bias_kv or not layer.batch_first):
            errors = ["engine='auto' takes records second, and add_bias_kv=True."]
        reasons += [f"{name or 'The module'} ({type(layer).__name__}): {error}" for error in errors]
    if reasons:
        raise UnsupportedModelError(
            f"Opacus has no per-sample gradients for these layers: {' '.join(reasons)} "
            "lightning_dp.fix(model, attention=True) puts opacus.layers there, or give engine='auto'.",
            topic="opacus-hooks",
        )


def _refuse_wrong_means(pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse rows whose mean is not the ordinary gradient, by public tolerances; not NaN and inf."""
    rough = any(rows.dtype.itemsize < 4 or rows.device.type != "cpu" for rows, _ in pairs.values())
    rough |= torch.is_autocast_enabled("cpu") or full_precision(torch.device("cpu")).changes_any
    part, whole = (5e-2, 1e-3) if rough else (1e-3, 1e-5)
    means = [(as_rows(rows).float(), plain.to_dense().flatten()) for rows, plain in pairs.values()]
    far = torch.stack([(rows.mean(0) - plain).norm() for rows, plain in means])
    lengths = torch.stack([rows.norm(dim=1).mean() for rows, _ in means])
    is_wrong = (far > part * lengths + whole * lengths.nan_to_num(0.0).norm()).tolist()
    if wrong := [name for name, is_far in zip(pairs, is_wrong, strict=True) if is_far]:
        raise UnsupportedModelError(
            f"The mean of Opacus' gradients per record is not the ordinary gradient of {wrong[:5]}: "
            "they are used outside of their layers, or Opacus mistakes one. Use engine='auto'.",
            topic="opacus-hooks",
        )
