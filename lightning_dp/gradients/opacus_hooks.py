"""Per-sample gradients from Opacus' rules, at hooks of our own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from opacus.grad_sample.functorch import prepare_layer
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, DPRNNBase
from torch import Tensor, nn

from lightning_dp._refusals import RefusedRun
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    UncoveredParameterError,
    UnsupportedModelError,
    as_unsupported,
)
from lightning_dp.gradients.materialised import MaterialisedGradients
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.opacus_limits import (
    is_trained,
    refuse_call,
    refuse_layers,
    refuse_output,
    refuse_overwritten,
    refuse_packed,
    refuse_wrong_sums,
)

__all__ = ["OpacusHooks"]

# From a layer's input and the gradient of its output, both records first, to each record's gradients.
_Rule: TypeAlias = Callable[[Tensor, Tensor], Mapping[nn.Parameter, Tensor]]


class OpacusHooks(AbstractGradientEngine):
    """Opacus' rule for every layer that it has one for, and ``torch.func`` for any other without buffers.

    A forward hook keeps what a layer saw, and a hook on its output waits for the gradient there, so
    that each call has its own, in whatever order they come and whatever overwrites the output. All is
    put into plain memory first: the rules read tensors as if they lay there in order. One gradient
    per record and parameter is made: memory is B times the parameters.

    The mean of the gradients over the records must be the ordinary gradient of the loss, which the
    same backward pass gives. That finds uses of a parameter that no hook sees.

    Of Opacus' own layers two would be given the gradients of other records, which are refused:
    ``DPMultiheadAttention`` with ``batch_first=False`` or ``add_bias_kv=True``, and recurrent layers
    called with packed sequences, whose rows are in the order of the lengths. The book-keeping engine
    covers both.
    """

    name = "hooks"
    runs_backward = True

    def __init__(self) -> None:
        self._hooks = ModuleHooks()
        self._params: Sequence[nn.Parameter] = ()
        self._trained: set[nn.Parameter] = set()
        self._names: dict[nn.Parameter, str] = {}
        self._outputs: set[Any] = set()
        self._is_live = False  # a backward pass is ours
        self._found: dict[nn.Parameter, Tensor] | None = None  # of the last backward pass
        self._plain: Sequence[Tensor | None] = ()  # its ordinary gradients

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        refuse_layers(module)
        self._params, self._trained = params, set(params)
        self._names = {param: name for name, param in module.named_parameters()}
        names = {part: name for name, part in module.named_modules()}
        try:
            for part in module.modules():
                if isinstance(part, DPRNNBase) and is_trained(part):
                    before = partial(part.register_forward_pre_hook, with_kwargs=True)
                    self._hooks.add(part, before, refuse_packed)
            for layer in dict.fromkeys(_layers(module)):
                self._watch(names[layer], layer)
        except UnsupportedModelError:
            self.detach()
            raise

    def _watch(self, name: str, layer: nn.Module) -> None:
        rule = _rule_of(name, layer)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            refuse_call(name, layer, args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._note(name, layer, rule, args[0], output)

        self._hooks.add(layer, partial(layer.register_forward_pre_hook, with_kwargs=True), before)
        # Before the user's hooks, which may change the output.
        self._hooks.add(layer, partial(layer.register_forward_hook, prepend=True), after)

    def _note(self, name: str, layer: nn.Module, rule: _Rule, given: Tensor, output: Any) -> None:
        """Wait for the gradient of what a layer made."""
        if not torch.is_grad_enabled():
            return
        refuse_output(name, layer, output)
        if output.requires_grad:
            self._outputs.add(output.grad_fn)
            back = partial(self._back, name, layer, rule, given.detach(), given._version)
            output.register_hook(back)

    @torch.no_grad()
    def _back(
        self,
        name: str,
        layer: nn.Module,
        rule: _Rule,
        given: Tensor,
        version: int,
        gradient: Tensor,
    ) -> None:
        """Add up each record's gradients of one call; the rules want the loss to be a sum."""
        if not self._is_live or self._found is None:
            return
        refuse_overwritten(name, layer, given, version)
        with as_unsupported(name, layer):
            rows = rule(given.contiguous(), (gradient.detach() * len(given)).contiguous())
            for param, row in rows.items():
                if param in self._trained:
                    so_far = self._found.get(param)
                    self._found[param] = row if so_far is None else so_far + row

    def outputs_of_layers(self) -> Collection[Any]:
        return self._outputs

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        self._found, self._is_live = {}, True
        try:
            self._plain = torch.autograd.grad(
                loss, tuple(self._params), retain_graph=keep_graph or None, allow_unused=True
            )
        finally:
            self._is_live = False
            self._outputs = set()

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> MaterialisedGradients:
        found, plain = self._found, self._plain
        self._found, self._plain = None, ()
        if found is None:
            raise RefusedRun(
                "OpacusHooks.backward() must come before take().", topic="out-of-order"
            )
        pairs = zip(self._params, plain, strict=True)
        missing = [self._names[p] for p, g in pairs if g is not None and p not in found]
        if missing:
            raise UncoveredParameterError(missing)
        gradients = MaterialisedGradients(self._params, [found.get(p) for p in self._params], scale)
        refuse_wrong_sums(self._names, found, dict(zip(self._params, plain, strict=True)))
        return gradients

    def drop(self) -> None:
        self._found, self._plain, self._outputs = None, (), set()

    def rest(self) -> None:
        self._hooks.take_off()

    def wake(self) -> None:
        self._hooks.put_on()

    def detach(self) -> None:
        self._hooks.take_off()
        self._hooks = ModuleHooks()
        self._params, self._trained, self._names = (), set(), {}
        self.drop()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose gradients are worked out: of one without a rule, no layer inside."""
    is_own = any(param.requires_grad for param in module.parameters(recurse=False))
    if is_own and type(module) not in (DPRNN, DPLSTM, DPGRU):  # theirs are on the layers inside
        yield module
        if type(module) not in GradSampleHooks.GRAD_SAMPLERS:
            return
    for part in module.children():
        yield from _layers(part)


def _rule_of(name: str, layer: nn.Module) -> _Rule:
    """Return Opacus' rule of a layer, or what ``torch.func`` makes of its forward pass.

    Raises:
        UnsupportedModelError: if there is neither.
    """
    known = GradSampleHooks.GRAD_SAMPLERS.get(type(layer))
    if known is not None:
        return lambda given, back: known(layer, [given], back)
    if names := [key for key, _ in layer.named_buffers()]:
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) itself has parameters, and the buffers "
            f"{names[:5]}, which Opacus does not take. Keep them in a module without parameters.",
            topic="opacus-hooks",
        )
    with as_unsupported(name, layer):
        try:
            prepare_layer(layer)
            compute = vars(layer)["ft_compute_sample_grad"]
        finally:
            vars(layer).pop("ft_compute_sample_grad", None)
    params = list(layer.parameters())

    def by_torch_func(given: Tensor, back: Tensor) -> Mapping[nn.Parameter, Tensor]:
        given = given.to(back.dtype) if given.is_floating_point() else given
        return dict(zip(params, compute(params, given, back), strict=True))

    return by_torch_func
