"""The only code that runs a model for a query: passes over a chunk of records, under an engine.

Raw gradients go to the engine and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from lightning_dp._refusals import Refusal, RefusedRun
from lightning_dp._world import held_here, is_sharded
from lightning_dp.boundary import BoundedSum, Query, bounded_sum
from lightning_dp.clipping import CountedGradients, Flat, Rescaling
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import (
    ALONE,
    AbstractGradientEngine,
    AbstractPerSampleGradients,
    Around,
    Forward,
    OtherRowsError,
    UnsupportedModelError,
)
from lightning_dp.gradients.batches import (
    DEFAULT_LAYOUT,
    RowOwners,
    SampleBatch,
    is_differentiable,
    loss_in,
)
from lightning_dp.gradients.engines import EngineChoice
from lightning_dp.gradients.graph import CoupledLossError, check_loss_graph
from lightning_dp.gradients.module_hooks import CompiledParts, as_written
from lightning_dp.gradients.parameter_sum import BookkeptGradients, at_least_float32
from lightning_dp.gradients.sharded import shards_at_point
from lightning_dp.gradients.snapshot import RandomState

__all__ = [
    "Pass",
    "RawGradientGuard",
    "RawGradientHookError",
    "RecordPasses",
    "Replay",
    "WrapEngine",
    "at_point",
    "passes_of",
]

_INSIDE = (
    "Parameters {} got a gradient inside of an autograd Function of the model (an activation "
    "checkpoint that is not torch's own, say), where gradients per record cannot be seen. Use "
    f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave it out. {ALONE}"
)

Quietly: TypeAlias = Callable[[AbstractGradientEngine], AbstractContextManager[Around | None]]
WrapEngine: TypeAlias = Callable[[AbstractGradientEngine], AbstractGradientEngine]


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
    if not query.runs_again:  # as nearly always
        return [Pass(gradient=sum([term.weight for term in query.terms]))]
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
        see: is called behind each pass with what ``training_step`` returns for the whole batch.
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


class RawGradientHookError(Refusal, RuntimeError):
    """A hook that is not ours would be shown un-noised gradients."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="gradient-hooks")


