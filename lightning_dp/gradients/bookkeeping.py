"""Clipped sums from what layers saw and what came back to them, in one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp._precision import FullPrecision, full_precision
from lightning_dp._refusals import RefusedRun
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import as_unsupported
from lightning_dp.gradients.bilinear import Rows, Uses
from lightning_dp.gradients.checkpointing import calling, joined
from lightning_dp.gradients.function_call import FunctionCall
from lightning_dp.gradients.function_rules import uses_by_rule
from lightning_dp.gradients.going_back import (
    Arriving,
    arranged,
    at_least_float32,
    go_back,
    of_records,
)
from lightning_dp.gradients.graph import Survey
from lightning_dp.gradients.hessian import Dual, run_along, split, uses_along
from lightning_dp.gradients.layer_call import Call, LayerCall
from lightning_dp.gradients.parameter_sum import (
    Allowance,
    BookkeptGradients,
    ParameterGradients,
    ScratchPool,
)
from lightning_dp.gradients.parts import PartGradients
from lightning_dp.gradients.record_by_record import Found, per_record, per_record_along
from lightning_dp.gradients.recorded import AbstractRecordingEngine
from lightning_dp.gradients.recording import Recorder
from lightning_dp.gradients.rules import RULES, Rule
from lightning_dp.gradients.time_steps import TimeSteps

__all__ = ["Bookkeeping"]


class Bookkeeping(AbstractRecordingEngine):
    """One backward pass for the gradients of layer outputs only; the rest is book-keeping.

    Forward hooks keep each layer's input. The backward pass stops at the layers' outputs, so
    autograd computes no weight gradient at all. Norms come from inputs and output gradients
    (an outer product has the product of the norms), and the clipped sum is an ordinary weight
    gradient with the records scaled. Gradients per record are made where that is cheaper or there is
    no other way: of convolutions, norm layers and biases, of linear layers on long sequences, of
    weights that layers of different types share. Where they are smaller than what they are made
    from, they take its place as soon as the backward pass has come to the layer; of larger ones at
    most 64 MiB are kept for the sum, and beyond that they are made in slices.

    Covers Linear, Conv1d to 3d, Embedding, LayerNorm, GroupNorm, InstanceNorm, RMSNorm,
    MultiheadAttention (run once more by itself), Opacus' DPRNN, DPGRU, DPLSTM (packed sequences too)
    and DPMultiheadAttention, layers called several times, and shared parameters. A use of a parameter
    outside its layer, an input that was overwritten, or layers that see different numbers of rows are
    detected in every batch.

    With ``traces``, every function that the forward pass calls is seen, and a parameter may be used
    anywhere: where it, or what is computed from parameters and constants alone, meets records, the
    call has its derivative for each record by a rule or by ``torch.func`` on that one function, and
    the part without records is pulled back, linearly. What holds the records, and in which
    dimension, is followed from the batch on, so that rows may be folded into it.

    Bu, Wang, Zha and Karypis, Differentially Private Optimization on Large Model at Small Cost
    (2023, arXiv:2210.00038), with the graph cut at the layers' outputs.

    Args:
        rules: what is known of layer types. With none, nothing is known but the functions that are
            called.
        traces: look for parameters in all functions.
    """

    has_products = True

    def __init__(
        self, rules: Mapping[type[nn.Module], Rule] = RULES, *, traces: bool = False
    ) -> None:
        super().__init__()
        self.name = "bookkeeping" if rules else "functional"
        self._rules, self._traces = rules, traces
        self.keeps_compiled = not traces  # a tracer sees no functions inside
        self._module: nn.Module | None = None
        self._params: Sequence[nn.Parameter] = ()
        self._found: dict[int, ParameterGradients] | None = None  # of the last backward pass
        self._memory = ScratchPool()
        self._precision = FullPrecision(())

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        self._recorder = Recorder(module, params, self._rules, traces=self._traces)
        self._module, self._params = module, params

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        calls, graph = self._calls_of(loss)
        with self._attached.paused():
            self._differentiate(loss, calls, graph, keep_graph, combined)

    def following(self, batch: Any, size: int) -> AbstractContextManager[None]:
        return self._attached.following(batch, size)

    def _calls_of(self, loss: Tensor) -> tuple[list[Call], Survey]:
        """Return the calls that the loss depends on; what is found of them will be of this pass."""
        self._found = None
        calls, graph = self._attached.take(loss)
        allowance = Allowance()
        self._found = {
            id(p): ParameterGradients([], p.shape, self._memory, allowance) for p in self._params
        }
        self._of_parts, self._steps = PartGradients(), TimeSteps()
        self._precision = full_precision(loss.device)
        self._steps.expect(calls)
        return calls, graph

    def _differentiate(
        self,
        loss: Tensor,
        calls: Sequence[Call],
        graph: Survey,
        keep_graph: bool,
        combined: bool,
    ) -> None:
        """Keep what is needed of a call as soon as the backward pass comes to its output.

        It has to go on to the innermost calls' outputs only; there it stops, and gives what came.
        What is not needed of a layer is free before the pass comes to the next one.
        """
        self.goes_into_parameters = bool(graph.checkpoints)
        if graph.checkpoints:
            self._through_checkpoints(loss, calls, graph, keep_graph, combined)
            return
        keep = partial(self._keep, combined=combined)
        go_back(loss, calls, graph.innermost, keep, keep_graph=keep_graph)
        with torch.no_grad():  # as during the pass itself
            self._join_steps(combined)
        self._pull_back(combined)

    def _through_checkpoints(
        self,
        loss: Tensor,
        calls: Sequence[Call],
        graph: Survey,
        keep_graph: bool,
        combined: bool,
    ) -> None:
        """Do the same in a whole backward pass: with reentrant checkpoints, torch lets none stop.

        Each of them runs its part of the model again, with another backward pass inside.
        """
        undo = self._follow(calls, graph, combined)
        try:
            torch.autograd.backward(loss, retain_graph=keep_graph)
        finally:
            for each in undo:
                each()
        with torch.no_grad():
            self._join_steps(combined)

    def _follow(
        self, calls: Sequence[Call], graph: Survey, combined: bool
    ) -> list[Callable[[], None]]:
        """Be told when the backward pass comes to calls and checkpoints; return what undoes it."""
        undo: list[Callable[[], None]] = []
        keep = partial(self._keep, combined=combined)
        for call in calls:
            arriving = Arriving(call, keep)
            undo += [handle.remove for handle in arriving.wait(set())]
        again = partial(self._run_again, combined)
        return undo + [calling(node, again) for node in graph.checkpoints]

    def _run_again(self, combined: bool, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run the part of the model in a reentrant checkpoint, which is then differentiated."""
        with self._attached.resumed():
            outputs = function(*inputs)
        if (root := joined(outputs)) is None:
            self._attached.drop()
        else:
            calls, graph = self._attached.take(root)
            self._steps.expect(calls)
            self._follow(calls, graph, combined)  # in a graph that nobody keeps
        return outputs

    def _pull_back(self, combined: bool) -> None:
        for param, rows in self._of_parts.pull_back(self._attached.whole.leaves(self._params)):
            self._count_in([(param, Rows.use(at_least_float32(rows)))], combined)

    def _keep(self, call: Call, gradients: Sequence[Tensor | None], combined: bool) -> None:
        """Keep the parts of one call from which the norms and the sum are made."""
        if isinstance(call, FunctionCall):
            if any(each is not None for each in gradients):
                self._keep_parts(call, gradients, combined)
            return
        inputs, (gradient,) = call.take_inputs(), gradients
        if gradient is not None:
            with as_unsupported(call.name, call.layer):
                tensors = arranged(call, inputs, gradient)
                if not self._steps.takes(call, tensors):
                    self._count_in(of_records(call, call.rule(call.layer, *tensors)), combined)

    def _join_steps(self, combined: bool) -> None:
        for call, uses_of_layer in self._steps.joined():
            with as_unsupported(call.name, call.layer):
                self._count_in(uses_of_layer, combined)

    def _keep_parts(
        self, call: FunctionCall, gradients: Sequence[Tensor | None], combined: bool
    ) -> None:
        (first, *others) = gradients
        by_rule = None
        if not others and first is not None:
            by_rule = uses_by_rule(call, at_least_float32(first))
        if by_rule is None:
            self._keep_found(per_record(call, gradients), combined)
            return
        for given, uses in by_rule:
            part, folding = given.part, call.folding
            assert part is not None
            if folding is not None:
                uses = [each for use in uses for each in use.form.of_records(use, folding)]
            if part.param is not None:
                self._count_in([(part.param, use) for use in uses], combined)
            else:
                for use in uses:
                    rows = use.form.rows(use.v, use.u)
                    self._of_parts.add(part, rows.reshape(len(rows), *part.tensor.shape))

    def _keep_found(self, found: Sequence[Found], combined: bool) -> None:
        for each in found:
            part = each.part
            if each.own is not None:
                self._of_parts.add_rows(part, each.own, each.gradients)
            elif part.param is not None:
                use = Rows.use(at_least_float32(each.gradients))
                self._count_in([(part.param, use)], combined)
            else:
                self._of_parts.add(part, each.gradients)

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
        self._found = None
        with self._attached.along_a_direction():
            calls = run_along(
                self._module, self._params, direction, lambda: self._duals_along(run_again)
            )
        parts = unflatten(direction, self._params)
        of = {id(param): part for param, part in zip(self._params, parts, strict=True)}
        with self._attached.paused(), torch.no_grad():
            for call, gradients in calls:
                self._keep_along(call, gradients, of, weights)
            self._pull_back(combined=False)
        return self.take(1.0, {})

    def _duals_along(self, run_again: Callable[[], Tensor]) -> list[tuple[Call, list[Dual | None]]]:
        self._attached.go_along()
        return self._duals_of(run_again())

    def _keep_along(
        self,
        call: Call,
        gradients: Sequence[Dual | None],
        of: dict[int, Tensor],
        weights: tuple[float, float],
    ) -> None:
        if isinstance(call, FunctionCall):
            self._keep_found(per_record_along(call, gradients, weights), combined=False)
            return
        (gradient,) = gradients
        call.take_inputs()
        if gradient is not None:
            with as_unsupported(call.name, call.layer):
                *inputs, back = (_arranged(call, each) for each in (*call.moved, gradient))
                uses = uses_along(call.rule, call.layer, inputs, back, of, weights)
                self._count_in(of_records(call, uses), combined=False)

    def _duals_of(self, loss: Tensor) -> list[tuple[Call, list[Dual | None]]]:
        """Return every call inside dual numbers, with the gradients of its outputs and derivatives."""
        calls, _ = self._calls_of(loss)
        edges = [edge for call in calls for edge in call.edges if edge is not None]
        if not edges:
            return []
        with self._attached.paused():
            found = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
        duals = iter([None if each is None else split(each) for each in found])
        return [
            (call, [None if edge is None else next(duals) for edge in call.edges]) for call in calls
        ]

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> BookkeptGradients:
        found, self._found = self._found, None
        if found is None:
            raise RefusedRun(
                "Bookkeeping.backward() must come before take().", topic="out-of-order"
            )
        gradients = [found[id(param)] for param in self._params]
        return BookkeptGradients(self._params, [g if g.uses else None for g in gradients], scale)

    def drop(self) -> None:
        self._found = None
        super().drop()

    def detach(self) -> None:
        super().detach()
        self._module, self._params, self._found = None, (), None
        self._memory = ScratchPool()


def _arranged(call: LayerCall, dual: Dual) -> Dual:
    value, moved = (None if e is None else call.arrange(at_least_float32(e)) for e in dual)
    assert value is not None
    return value, moved
