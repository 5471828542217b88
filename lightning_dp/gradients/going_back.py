"""A backward pass through recorded calls, which are told when the gradients of their outputs come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dp.gradients.bilinear import Uses, uses_of_records
from lightning_dp.gradients.layer_call import Call, LayerCall

__all__ = ["Arriving", "arranged", "at_least_float32", "go_back", "of_records"]


class Arriving:
    """One call, until the gradients of all its outputs have come.

    Args:
        call: of the graph that is differentiated.
        done: is called with it and the gradients.
    """

    def __init__(self, call: Call, done: Callable[[Call, Sequence[Tensor | None]], object]) -> None:
        self._call, self._done = call, done
        self._gradients: list[Tensor | None] = [None] * len(call.edges)
        self._is_done = False

    def ends_at(self, innermost: set[Any]) -> list[tuple[Arriving, int, Any]]:
        """Return the outputs where the backward pass stops."""
        edges = enumerate(self._call.edges)
        return [(self, i, e) for i, e in edges if e is not None and e.node in innermost]

    def wait(self, innermost: set[Any]) -> list[RemovableHandle]:
        """Watch the other outputs."""
        return [
            edge.node.register_prehook(partial(self._seen, place))
            for place, edge in enumerate(self._call.edges)
            if edge is not None and edge.node not in innermost
        ]

    def _seen(self, place: int, gradients: tuple[Tensor | None, ...]) -> None:
        edge = self._call.edges[place]
        assert edge is not None
        self.arrived(place, gradients[edge.output_nr])

    def arrived(self, place: int, gradient: Tensor | None) -> None:
        """Take the gradient of one output; with the only one the call is done."""
        if self._is_done:
            return
        self._gradients[place] = gradient
        if len(self._gradients) == 1:
            self.finish()

    def finish(self) -> None:
        """Hand the gradients on, once; they are not held any longer."""
        if not self._is_done:
            self._is_done = True
            gradients, self._gradients = self._gradients, []
            self._done(self._call, gradients)


def go_back(
    loss: Tensor,
    calls: Sequence[Call],
    innermost: set[Any],
    done: Callable[[Call, Sequence[Tensor | None]], object],
    *,
    keep_graph: bool,
) -> None:
    """Differentiate a loss as far as the outputs of calls, and hand each its gradients as they come.

    The pass stops at the innermost calls' outputs.

    Args:
        loss: depends on all of these calls.
        calls: recorded ones.
        innermost: the graph nodes of those that no other call feeds.
        done: is called with each call, once, and the gradients of its outputs.
        keep_graph: the graph is going to be used once more.
    """
    arriving = [Arriving(call, done) for call in calls]
    ends = [end for each in arriving for end in each.ends_at(innermost)]
    if not ends:
        return
    handles = [handle for each in arriving for handle in each.wait(innermost)]
    try:
        edges = [edge for _, _, edge in ends]
        back = torch.autograd.grad(loss, edges, retain_graph=keep_graph, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    found: list[Tensor | None] = list(back)
    del back  # each is free when its call has seen it
    with torch.no_grad():  # as during the pass itself
        for number, (each, place, _) in enumerate(ends):
            gradient, found[number] = found[number], None
            each.arrived(place, gradient)
        for each in arriving:
            each.finish()


def arranged(call: LayerCall, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return a call's inputs and the gradient of its output as its layer's rule takes them."""
    return [call.arrange(at_least_float32(each)) for each in (*inputs, gradient)]


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half precision as float32; integers and float64 as they are."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


def of_records(call: LayerCall, uses: Uses) -> Uses:
    return uses if call.folding is None else uses_of_records(uses, call.folding)
