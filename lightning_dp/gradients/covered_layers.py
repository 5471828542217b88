"""The layers whose calls are recorded by rule, and the parameters that a call of each of them uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any, cast

from torch import nn

from lightning_dp.gradients import attention
from lightning_dp.gradients.attention import multihead_attention
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.graph import Survey, in_order, survey
from lightning_dp.gradients.layer_call import LayerCall
from lightning_dp.gradients.opacus_layers import own_parameters
from lightning_dp.gradients.rules import Rule, refuse_options, rule_of
from lightning_dp.gradients.sharded import WholeParameters
from lightning_dp.gradients.unsupported import refuse_script

__all__ = ["CoveredLayers"]


class CoveredLayers:
    """The layers with trained parameters of which a rule is known.

    Args:
        module: the whole model.
        params: the trained parameters.
        rules: what is known of layer types.
        whole: the parameters that stand in the places of sharded ones.
        traces: leave out layers that no rule covers, instead of refusing them.

    Raises:
        UnsupportedModelError: naming a layer that is not covered, and the cure.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        rules: Mapping[type[nn.Module], Rule],
        whole: WholeParameters,
        *,
        traces: bool,
    ) -> None:
        self._rules, self._whole = rules, whole
        self._known_rules: dict[tuple[type, Any], Rule | None] = {}
        self._trained = {id(param) for param in params}
        layers = self._found(module, traces)
        # Along a direction other tensors stand in the places of the parameters.
        self.own = {layer: self._used_by_a_call(layer) for layer in layers}
        """For each layer, in order, the ids of the parameters that one call uses."""
        self._held = {layer: tuple(layer._parameters.values()) for layer in layers}
        self.names = {layer: name for name, layer in module.named_modules()}
        """The dotted names of all modules."""

    def _found(self, module: nn.Module, traces: bool) -> list[nn.Module]:
        covered = []
        for name, layer in module.named_modules():
            if not any(id(param) in self._trained for param in layer.parameters()):
                continue
            refuse_script(name, layer)
            try:
                refuse_options(name, layer, self.rule_of(layer))
            except UnsupportedModelError:
                if not traces:
                    raise
                continue
            if any(id(param) in self._trained for param in self._parameters_of(layer)):
                covered.append(layer)
        return [layer for layer in covered if self.rule_of(layer) is not None]

    def rule_of(self, layer: nn.Module) -> Rule | None:
        """Return what is known of a layer; None if it has no rule."""
        key = type(layer), type(layer).forward
        if key not in self._known_rules:
            self._known_rules[key] = rule_of(layer, self._rules)
        return self._known_rules[key]

    def _parameters_of(self, layer: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that its calls use."""
        if self.rule_of(layer) is multihead_attention:
            return attention.parameters_of(cast(nn.MultiheadAttention, layer))
        return own_parameters(layer)

    def _used_by_a_call(self, layer: nn.Module) -> list[int]:
        """Return the parameters' ids; by rule, one that is both weight and bias is used twice."""
        if self.rule_of(layer) is multihead_attention:
            return [id(param) for param in self._parameters_of(layer)]
        found = (getattr(layer, name, None) for name in ("weight", "bias"))
        return [id(param) for param in found if param is not None]

    def is_exchanged(self, layer: nn.Module, is_along: bool) -> bool:
        """Tell whether other tensors are in the places of its parameters now.

        Args:
            layer: one of these.
            is_along: dual numbers may be there.
        """
        now, held = layer._parameters.values(), self._held[layer]
        if len(now) == len(held) and all(map(is_, now, held)):
            return False
        return not is_along and not self._is_gathered(layer)

    def _is_gathered(self, layer: nn.Module) -> bool:
        """Tell whether the whole parameters are there, in the places of the layer's shards."""
        self._whole.look(layer)
        now, held = layer._parameters.values(), self._held[layer]
        return len(now) == len(held) and all(map(is_, map(self._whole.trained, now), held))

    def miscounted(self, calls: Sequence[LayerCall], graph: Survey) -> Collection[int]:
        """Return the trained parameters, by ``id``, that have more or fewer uses than recorded calls.

        Args:
            calls: of these layers, that the loss depends on.
            graph: of the loss.
        """
        recorded = Counter[int]()
        for layer, times in Counter(call.layer for call in calls).items():
            if self.rule_of(layer) is not multihead_attention:
                for key in self.own[layer]:
                    recorded[key] += times
        for call in calls:
            if self.rule_of(call.layer) is multihead_attention:
                part = in_order(call.edges[0].node, call.sources)
                inside = survey(part, graph.reached).uses
                inside = self._whole.translated(inside)
                recorded.update({key: inside[key] for key in self.own[call.layer]})
        # Fewer uses than calls: a call used another tensor in the parameter's place.
        uses = self._whole.translated(graph.uses)
        return {key for key in self._trained if uses[key] != recorded[key]}
