"""Clipped sums from what layers saw and what came back to them, in one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import is_
from typing import Any, Literal
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    AbstractPerSampleGradients,
    Around,
    Forward,
    UncoveredParameterError,
    UnsupportedModelError,
    as_unsupported,
    refuse_complex,
    refuse_without_records,
)
from lightning_dp.gradients.batches import RowOwners, SampleBatch, folding_in_force
from lightning_dp.gradients.calls import Call, CallSums, DualSums, KeptInputs, go_back, run_along
from lightning_dp.gradients.graph import Survey, changes_order, survey
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.parameter_sum import ScratchPool
from lightning_dp.gradients.rules import Rule, own_parameters, refuse_options, rule_of
from lightning_dp.gradients.sharded import WholeParameters, is_unit, twin, unit_rule

__all__ = ["AbstractLayerEngine", "LayerCalls"]

_OTHER_ORDER = (
    "Between layers, rows are chosen or put into another order (an index, flip, roll or sort along the "
    "first dimension), so that a row is not the same record everywhere. Leave the records in the order "
    "in which they came."
)
_EXCHANGED = (
    "{} ({}) was called with other parameters than its own (torch.func.functional_call, or a hook that "
    "replaces them). Call it as it is, or freeze it with requires_grad_(False)."
)
_NO_TENSORS = (
    "The layer {} ({}) itself has parameters, and something else than tensors goes in (or by name) or "
    "comes out. Give the parameters to a separate layer, called with tensors by position and returning "
    "one tensor."
)
_TENSORS = frozenset((Tensor, nn.Parameter))


class AbstractLayerEngine(AbstractGradientEngine):
    """An engine whose forward hooks record every call of a layer with trained parameters.

    Args:
        module, params: as for :class:`AbstractGradientEngine`.
        keeps: holds the inputs of a call.
        units: layers of no known type run again for each record: in copies of sharded models.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        keeps: Callable[[Sequence[Tensor], Tensor], KeptInputs] = KeptInputs,
        *,
        units: bool = False,
    ) -> None:
        super().__init__(module, params)
        refuse_complex(module, params)
        self._whole, self._keeps, self._memory = WholeParameters(module), keeps, ScratchPool()
        self._known = list(module.parameters())  # no whole ones in the places of shards
        self._param_names = {id(param): name for name, param in module.named_parameters()}
        self._names = {layer: name for name, layer in module.named_modules()}
        self._what: Literal["values", "nothing", "duals"] = "values"
        self._owners: RowOwners | None = None  # of the samples that run
        self.drop()
        trained = {id(param) for param in params}
        rules = self._rules(trained, units)
        # Along a direction other tensors stand in the places of the parameters.
        self._held = {layer: tuple(layer._parameters.values()) for layer in rules}
        self._used = {layer: [id(param) for param in _used_by(layer)] for layer in rules}
        self._hooks = ModuleHooks()
        me: Any = proxy(self)  # so that its memory is free as soon as nobody has the engine
        for layer, rule in rules.items():  # before the user's hooks, which may change the output
            register = partial(layer.register_forward_hook, prepend=True, with_kwargs=True)
            self._hooks.add(layer, register, partial(type(self)._watch, me, rule))
            if rule is None:  # after the user's hooks, which do not run again
                begin = partial(type(self)._begin, me)
                self._hooks.add(layer, layer.register_forward_pre_hook, begin)
        self._whole.hang_on(self._hooks)

    def _rules(self, trained: Collection[int], units: bool) -> dict[nn.Module, Rule | None]:
        """Return the layers whose calls use trained parameters, with their rules; None for shards."""
        found: dict[nn.Module, Rule | None] = {}
        for layer, name in self._names.items():
            if not any(id(param) in trained for param in layer.parameters()):
                continue
            rule = rule_of(layer)
            own = [param for param in own_parameters(layer) if id(param) in trained]
            is_known = rule is not None or units or is_unit(layer)
            refuse_options(name, layer, has_rule=is_known, has_own=bool(own))
            if own:
                found[layer] = rule
        return found

    def drop(self) -> None:
        super().drop()
        self._forget()

    def _forget(self) -> None:
        self._calls: list[Call] = []
        self._before: dict[nn.Module, nn.Module] = {}  # layers that are running, as they began
        self._problem: UnsupportedModelError | None = None
        self._unseen: dict[Any, str] = {}  # graph nodes of outputs with other parameters, and why

    def run(self, forward: Forward, batch: SampleBatch, around: Around | None = None) -> Any:
        self._owners = batch.owners
        return super().run(forward, batch, around)

    def watching(self) -> AbstractContextManager[None]:
        return self._hooks

    @contextmanager
    def _recording(self, what: Literal["nothing", "duals"]) -> Iterator[None]:
        """Inside, record nothing, since checkpointed layers run again; or calls of dual numbers."""
        before, self._what = self._what, what
        try:
            yield
        finally:
            self._what = before

    @contextmanager
    def repeating(self) -> Iterator[None]:
        # What runs again saves what it saved before; it is not recorded.
        seen = self._calls, self._problem, self._unseen
        self._forget()
        try:
            with self._hooks:
                yield
        finally:
            self._calls, self._problem, self._unseen = seen

    def _begin(self, layer: nn.Module, args: Any) -> None:
        self._before[layer] = twin(layer)

    def _watch(
        self,
        rule: Rule | None,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        name = self._names[layer]
        if self._what == "nothing" or not torch.is_grad_enabled():
            return
        if self._is_exchanged(layer):  # the loss must not depend on it
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self._unseen[output.grad_fn] = _EXCHANGED.format(
                    name or "The module", type(layer).__name__
                )
        elif kwargs or not args or not _are_tensors((*args, output)):
            problem = _NO_TENSORS.format(name or "of the whole module", type(layer).__name__)
            self._problem = UnsupportedModelError(problem, topic="unsupported-layer")
        elif output.requires_grad:
            refuse_without_records(name, layer, args[0])
            rule = unit_rule(layer, self._before.pop(layer, layer)) if rule is None else rule
            inputs = [x if self._what == "duals" else x.detach() for x in args]
            kept, edge = self._keeps(inputs, output), get_gradient_edge(output)
            call = Call(rule, layer, kept, edge, folding=folding_in_force(), name=name)
            call.owners = self._owners
            self._calls.append(call)

    def _is_exchanged(self, layer: nn.Module) -> bool:
        """Return whether other tensors are in the places of a layer's parameters now."""
        held = self._held[layer]
        if self._what == "duals" or _are_same(layer._parameters.values(), held):
            return False
        self._whole.look(layer)  # the whole parameters may be there, in the places of shards
        return not _are_same(map(self._whole.trained, layer._parameters.values()), held)

    def used_by(self, call: Call) -> Sequence[int]:
        """Return the parameters that a call uses, by ``id``."""
        return self._used[call.layer]

    def outputs_of_layers(self) -> set[Any]:
        return {call.edge.node for call in self._calls} | self._unseen.keys()

    def calls_of(self, loss: Tensor) -> list[Call]:
        """Hand over the recorded calls that the loss depends on; refuse all else that it depends on."""
        calls, problem, unseen = self._calls, self._problem, self._unseen
        outputs = self.outputs_of_layers()
        self._forget()
        if problem is not None:
            raise problem
        graph = survey(loss.grad_fn, outputs)
        self._whole.refuse_unknown(graph.leaves, self._known)
        if any(map(self._changes_order, graph.choosing)) and all(c.folding is None for c in calls):
            raise UnsupportedModelError(_OTHER_ORDER, topic="rows-and-records")
        for node in graph.reached & unseen.keys():
            raise UnsupportedModelError(unseen[node], topic="unseen-use")
        calls = [call for call in calls if call.edge.node in graph.reached]
        self._refuse_uncovered(calls, graph)
        for call in calls:
            call.is_first = call.edge.node in graph.innermost
        return calls

    def _changes_order(self, node: Any) -> bool:
        return changes_order(node)

    def _refuse_uncovered(self, calls: Sequence[Call], graph: Survey) -> None:
        """Refuse trained parameters that have more or fewer uses in a graph than recorded calls."""
        recorded = Counter([key for call in calls for key in self._used[call.layer]])
        # Fewer uses than calls: a call used another tensor in the parameter's place.
        uses = self._whole.translated(graph.uses)
        missing = [id(param) for param in self._params if uses[id(param)] != recorded[id(param)]]
        if missing:
            raise UncoveredParameterError([self._param_names[key] for key in missing])


def _are_same(some: Any, others: Sequence[Any]) -> bool:
    some = tuple(some)
    return len(some) == len(others) and all(map(is_, some, others))


def _are_tensors(given: Sequence[Any]) -> bool:
    return _TENSORS.issuperset(map(type, given)) or all(isinstance(x, Tensor) for x in given)


def _used_by(layer: nn.Module) -> list[Any]:
    """Return the parameters that one call uses; one that is weight and bias is used twice."""
    if rule_of(layer) is None:
        return list(own_parameters(layer))
    found = (getattr(layer, name, None) for name in ("weight", "bias"))
    return [param for param in found if param is not None]


class LayerCalls(AbstractLayerEngine):
    """One backward pass for the gradients of layer outputs only; the rest is book-keeping.

    Forward hooks keep each layer's input. The backward pass stops at the layers' outputs, so
    autograd computes no weight gradient at all. Norms come from inputs and output gradients
    (an outer product has the product of the norms), and the clipped sum is an ordinary weight
    gradient with the records scaled. Gradients per record are made where that is cheaper or there is
    no other way: of convolutions, norm layers and biases, of linear layers on long sequences, of
    weights that layers of different types share. Where they are smaller than what they are made
    from, they take its place as soon as the backward pass has come to the layer; of larger ones at
    most 64 MiB are kept for the sum, and beyond that they are made in slices.

    Covers the layers of ``RULES``, called any number of times, and shared parameters. A use of a
    parameter outside its layer, an input that was overwritten, rows in another order, or layers
    that see different numbers of rows are detected in every batch.

    Bu, Wang, Zha and Karypis, Differentially Private Optimization on Large Model at Small Cost
    (2023, arXiv:2210.00038), with the graph cut at the layers' outputs.
    """

    name = "layers"
    has_products = True
    takes_shards = True

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        trained = self._whole.trained
        sums = CallSums(self._params, self._memory, combined=combined, trained=trained)
        self._go_back(loss, sums, keep_graph=keep_graph)

    def _go_back(
        self, loss: Tensor, sums: CallSums, *, keep_graph: bool = False, along: bool = False
    ) -> None:
        self._found = None
        calls = self.calls_of(loss)

        def done(call: Call, gradient: Tensor | None) -> None:
            try:
                sums.take(call, gradient)
            except Exception as error:
                raise as_unsupported(error, call.name, call.layer) from None

        with self._recording("nothing"):
            go_back(loss, calls, done, keep_graph=keep_graph, along=along)
        self._found = sums.gradients

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> AbstractPerSampleGradients:
        def run(duals: Sequence[Tensor]) -> None:
            sums = DualSums(self._params, self._memory, duals, weights)
            self._go_back(run_again(), sums, along=True)

        with self._recording("duals"):
            run_along(self._module, self._params, direction, run)
        return self.take(1.0)
