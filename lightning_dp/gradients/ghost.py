"""Clipped sums with nothing kept but norms: one backward pass for these, another one for the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce

import torch
from torch import Tensor, nn

from lightning_dp._precision import where_used
from lightning_dp._refusals import RefusedRun
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.functional import flat_zeros, parts_of
from lightning_dp.gradients.base import UnsupportedModelError, number_of_records
from lightning_dp.gradients.materialised import MaterialisedGradients, places_in, restricted
from lightning_dp.gradients.parameter_passes import ParameterPasses
from lightning_dp.gradients.parameter_sum import ParameterGradients, without_zeros
from lightning_dp.gradients.recorded import AbstractRecordingEngine
from lightning_dp.gradients.recording import Recorder
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


class GhostClipping(AbstractRecordingEngine):
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
    keeps_compiled = True

    def __init__(self) -> None:
        super().__init__()
        self._params: Sequence[nn.Parameter] = ()
        self._last: tuple[ParameterPasses, _Norms] | None = None

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        self._recorder, self._params = Recorder(module, params, RULES, saves=True), params

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        self._last = None
        calls, graph = self._attached.take(loss)
        if graph.checkpoints:
            raise UnsupportedModelError(_REENTRANT, topic="checkpointing")
        if combined or keep_graph:
            raise UnsupportedModelError(
                _SEVERAL if combined else _NEEDED, topic="unsupported-model"
            )
        passes = ParameterPasses(self._attached, self._params, loss, calls, graph.innermost)
        norms = _Norms()
        passes.run(norms.add, keep=True)
        self._last = passes, norms

    def repeating(self) -> AbstractContextManager[None]:
        return self._attached.repeating()

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> GhostGradients:
        last, self._last = self._last, None
        if last is None:
            raise RefusedRun(
                "GhostClipping.backward() must come before take().", topic="out-of-order"
            )
        return GhostGradients(self._params, *last, scale)

    def drop(self) -> None:
        self._last = None
        super().drop()

    def detach(self) -> None:
        super().detach()
        self._params, self._last = (), None


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
        passes: ParameterPasses,
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
