"""Opacus' own per-sample gradients, for comparison: its rules of layers in the place of ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn

from lightning_dp.functional import as_rows, full_precision
from lightning_dp.gradients.base import (
    UncoveredParameterError,
    UnsupportedModelError,
    as_unsupported,
    number_of_records,
)
from lightning_dp.gradients.bilinear import Rows, Uses
from lightning_dp.gradients.graph import Survey
from lightning_dp.gradients.layer_calls import AbstractLayerEngine, Call, go_back
from lightning_dp.gradients.parameter_sum import MaterialisedGradients
from lightning_dp.gradients.rules import Rule
from lightning_dp.gradients.sharded import run_again

__all__ = ["OpacusHooks"]


class OpacusHooks(AbstractLayerEngine):
    """The rules of Opacus' ``GradSampleModule``: one gradient per record and parameter in memory.

    Layers that Opacus has no sampler of run again for each record, under ``torch.func.vmap``.

    Refused is what its validators refuse; gradients whose mean over the records is not the ordinary
    gradient; and records in another dimension or order, which no mean shows.
    """

    name = "hooks"

    def _rules(self, trained: Collection[int], units: bool) -> dict[nn.Module, Rule | None]:
        _refuse_layers(self._module)
        samplers = GradSampleHooks.GRAD_SAMPLERS
        self._has_recurrent = any(isinstance(each, DPRNN | DPLSTM | DPGRU) for each in self._names)
        return {
            layer: partial(_sampled, samplers[type(layer)])
            if type(layer) in samplers
            else run_again
            for layer in _layers(self._module)
        }

    def _watch(self, rule: Any, layer: nn.Module, *call: Any) -> None:
        # Opacus' recurrent layers tell so of packed sequences, whose records are in another order.
        if vars(layer).pop("max_batch_len", None) is not None and torch.is_grad_enabled():
            raise UnsupportedModelError(
                f"{self._names[layer]} was called with packed sequences, where Opacus takes rows for "
                "records. Use engine='auto'.",
                topic="opacus-hooks",
            )
        super()._watch(rule, layer, *call)

    def _changes_order(self, node: Any) -> bool:
        # Opacus' recurrent layers have time first, and turn it round for the second direction.
        return not self._has_recurrent and super()._changes_order(node)

    def _refuse_uncovered(self, calls: Sequence[Call], graph: Survey) -> None:
        """Leave it to the means: a layer without a rule may use a parameter any number of times."""

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        self._found, calls = None, self.calls_of(loss)
        found, counts, types = dict[Any, Tensor](), set[int](), set[torch.dtype]()

        def done(call: Call, gradient: Tensor | None) -> None:
            inputs = call.take_inputs()
            if gradient is None:
                return
            types.add(gradient.dtype)
            try:
                for param, use in call.uses(*inputs, gradient):
                    counts.add(len(use.u))
                    found[param] = found[param] + use.u if param in found else use.u
            except Exception as error:
                raise as_unsupported(error, call.name, call.layer) from None

        with self._recording("nothing"):
            plain, _ = go_back(loss, calls, done, keep_graph=keep_graph, others=self._params)
        rows = [found.get(param) for param in self._params]

        def gradients(scale: float) -> MaterialisedGradients:
            """Return the rows, whose sums must be the ordinary gradients of the mean loss."""
            names = [self._param_names[id(param)] for param in self._params]
            used = [x for x in zip(names, rows, plain, strict=True) if x[2] is not None]
            if missing := [name for name, of_each, _ in used if of_each is None]:
                raise UncoveredParameterError(missing)
            if n := number_of_records(counts):
                _refuse_wrong_sums(used, types)
            return MaterialisedGradients(self._params, rows, scale * n)

        self._found = gradients


def _sampled(sampler: Callable[..., Any], layer: nn.Module, *tensors: Tensor) -> Uses:
    *inputs, gradient = (each.contiguous() for each in tensors)  # as Opacus' rules want
    return [(p, Rows.use(rows)) for p, rows in sampler(layer, inputs, gradient).items()]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that hold trained parameters; what is in one without a rule is its."""
    is_own = any(param.requires_grad for param in module.parameters(recurse=False))
    if is_own and type(module) not in (DPRNN, DPLSTM, DPGRU):
        yield module
        if type(module) not in GradSampleHooks.GRAD_SAMPLERS:
            return
    for part in module.children():
        yield from _layers(part)


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


def _refuse_wrong_sums(
    used: Sequence[tuple[str, Any, Any]], types: Collection[torch.dtype]
) -> None:
    """Refuse rows whose sum is not the ordinary gradient, by public tolerances; not NaN and inf."""
    names, rows, plain = zip(*used, strict=True)
    rough = any(each.itemsize < 4 for each in types) or any(not each.is_cpu for each in rows)
    rough |= torch.is_autocast_enabled("cpu") or full_precision(torch.device("cpu")).changes_any
    part, whole = (5e-2, 1e-3) if rough else (1e-3, 1e-5)
    pairs = [(as_rows(r).float(), p.to_dense().flatten()) for r, p in zip(rows, plain, strict=True)]
    far = torch.stack([(r.sum(0) - p).norm() for r, p in pairs])
    lengths = torch.stack([r.norm(dim=1).sum() for r, _ in pairs])
    is_wrong = (far > part * lengths + whole * lengths.nan_to_num(0.0).norm()).tolist()
    if wrong := [name for name, is_far in zip(names, is_wrong, strict=True) if is_far]:
        raise UnsupportedModelError(
            f"The mean of Opacus' gradients per record is not the ordinary gradient of {wrong[:5]}: "
            "they are used outside of their layers, or Opacus mistakes one. Use engine='auto'.",
            topic="opacus-hooks",
        )