class RawGradientGuard:
    """Drops the gradient that autograd accumulates into a trainable parameter, at once.

    Args:
        parameters: name and parameter, every one that can get a gradient from records.

    Raises:
        RawGradientHookError: if somebody else's hook on a parameter would see raw gradients.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._touched: dict[str, nn.Parameter] = {}
        parameters = list(parameters)
        _refuse_foreign_hooks(parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._dropper(name, parameter)
            )
            for name, parameter in parameters
            if parameter.requires_grad
        ]

    def _dropper(self, name: str, parameter: nn.Parameter) -> Any:
        def drop(_: Tensor) -> None:
            self._touched[name] = parameter
            parameter.grad = None

        return drop

    def touched(self) -> dict[str, nn.Parameter]:
        """Return the parameters that got a raw gradient since the last call, by name."""
        touched, self._touched = self._touched, {}
        return touched

    def remove(self) -> None:
        """Take the guard's hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _refuse_foreign_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks on parameters: they run before a gradient can be dropped."""
    hooked = [
        name
        for name, parameter in parameters
        if getattr(parameter, "_backward_hooks", None)
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise RawGradientHookError(
            f"Parameters {hooked[:5]} carry gradient hooks, which would see gradients without noise "
            "(WandbLogger.watch() sets such hooks by default). Remove them before fit; "
            "watch(log='parameters') is fine."
        )


class _NoLoss(Exception):
    """A run gave nothing to go back from."""


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
        public: parameters that are trained on no records; their gradients are let through.
        quietly: given the engine in use, is entered around each run of a chunk, so that it leaves no
            trace in the model; yields what is entered around parts of a batch that run together.
        again: is entered around what runs once more since another engine takes over.
        wrap: puts something between the engine and the clipping.
        loss_graph_check: :meth:`check_loss` refuses losses that mix records, by their graph.
        loss_scale: multiplies each record's loss during its backward pass, and is divided out after
            it: of the record itself, so neither how many others there are nor how the loss was
            divided decides what becomes too large or too small for a type of 16 bits, how it is
            rounded there, or what a backward pass that is not linear (a clamp) makes of it.

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
        self._module, self._params, self.clipping = module, params, clipping
        self._choice = EngineChoice(engine) if isinstance(engine, str) else engine
        self.is_synthetic = False
        """The samples are made up, so that a refusal may name the line that they reached."""
        self._is_sharded = any(map(is_sharded, params))
        self._quietly, self._again, self._wrap = quietly, again, wrap
        self._checks_graph, self._loss_scale = loss_graph_check, loss_scale
        self._rows, self._factor = 1, 1.0  # of the latest pass
        self.go_on()
        others = {id(param) for param in public}
        watched = ((n, p) for n, p in module.named_parameters() if id(p) not in others)
        self._raw = RawGradientGuard(watched)

    def go_on(self) -> None:
        """Go on with the engine that the choice has come to."""
        engine = self._choice.make(self._module, self._params)
        engine.loss_scale = self._loss_scale
        self._compiled = CompiledParts(self._module, self._params, keeps_frozen=not engine.isolates)
        self.engine = self._wrap(engine)
        """The engine in use, whose hooks are on the model while it runs forward, and not else."""

    def detach(self) -> None:
        """Leave the model as it was."""
        self.engine.drop()
        self._raw.remove()

    # -- the engine in use -------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """The engine in use, why it is not another one, and what runs as written, in words."""
        note = self.compiled_note
        return self._choice.description if note is None else f"{self._choice.description}; {note}"

    @property
    def compiled_note(self) -> str | None:
        """The compiled parts that run as written, in words; None if there are none."""
        return None if self.engine.one_record else self._compiled.note

    @property
    def randomness(self) -> RandomState | None:
        """Torch's random state of now, if another engine may have to run once more from here."""
        if not self._choice.can_fall:
            return None
        return RandomState(self._params[0].device, torch_only=True)

    def go_down(self, reason: UnsupportedModelError) -> None:
        """Go on with the next engine of the choice, if there is one; what passes left is forgotten."""
        self.drop()
        is_told = isinstance(reason, CoupledLossError | OtherRowsError)
        if self.is_synthetic and not is_told:
            reason = reason.placed()
        if not self._choice.fall(reason):
            raise reason if is_told else self._choice.refusal(reason)
        self.go_on()

    # -- the parts of a pass -----------------------------------------------------------------------

    def forward(
        self,
        forward: Forward,
        batch: Any,
        size: int,
        around: Around | None = None,
        owners: RowOwners | None = None,
    ) -> Any:
        """Run a forward pass of a batch of ``size`` rows, of these units, under the engine."""
        with self.as_written():
            output = self.engine.run(forward, self._batch(batch, size, owners), around)
        if self.engine.one_record:  # which goes back at once, where there are several
            self._refuse_inside()
        return output

    def _batch(self, batch: Any, size: int, owners: RowOwners | None) -> SampleBatch:
        self._rows = max(1, size)
        return SampleBatch(batch, size, self._choice.layout or DEFAULT_LAYOUT, owners)

    def as_written(self) -> AbstractContextManager[None]:
        """Let compiled parts that the engine must see run their own code, inside.

        For forward passes that are watched and for their backward passes, which run parts of them
        again; an engine that sees no layers needs nothing of it.
        """
        return nullcontext() if self.engine.one_record else self._compiled.as_written()

    def check_loss(self, loss: Tensor, size: int) -> None:
        """Refuse a loss that mixes its records by more than sums, before its backward pass."""
        if self._checks_graph and not self.engine.isolates:
            check_loss_graph(loss, size, self.engine.outputs_of_layers())

    def _scaled(self, loss: Tensor, divisor: float = 1.0) -> Tensor:
        """Return the loss, a mean over rows, with the loss of each row times the scale."""
        self._factor = self._scale_of_mean * divisor
        return loss if self._factor == 1 else at_least_float32(loss) * self._factor

    @property
    def _scale_of_mean(self) -> float:
        """Return what a mean over rows is multiplied by, so that each row's loss has the scale."""
        is_done = self.engine.one_record  # by the engine, of each record
        return 1.0 if is_done else self._loss_scale * self._rows

    def backward(
        self,
        loss: Tensor,
        *,
        keep_graph: bool = False,
        combined: bool = False,
        divisor: float = 1.0,
    ) -> None:
        """Run the backward pass of a loss, as :meth:`AbstractGradientEngine.backward`.

        Args:
            divisor: the loss was divided by it.
        """
        with self.as_written():
            self._raw.touched()
            scaled = self._scaled(loss, divisor)
            self.engine.backward(scaled, keep_graph=keep_graph, combined=combined)
        self._refuse_inside()

    def _refuse_inside(self) -> None:
        if inside := self._raw.touched():
            raise UnsupportedModelError(_INSIDE.format(sorted(inside)[:5]), topic="unseen-use")

    def take(self, scale: float = 1.0) -> AbstractPerSampleGradients:
        """Take what the last backward pass left; ``scale`` undoes a division of the loss."""
        self._raw.touched()
        return self.engine.take(scale / self._factor)

    def drop(self) -> None:
        """Forget what passes left."""
        self._raw.touched()
        self.engine.drop()

    # -- queries -----------------------------------------------------------------------------------

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
        begun = chunk.randomness
        if begun is None and self._choice.can_fall:
            begun = RandomState(self._params[0].device)
        try:
            return ask(chunk)
        except UnsupportedModelError as reason:
            if chunk.forward is None:
                raise
            ran_parts = self.engine.runs_parts
            self.go_down(reason)
        try:
            with self._again():
                return self._by_some_engine(replace(chunk, randomness=begun), ask)
        except UnsupportedModelError:
            raise
        except Exception:  # the user's: what records alone could not run, ordinary training cannot
            if ran_parts:
                self._choice.climb()
                self.go_on()
            raise

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
        quietly = self._quietly(self.engine)
        with chunk.again(), quietly as around, self._at(each.point), torch.enable_grad():
            try:
                if each.direction is not None:
                    return self._along(chunk, each, each.direction, around)
                output = self.forward(chunk.forward, chunk.batch, chunk.rows, around, chunk.owners)
                loss = loss_in(output)
                if has_gradient := is_differentiable(loss):
                    self.check_loss(loss, chunk.rows)
                    elsewhere = each.point is not None  # where nothing can be asked for afterwards
                    self.backward(loss, combined=combined or elsewhere)
                chunk.see(output)
                return self.take() if has_gradient else None
            except _NoLoss:
                return None
            finally:
                self.drop()

    def _along(
        self, chunk: Replay, each: Pass, direction: Tensor, around: Around | None
    ) -> AbstractPerSampleGradients:
        """Return w g_i + w' H_i u of each record, as :meth:`AbstractGradientEngine.along`."""
        batch = self._batch(chunk.batch, chunk.rows, chunk.owners)

        def run_again() -> Tensor:
            assert chunk.forward is not None
            output = self.engine.run(chunk.forward, batch, around)
            chunk.see(output)
            loss = loss_in(output)
            if not is_differentiable(loss):
                raise _NoLoss
            self.check_loss(loss, chunk.rows)
            return self._scaled(loss)

        unit = self._scale_of_mean
        weights = each.gradient / unit, each.product / unit
        with as_written():
            return self.engine.along(run_again, direction, weights)

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
