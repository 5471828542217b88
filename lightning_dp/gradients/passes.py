"""The only code that runs a model for a query: passes over a chunk of records, under an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp._refusals import RefusedRun
from lightning_dp._shards import held_here, is_sharded
from lightning_dp._training_step import loss_in
from lightning_dp.boundary import (
    AbstractPerSampleGradients,
    BoundedSum,
    Pass,
    Query,
    bounded_sum,
)
from lightning_dp.gradients.base import Around, Forward, UnsupportedModelError
from lightning_dp.gradients.chunks import (
    NoLoss,
    OtherRowsError,
    Replay,
    at_point,
    is_differentiable,
)
from lightning_dp.gradients.engines import EngineChoice
from lightning_dp.gradients.parameter_sum import BookkeptGradients, check_sum, plain_gradients
from lightning_dp.gradients.random_state import RandomState
from lightning_dp.gradients.sharded import shards_at_point
from lightning_dp.gradients.watched_model import WatchedModel, WrapEngine

__all__ = ["RecordPasses"]

_PLAIN = Pass(point=None, direction=None, gradient=1.0, product=0.0)


class RecordPasses:
    """A model under its gradient engine, which answers queries from chunks of records.

    Every pass over a chunk sees the same records with the same randomness, and what each record
    contributes is combined and restricted before it is clipped.

    Where an engine cannot tell the records of a chunk apart, the next one of the choice answers from
    the same records with the same randomness, and is used from then on. Shapes and graphs decide
    that. Every engine gives the same sum, so none of several processes has to know of another's.

    Args:
        module: the whole model.
        params: the trained parameters, in the order of flat vectors.
        engine: name of the gradient engine, or a choice that is shared with others.
        optimizer, public, attaching, wrap, loss_graph_check: as for :class:`WatchedModel`.
        backward: goes back from a loss, for engines that watch ``loss.backward()``.
        quietly: is entered around each run of a chunk, so that it leaves no trace in the model.
        again: is entered around what runs once more since another engine takes over.
        adds_up: refuse an engine whose gradients of records do not add up to that of the loss
            (``check_sum``), by one more backward pass; for made-up records.
        around: gives, for each run, what is entered around parts of a batch that run together.

    Raises:
        UnsupportedModelError: if no engine can handle the model.
        RawGradientHookError: if somebody else's hook on a parameter would see raw gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        engine: str | EngineChoice,
        *,
        optimizer: Optimizer | None = None,
        public: Collection[nn.Parameter] = (),
        backward: Callable[[Tensor], object] = Tensor.backward,
        quietly: Callable[[], AbstractContextManager[None]] = nullcontext,
        attaching: Callable[[], AbstractContextManager[None]] = nullcontext,
        again: Callable[[], AbstractContextManager[None]] = nullcontext,
        wrap: WrapEngine = lambda engine: engine,
        loss_graph_check: bool = True,
        adds_up: bool = False,
        around: Callable[[], AbstractContextManager[Around | None]] = nullcontext,
    ) -> None:
        self._adds_up, self._around = adds_up, around
        self._is_sharded = any(map(is_sharded, params))
        self._elsewhere = 0  # passes at other points that were made
        self._module, self._params = module, params
        self._go_back, self._quietly, self._again = backward, quietly, again
        self.watched = WatchedModel(
            module,
            params,
            EngineChoice(engine) if isinstance(engine, str) else engine,
            optimizer=optimizer,
            public=public,
            attaching=attaching,
            wrap=wrap,
            loss_graph_check=loss_graph_check,
        )

    def detach(self) -> None:
        """Leave the model as it was."""
        self.watched.detach()

    def __enter__(self) -> RecordPasses:
        return self

    def __exit__(self, *unused: object) -> None:
        self.detach()

    def answer(
        self,
        query: Query,
        chunk: Replay,
        *,
        first: AbstractPerSampleGradients | None = None,
        onto: BoundedSum | None = None,
    ) -> BoundedSum | None:
        """Return the query's bounded sum over the records of a chunk.

        Args:
            query: what is asked.
            chunk: its records.
            first: their gradients at the present parameters, where they are known already; they may
                be changed.
            onto: the sum over other chunks, which is added to in its own memory.

        Returns:
            None where a pass gave no gradient at all, and for a chunk without records.

        Raises:
            OtherRowsError: if the model saw more or fewer rows than there are records.
            CoupledLossError: if the loss mixes them by more than sums.
            UnsupportedModelError: if the engine cannot tell the records apart.
        """
        before = self._elsewhere
        try:
            found = self.gradients(query, chunk, first=first)
        except OtherRowsError:
            self.go_along(query, chunk, made=self._elsewhere - before)
            raise
        if found is None:
            self.go_along(query, chunk, made=self._elsewhere - before)
            return None
        if onto is None and query.count_weight > 0:  # without one the first sum is taken as it is
            onto = BoundedSum.empty(query, held_here(self._params))
        return bounded_sum(found, query.clip_norm, query.count_weight, onto)

    def go_along(self, query: Query, chunk: Replay, made: int = 0) -> None:
        """Make the passes at other points that are left, of which nothing is taken.

        Processes with shards gather each layer's parameters together, so all make the same passes; also
        one that has no record, but a stand-in, or nothing to go back from.

        Args:
            query: what is asked.
            chunk: its records, or the stand-in.
            made: how many of these passes were made.
        """
        if not self._is_sharded or chunk.forward is None:
            return
        randomness = chunk.randomness or RandomState(self._params[0].device)
        for each in [each for each in query.passes if each.point is not None][made:]:
            with suppress(OtherRowsError), randomness.again():
                self._run(chunk, each, combined=True)
            self.watched.drop()

    def add_nothing(self, query: Query, onto: BoundedSum) -> BoundedSum:
        """Add the sum over no records to one over shards, which all processes add up together.

        Args:
            query: what is asked.
            onto: the sum so far.
        """
        none = BookkeptGradients(self._params, [None] * len(self._params), 1.0)
        return bounded_sum(none, query.clip_norm, query.count_weight, onto)

    def gradients(
        self, query: Query, chunk: Replay, *, first: AbstractPerSampleGradients | None = None
    ) -> AbstractPerSampleGradients | None:
        """Return each record's part before it is clipped; as :meth:`answer`."""
        begun = self.watched.randomness if chunk.randomness is None else chunk.randomness
        try:
            return self._gradients(query, chunk, first)
        except UnsupportedModelError as reason:
            if chunk.forward is None:
                raise
            self.watched.go_down(reason)
        with self._again():
            return self.gradients(query, replace(chunk, randomness=begun))

    def _gradients(
        self, query: Query, chunk: Replay, first: AbstractPerSampleGradients | None
    ) -> AbstractPerSampleGradients | None:
        """Return the same by the engine in use."""
        if not chunk.size or not (first is None or _is_of_all(first, chunk)):
            return None
        randomness, passes = chunk.randomness, query.passes
        combined = len(passes) > 1
        parts: list[tuple[float, AbstractPerSampleGradients]] = []
        for each in passes:
            if first is not None and each.point is None and each.direction is None:
                found: AbstractPerSampleGradients | None = first
            elif randomness is None:
                if combined:
                    randomness = RandomState(self._params[0].device)
                found = self._run(chunk, each, combined)
            else:
                with randomness.again():
                    found = self._run(chunk, each, combined)
            if found is None or not _is_of_all(found, chunk):
                return None
            # A pass along a direction has its two weights in it.
            parts.append((each.gradient if each.direction is None else 1.0, found))
        (weight, one), *others = parts
        total = one if weight == 1 and not others else one.combine(weight, others)
        return total if query.coordinates is None else total.restrict(query.coordinates)

    def run(
        self,
        forward: Forward,
        batch: Any,
        size: int,
        *,
        combined: bool = False,
        see: Callable[[Any], object] = id,
    ) -> AbstractPerSampleGradients | None:
        """Return each record's gradient here; None if there is nothing to go back from.

        Args:
            forward, batch, size: as in :class:`Replay`.
            see: is called with what ``training_step`` returns for the whole batch.
            combined: with the gradients of another pass.
        """
        randomness = self.watched.randomness
        try:
            return self._run(Replay(forward, batch, size), _PLAIN, combined, see)
        except UnsupportedModelError as reason:
            if randomness is None:
                raise
            self.watched.go_down(reason)
        with self._again(), randomness.again():
            return self.run(forward, batch, size, combined=combined, see=see)

    def _run(
        self, chunk: Replay, each: Pass, combined: bool, see: Callable[[Any], object] = id
    ) -> AbstractPerSampleGradients | None:
        """Run one pass over some records; None if there is nothing to go back from.

        Args:
            chunk: the records.
            each: where, and along which direction.
            combined: with the gradients of another pass.
        """
        if chunk.forward is None:
            raise RefusedRun(
                "A chunk that cannot be run again was asked for more.", topic="out-of-order"
            )
        with self._quietly(), self._at(each.point), torch.enable_grad():
            if each.direction is not None:
                return self._along(each.direction, (each.gradient, each.product), chunk)
            with self._apart() as around:
                output = self.watched.run(chunk.forward, chunk.batch, chunk.size, around)
            see(output)
            loss = loss_in(output)
            if not is_differentiable(loss):
                self.watched.engine.drop()
                return None
            self.watched.check_loss(loss, chunk.size)
            adds_up = (
                self._adds_up and self.watched.engine.runs_backward and not self.watched.isolates
            )
            with self.watched.engine.repeating():
                plain = plain_gradients(loss, self._params) if adds_up else None
            if self.watched.engine.runs_backward:
                elsewhere = each.point is not None  # where nothing can be asked for after the pass
                self.watched.backward(loss, combined=combined or elsewhere)
            else:
                with self.watched.as_written():
                    self._go_back(loss)
            found = self.watched.take()
            if plain is not None and found is not None:
                names = {id(param): name for name, param in self._module.named_parameters()}
                check_sum(found, plain, self._params, [names[id(p)] for p in self._params])
            return found

    def _apart(self) -> AbstractContextManager[Around | None]:
        """Return a context that keeps what parts of a batch do apart, where an engine runs parts."""
        is_in_parts = self.watched.isolates and not self.watched.one_record
        return self._around() if is_in_parts else nullcontext()

    def _at(self, point: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the parameters are those of a point; as they are, if it is None."""
        if point is None:
            return nullcontext()
        self._elsewhere += 1
        if self._is_sharded:
            return shards_at_point(self._module, self._params, point)
        return at_point(self._params, point)

    def _along(
        self,
        direction: Tensor,
        weights: tuple[float, float],
        chunk: Replay,
    ) -> AbstractPerSampleGradients | None:
        assert chunk.forward is not None
        try:
            with self._apart() as around:
                return self.watched.along(
                    chunk.forward, chunk.batch, chunk.size, direction, weights, around
                )
        except NoLoss:
            self.watched.engine.drop()
            return None


def _is_of_all(found: AbstractPerSampleGradients, chunk: Replay) -> bool:
    """Tell whether each record has its gradient; no record at all is for the caller to judge."""
    if found.count not in (0, chunk.size):
        raise OtherRowsError
    return found.count > 0
