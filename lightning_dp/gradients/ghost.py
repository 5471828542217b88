"""Clipped sums with nothing kept but norms: one backward pass for these, another one for the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp._refusals import RefusedRun
from lightning_dp.functional import flat_zeros, full_precision, parts_of, where_used
from lightning_dp.gradients.base import (
    AbstractPerSampleGradients,
    UnsupportedModelError,
    as_unsupported,
    number_of_records,
)
from lightning_dp.gradients.bilinear import Use
from lightning_dp.gradients.layer_calls import AbstractLayerEngine, Call, KeptInputs, go_back
from lightning_dp.gradients.module_hooks import as_written
from lightning_dp.gradients.parameter_sum import (
    Allowance,
    MaterialisedGradients,
    ParameterGradients,
    places_in,
    restricted,
    without_zeros,
)

__all__ = ["GhostClipping", "GhostGradients"]

_SEVERAL = (
    "The estimator compares each record's gradients at several points, or asks at another one than the "
    "model's, and nothing but norms is kept of a pass."
)
_NEEDED = (
    "The graph of the loss goes back once more after engine='ghost', in a backward() of the module's own "
    "or with arguments of manual_backward, and it is needed later. Use engine='layers'."
)
_ONCE = (
    "The graph of the loss could not be differentiated a second time ({}), as engine='ghost' does. Use "
    "engine='layers'."
)

# Records are worked on in slices of this many bytes that go into a layer and come back.
_SLICE, _SLICE_ELSEWHERE = 2 << 20, 64 << 20
_ROWS = 2 << 20  # gradients of records of one slice that may be made at once

# Is called with the place of a parameter, some records, and their gradients for it: for every parameter
# that has any, for all records from the first to the last.
Done: TypeAlias = Callable[[int, slice, ParameterGradients], None]


class GhostClipping(AbstractLayerEngine):
    """Two backward passes for the gradients of layer outputs; between them nothing is kept but norms.

    The first one computes each record's norm, layer by layer: the input that autograd holds for the
    layer and the gradient of its output give it, and the latter is free before the pass goes on.
    The second one comes to the same layers with the same gradients, and adds up the clipped ones,
    by the same rules as :class:`LayerCalls`. So a record that is not finite is left out exactly, and
    the loss need not be given for each record. It costs the time of a second pass (without weight
    gradients), and next to no memory; inputs are dropped and computed again where activation
    checkpoints do that.

    Both passes go through one graph. Where they give other values all the same (kernels that add in
    any order, checkpoints that draw other random numbers), a record's part for each parameter is scaled
    down to the norm that the first one found, so the bound holds whatever the second one finds.

    Parameters that are used several times keep what their uses saw until all of them have come.
    Hooks on tensors run twice.

    Li, Tramèr, Liang and Hashimoto, Large Language Models Can Be Strong Differentially Private
    Learners (2022, arXiv:2110.05679).
    """

    name = "ghost"

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        super().__init__(module, params, _SavedInputs)

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        self._found = None
        calls = self.calls_of(loss)
        if combined or keep_graph:
            raise UnsupportedModelError(
                _SEVERAL if combined else _NEEDED, topic="unsupported-model"
            )
        found = GhostGradients(self, self._params, loss, calls)
        self._found = partial(found.times, keep=False)


class _Save(torch.autograd.Function):
    """A node that saves tensors; no backward pass comes to it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return output.new_empty(0)


class _SavedInputs(KeptInputs):
    """The inputs of a call, saved by autograd next to what the layer saves itself.

    Where an activation checkpoint drops what a layer saves, it drops these as well, and runs its part
    of the model again when they are asked for; where hooks on saved tensors move them to the host, they
    move these. The same must be saved again while the part runs again, since a checkpoint counts.
    """

    def __init__(self, inputs: Sequence[Tensor], output: Tensor | None = None) -> None:
        # Older torch frees what a node saved with the tensor that it made, so that is held.
        self._made: Any = _Save.apply(output, *inputs)  # type: ignore[no-untyped-call]

    def take(self, *, keep: bool) -> tuple[Tensor, ...] | None:
        made = self._made
        if not keep:
            self._made = None
        try:
            return tuple(each.detach() for each in made.grad_fn.saved_tensors)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            return None


