"""Clipped sums with nothing kept but norms: one backward pass for these, another one for the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp._precision import where_used
from lightning_dp._refusals import RefusedRun
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.functional import flat_zeros, parts_of
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    UnsupportedModelError,
    as_unsupported,
    number_of_records,
)
from lightning_dp.gradients.compiled import as_written
from lightning_dp.gradients.convolution import convolution
from lightning_dp.gradients.forms import Use
from lightning_dp.gradients.going_back import arranged, go_back, of_records
from lightning_dp.gradients.layers import (
    embedding,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    rms_norm,
)
from lightning_dp.gradients.materialised import MaterialisedGradients, places_in, restricted
from lightning_dp.gradients.opacus_layers import as_it_is
from lightning_dp.gradients.parameter_gradients import Allowance, ParameterGradients, without_zeros
from lightning_dp.gradients.recording import Call, LayerCall, Recorder
from lightning_dp.gradients.rules import RULES

__all__ = ["GhostClipping", "GhostGradients"]

_SEVERAL = (
    "The estimator compares each record's gradients at several points, or asks at another one than the "
    "model's, and nothing but norms is kept of a pass."
)
_NEEDED = (
    "The graph of the loss goes back once more after engine='ghost', in a backward() of the module's own "
    "or with arguments of manual_backward, and it is needed later. Use engine='bookkeeping'."
)
_REENTRANT = (
    "The model has reentrant activation checkpoints. Give torch.utils.checkpoint use_reentrant=False; "
    "with Hugging Face, gradient_checkpointing_enable("
    "gradient_checkpointing_kwargs={'use_reentrant': False})."
)
_ONCE = (
    "The graph of the loss could not be differentiated a second time ({}), as engine='ghost' does. Use "
    "engine='bookkeeping'."
)
_LATE = "A parameter was used once more than calls of its layers were recorded."

# What is made of the records is made slice by slice: of so many bytes that go into a layer and come back.
_SLICE, _SLICE_ELSEWHERE = 2 << 20, 64 << 20
_ROWS = 2 << 20  # gradients of records of one slice that may be made at once
_BY_RECORD = {linear, convolution, embedding, layer_norm, group_norm, instance_norm, rms_norm}

Done: TypeAlias = Callable[[int, slice, ParameterGradients], None]


class GhostClipping(AbstractGradientEngine):
    """Two backward passes for the gradients of layer outputs; between them nothing is kept but norms.

    The first one computes each record's norm, layer by layer: the input that autograd holds for the
    layer and the gradient of its output give it, and the latter is free before the pass goes on.
    The second one comes to the same layers with the same gradients, and adds up the clipped ones,
    by the same rules of :class:`Bookkeeping`. So a record that is not finite is left out exactly, and
    the loss need not be given for each record. It costs the time of a second pass (without weight
    gradients), and next to no memory; inputs are dropped and computed again where activation
    checkpoints do that.

    Both passes go through one graph. Where they give other values all the same (kernels that add in
    any order, checkpoints that draw other random numbers), a record's part for each parameter is scaled
    down to the norm that the first one found, so the bound holds whatever the second one finds.

    Parameters that are used several times keep what their uses saw until all of them have come.
    Hooks on tensors run twice. Covers the layers of :class:`Bookkeeping` without ``traces``.

    Li, Tramèr, Liang and Hashimoto, Large Language Models Can Be Strong Differentially Private
    Learners (2022, arXiv:2110.05679).
    """

    name = "ghost"
    runs_backward = True
    keeps_compiled = True

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._params: Sequence[nn.Parameter] = ()
        self._last: tuple[_Passes, _Norms] | None = None

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        self._recorder, self._params = Recorder(module, params, RULES, saves=True), params

    @property
    def _attached(self) -> Recorder:
        if self._recorder is None:
            raise RefusedRun(
                "The engine watches no model: attach() must come first.", topic="out-of-order"
            )
        return self._recorder

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        self._last = None
        calls, graph = self._attached.take(loss)
        if graph.checkpoints:
            raise UnsupportedModelError(_REENTRANT, topic="checkpointing")
        if combined or keep_graph:
            raise UnsupportedModelError(
                _SEVERAL if combined else _NEEDED, topic="unsupported-model"
            )
        passes = _Passes(self._attached, self._params, loss, calls, graph.innermost)
        norms = _Norms()
        passes.run(norms.add, keep=True)
        self._last = passes, norms

    def repeating(self) -> AbstractContextManager[None]:
        return self._attached.repeating()

    def outputs_of_layers(self) -> Collection[Any]:
        return self._attached.outputs()

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> GhostGradients:
        last, self._last = self._last, None
        if last is None:
            raise RefusedRun(
                "GhostClipping.backward() must come before take().", topic="out-of-order"
            )
        return GhostGradients(self._params, *last, scale)

    def drop(self) -> None:
        self._last = None
        if self._recorder is not None:
            self._recorder.drop()

    def rest(self) -> None:
        if self._recorder is not None:
            self._recorder.take_off()

    def wake(self) -> None:
        if self._recorder is not None:
            self._recorder.put_on()

    def detach(self) -> None:
        if self._recorder is not None:
            self._recorder.take_off()
        self._recorder, self._params, self._last = None, (), None


class _Passes:
    """Backward passes through one graph, which hand each parameter's gradients over when they are whole.

    Args:
        recorder: of the calls.
        params: the trained parameters.
        loss: whose graph it is.
        calls: of layers, that the loss depends on.
        innermost: the graph nodes of those that no other call feeds.
    """

    def __init__(
        self,
        recorder: Recorder,
        params: Sequence[nn.Parameter],
        loss: Tensor,
        calls: Sequence[Call],
        innermost: set[Any],
    ) -> None:
        self._recorder, self._params = recorder, params
        self._graph: tuple[Tensor, Sequence[Call], set[Any]] | None = loss, calls, innermost
        self._place_of = {id(param): place for place, param in enumerate(params)}
        self._calls_of = Counter(place for call in calls for place in self._used_by(call))
        self._is_first = True

    def run(self, done: Done, *, keep: bool) -> None:
        """Go back once.

        Args:
            done: is called with the place of a parameter, some records, and their gradients for it: for
                every parameter that has any, for all records from the first to the last.
            keep: the graph is needed once more; else it is free where the pass has been.
        """
        if self._graph is None:
            raise RefusedRun(
                "The gradients were summed already; their graph is free.", topic="out-of-order"
            )
        loss, calls, innermost = self._graph
        if not keep:
            self._graph = None
        gathered = _Gathered(self._params, self._calls_of, done)
        arrived = partial(self._arrived, gathered, keep)
        try:
            with self._recorder.repeating(), as_written():
                go_back(loss, calls, innermost, arrived, keep_graph=keep)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self._is_first:
                raise
            # Torch's own words tell sizes of a batch, which is private.
            raise UnsupportedModelError(
                _ONCE.format(type(error).__name__), topic="unsupported-model"
            ) from None
        with torch.no_grad():
            gathered.finish()
        self._is_first = False

    @torch.no_grad()
    def _arrived(
        self, gathered: _Gathered, keep: bool, call: Call, gradients: Sequence[Tensor | None]
    ) -> None:
        assert isinstance(call, LayerCall)
        (gradient,) = gradients
        places = self._used_by(call)
        with as_unsupported(call.name, call.layer):
            if gradient is not None:
                inputs = call.take_inputs(keep=keep)
                if all(self._calls_of[place] == 1 for place in places) and _is_by_record(call):
                    for records in _slices(len(gradient), (*inputs, gradient)):
                        some = [each[records] for each in (*inputs, gradient)]
                        gathered.hand_over(self._placed(call, *some), records)
                else:
                    gathered.add(self._placed(call, *inputs, gradient))
            gathered.leave(places)

    def _placed(self, call: LayerCall, *tensors: Tensor) -> list[tuple[int, Use]]:
        """Return the uses of trained parameters in a call, with their places."""
        *inputs, gradient = tensors
        uses = of_records(call, call.rule(call.layer, *arranged(call, inputs, gradient)))
        found = [(self._place_of.get(id(param)), use) for param, use in uses]
        return [(place, use) for place, use in found if place is not None]

    def _used_by(self, call: Call) -> list[int]:
        """Return the places of the trained parameters that a call uses."""
        assert isinstance(call, LayerCall)
        used = self._recorder.used_by(call)
        return [place for key, place in self._place_of.items() if key in used]

    def close(self) -> None:
        """Free the graph."""
        self._graph = None


class _Gathered:
    """The uses of each parameter, until the last call that uses it has come.

    Args:
        params: the trained parameters.
        calls: how many calls use each of them, by its place.
        done: as in :meth:`_Passes.run`.
    """

    def __init__(self, params: Sequence[nn.Parameter], calls: Counter[int], done: Done) -> None:
        self._params, self._done = params, done
        self._to_come = Counter(calls)
        self._found: dict[int, list[Use]] = {}

    def hand_over(self, uses: Sequence[tuple[int, Use]], records: slice) -> None:
        """Hand over what some records did in the only call that uses these parameters."""
        by_place: dict[int, list[Use]] = {}
        for place, use in uses:
            by_place.setdefault(place, []).append(use)
        for place, own in by_place.items():
            self._done(place, records, self._gradients(place, own))

    def add(self, uses: Sequence[tuple[int, Use]]) -> None:
        """Keep what one of several calls left."""
        for place, use in uses:
            if not self._to_come[place]:
                raise UnsupportedModelError(_LATE, topic="unseen-use")
            self._found.setdefault(place, []).append(use)

    def leave(self, places: Sequence[int]) -> None:
        """Take note that a call that uses these has come."""
        for place in places:
            self._to_come[place] -= 1
            if not self._to_come[place]:
                self._take(place)

    def finish(self) -> None:
        """Hand over what is left, where nothing came back to a call."""
        for place in list(self._found):
            self._take(place)

    def _take(self, place: int) -> None:
        uses = self._found.pop(place, [])
        if not uses:
            return
        number_of_records({len(use.u) for use in uses})  # or it raises
        tensors = [each for use in uses for each in (use.v, use.u)]
        for records in _slices(len(uses[0].u), tensors):
            self._done(place, records, self._gradients(place, [use.of(records) for use in uses]))

    def _gradients(self, place: int, uses: Sequence[Use]) -> ParameterGradients:
        shape = self._params[place].shape
        return ParameterGradients(uses, shape, None, Allowance(_ROWS))


class _Norms:
    """The squared norm of each record's gradient, for each parameter."""

    def __init__(self) -> None:
        self._squares: dict[int, list[Tensor]] = {}

    def add(self, place: int, records: slice, gradients: ParameterGradients) -> None:
        """Take those of some records, which follow those before, for one parameter."""
        self._squares.setdefault(place, []).append(gradients.squared_norms())

    def of(self, place: int) -> Tensor:
        """Return those of all records for one parameter."""
        parts = self._squares[place]
        if len(parts) > 1:
            self._squares[place] = parts = [torch.cat(parts)]
        return parts[0]

    def of_all(self) -> list[Tensor]:
        """Return them for every parameter that has any."""
        return [self.of(place) for place in self._squares]


