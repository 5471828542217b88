"""Clipped sums from what layers saw and what came back to them, in one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_dp._precision import FullPrecision, full_precision
from lightning_dp._refusals import RefusedRun
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    UncoveredParameterError,
    UnsupportedModelError,
    as_unsupported,
    refuse_special,
    refuse_without_records,
)
from lightning_dp.gradients.bilinear import AbstractFolding, Uses, uses_of_records
from lightning_dp.gradients.graph import Survey, changes_order, survey
from lightning_dp.gradients.hessian import Dual, run_along, split, uses_along
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.parameter_sum import (
    Allowance,
    BookkeptGradients,
    ParameterGradients,
    ScratchPool,
)
from lightning_dp.gradients.row_owners import folding_in_force
from lightning_dp.gradients.rules import Rule, own_parameters, refuse_options, rule_of
from lightning_dp.gradients.sharded import WholeParameters, is_unit, refuse_other_shards, unit_rule

__all__ = ["AbstractLayerEngine", "KeptInputs", "LayerCall", "LayerCalls", "Recorder", "go_back"]

_OTHER_ORDER = (
    "Between layers, rows are chosen or put into another order (an index, flip, roll or sort along the "
    "first dimension), so that a row is not the same record everywhere. Leave the records in the order "
    "in which they came."
)
_TENSORS = frozenset((Tensor, nn.Parameter))


class KeptInputs:
    """The inputs of a call, held as they are.

    Args:
        inputs: of the call.
        output: of the call.
    """

    def __init__(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        self._inputs = tuple([each.detach() for each in inputs])
        self._versions = [each._version for each in inputs]

    def take(self, *, keep: bool) -> tuple[Tensor, ...] | None:
        """Return the inputs, as often as they are kept; None if one was overwritten since."""
        inputs = self._inputs
        if not keep:
            self._inputs = ()
        return inputs if [each._version for each in inputs] == self._versions else None


@dataclass(eq=False, slots=True)
class LayerCall:
    """One call of a layer, until the backward pass comes to it."""

    name: str
    layer: nn.Module
    rule: Rule
    inputs: KeptInputs
    edge: GradientEdge  # of the output
    folding: AbstractFolding | None  # whose the rows are; None if they are the records
    moved: tuple[Dual, ...] = ()  # along a direction: the inputs with their derivatives

    def take_inputs(self, *, keep: bool = False) -> tuple[Tensor, ...]:
        """Hand over the inputs. Raises if they are not what they were.

        Args:
            keep: they are taken once more; else they are not held any longer.
        """
        if (inputs := self.inputs.take(keep=keep)) is None:
            raise UnsupportedModelError(
                f"The input of {self.name or 'the module'} ({type(self.layer).__name__}) was "
                "overwritten after the layer had used it. Do not change tensors in place between layers.",
                topic="overwritten-tensors",
            )
        return inputs

    def uses(self, *tensors: Tensor) -> Uses:
        """Return every parameter of the layer with its use in this call.

        Args:
            tensors: the inputs, and the gradient of the output.
        """
        return self.of_records(self.rule(self.layer, *map(_at_least_float32, tensors)))

    def of_records(self, uses: Uses) -> Uses:
        """Return uses of rows as those of the records to which they belong."""
        return uses if self.folding is None else uses_of_records(uses, self.folding)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Recorder:
    """Forward hooks that record every call of a layer with trained parameters.

    Args:
        module: the whole model.
        params: the trained parameters.
        keeps: holds the inputs of a call.
        units: layers of no known type run again for each record.

    Raises:
        UnsupportedModelError: naming a layer of which no rule is known, and the cure.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        keeps: Callable[[Sequence[Tensor], Tensor], KeptInputs] = KeptInputs,
        *,
        units: bool = False,
    ) -> None:
        refuse_other_shards(module, params)
        refuse_special(module, params)
        self.whole = WholeParameters(module)
        """The parameters that stand in the places of sharded ones."""
        self._params, self._keeps = params, keeps
        self._known = list(module.parameters())
        self._param_names = {id(param): name for name, param in module.named_parameters()}
        self._names = {layer: name for name, layer in module.named_modules()}
        self._is_watching, self._is_along = True, False  # along a direction
        self.drop()
        trained = {id(param) for param in params}
        rules = _rules_of_layers(module, trained, units)
        # Along a direction other tensors stand in the places of the parameters.
        self._held = {layer: tuple(layer._parameters.values()) for layer in rules}
        self._used = {layer: _used_by_a_call(layer) for layer in rules}
        self._hooks = ModuleHooks()
        for layer, rule in rules.items():  # before the user's hooks, which may change the output
            register = partial(layer.register_forward_hook, prepend=True, with_kwargs=True)
            self._hooks.add(layer, register, partial(self._watch, rule))
        self.whole.hang_on(self._hooks)

    def take_off(self) -> None:
        """Leave the model as it was."""
        self._hooks.take_off()

    def put_on(self) -> None:
        """Watch the model again."""
        self._hooks.put_on()

    def drop(self) -> None:
        """Forget what was recorded."""
        self._calls: list[LayerCall] = []
        self._problem: UnsupportedModelError | None = None
        self._unseen: dict[Any, str] = {}  # graph nodes of outputs with other parameters, and why

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded: checkpointed layers run again."""
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Inside, what checkpoints run again saves what it saved before; it is not recorded."""
        is_on = self._hooks.are_on
        seen = self._calls, self._problem, self._unseen
        self.drop()
        self.put_on()
        try:
            yield
        finally:
            self._calls, self._problem, self._unseen = seen
            if not is_on:
                self.take_off()

    @contextmanager
    def along_a_direction(self) -> Iterator[None]:
        """Inside, parameters are dual numbers, and the derivatives of inputs are recorded too."""
        self._is_along = True
        try:
            yield
        finally:
            self._is_along = False

    def _watch(
        self,
        rule: Rule | None,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if not self._is_watching or not torch.is_grad_enabled():
            return
        if self._is_exchanged(layer):
            self._ignore(layer, output)
        elif kwargs or not args or not _are_tensors((*args, output)):
            problem = (
                f"The layer {self._names[layer] or 'of the whole module'} "
                f"({type(layer).__name__}) itself has parameters, and something else "
                "than tensors goes in (or by name) or comes out. Give the parameters to a separate "
                "layer, called with tensors by position and returning one tensor."
            )
            self._problem = UnsupportedModelError(problem, topic="unsupported-layer")
        elif output.requires_grad:
            self._note(layer, rule, args, output)

    def _note(
        self, layer: nn.Module, rule: Rule | None, given: tuple[Tensor, ...], output: Tensor
    ) -> None:
        name = self._names[layer]
        refuse_without_records(name, layer, given[0])
        rule = unit_rule(layer) if rule is None else rule
        inputs, edge = self._keeps(given, output), get_gradient_edge(output)
        moved = tuple(split(each) for each in given) if self._is_along else ()
        self._calls.append(LayerCall(name, layer, rule, inputs, edge, folding_in_force(), moved))

    def _is_exchanged(self, layer: nn.Module) -> bool:
        """Return whether other tensors are in the places of a layer's parameters now."""
        held = self._held[layer]
        if _are_same(layer._parameters.values(), held):
            return False
        if self._is_along:  # dual numbers are there
            return False
        self.whole.look(layer)  # the whole parameters may be there, in the places of shards
        return not _are_same(map(self.whole.trained, layer._parameters.values()), held)

    def _ignore(self, layer: nn.Module, output: Any) -> None:
        """Remember a call with other parameters than the layer's own: the loss must not depend on it."""
        if isinstance(output, Tensor) and output.grad_fn is not None:
            self._unseen[output.grad_fn] = (
                f"{self._names[layer] or 'The module'} ({type(layer).__name__}) was called with "
                "other parameters than its own (torch.func.functional_call, or a hook that replaces "
                "them). Call it as it is, or freeze it with requires_grad_(False)."
            )

    def used_by(self, call: LayerCall) -> set[int]:
        """Return the parameters that a call uses, by ``id``."""
        return set(self._used[call.layer])

    def outputs(self) -> set[Any]:
        """Return the graph nodes of the outputs of all calls so far."""
        return {call.edge.node for call in self._calls} | self._unseen.keys()

    def take(self, loss: Tensor) -> tuple[list[LayerCall], set[Any]]:
        """Hand over the recorded calls that the loss depends on, if they are all that it depends on.

        Returns:
            The calls, and the graph nodes of the outputs of those that no other call feeds.

        Raises:
            UnsupportedModelError: if a call was not understood, or rows are in another order later.
            UncoveredParameterError: if a parameter is used outside of them.
        """
        calls, problem, unseen, outputs = self._calls, self._problem, self._unseen, self.outputs()
        self.drop()
        if problem is not None:
            raise problem
        graph = survey(loss.grad_fn, outputs)
        self.whole.refuse_unknown(graph.leaves, self._known)
        is_told = any(call.folding is not None for call in calls)
        if not is_told and any(map(changes_order, graph.choosing)):
            raise UnsupportedModelError(_OTHER_ORDER, topic="rows-and-records")
        for node in graph.reached & unseen.keys():
            raise UnsupportedModelError(unseen[node], topic="unseen-use")
        calls = [call for call in calls if call.edge.node in graph.reached]
        self._refuse_uncovered(calls, graph)
        return calls, graph.innermost

    def _refuse_uncovered(self, calls: Sequence[LayerCall], graph: Survey) -> None:
        """Refuse trained parameters that have more or fewer uses in a graph than recorded calls."""
        recorded = Counter[int]()
        for layer, times in Counter(call.layer for call in calls).items():
            for key in self._used[layer]:
                recorded[key] += times
        # Fewer uses than calls: a call used another tensor in the parameter's place.
        uses = self.whole.translated(graph.uses)
        missing = [id(param) for param in self._params if uses[id(param)] != recorded[id(param)]]
        if missing:
            raise UncoveredParameterError([self._param_names[key] for key in missing])


def _are_same(some: Any, others: Sequence[Any]) -> bool:
    some = tuple(some)
    return len(some) == len(others) and all(map(is_, some, others))


def _are_tensors(given: Sequence[Any]) -> bool:
    return _TENSORS.issuperset(map(type, given)) or all(isinstance(x, Tensor) for x in given)


def _used_by_a_call(layer: nn.Module) -> list[int]:
    """Return the ids of the parameters that one call uses; one that is weight and bias is used twice."""
    if rule_of(layer) is None:
        return [id(param) for param in own_parameters(layer)]
    found = (getattr(layer, name, None) for name in ("weight", "bias"))
    return [id(param) for param in found if param is not None]


def _rules_of_layers(
    module: nn.Module, trained: Collection[int], units: bool
) -> dict[nn.Module, Rule | None]:
    """Return the layers whose calls use trained parameters, with their rules; None for shards.

    Raises:
        UnsupportedModelError: naming a layer of which none is known, and the cure.
    """
    found: dict[nn.Module, Rule | None] = {}
    for name, layer in module.named_modules():
        if not any(id(param) in trained for param in layer.parameters()):
            continue
        rule = rule_of(layer)
        own = [param for param in own_parameters(layer) if id(param) in trained]
        is_known = rule is not None or units or is_unit(layer)
        refuse_options(name, layer, has_rule=is_known, has_own=bool(own))
        if own:
            found[layer] = rule
    return found


def go_back(
    loss: Tensor,
    calls: Sequence[LayerCall],
    innermost: Collection[Any],
    done: Callable[[LayerCall, Tensor | None], object],
    *,
    keep_graph: bool,
) -> None:
    """Differentiate a loss as far as the outputs of calls, and hand each its gradient as it comes.

    The pass stops at the innermost calls' outputs.

    Args:
        loss: depends on all of these calls.
        calls: recorded ones.
        innermost: the graph nodes of those that no other call feeds.
        done: is called with each call, once, and the gradient of its output.
        keep_graph: the graph is going to be used once more.
    """
    ends = [call for call in calls if call.edge.node in innermost]
    waiting = {call for call in calls if call.edge.node not in innermost}

    def arrived(call: LayerCall, gradients: tuple[Tensor | None, ...]) -> None:
        if call in waiting:
            waiting.remove(call)
            done(call, gradients[call.edge.output_nr])

    if not ends:
        return
    handles = [call.edge.node.register_prehook(partial(arrived, call)) for call in waiting]
    try:
        found: list[Tensor | None] = list(
            torch.autograd.grad(
                loss, [call.edge for call in ends], retain_graph=keep_graph, allow_unused=True
            )
        )
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():  # as during the pass itself
        for number, call in enumerate(ends):
            gradient, found[number] = found[number], None  # free when its call has seen it
            done(call, gradient)
        for call in waiting:  # nothing came back to them
            done(call, None)


class AbstractLayerEngine(AbstractGradientEngine):
    """An engine that sees a model through a :class:`Recorder`, which ``attach`` makes."""

    keeps_compiled = True

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    @property
    def _attached(self) -> Recorder:
        if self._recorder is None:
            raise RefusedRun(
                "The engine watches no model: attach() must come first.", topic="out-of-order"
            )
        return self._recorder

    def outputs_of_layers(self) -> Collection[Any]:
        return self._attached.outputs()

    def drop(self) -> None:
        if self._recorder is not None:
            self._recorder.drop()

    def rest(self) -> None:
        if self._recorder is not None:
            self._recorder.take_off()

    def wake(self) -> None:
        if self._recorder is not None:
            self._recorder.put_on()

    def detach(self) -> None:
        self.rest()
        self.drop()  # the recorder's hooks know it, so that it is freed late
        self._recorder = None


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

    Args:
        units: layers of no known type run again for each record: in copies of sharded models.
    """

    name = "layers"
    has_products = True

    def __init__(self, *, units: bool = False) -> None:
        super().__init__()
        self._units = units
        self._module: nn.Module | None = None
        self._params: Sequence[nn.Parameter] = ()
        self._found: dict[int, ParameterGradients] | None = None  # of the last backward pass
        self._memory = ScratchPool()
        self._precision = FullPrecision(())

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        self._recorder = Recorder(module, params, units=self._units)
        self._module, self._params = module, params

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        calls, innermost = self._calls_of(loss)
        keep = partial(self._keep, combined=combined)
        with self._attached.paused():
            go_back(loss, calls, innermost, keep, keep_graph=keep_graph)

    def _calls_of(self, loss: Tensor) -> tuple[list[LayerCall], set[Any]]:
        """Return the calls that the loss depends on; what is found of them will be of this pass."""
        self._found = None
        taken = self._attached.take(loss)
        allowance = Allowance()
        self._found = {
            id(p): ParameterGradients([], p.shape, self._memory, allowance) for p in self._params
        }
        self._precision = full_precision(loss.device)
        return taken

    def _keep(self, call: LayerCall, gradient: Tensor | None, *, combined: bool) -> None:
        """Keep the parts of one call from which the norms and the sum are made.

        What is not needed of a layer is free before the backward pass comes to the next one.
        """
        inputs = call.take_inputs()
        if gradient is not None:
            with as_unsupported(call.name, call.layer):
                self._count_in(call.uses(*inputs, gradient), combined)

    def _count_in(self, uses: Uses, combined: bool) -> None:
        assert self._found is not None
        trained = self._attached.whole.trained
        with self._precision:
            for param, use in uses:
                found = self._found.get(id(param)) or self._found.get(id(trained(param)))
                if found is not None:
                    found.add(use, combined=combined)

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> BookkeptGradients:
        """Return w g_i + w' H_i u from one forward and backward pass in dual numbers.

        Each layer's gradient is a bilinear form, so that its derivative along the direction is two
        uses of the same form (:meth:`AbstractForm.along`).
        """
        assert self._module is not None
        with self._attached.along_a_direction():
            calls = run_along(
                self._module, self._params, direction, lambda: self._duals_of(run_again())
            )
        parts = unflatten(direction, self._params)
        of = {id(param): part for param, part in zip(self._params, parts, strict=True)}
        with self._attached.paused(), torch.no_grad():
            for call, gradient in calls:
                call.take_inputs()
                with as_unsupported(call.name, call.layer):
                    *inputs, back = (_dual_in_float32(each) for each in (*call.moved, gradient))
                    uses = uses_along(call.rule, call.layer, inputs, back, of, weights)
                    self._count_in(call.of_records(uses), combined=False)
        return self.take(1.0)

    def _duals_of(self, loss: Tensor) -> list[tuple[LayerCall, Dual]]:
        """Return the calls that have a gradient with it and its derivative, inside dual numbers."""
        calls, _ = self._calls_of(loss)
        if not calls:
            return []
        with self._attached.paused():
            found = torch.autograd.grad(
                loss, [call.edge for call in calls], create_graph=True, allow_unused=True
            )
        pairs = zip(calls, found, strict=True)
        return [(call, split(gradient)) for call, gradient in pairs if gradient is not None]

    def take(self, scale: float) -> BookkeptGradients:
        found, self._found = self._found, None
        if found is None:
            raise RefusedRun("LayerCalls.backward() must come before take().", topic="out-of-order")
        gradients = [found[id(param)] for param in self._params]
        return BookkeptGradients(self._params, [g if g.uses else None for g in gradients], scale)

    def drop(self) -> None:
        self._found = None
        super().drop()

    def detach(self) -> None:
        super().detach()
        self._module, self._params, self._memory = None, (), ScratchPool()


def _dual_in_float32(dual: Dual) -> Dual:
    value, moved = dual
    return _at_least_float32(value), None if moved is None else _at_least_float32(moved)