class GhostGradients(AbstractPerSampleGradients):
    """Gradients per record of which one backward pass leaves the norms; all else takes another pass.

    Args:
        engine: recorded the calls.
        params: the trained parameters, in the order of flat vectors.
        loss: the mean over the records.
        calls: that it depends on.
    """

    def __init__(
        self,
        engine: AbstractLayerEngine,
        params: Sequence[nn.Parameter],
        loss: Tensor,
        calls: Sequence[Call],
    ) -> None:
        self._engine, self._params, self._keep = engine, params, False
        self._graph: tuple[Tensor, Sequence[Call]] | None = loss, calls
        self._place_of = {id(param): place for place, param in enumerate(params)}
        self._calls_of = Counter(place for call in calls for place in self._used_by(call))
        squares: dict[int, list[Tensor]] = {}

        def add(place: int, records: slice, gradients: ParameterGradients) -> None:
            squares.setdefault(place, []).append(gradients.squared_norms())

        self._go_back(loss, calls, add, keep=True)
        self._squares = {place: torch.cat(parts) for place, parts in squares.items()}
        self._count = number_of_records({len(each) for each in self._squares.values()})
        self._factor: float = self._count

    @property
    def count(self) -> int:
        return self._count

    def norms(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.norms_by_parameter(), dim=1)
        return norms

    def norms_by_parameter(self) -> Tensor:
        like = next(iter(self._squares.values()), torch.zeros(0, dtype=torch.float64))
        norms = like.new_zeros(self._count, len(self._params))
        for place, squares in self._squares.items():
            norms[:, place] = squares.sqrt() * abs(self._factor)
        return where_used(norms, self._params[0].device)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = flat_zeros(self._params)
        self.add_weighted_sum(weights, total)
        return total

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        weights = weights * self._factor
        dtype = torch.promote_types(self._params[0].dtype, torch.float32)
        parts = parts_of(onto, self._params)

        def add(place: int, records: slice, gradients: ParameterGradients) -> None:
            again, first = gradients.squared_norms(), self._squares[place][records]
            # Where norms are larger now, they are brought back to the first ones.
            ratio = (first / again).sqrt().nan_to_num(nan=0.0, posinf=0.0)
            shares = where_used(torch.where(again <= first, 1.0, ratio), weights.device)
            own = weights[records] if weights.dim() == 1 else weights[records, place]
            own, kept, left_out = without_zeros(own * shares)
            gradients.add_weighted_sum(own.to(dtype), parts[place], kept, left_out)

        self._once_more(add, keep=self._keep)

    def discard(self) -> None:
        self._graph = None

    def restrict(self, coordinates: Tensor) -> MaterialisedGradients:
        chosen = list(places_in(coordinates, self._params))
        parts = [
            flat_zeros([param], self._count * len(places)).view(self._count, len(places))
            for param, places in zip(self._params, chosen, strict=True)
        ]

        def look(place: int, records: slice, gradients: ParameterGradients) -> None:
            if len(chosen[place]):
                parts[place][records] = gradients.entries(chosen[place]).to(parts[place])

        self._once_more(look, keep=True)
        return restricted(parts, self._factor)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> GhostGradients:
        if others:
            raise TypeError("Gradients of which only the norms are known cannot be combined.")
        return self.times(weight, keep=True)

    def times(self, weight: float, *, keep: bool) -> GhostGradients:
        """Return all of them times a number; ``keep`` if the graph is needed after their sum."""
        found = copy(self)
        found._factor, found._keep = weight * self._factor, keep
        return found

    # -- backward passes ---------------------------------------------------------------------------

    def _once_more(self, done: Done, *, keep: bool) -> None:
        """Go back again; without ``keep`` the graph is free where the pass has been."""
        if self._graph is None:
            raise RefusedRun(
                "weighted_sum() may be called once; it frees the graph.", topic="out-of-order"
            )
        loss, calls = self._graph
        if not keep:
            self._graph = None
        try:
            self._go_back(loss, calls, done, keep=keep)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Torch's own words tell sizes of a batch, which is private.
            raise UnsupportedModelError(
                _ONCE.format(type(error).__name__), topic="unsupported-model"
            ) from None

    def _go_back(self, loss: Tensor, calls: Sequence[Call], done: Done, *, keep: bool) -> None:
        self._to_come, self._found = Counter(self._calls_of), dict[int, list[Use]]()
        self._precision = full_precision(loss.device)
        with self._engine.repeating(), as_written():
            go_back(loss, calls, partial(self._arrived, done, keep), keep_graph=keep)

    @torch.no_grad()
    def _arrived(self, done: Done, keep: bool, call: Call, gradient: Tensor | None) -> None:
        places = self._used_by(call)
        try:
            if gradient is not None:
                tensors = *call.take_inputs(keep=keep), gradient
                is_only_one = all(self._calls_of[place] == 1 for place in places)
                if is_only_one and call.folding is None and call.owners is None:
                    for records in _slices(len(gradient), tensors):
                        some = self._uses(call, *[each[records] for each in tensors])
                        for place, uses in some.items():
                            self._hand_over(done, place, records, uses)
                else:
                    for place, uses in self._uses(call, *tensors).items():
                        self._found.setdefault(place, []).extend(uses)
            for place in places:
                self._to_come[place] -= 1
                if not self._to_come[place] and place in self._found:
                    self._take(done, place)
        except Exception as error:
            raise as_unsupported(error, call.name, call.layer) from None

    def _uses(self, call: Call, *tensors: Tensor) -> dict[int, list[Use]]:
        """Return the uses of each trained parameter in a call, by its place."""
        found: dict[int, list[Use]] = {}
        for param, use in call.uses(*tensors):
            if (place := self._place_of.get(id(param))) is not None:
                found.setdefault(place, []).append(use)
        return found

    def _used_by(self, call: Call) -> list[int]:
        """Return the places of the trained parameters that a call uses."""
        keys = dict.fromkeys(self._engine.used_by(call))
        return [self._place_of[key] for key in keys if key in self._place_of]

    def _take(self, done: Done, place: int) -> None:
        """Hand over what several calls left, all of which have come."""
        uses = self._found.pop(place)
        number_of_records({len(use.u) for use in uses})  # or it raises
        tensors = [each for use in uses for each in (use.v, use.u)]
        for records in _slices(len(uses[0].u), tensors):
            self._hand_over(done, place, records, [use.of(records) for use in uses])

    def _hand_over(self, done: Done, place: int, records: slice, uses: Sequence[Use]) -> None:
        shape = self._params[place].shape
        with self._precision:
            done(place, records, ParameterGradients(uses, shape, None, Allowance(_ROWS)))


def _slices(count: int, tensors: Sequence[Tensor]) -> list[slice]:
    """Return the records in slices whose parts of the tensors take no more than is allowed."""
    most = _SLICE if tensors[0].device.type == "cpu" else _SLICE_ELSEWHERE
    each = sum(tensor.nbytes for tensor in tensors) // (count or 1)
    size = max(1, most // (each or 1))
    return [slice(start, start + size) for start in range(0, count, size)]
