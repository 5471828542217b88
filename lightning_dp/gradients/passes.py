"""The only code that runs a model for a query: passes over a chunk of records, under an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from lightning_dp._refusals import RefusedRun
from lightning_dp._snapshot import RandomState
from lightning_dp._world import held_here, is_sharded
from lightning_dp.boundary import BoundedSum, Query, bounded_sum
from lightning_dp.clipping import Flat, Rescaling
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    AbstractPerSampleGradients,
    Around,
    Forward,
    OtherRowsError,
    UnsupportedModelError,
)
from lightning_dp.gradients.batches import RowOwners, is_differentiable, loss_in
from lightning_dp.gradients.clip_count import CountedGradients
from lightning_dp.gradients.engines import EngineChoice
from lightning_dp.gradients.parameter_sum import BookkeptGradients
from lightning_dp.gradients.sharded import shards_at_point
from lightning_dp.gradients.watched_model import NoLoss, WatchedModel, WrapEngine

__all__ = ["Pass", "RecordPasses", "Replay", "at_point", "passes_of"]

Quietly: TypeAlias = Callable[[AbstractGradientEngine], AbstractContextManager[Around | None]]


@dataclass(frozen=True)
class Pass:
    """One run over the batch: ``gradient`` · g_i(point) + ``product`` · H_i(point) direction.

    Args:
        point, direction: as in :class:`~lightning_dp.boundary.Term`.
        gradient, product: the weights.
    """

    point: Tensor | None = None
    direction: Tensor | None = None
    gradient: float = 1.0
    product: float = 0.0


def passes_of(query: Query) -> list[Pass]:
    """Return the passes to run, one for each point and one for each further direction there.

    A gradient and a Hessian-vector product at the same point come from one pass.
    """
    found = []
    for point in _distinct(term.point for term in query.terms):
        here = [term for term in query.terms if term.point is point]
        gradient = sum(term.weight for term in here if term.direction is None)
        along = _distinct(term.direction for term in here if term.direction is not None)
        for direction in along or [None]:
            with_it = sum(term.weight for term in here if term.direction is direction)
            found.append(Pass(point, direction, gradient, 0.0 if direction is None else with_it))
            gradient = 0.0
    return found


def _distinct(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return each object once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())


@contextmanager
def at_point(params: Sequence[nn.Parameter], point: Tensor) -> Iterator[None]:
    """Inside, the parameters hold the flat vector ``point``; afterwards they are what they were."""
    before = [param.data for param in params]
    for param, data in zip(params, unflatten(point, params), strict=True):
        param.data = data.to(param.device)
    try:
        yield
    finally:
        for param, data in zip(params, before, strict=True):
            param.data = data


@dataclass(frozen=True)
class Replay:
    """A chunk of records that can be run as often as a query asks.

    Args:
        forward: runs a batch and returns its loss, the mean over the records, or None if it gives
            none. None if it cannot be run again.
        batch: what the records are in.
        size: how many records it has; units, if they have several rows.
        randomness: as its first run found it; None if that run is still to come.
        see: is called with what ``training_step`` returns for the whole batch.
        owners: the units to which its rows belong; None if each row is one.
    """

    forward: Forward | None
    batch: Any
    size: int
    randomness: RandomState | None = None
    see: Callable[[Any], object] = id
    owners: RowOwners | None = None

    @property
    def rows(self) -> int:
        """The number of rows of the data set in it."""
        return self.size if self.owners is None else len(self.owners.owners)

    def again(self) -> AbstractContextManager[None]:
        """Return a context in which the records draw what they drew in their first run."""
        return nullcontext() if self.randomness is None else self.randomness.again()


class RecordPasses:
    """A model under its gradient engine, which answers queries from chunks of records.

    Every pass over a chunk sees the same records with the same randomness, and what each record
    contributes is combined and restricted before it is clipped. A pass leaves nothing of the engine
    on the model, and nothing in the engine; so any number of them may be made between two steps.

    Where an engine cannot tell the records of a chunk apart, the next one of the choice answers from
    the same records with the same randomness, and is used from then on. Shapes and graphs decide
    that. Every engine gives the same sum, so none of several processes has to know of another's.

    Args:
        module: the whole model.
        params: the trained parameters, in the order of flat vectors.
        engine: name of the gradient engine, or a choice that is shared with others.
        clipping: the rule by which each record's gradient is scaled to the query's clip norm.
        public, wrap, loss_graph_check, loss_scale: as for :class:`WatchedModel`.
        quietly: given the engine in use, is entered around each run of a chunk, so that it leaves no
            trace in the model; yields what is entered around parts of a batch that run together.
        again: is entered around what runs once more since another engine takes over.

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
        clipping: Rescaling = Flat(),  # noqa: B008 (frozen)
        public: Collection[nn.Parameter] = (),
        quietly: Quietly = lambda engine: nullcontext(),
        again: Callable[[], AbstractContextManager[None]] = nullcontext,
        wrap: WrapEngine = lambda engine: engine,
        loss_graph_check: bool = True,
        loss_scale: float = 1.0,
    ) -> None:
        self._module, self._params = module, params
        self._is_sharded = any(map(is_sharded, params))
        self._quietly, self._again, self.clipping = quietly, again, clipping
        self.watched = WatchedModel(
            module,
            params,
            EngineChoice(engine) if isinstance(engine, str) else engine,
            public=public,
            wrap=wrap,
            loss_graph_check=loss_graph_check,
            loss_scale=loss_scale,
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
        found = self.gradients(query, chunk, first=first)
        if found is None:
            return None
        if onto is None and query.count_weight > 0:  # without one the first sum is taken as it is
            onto = BoundedSum.empty(query, held_here(self._params))
        rescaled = self.clipping.rescale(found, query.clip_norm)
        if query.count_weight > 0:
            rescaled = CountedGradients(rescaled, query.clip_norm, query.count_weight)
        return bounded_sum(rescaled, query.sensitivity, onto)

    def go_along(self, query: Query, chunk: Replay) -> None:
        """Make a query's passes at other points, of which nothing is taken.

        Processes with shards gather each layer's parameters together, so all make the same passes; also
        one that has no record, but a stand-in, or nothing to go back from.
        """
        if self._is_sharded and chunk.forward is not None:
            for each in passes_of(query):
                if each.point is not None:
                    self._pass(chunk, each)

    def add_nothing(self, query: Query, onto: BoundedSum) -> BoundedSum:
        """Add the sum over no records to one over shards, which all processes add up together."""
        none = BookkeptGradients(self._params, [None] * len(self._params), 1.0)
        return bounded_sum(none, query.sensitivity, onto)

    def gradients(
        self, query: Query, chunk: Replay, *, first: AbstractPerSampleGradients | None = None
    ) -> AbstractPerSampleGradients | None:
        """Return each record's part before it is clipped; as :meth:`answer`."""
        return self._by_some_engine(chunk, lambda chunk: self._combined(query, chunk, first))

    def run(
        self, forward: Forward, batch: Any, size: int, *, combined: bool = False
    ) -> AbstractPerSampleGradients | None:
        """Return each record's gradient here; None if there is nothing to go back from.

        Args:
            forward, batch, size: as in :class:`Replay`.
            combined: with the gradients of another pass.
        """
        chunk = Replay(forward, batch, size)
        return self._by_some_engine(chunk, lambda chunk: self._pass(chunk, Pass(), combined))

    def _by_some_engine(
        self, chunk: Replay, ask: Callable[[Replay], AbstractPerSampleGradients | None]
    ) -> AbstractPerSampleGradients | None:
        """Ask the engine in use; where it cannot tell the records apart, the next one."""
        begun = chunk.randomness or self.watched.randomness
        try:
            return ask(chunk)
        except UnsupportedModelError as reason:
            if chunk.forward is None:
                raise
            self.watched.go_down(reason)
        with self._again():
            return self._by_some_engine(replace(chunk, randomness=begun), ask)

    def _combined(
        self, query: Query, chunk: Replay, first: AbstractPerSampleGradients | None
    ) -> AbstractPerSampleGradients | None:
        """Return each record's part by the engine in use."""
        if not chunk.size:
            return None
        passes = passes_of(query)
        combined = len(passes) > 1
        parts: list[tuple[float, AbstractPerSampleGradients | None]] = []
        for each in passes:
            if first is not None and each.point is None and each.direction is None:
                found: AbstractPerSampleGradients | None = first
            else:
                begun = chunk.randomness
                if combined and begun is None:
                    begun = RandomState(self._params[0].device)
                found = self._pass(chunk, each, combined)
                chunk = replace(chunk, randomness=begun)
            # A pass along a direction has its two weights in it.
            parts.append((each.gradient if each.direction is None else 1.0, found))
        whole = [(weight, found) for weight, found in parts if _is_of_all(found, chunk)]
        if len(whole) < len(parts) or not (first is None or _is_of_all(first, chunk)):
            return None
        (weight, one), *others = whole
        total = one if weight == 1 and not others else one.combine(weight, others)
        return total if query.coordinates is None else total.restrict(query.coordinates)

    def _pass(
        self, chunk: Replay, each: Pass, combined: bool = True
    ) -> AbstractPerSampleGradients | None:
        """Run one pass over some records; None if there is nothing to go back from."""
        if chunk.forward is None:
            raise RefusedRun(
                "A further query needs a chunk that can run again.", topic="out-of-order"
            )
        run = chunk.forward, chunk.batch, chunk.rows
        quietly = self._quietly(self.watched.engine)
        with chunk.again(), quietly as around, self._at(each.point), torch.enable_grad():
            try:
                if each.direction is not None:
                    weights = each.gradient, each.product
                    return self.watched.along(*run, each.direction, weights, around, chunk.owners)
                output = self.watched.run(*run, around, chunk.owners)
                chunk.see(output)
                loss = loss_in(output)
                if not is_differentiable(loss):
                    return None
                self.watched.check_loss(loss, chunk.rows)
                elsewhere = each.point is not None  # where nothing can be asked for after the pass
                self.watched.backward(loss, combined=combined or elsewhere)
                return self.watched.take()
            except NoLoss:
                return None
            finally:
                self.watched.drop()

    def _at(self, point: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the parameters are those of a point; as they are, if it is None."""
        if point is None:
            return nullcontext()
        if self._is_sharded:
            return shards_at_point(self._module, self._params, point)
        return at_point(self._params, point)


def _is_of_all(
    found: AbstractPerSampleGradients | None, chunk: Replay
) -> TypeGuard[AbstractPerSampleGradients]:
    """Tell whether each record has its gradient; no record at all is for the caller to judge."""
    if found is not None and found.count not in (0, chunk.size):
        raise OtherRowsError
    return found is not None and found.count > 0