class GhostGradients(AbstractPerSampleGradients):
    """Gradients per record of which the norms are known; all else takes another backward pass.

    Args:
        params: the trained parameters, in the order of flat vectors.
        passes: through the graph of the loss, the mean over the records.
        norms: what the first one found.
        scale: multiplies all of them.
        keep: the graph is needed after the sum.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        passes: _Passes,
        norms: _Norms,
        scale: float,
        *,
        keep: bool = False,
    ) -> None:
        self._params, self._passes, self._norms, self._keep = params, passes, norms, keep
        self._count = number_of_records({len(each) for each in norms.of_all()})
        self._scale, self._factor = scale, scale * self._count

    @property
    def count(self) -> int:
        return self._count

    def norms(self) -> Tensor:
        if not (squares := self._norms.of_all()):
            return torch.zeros(0, dtype=torch.float64)
        total = reduce(torch.add, squares)
        return where_used(total.sqrt() * abs(self._factor), self._params[0].device)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = flat_zeros(self._params)
        self.add_weighted_sum(weights, total)
        return total

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        weights = weights * self._factor
        dtype = torch.promote_types(self._params[0].dtype, torch.float32)
        parts = parts_of(onto, self._params)

        def add(place: int, records: slice, gradients: ParameterGradients) -> None:
            again, first = gradients.squared_norms(), self._norms.of(place)[records]
            shares = where_used(_no_longer(again, first), weights.device)
            own, kept, left_out = without_zeros(weights[records] * shares)
            gradients.add_weighted_sum(own.to(dtype), parts[place], kept, left_out)

        self._passes.run(add, keep=self._keep)

    def discard(self) -> None:
        self._passes.close()

    def restrict(self, coordinates: Tensor) -> MaterialisedGradients:
        chosen = list(places_in(coordinates, self._params))
        parts = [
            torch.zeros(
                self._count,
                len(places),
                dtype=torch.promote_types(param.dtype, torch.float32),
                device=param.device,
            )
            for param, places in zip(self._params, chosen, strict=True)
        ]

        def look(place: int, records: slice, gradients: ParameterGradients) -> None:
            if len(chosen[place]):
                parts[place][records] = gradients.entries(chosen[place]).to(parts[place])

        self._passes.run(look, keep=True)
        return restricted(parts, self._factor)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> GhostGradients:
        if others:
            raise TypeError("Gradients of which only the norms are known cannot be combined.")
        return GhostGradients(
            self._params, self._passes, self._norms, weight * self._scale, keep=True
        )


def _no_longer(again: Tensor, first: Tensor) -> Tensor:
    """Return what brings squared norms back to the first ones, where they are larger now; else 1."""
    ratio = (first / again).sqrt().nan_to_num(nan=0.0, posinf=0.0)
    return torch.where(again <= first, 1.0, ratio)


def _is_by_record(call: LayerCall) -> bool:
    """Tell whether what the call's rule makes of some rows is that of as many records."""
    return call.rule in _BY_RECORD and call.folding is None and call.arrange is as_it_is


def _slices(count: int, tensors: Sequence[Tensor]) -> list[slice]:
    """Return the records in slices whose parts of the tensors take no more than is allowed."""
    most = _SLICE if tensors[0].device.type == "cpu" else _SLICE_ELSEWHERE
    each = sum(tensor.nbytes for tensor in tensors) // (count or 1)
    size = max(1, most // (each or 1))
    return [slice(start, start + size) for start in range(0, count, size)]
