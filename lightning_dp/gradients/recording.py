"""The calls of layers, recorded as the forward pass of a model goes by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_dp.gradients import attention
from lightning_dp.gradients.any_layer import any_layer
from lightning_dp.gradients.attention import AttentionCall, multihead_attention
from lightning_dp.gradients.base import UncoveredParameterError, UnsupportedModelError
from lightning_dp.gradients.embedding_bag import embedding_bag, tensors_of_bags
from lightning_dp.gradients.folding import AbstractFolding
from lightning_dp.gradients.hessian import Dual, split
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.opacus_layers import Arrange, OpacusLayers, own_parameters
from lightning_dp.gradients.row_owners import folding_in_force
from lightning_dp.gradients.rules import Rule, refuse_options, rule_of
from lightning_dp.gradients.unsupported import (
    refuse_script,
    refuse_special,
    refuse_without_records,
)

__all__ = ["LayerCall", "Recorder", "Survey", "survey"]


@dataclass
class LayerCall:
    """One call of a layer, until the backward pass comes to it."""

    name: str
    layer: nn.Module
    rule: Rule
    inputs: tuple[Tensor, ...]
    versions: list[int]
    sources: set[Any]  # the graph nodes that made the inputs
    edge: GradientEdge
    arrange: Arrange  # makes of its tensors such with rows first
    folding: AbstractFolding | None  # whose the rows are; None if they are the records
    moved: tuple[Dual, ...] = ()  # along a direction: the inputs with their derivatives

    def take_inputs(self) -> tuple[Tensor, ...]:
        """Hand over the inputs, which are not held any longer. Raises if they are not what they were."""
        inputs, self.inputs = self.inputs, ()
        if [each._version for each in inputs] != self.versions:
            raise UnsupportedModelError(
                f"The input of {self.name or 'the module'} ({type(self.layer).__name__}) was "
                "overwritten after the layer had used it. Do not change tensors in place between layers."
            )
        return inputs


class Recorder:
    """Forward hooks that record every call of a layer with trained parameters.

    Args:
        module: the whole model.
        params: the trained parameters.
        rules: what is known of layer types.

    Raises:
        UnsupportedModelError: naming a layer that is not covered, and the cure.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        rules: Mapping[type[nn.Module], Rule],
    ) -> None:
        self._rules = rules
        self._params = params
        self._calls: list[LayerCall] = []
        self._unseen: dict[Any, str] = {}  # graph nodes of outputs that no rule knows of, and why
        self._random_states: dict[nn.Module, Tensor | None] = {}  # before calls that are running
        self._problem: str | None = None
        self._is_watching = True
        self._is_along = False  # a direction
        refuse_special(module, params)
        trained = {id(param) for param in params}
        for name, layer in module.named_modules():
            if any(id(param) in trained for param in layer.parameters()):
                refuse_script(name, layer)
                refuse_options(name, layer, self._rule_of(layer))
        layers = [
            layer
            for layer in module.modules()
            if any(id(param) in trained for param in self._parameters_of(layer))
        ]
        self._names = {id(param): name for name, param in module.named_parameters()}
        # Along a direction other tensors stand in the places of the parameters.
        self._own = {layer: self._used_by_a_call(layer) for layer in layers}
        self._held = {layer: tuple(layer._parameters.values()) for layer in layers}
        self._layer_names = {layer: name for name, layer in module.named_modules()}
        self._opacus_layers = OpacusLayers(module)
        self._hooks = ModuleHooks()
        for layer in layers:
            # Before the user's hooks, which may change the output.
            register = partial(layer.register_forward_hook, prepend=True, with_kwargs=True)
            self._hooks.add(layer, register, self._watch)
            if self._rule_of(layer) is multihead_attention:
                self._hooks.add(layer, layer.register_forward_pre_hook, self._before_attention)

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
        self._unseen, self._random_states = {}, {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded: checkpointed layers run again, others record by record."""
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True

    @contextmanager
    def along_a_direction(self) -> Iterator[None]:
        """Inside, parameters are dual numbers, and the derivatives of inputs are recorded too."""
        self._is_along = True
        try:
            yield
        finally:
            self._is_along = False

    def _rule_of(self, layer: nn.Module) -> Rule:
        return rule_of(layer, self._rules)

    def _parameters_of(self, layer: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that its calls use."""
        if self._rule_of(layer) is multihead_attention:
            return attention.parameters_of(cast(nn.MultiheadAttention, layer))
        return own_parameters(layer)

    def _used_by_a_call(self, layer: nn.Module) -> list[int]:
        """Return the parameters' ids; by rule, one that is both weight and bias is used twice."""
        if self._rule_of(layer) in (any_layer, multihead_attention):
            return [id(param) for param in self._parameters_of(layer)]
        found = (getattr(layer, name, None) for name in ("weight", "bias"))
        return [id(param) for param in found if param is not None]

    def _is_exchanged(self, layer: nn.Module) -> bool:
        """Tell whether other tensors are in the places of its parameters now."""
        now, held = layer._parameters.values(), self._held[layer]
        return not self._is_along and not (len(now) == len(held) and all(map(is_, now, held)))

    def _ignore(self, layer: nn.Module, output: Any) -> None:
        """Remember a call with other parameters than the layer's own: the loss must not depend on it."""
        if isinstance(output, Tensor) and output.grad_fn is not None:
            self._unseen[output.grad_fn] = (
                f"{self._layer_names[layer] or 'The module'} ({type(layer).__name__}) was called with "
                "other parameters than its own (torch.func.functional_call, or a hook that replaces "
                "them). Call it as it is, or freeze it with requires_grad_(False)."
            )

    def _before_attention(self, layer: nn.MultiheadAttention, args: tuple[Any, ...]) -> None:
        if self._is_watching and torch.is_grad_enabled():
            self._random_states[layer] = attention.random_state(layer)

    def _watch(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self._is_watching or not torch.is_grad_enabled():
            return
        rule = self._rule_of(layer)
        if self._is_exchanged(layer):
            self._ignore(layer, output)
            return
        if rule is embedding_bag:
            args, kwargs = tensors_of_bags(cast(nn.EmbeddingBag, layer), args, kwargs), {}
        if rule is multihead_attention:
            self._watch_attention(cast(nn.MultiheadAttention, layer), args, kwargs, output)
        elif kwargs or not args or not all(isinstance(each, Tensor) for each in (*args, output)):
            self._problem = (
                f"The layer {self._layer_names[layer] or 'of the whole module'} "
                f"({type(layer).__name__}) itself has parameters, and something else "
                "than tensors goes in (or by name) or comes out. Give the parameters to a separate "
                "layer, called with tensors by position and returning one tensor."
            )
        else:
            self._note(layer, rule, args, output)

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
            self._problem = str(problem)
            return
        if shares is not None and shares.grad_fn is not None:
            self._unseen[shares.grad_fn] = (
                "The loss depends on the attention weights that nn.MultiheadAttention returns. Use "
                "its output only, or DPMultiheadAttention of Opacus."
            )
        self._note(layer, partial(multihead_attention, call=call), tensors, output)

    def _note(
        self, layer: nn.Module, rule: Rule, given: tuple[Tensor, ...], output: Tensor
    ) -> None:
        if not output.requires_grad:
            return
        try:
            arrange = self._opacus_layers.arrange(layer, given[0])
        except UnsupportedModelError as problem:
            self._problem = str(problem)
            return
        refuse_without_records(self._layer_names[layer], layer, given[0])
        inputs = tuple(each.detach() for each in given)
        versions, sources = [each._version for each in inputs], {each.grad_fn for each in given}
        edge = get_gradient_edge(output)
        moved = tuple(split(each) for each in given) if self._is_along else ()
        name = self._layer_names[layer]
        folding = folding_in_force()
        call = LayerCall(
            name, layer, rule, inputs, versions, sources, edge, arrange, folding, moved
        )
        self._calls.append(call)

    def outputs(self) -> set[Any]:
        """Return the graph nodes of the outputs of all calls so far."""
        return {call.edge.node for call in self._calls} | self._unseen.keys()

    def take(self, loss: Tensor) -> tuple[list[LayerCall], Survey]:
        """Hand over the recorded calls that the loss depends on, if they are all that it depends on.

        Raises:
            UnsupportedModelError: if a call was not understood.
            UncoveredParameterError: if a parameter is used outside of them.
        """
        calls, unseen, problem = self._calls, self._unseen, self._problem
        self.drop()
        if problem is not None:
            raise UnsupportedModelError(problem)
        graph = survey(loss.grad_fn, {call.edge.node for call in calls} | unseen.keys())
        for node in graph.reached & unseen.keys():
            raise UnsupportedModelError(unseen[node])
        calls = [call for call in calls if call.edge.node in graph.reached]
        self._refuse_uncovered(calls, graph)
        return calls, graph

    def _refuse_uncovered(self, calls: Sequence[LayerCall], graph: Survey) -> None:
        """Refuse a use of a parameter in the graph that is not a recorded call of its layer."""
        recorded = Counter[int]()
        for call in calls:
            own = self._own[call.layer]
            if self._rule_of(call.layer) not in (any_layer, multihead_attention):
                recorded.update(own)
            else:
                inside = survey(call.edge.node, graph.reached, call.sources).uses
                recorded.update({key: inside[key] for key in own})
        # Fewer uses than calls: a call used another tensor in the parameter's place.
        missing = [self._names[id(p)] for p in self._params if graph.uses[id(p)] != recorded[id(p)]]
        if missing:
            raise UncoveredParameterError(missing)


@dataclass
class Survey:
    """The findings in a graph.

    Args:
        uses: for each parameter, by ``id``, in how many places it meets something else.
        reached: the recorded calls that the graph contains.
        innermost: those of them that no other recorded call feeds.
    """

    uses: Counter[int] = field(default_factory=Counter)
    reached: set[Any] = field(default_factory=set)
    innermost: set[Any] = field(default_factory=set)


def survey(root: Any, calls: Collection[Any], stop: Collection[Any] = ()) -> Survey:
    """Find in one walk of a graph where parameters are used and which recorded calls it contains.

    A transpose, a cast or a norm of a parameter alone is still the parameter; the node that brings
    it together with something else is one use of it, and so is a recorded call of a layer. A layer
    of the usual kind uses its parameters once in each call, so a larger count than that of the
    recorded calls tells of a use that nobody recorded.

    Args:
        root: the graph node where to begin, ``loss.grad_fn``.
        calls: the nodes of the outputs of recorded layer calls.
        stop: nodes below which nothing is looked at.
    """
    found, boundaries = Survey(), set(calls)
    owner: dict[Any, int | None] = {}  # of each node: the only parameter it depends on, if any
    feeds_on_calls: set[Any] = set()
    stack = [(root, False)]
    while stack:
        node, is_finished = stack.pop()
        if node is None or (node in owner and not is_finished):
            continue
        below = [child for child, _ in node.next_functions if child is not None]
        below = [] if node in stop else below
        if not is_finished:
            owner[node] = None
            stack.append((node, True))
            stack.extend((child, False) for child in below)
            continue
        if any(child in feeds_on_calls or child in boundaries for child in below):
            feeds_on_calls.add(node)
        if node in boundaries:
            found.reached.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            owner[node] = id(variable)
            continue
        owners = [owner[child] for child in below]
        if len(set(owners)) == 1 and node not in boundaries:
            owner[node] = owners[0]
        else:
            found.uses.update(each for each in owners if each is not None)
    if (last := owner.get(root)) is not None:
        found.uses[last] += 1
    found.innermost = found.reached - feeds_on_calls
    return found
