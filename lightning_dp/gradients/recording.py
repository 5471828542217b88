"""The calls in which a model uses its parameters, recorded as the forward pass goes by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_dp.gradients import attention
from lightning_dp.gradients.attention import AttentionCall, multihead_attention
from lightning_dp.gradients.base import UncoveredParameterError, UnsupportedModelError
from lightning_dp.gradients.bilinear import Folded, Owned
from lightning_dp.gradients.checkpointing import REENTRANT
from lightning_dp.gradients.covered_layers import CoveredLayers
from lightning_dp.gradients.embedding_bag import embedding_bag, tensors_of_bags
from lightning_dp.gradients.function_call import FunctionCall
from lightning_dp.gradients.graph import (
    Region,
    Survey,
    changes_order,
    in_order,
    survey,
    uncovered,
)
from lightning_dp.gradients.hessian import split
from lightning_dp.gradients.layer_call import Call, LayerCall
from lightning_dp.gradients.layouts import Layout
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.opacus_layers import Arrange, FromPacked, OpacusLayers, from_the_second
from lightning_dp.gradients.row_owners import folding_in_force
from lightning_dp.gradients.rules import Rule, is_by_position
from lightning_dp.gradients.saved_inputs import SavedInputs
from lightning_dp.gradients.scattered import Place, Scattered
from lightning_dp.gradients.sharded import WholeParameters, refuse_other_shards
from lightning_dp.gradients.tensor_roles import TensorRoles
from lightning_dp.gradients.tracing import FunctionTracer
from lightning_dp.gradients.unsupported import refuse_special, refuse_without_records

__all__ = ["Recorder"]


def _place_of_output(arrange: Arrange, output: Tensor) -> Place:
    """Return where the output of a layer holds the records, whose input had to be arranged."""
    if isinstance(arrange, FromPacked):
        return Scattered(0, arrange.records[: len(output)].to(output.device))
    return Layout(1 if arrange is from_the_second else 0)


_OTHER_ORDER = (
    "Between layers, rows are chosen or put into another order (an index, flip, roll or sort along the "
    "first dimension), so that a row is not the same record everywhere. Leave the records in the order "
    "in which they came."
)


def _refuse_other_order(calls: Sequence[Call], graph: Survey) -> None:
    """Refuse rows that are not the same records in all layers, unless it is known whose they are."""
    are_told = any(
        isinstance(call, LayerCall)
        and (call.folding is not None or isinstance(call.arrange, FromPacked))
        for call in calls
    )
    if not are_told and any(map(changes_order, graph.choosing)):
        raise UnsupportedModelError(_OTHER_ORDER, topic="rows-and-records")


_TENSORS = frozenset((Tensor, nn.Parameter))


def _are_tensors(given: Sequence[Any]) -> bool:
    return _TENSORS.issuperset(map(type, given)) or all(isinstance(x, Tensor) for x in given)


class Recorder:
    """Forward hooks that record every call of a layer with trained parameters.

    With a tracer, they record the calls that a rule knows; parameters that are used in any other way
    are found in the functions that are called.

    Args:
        module: the whole model.
        params: the trained parameters.
        rules: what is known of layer types.
        traces: look for uses of parameters in all functions, too.
        saves: let autograd hold the inputs of layers, as :class:`SavedInputs`.

    Raises:
        UnsupportedModelError: naming a layer that is not covered, and the cure.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        rules: Mapping[type[nn.Module], Rule],
        *,
        traces: bool = False,
        saves: bool = False,
    ) -> None:
        self._params, self._saves = params, saves
        self._calls: list[LayerCall] = []
        self._unseen: dict[Any, str] = {}  # graph nodes of outputs that no rule knows of, and why
        self._random_states: dict[nn.Module, Tensor | None] = {}  # before calls that are running
        self._marks: list[int] = []  # the tracer's calls before layers that are running
        self._problem: UnsupportedModelError | None = None
        self._is_watching = True
        self._is_along = False  # a direction
        self._known = list(module.parameters())
        self._names = {id(param): name for name, param in module.named_parameters()}
        refuse_other_shards(module, params)
        refuse_special(module, params)
        self.whole = WholeParameters(module)
        """The parameters that stand in the places of sharded ones."""
        trained = {self._names[id(param)]: param for param in params}
        self._tracer = FunctionTracer(TensorRoles(trained, module, self.whole)) if traces else None
        self._layers = CoveredLayers(module, params, rules, self.whole, traces=traces)
        self._opacus_layers = OpacusLayers(module)
        self._hooks = ModuleHooks()
        for layer in self._layers.own:
            self._hang_on(layer)
        self.whole.hang_on(self._hooks)

    def _hang_on(self, layer: nn.Module) -> None:
        rule = self._layers.rule_of(layer)
        is_attention = rule is multihead_attention
        # Before the user's hooks, which may change the output.
        register = partial(layer.register_forward_hook, prepend=True, with_kwargs=True)
        self._hooks.add(layer, register, partial(self._watch, rule))
        if is_attention or self._tracer is not None:
            self._hooks.add(layer, layer.register_forward_pre_hook, self._before)

    def take_off(self) -> None:
        """Leave the model as it was."""
        self._hooks.take_off()
        self._opacus_layers.hooks.take_off()

    def put_on(self) -> None:
        """Watch the model again."""
        self._opacus_layers.hooks.put_on()
        self._hooks.put_on()

    def drop(self) -> None:
        """Forget what was recorded."""
        self._calls, self._problem = [], None
        self._unseen, self._random_states, self._marks = {}, {}, []
        if self._tracer is not None:
            self._tracer.clear()

    def following(self, batch: Any, n: int) -> AbstractContextManager[None]:
        """Follow the records of a batch through the forward pass inside, which is next."""
        if self._tracer is None:
            return nullcontext()
        self._tracer.clear()
        if self._is_along:  # dual numbers stand there already
            self._tracer.go_along()
        return self._tracer.following(batch, n)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded: checkpointed layers run again, others record by record."""
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside a pause, what runs is recorded: a part of the model that ran without gradients."""
        is_on, self._is_watching = self._hooks.are_on, True
        self.put_on()
        try:
            yield
        finally:
            self._is_watching = False
            if not is_on:
                self.take_off()

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Inside, what checkpoints run again saves what it saved before; it is not recorded."""
        is_on = self._hooks.are_on
        seen = self._calls, self._problem, self._unseen, self._random_states
        self._calls, self._problem, self._unseen, self._random_states = [], None, {}, {}
        self.put_on()
        try:
            yield
        finally:
            self._calls, self._problem, self._unseen, self._random_states = seen
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

    def go_along(self) -> None:
        """Expect dual numbers in the places of the parameters, from now until the next pass."""
        if self._tracer is not None:
            self._tracer.go_along()

    def _ignore(self, layer: nn.Module, output: Any) -> None:
        """Remember a call with other parameters than the layer's own: the loss must not depend on it."""
        if self._tracer is None and isinstance(output, Tensor) and output.grad_fn is not None:
            self._unseen[output.grad_fn] = (
                f"{self._layers.names[layer] or 'The module'} ({type(layer).__name__}) was called with "
                "other parameters than its own (torch.func.functional_call, or a hook that replaces "
                "them). Call it as it is, or freeze it with requires_grad_(False)."
            )

    def _before(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_watching or not torch.is_grad_enabled():
            return
        if self._tracer is not None:
            self._marks.append(len(self._tracer.calls))
        if isinstance(layer, nn.MultiheadAttention):
            self._random_states[layer] = attention.random_state(layer)

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
        mark = self._marks.pop() if self._marks else 0
        before = len(self._calls)
        if rule is embedding_bag:
            args, kwargs = tensors_of_bags(cast(nn.EmbeddingBag, layer), args, kwargs), {}
        if self._layers.is_exchanged(layer, self._is_along):
            self._ignore(layer, output)
        elif rule is multihead_attention:
            self._watch_attention(cast(nn.MultiheadAttention, layer), args, kwargs, output)
        elif kwargs or not args or not _are_tensors((*args, output)):
            problem = (
                f"The layer {self._layers.names[layer] or 'of the whole module'} "
                f"({type(layer).__name__}) itself has parameters, and something else "
                "than tensors goes in (or by name) or comes out. Give the parameters to a separate "
                "layer, called with tensors by position and returning one tensor."
            )
            self._give_up(UnsupportedModelError(problem, topic="unsupported-layer"))
        else:
            self._note(layer, rule, args, output)
        if self._tracer is not None and len(self._calls) > before:
            self._tracer.forget_since(mark)
            made = output if isinstance(output, Tensor) else output[0]
            self._tracer.roles.add_layer_output(
                made, _place_of_output(self._calls[-1].arrange, made)
            )

    def _give_up(self, problem: UnsupportedModelError) -> None:
        """Remember why a call cannot be recorded by rule; a tracer has it by its functions."""
        if self._tracer is None:
            self._problem = problem

    def _watch_attention(
        self,
        layer: nn.MultiheadAttention,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[Tensor, Tensor | None],
    ) -> None:
        output, shares = outputs
        state = self._random_states.pop(layer, None)
        try:
            call, tensors = AttentionCall.of(layer, args, kwargs, output, state, self._is_along)
        except UnsupportedModelError as problem:
            self._give_up(problem.plain())
            return
        before = len(self._calls)
        self._note(layer, partial(multihead_attention, call=call), tensors, output)
        if shares is not None and shares.grad_fn is not None and len(self._calls) > before:
            self._unseen[shares.grad_fn] = (
                "The loss depends on the attention weights that nn.MultiheadAttention returns. Use "
                "its output only, or DPMultiheadAttention of Opacus."
            )

    def _note(
        self, layer: nn.Module, rule: Rule | None, given: tuple[Tensor, ...], output: Tensor
    ) -> None:
        if not output.requires_grad or rule is None:
            return
        try:
            arrange = self._opacus_layers.arrange(layer, given[0])
        except UnsupportedModelError as problem:
            self._give_up(problem.plain())
            return
        folding = folding_in_force()
        if folding is None and self._tracer is not None and not self._opacus_layers.is_inside:
            layout = self._traced_layout(self._tracer, layer, given, output)
            if layout is None or layout.dim is None:
                return  # no rule holds for it: the tracer has it by its functions
            n = self._tracer.roles.n
            if isinstance(layout, Scattered):
                arrange = partial(torch.movedim, source=layout.dim, destination=0)
                folding = Owned(n, layout.owners)
                layout = Layout(0)
            elif layout.dim > 0:
                arrange = partial(layout.rows_first, n=n)
                layout = Layout(0, inner=layout.rows)
            if layout.rows > 1:
                folding = Folded(n, layout.outer, layout.inner)
        refuse_without_records(self._layers.names[layer], layer, given[0])
        saved = SavedInputs(given, output) if self._saves else None
        inputs = () if self._saves else tuple([each.detach() for each in given])
        versions, sources = [each._version for each in inputs], {each.grad_fn for each in given}
        edges = [get_gradient_edge(output)]
        moved = tuple(split(each) for each in given) if self._is_along else ()
        name = self._layers.names[layer]
        call = LayerCall(
            name, layer, rule, inputs, versions, sources, edges, arrange, folding, moved, saved
        )
        self._calls.append(call)

    def _traced_layout(
        self, tracer: FunctionTracer, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor
    ) -> Place | None:
        """Return where a call's rows hold the records; None if the layer's rule does not hold there."""
        rows = given[:1]
        if isinstance(layer, nn.MultiheadAttention):
            rows = given[:3]
        elif isinstance(layer, nn.EmbeddingBag):
            rows = (output,)
        layouts = {tracer.roles.layout_of(each) for each in rows}
        layout = layouts.pop()
        if layouts or layout is None or layout.dim is None:
            return None
        if isinstance(layout, Scattered) and not layout.is_whole:
            return None
        if layout.dim > 0 and not is_by_position(layer, layout.dim, given[0].dim()):
            return None
        return layout

    def used_by(self, call: LayerCall) -> set[int]:
        """Return the parameters that a call uses, by ``id``."""
        return set(self._layers.own[call.layer])

    def outputs(self) -> set[Any]:
        """Return the graph nodes of the outputs of all calls so far."""
        edges = (edge for call in self._all() for edge in call.edges)
        return {edge.node for edge in edges if edge is not None} | self._unseen.keys()

    def _all(self) -> list[Call]:
        return [*self._calls, *([] if self._tracer is None else self._tracer.calls)]

    def take(self, loss: Tensor) -> tuple[list[Call], Survey]:
        """Hand over the recorded calls that the loss depends on, if they are all that it depends on.

        Raises:
            UnsupportedModelError: if a call was not understood.
            UncoveredParameterError: if a parameter is used outside of them.
        """
        calls, problem = self._all(), self._problem
        if self._tracer is not None:
            problem = problem or self._tracer.problem
        unseen = self._unseen
        if problem is not None:
            self.drop()
            raise problem
        nodes = {edge.node: call for call in calls for edge in call.edges if edge is not None}
        # Below what is computed from parameters alone nothing is a call: it is pulled back as one.
        parts = {s for call in calls if isinstance(call, FunctionCall) for s in call.part_sources}
        order = in_order(loss.grad_fn)
        leaves = [getattr(node, "variable", None) for node, into in order.items() if not into]
        graph = survey(in_order(loss.grad_fn, parts) if parts else order, self.outputs())
        self.drop()
        self.whole.refuse_unknown(leaves, self._known)
        if graph.checkpoints and self._tracer is not None:
            raise UnsupportedModelError(REENTRANT, topic="checkpointing")
        if graph.choosing and self._tracer is None:
            _refuse_other_order(calls, graph)
        for node in graph.reached & unseen.keys():
            raise UnsupportedModelError(unseen[node], topic="unseen-use")
        reached = {id(nodes[node]) for node in graph.reached}
        if len(reached) < len(calls):
            calls = [call for call in calls if id(call) in reached]
        self._refuse_uncovered(loss, calls, graph)
        return calls, graph

    def _refuse_uncovered(self, loss: Tensor, calls: Sequence[Call], graph: Survey) -> None:
        """Refuse a use of a parameter in the graph that is not a recorded call."""
        if self._tracer is None:
            of_layers = [call for call in calls if isinstance(call, LayerCall)]
            missing = self._layers.miscounted(of_layers, graph)
        else:
            regions = {
                edge.node: self._region(call)
                for call in calls
                for edge in call.edges
                if edge is not None
            }
            trained = {id(leaf): id(param) for leaf, param in self.whole.leaves(self._params)}
            missing = uncovered(loss.grad_fn, regions, trained)
        names = [self._names[id(param)] for param in self._params if id(param) in missing]
        if names:
            raise UncoveredParameterError(names)

    def _region(self, call: Call) -> Region:
        if isinstance(call, LayerCall):
            return Region(call.sources, own=self._layers.own[call.layer])
        return Region(call.sources, known=call.part_sources)
