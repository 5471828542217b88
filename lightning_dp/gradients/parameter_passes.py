"""Backward passes that hand over each parameter's gradients of records, and keep nothing of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp._precision import FullPrecision, full_precision
from lightning_dp._refusals import RefusedRun
from lightning_dp.gradients.base import UnsupportedModelError, as_unsupported, number_of_records
from lightning_dp.gradients.bilinear import Use
from lightning_dp.gradients.compiled import as_written
from lightning_dp.gradients.going_back import arranged, go_back, of_records
from lightning_dp.gradients.layer_call import Call, LayerCall
from lightning_dp.gradients.opacus_layers import as_it_is
from lightning_dp.gradients.parameter_sum import Allowance, ParameterGradients
from lightning_dp.gradients.recording import Recorder
from lightning_dp.gradients.rules import (
    convolution,
    embedding,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    rms_norm,
)

__all__ = ["ParameterPasses"]

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


class ParameterPasses:
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
        gathered = _Gathered(self._params, self._calls_of, done, full_precision(loss.device))
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
        done: as in :meth:`ParameterPasses.run`.
        precision: in which it is called.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        calls: Counter[int],
        done: Done,
        precision: FullPrecision,
    ) -> None:
        self._params, self._done, self._precision = params, done, precision
        self._to_come = Counter(calls)
        self._found: dict[int, list[Use]] = {}

    def hand_over(self, uses: Sequence[tuple[int, Use]], records: slice) -> None:
        """Hand over what some records did in the only call that uses these parameters."""
        by_place: dict[int, list[Use]] = {}
        for place, use in uses:
            by_place.setdefault(place, []).append(use)
        for place, own in by_place.items():
            self._call(place, records, own)

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
            self._call(place, records, [use.of(records) for use in uses])

    def _call(self, place: int, records: slice, uses: Sequence[Use]) -> None:
        shape = self._params[place].shape
        with self._precision:
            self._done(place, records, ParameterGradients(uses, shape, None, Allowance(_ROWS)))


def _is_by_record(call: LayerCall) -> bool:
    """Tell whether what the call's rule makes of some rows is that of as many records."""
    return call.rule in _BY_RECORD and call.folding is None and call.arrange is as_it_is


def _slices(count: int, tensors: Sequence[Tensor]) -> list[slice]:
    """Return the records in slices whose parts of the tensors take no more than is allowed."""
    most = _SLICE if tensors[0].device.type == "cpu" else _SLICE_ELSEWHERE
    each = sum(tensor.nbytes for tensor in tensors) // (count or 1)
    size = max(1, most // (each or 1))
    return [slice(start, start + size) for start in range(0, count, size)]
