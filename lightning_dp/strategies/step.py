"""The accounts of a private step: every record is answered for once, then the sum is released."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp._refusals import RefusedRun
from lightning_dp._world import World, as_shard, held_here, is_sharded
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.boundary import Query
from lightning_dp.config import PrivacyConfig
from lightning_dp.functional import unflatten
from lightning_dp.gradients import (
    AbstractGradientEngine,
    EngineChoice,
    OtherRowsError,
    RecordPasses,
    Replay,
    UnsupportedModelError,
)
from lightning_dp.gradients.base import (
    OTHER_ROWS,
    UNANSWERED,
    AbstractPerSampleGradients,
    Around,
    Forward,
)
from lightning_dp.gradients.batches import RowOwners, leaves, loss_in
from lightning_dp.gradients.fix import normalises_over_the_batch
from lightning_dp.gradients.passes import WrapEngine, passes_of
from lightning_dp.gradients.side_effects import NotedCalls, SideEffects
from lightning_dp.gradients.snapshot import RandomState, apart, restored
from lightning_dp.isolation.requirements import MisconfigurationError
from lightning_dp.mechanism import Mechanism
from lightning_dp.optimizers import NOISE_VARIANCE
from lightning_dp.run import PrivateRun
from lightning_dp.sampling.loader import Chunk
from lightning_dp.strategies.update_guard import ParameterGuard

__all__ = ["Agreement", "FitEngine", "PrivateStep", "RecordRuns", "SyncPoint", "end_training"]

LOSS_SCALE = 256.0
"""Of each record, with float16: gradients of outputs from 2.4e-7 to 255 are normal numbers in it."""

_IS_TRAINING = attrgetter("training")
_NORMS = (
    "A BatchNorm layer that was frozen and in eval() as the fit began is in train() now: it mixes "
    "records and keeps statistics of them. Put it into eval() again before each step, or let "
    "lightning_dp.fix(model) put constants in its place."
)

_TOO_EARLY = (
    "optimizer.step() was called before all chunks of the batch were there. A batch is handed out in "
    "accumulate_grad_batches chunks (with FullBatch(): in batches of the loader's batch_size); step "
    "once, after the last of them."
)

_AGAIN = (
    "Backward ran more than once for one batch, or after its optimizer step: a record would count "
    "twice. Add the losses up and call backward once per batch."
)

_FORKED = (
    "This process was forked from the one that charged the step (os.fork, multiprocessing inside of "
    "training_step or a hook), which releases it: two releases of one charge. Let the child leave "
    "training to its parent, or start it with multiprocessing's 'spawn'."
)

_SILENT = (
    "{} gave no gradient for any record of the first batch (training_step returns no loss, or one "
    "that does not depend on trained parameters), so it would train on noise alone. Return the loss."
)


@dataclass
class _BatchAccounts:
    """The accounts of one logical batch, from its first chunk on.

    Args:
        chunk: was handed out last; None once its backward pass was answered.
        is_whole: all chunks of the batch were handed out.
        owed: records that were handed out and have no answer yet.
        faults: reasons for which the batch may not be released.
        answered: the chunks of a step that asks several queries.
    """

    chunk: Chunk | None = None
    is_whole: bool = False
    owed: int = 0
    faults: list[str] = field(default_factory=list)
    answered: list[Replay] = field(default_factory=list)


class PrivateStep:
    """Turns what Lightning does with a batch into answers to the mechanism's query.

    Raw gradients exist only inside the backward pass. Each chunk is answered once, each batch
    released once, and only for the parameters that were there when the fit began.

    Args:
        module: the user's model.
        parameters: those that are trained.
        engine: runs the passes.
        device: where the model runs.
    """

    def __init__(
        self,
        module: LightningModule,
        parameters: ParameterGuard,
        engine: FitEngine,
        device: torch.device,
    ) -> None:
        self.parameters, self.params = parameters, parameters.trained
        self.engine, self._passes = engine, engine.passes
        self._module, self._device, self._process = module, device, os.getpid()
        self._batch = _BatchAccounts()
        self._norms = [part for part in module.modules() if normalises_over_the_batch(part)]
        self._forward_again: Forward | None = None  # the chunk's forward pass, once more
        self._records: object = None  # what goes into it
        self._randomness: RandomState | None = None  # of the chunk, if it may be run again
        self._is_passed_on = False  # the chunk is the next engine's
        self.look: Callable[[AbstractPerSampleGradients], None] | None = None
        """Called with the gradients of the chunk in hand, which it leaves as they are."""

    @property
    def held(self) -> Sequence[Tensor]:
        """The trained parameters as this process holds them, of sharded ones its part."""
        return held_here(self.params) if self.engine.is_sharded else self.params

    @property
    def one_record(self) -> bool:
        """True if each record must run alone, by :meth:`answer_each`."""
        return self._passes.engine.one_record

    def run(self, forward: Forward, batch: object) -> Any:
        """Run the chunk's forward pass under the engine, and return what ``training_step`` does."""
        chunk, effects = self._batch.chunk, self.engine.effects
        size = 1 if chunk is None else max(1, chunk.rows)
        owners = None if chunk is None else _owners(chunk)
        if not self._passes.engine.runs_parts:
            return self._passes.forward(forward, batch, size, owners=owners)
        with effects.of_step() as around:
            output = self._passes.forward(forward, batch, size, around, owners)
        if effects.state_differs is not None:
            self.note(effects.state_differs)
        return output

    def has_no_loss(self, forward: Forward, batch: object) -> bool:
        """Return True if records, which run alone, have no loss, whatever their values are."""
        passes, chunk = self._passes, self._batch.chunk
        if not passes.engine.runs_parts or chunk is None:
            return False
        loss = loss_in(passes.forward(forward, batch, chunk.rows, owners=_owners(chunk)))
        passes.drop()
        return loss is None and not passes.engine.has_asked

    def begin(self, chunk: Chunk) -> None:
        """Open the accounts of the next physical batch."""
        self._check_process()
        self._is_passed_on, self.look = False, None
        if self._batch.chunk is not None:
            self._passes.drop()  # what a batch without a backward pass left
        if chunk.first:
            self._batch = _BatchAccounts()
        self._batch.chunk, self._batch.is_whole = chunk, chunk.last
        self._batch.owed += chunk.size

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RefusedRun(_FORKED, topic="batches-and-steps")

    def before_forward(self, mechanism: Mechanism, forward_again: Forward, batch: object) -> None:
        """Remember what further passes over the chunk need: its forward pass and its randomness.

        Args:
            mechanism: has begun a step.
            forward_again: runs a batch once more and returns its loss.
            batch: what ``training_step`` is called with.
        """
        query = mechanism.query
        self._records = batch
        self._check_norms()
        rows = 0 if self._batch.chunk is None else self._batch.chunk.rows
        if not self.one_record and _is_one_row(batch, rows):
            self.note(OTHER_ROWS)
        if not self._module.automatic_optimization:
            return  # the optimizer would step again
        self._forward_again = forward_again
        if (query is not None and query.runs_again) or _has_rounds(mechanism):
            self._randomness = RandomState(self._device)
        else:
            self._randomness = self._passes.randomness

    def _check_norms(self) -> None:
        """Note that a layer that was constant as the fit began normalises over the batch by now."""
        if any(map(_IS_TRAINING, self._norms)):
            self.note(_NORMS)

    def leave_forward(self) -> None:
        """Note that ``training_step``, which is over now, wrote to parameters."""
        if (fault := self.parameters.leave_forward()) is not None:
            self.note(fault)

    def pass_on(self, reason: UnsupportedModelError) -> None:
        """Leave the chunk to the next engine, which runs it again, if that can be.

        The step stays charged once and is released once. Shapes and the graph decide; a rank does it
        without the others, since every engine gives the same sum.

        Raises:
            UnsupportedModelError: if there is no engine that may do better.
        """
        if self._forward_again is None:
            raise reason
        self._passes.go_down(reason)

    def begin_again(self) -> None:
        """Draw the random numbers of the chunk once more from here on."""
        if self._randomness is not None:
            self._randomness.restore()

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that mixes the chunk's records by more than sums.

        Raises:
            CoupledLossError: naming the node of its graph, and the cure.
        """
        if self._batch.chunk is None:
            return
        try:
            self._passes.check_loss(loss, self._batch.chunk.rows)
        except UnsupportedModelError as reason:
            self.pass_on(reason)
            self._is_passed_on = True

    def backward(
        self, loss: Tensor, query: Query | None, *, keep_graph: bool, divisor: float = 1.0
    ) -> None:
        """Run the backward pass of a loss that was divided, as the engine does it."""
        if self._batch.chunk is None:
            raise RefusedRun(_AGAIN, topic="batches-and-steps")
        if self._batch.faults or self._is_passed_on:  # nothing is released, or by another engine
            return
        combined = query is not None and len(passes_of(query)) > 1
        try:
            self._passes.backward(loss, keep_graph=keep_graph, combined=combined, divisor=divisor)
        except UnsupportedModelError as reason:
            self.pass_on(reason)
            self._is_passed_on = True

    def _take(self, scale: float) -> AbstractPerSampleGradients | None:
        """Take what the backward pass left; None if nothing, or if the next engine has to run."""
        if not self._is_passed_on and not self._batch.faults:
            try:
                return self._passes.take(scale)
            except UnsupportedModelError as reason:
                self.pass_on(reason)
                self._is_passed_on = True
        self._passes.drop()
        return None

    def awaits(self, mechanism: Mechanism) -> bool:
        """True if a backward pass is still to answer for the chunk in hand."""
        return mechanism.is_begun and self._batch.chunk is not None

    def answer(self, mechanism: Mechanism, scale: float) -> None:
        """Bound what the backward pass left, and give it to the mechanism.

        Args:
            mechanism: has begun a step.
            scale: undoes a division of the loss.
        """
        batch, chunk = self._batch, self._batch.chunk
        if chunk is None or not mechanism.is_begun:
            raise RefusedRun(_AGAIN, topic="batches-and-steps")
        batch.chunk = None
        self._check_norms()
        gradients, look = self._take(scale), self.look
        self.look = None
        if gradients is not None and look is not None:
            look(gradients)
        replay = Replay(
            self._forward_again,
            self._records,
            chunk.size,
            self._randomness,
            owners=_owners(chunk),
        )
        if gradients is None or not chunk.size:
            self._add_nothing(mechanism, replay)
        if gradients is None and not self._is_passed_on:
            return  # nothing was back-propagated, so the records stay without an answer
        if chunk.size == 0 or mechanism.query is None:
            return  # the gradient of a stand-in record, or one that nobody asked for, ends here
        if _has_rounds(mechanism):
            batch.answered.append(replay)
        batch.owed -= chunk.size
        with self.engine.on_this_rank() if gradients is None else nullcontext():
            self._give(mechanism, mechanism.query, replay, gradients)

    def answer_each(
        self, mechanism: Mechanism, forwards: Sequence[tuple[Forward, object]], *, is_first: bool
    ) -> None:
        """Run each record of the chunk alone, and give its part to the mechanism.

        Each record draws from another seed, so that none depends on what others draw. One
        without a loss contributes zero: which ones do that is for each of them alone to decide.

        Args:
            mechanism: has begun a step.
            forwards: what runs each record, and its batch; one of a stand-in for an empty chunk.
            is_first: nothing was released yet; then some record must have a gradient.
        """
        batch, chunk, query = self._batch, self._batch.chunk, mechanism.query
        if chunk is None:
            raise RefusedRun(
                "training_step ran twice for one batch. Leave its call to Lightning.",
                topic="batches-and-steps",
            )
        batch.chunk = None
        seeds = _seeds(len(forwards))
        replays = [
            Replay(forward, record, 1, RandomState.seeded(self._device, seed))
            for (forward, record), seed in zip(forwards, seeds, strict=True)
        ]
        if not chunk.size or query is None:
            for each, (forward, record) in zip(replays, forwards, strict=True):
                assert each.randomness is not None
                with each.randomness.again():  # nothing is asked of them, and they log, as ever
                    self._passes.run(forward, record, 1)
            return
        if len(replays) != chunk.size:
            raise OtherRowsError
        if _has_rounds(mechanism):
            batch.answered += replays
        batch.owed -= chunk.size
        found = [self._give(mechanism, query, replay) for replay in replays]
        if is_first and not any(found):
            self.note(_SILENT.format(type(self._module).__name__))

    def note(self, fault: str) -> None:
        """Note that real records failed a check: nothing of this batch may be released.

        It is not raised here, since other ranks would wait for this one.
        """
        self._batch.faults.append(fault)
        self._passes.drop()

    def fault(self, mechanism: Mechanism) -> str | None:
        """Return why what was answered so far may not be released; None if it may."""
        if self._batch.faults:
            return self._batch.faults[0]
        is_owed = mechanism.query is not None and self._batch.owed
        return UNANSWERED.format(type(self._module).__name__) if is_owed else None

    def is_unreleased(self, mechanism: Mechanism) -> bool:
        """Tell whether all chunks of the batch were handed out, and its optimizer step was left out."""
        return mechanism.is_begun and self._batch.is_whole

    def _give(
        self,
        mechanism: Mechanism,
        query: Query,
        replay: Replay,
        here: AbstractPerSampleGradients | None = None,
    ) -> bool:
        """Answer a query from one chunk; return False, and owe it, if it has no gradients."""
        if query.runs_again and not self._module.automatic_optimization:
            raise MisconfigurationError(
                "An estimator that compares gradients at two points must run training_step again, "
                "which manual optimization does not allow. Use automatic optimization.",
                topic="manual-optimization",
            )
        try:
            found = self._passes.answer(query, replay, first=here, onto=mechanism.so_far)
        except OtherRowsError:
            self.note(OTHER_ROWS)
            found = None
        if found is not None:
            mechanism.answer(found)
        else:
            self._add_nothing(mechanism)
            # A record that runs alone and has no gradient contributes zero.
            self._batch.owed += 0 if self.one_record else replay.size
        return found is not None

    def _add_nothing(self, mechanism: Mechanism, replay: Replay | None = None) -> None:
        """Take part in the other processes' sum over shards, where this one has no gradients."""
        if self.engine.is_sharded and mechanism.query is not None and mechanism.so_far is not None:
            if replay is not None:
                self._passes.go_along(mechanism.query, replay)
            mechanism.answer(self._passes.add_nothing(mechanism.query, mechanism.so_far))

    def _answer_again(self, mechanism: Mechanism, agree: Callable[[str | None], None]) -> None:
        """Answer a further query from all chunks of the batch."""
        query = mechanism.query
        if query is None:
            raise RefusedRun("No further query was asked.", topic="out-of-order")
        for replay in self._batch.answered:
            self._give(mechanism, query, replay)
        agree(self.fault(mechanism))

    def release(
        self,
        mechanism: Mechanism,
        optimizer: Optimizer,
        agree: Callable[[str | None], None],
    ) -> None:
        """Give every trained parameter its private gradient.

        Args:
            agree: called with the fault of this process, if any, before anything is noised; it
                raises on all ranks if one of them has a fault.
        """
        if not mechanism.is_begun:
            raise RefusedRun(
                "Two optimizer steps on one batch: the second would use the data without being "
                "charged. Step once per batch.",
                topic="batches-and-steps",
            )
        self._check_process()
        self.parameters.check_optimizer(optimizer)
        if mechanism.query is not None and not self._batch.is_whole:
            self.note(_TOO_EARLY)
        agree(self.fault(mechanism))
        try:
            held = self.held
            estimate = mechanism.tell(held, lambda: self._answer_again(mechanism, agree))
        finally:
            self._batch.answered.clear()
            self._forward_again = self._records = None
        for group in optimizer.param_groups:
            if NOISE_VARIANCE in group:
                group[NOISE_VARIANCE] = mechanism.noise_variance
        gradients = unflatten(estimate, held)
        if self.engine.is_sharded:
            gradients = [as_shard(*each) for each in zip(gradients, self.params, strict=True)]
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient

    def detach(self) -> None:
        """Leave the model as it was."""
        self._passes.detach()
        self._batch, self._forward_again, self._records = _BatchAccounts(), None, None


class RecordRuns:
    """The batch of one step as its records: each runs alone, and what they leave is put together.

    The loss that Lightning goes on with is the mean of theirs, cut off from any parameter. What they
    log and count is logged and counted once (:class:`~lightning_dp.gradients.side_effects.NotedCalls`).
    No record sees any of it.

    Args:
        module: the user's model. While a record runs, it is kept apart
            (:func:`lightning_dp.gradients.snapshot.apart`).
    """

    def __init__(self, module: LightningModule) -> None:
        self._noted = NotedCalls(module)
        self._outputs: dict[int, Any] = {}  # of each record's first run, by place

    def forwards(
        self, forward: Callable[[Any], Any], batches: Sequence[Any]
    ) -> list[tuple[Callable[[Any], Tensor | None], Any]]:
        """Return, for each record, what runs it and returns its loss, and its batch; a first run counts.

        Args:
            forward: runs ``training_step`` on a batch.
            batches: of one record each.
        """
        self._outputs = {}
        self._noted.forget()
        return [(partial(self._run, forward, i), batch) for i, batch in enumerate(batches)]

    def _run(self, forward: Callable[[Any], Any], place: int, batch: Any) -> Tensor | None:
        if place in self._outputs:
            again: Tensor | None = loss_in(forward(batch))
            return again
        with self._noted.noting(torch.tensor([place])):
            output = forward(batch)
        detached = output.detach() if isinstance(output, Tensor) else output
        is_mapping = isinstance(output, Mapping)
        self._outputs[place] = recursive_detach(output) if is_mapping else detached
        loss: Tensor | None = loss_in(output)
        return loss

    def together(self, device: torch.device) -> Any:
        """Count and log what the records left, and return their outputs as one of the whole batch."""
        self._noted.do()
        outputs, self._outputs = list(self._outputs.values()), {}
        losses = [loss for each in outputs if isinstance(loss := loss_in(each), Tensor)]
        mean = torch.stack([each.mean() for each in losses]).mean() if losses else None
        loss = torch.zeros((), device=device) if mean is None else mean
        loss = loss.requires_grad_()
        names = dict.fromkeys(n for each in outputs if isinstance(each, Mapping) for n in each)
        if not names:
            return loss
        of_each = [each if isinstance(each, Mapping) else {} for each in outputs]
        return {**{name: [each.get(name) for each in of_each] for name in names}, "loss": loss}


def _owners(chunk: Chunk) -> RowOwners | None:
    """Return the unit of each row of a chunk; None where each row is one."""
    return RowOwners(chunk.size, torch.tensor(chunk.owners)) if chunk.owners else None


def _seeds(count: int) -> list[int]:
    """Return a seed for each record; the global generator moves on alike for every number of them."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return [int(seed) for seed in torch.randint(2**32, (count,), generator=generator)]


def _is_one_row(batch: object, size: int) -> bool:
    """Return True if a batch of several records has tensors of one row alone."""
    # An engine would take such a row for one that all records share and no record is in.
    lengths = [len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return size > 1 and {*lengths} == {1}


def _has_rounds(mechanism: Mechanism) -> bool:
    return mechanism.plan.traits.queries_per_step > 1


# -- the engine ----------------------------------------------------------------------------------

_SEVERAL = (
    "The estimator may ask for more than each record's gradient at the present parameters, and of a pass "
    "nothing but norms is kept."
)
_SHARDS = "Its sums do not go into shards of parameters."

_WAITS = (
    "A batch has shapes that the gradient engine cannot tell records apart in, and training_step must "
    "not run again for the next engine, since it waits for other processes (all_gather, all_reduce). "
    "Leave that out of training_step, or choose engine='one_by_one'."
)


class FitEngine:
    """The gradient engine on the model of a fit, and the passes under it.

    Args:
        module: the user's model.
        config: of the run, with the engine that is wanted.
        world: the processes of the job.
        params: the trained parameters.
        public: parameters of other optimizers, which are trained on no records.
        wrap: puts something between the engine and the clipping.
    """

    def __init__(
        self,
        module: LightningModule,
        config: PrivacyConfig,
        world: World,
        params: Sequence[nn.Parameter],
        public: Sequence[nn.Parameter],
        wrap: WrapEngine,
    ) -> None:
        self._module, self._world = module, world
        self.is_sharded = any(is_sharded(param) for param in params)
        """Each process has a part of each parameter, and all run the same passes together."""
        is_automatic = module.automatic_optimization and not public
        self.choice = _choice_for(config, world, is_automatic=is_automatic)
        self.effects = SideEffects(module)
        names = {id(param): name for name, param in module.named_parameters()}
        self.passes = RecordPasses(
            module,
            params,
            self.choice,
            clipping=config.clipping.bind([names[id(param)] for param in params]),
            public=public,
            quietly=self._quietly,
            again=self.on_this_rank,
            wrap=wrap,
            loss_graph_check=config.checks.loss_graph,
            loss_scale=LOSS_SCALE if module.trainer.precision == "16-mixed" else 1.0,
        )

    def settle(self) -> None:
        """Go on with the engine that the lead process came to, and with no other, if there are shards.

        All processes make each pass together, so none of them may run a chunk again by itself.
        """
        if self.is_sharded:
            self.choice.stay(self._world.broadcast(self.choice.reasons))
            self.passes.go_on()

    def on_this_rank(self) -> AbstractContextManager[Any]:
        """Refuse to wait for other ranks inside, where a chunk runs once more here and not there."""
        return _NoCollectives() if self._world.size > 1 else nullcontext()  # type: ignore[no-untyped-call]

    @contextmanager
    def _quietly(self, engine: AbstractGradientEngine) -> Iterator[Around | None]:
        """Leave no trace of a run in the module; passes see to the global random states."""
        one, module = engine.one_record, self._module
        alone = apart(module) if one else restored(module, global_random=False)
        in_parts = self.effects.of_step(are_done=False) if engine.runs_parts else nullcontext()
        with alone, in_parts as around:
            yield around


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations over several processes raise: the others do not make them."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation of this process."""
        if func.namespace in ("c10d", "_c10d_functional"):
            raise UnsupportedModelError(_WAITS, topic="manual-optimization")
        return func(*args, **(kwargs or {}))


def _choice_for(config: PrivacyConfig, world: World, *, is_automatic: bool) -> EngineChoice:
    """Return the engines that can do what a run asks for, the named one first."""
    choice = EngineChoice(config.engine)
    if config.engine == "ghost":  # norms alone may not be enough; told before a batch is seen
        if not config.resolved_estimator().traits.asks_one_gradient:
            choice.fall(UnsupportedModelError(_SEVERAL, topic="unsupported-model"))
        elif world.is_sharded:
            choice.fall(UnsupportedModelError(_SHARDS, topic="sharded"))
    if not is_automatic and config.engine != "one_by_one":
        choice = choice.whole_batch()  # which goes back, steps, and makes public rows
    return choice.over_shards() if world.is_sharded else choice


# -- one decision on all ranks --------------------------------------------------------------------

_APART = (
    "the ranks diverged: one of them stepped the optimizer, and another did not. Call "
    "optimizer.step() for every batch, whatever its records are."
)


class SyncPoint(IntEnum):
    """Points of a step at which the ranks meet."""

    NO_RELEASE = 0
    RELEASE = 1
    UPDATE = 2
    SPOT_CHECK = 3
    END = 4


class Agreement:
    """The decision of all ranks to go on, or to end a void run; each calls it with what it found.

    It takes one small sum at each place. A rank at another place than the others is a fault, where it
    would be a dead-lock.

    Args:
        run: is voided if real records failed a check on any rank.
        world: the processes of the job.
        device: where tensors must be to be summed.
        broadcast: gives every rank the text of one of them.
        leave: called when the run is void, whatever else fails then.
    """

    def __init__(
        self,
        run: PrivateRun,
        world: World,
        device: torch.device,
        broadcast: Callable[[str | None, int], str | None],
        leave: Callable[[], None],
    ) -> None:
        self._run, self._world, self._device = run, world, device
        self._broadcast, self._leave = broadcast, leave

    def __call__(
        self, fault: str | None, place: SyncPoint = SyncPoint.RELEASE, *, unused: int = 0
    ) -> None:
        """Go on, or end the run.

        Args:
            fault: what this rank found, or None.
            place: where it is.
            unused: charges of which nothing was used so far.

        Raises:
            VoidedRunError: on all ranks.
            MisconfigurationException: instead, if those are all charges: there is nothing to withdraw.
        """
        if (voided := self._run.voided) is not None:  # and somebody caught the error
            raise VoidedRunError(voided)
        reason = self._common(fault, place)
        if reason is None:
            return
        if self._run.steps_begun <= unused:
            raise MisconfigurationError(reason, topic="voided-run")
        self._end(reason)

    def anyone(self, found: bool, place: SyncPoint) -> bool:
        """Tell every rank whether one of them found something.

        Raises:
            VoidedRunError: on all ranks, if one of them is at another place.
        """
        reason = self._common("" if found else None, place)
        if reason is not None and reason != "":
            self._end(reason)
        return reason is not None

    def _end(self, reason: str) -> NoReturn:
        try:
            self._run.void(reason)
        finally:  # also if the disk is full
            self._leave()
        raise VoidedRunError(reason)

    def _common(self, fault: str | None, place: SyncPoint) -> str | None:
        """Return the first rank's fault on every rank; None if there is none anywhere."""
        rank, size = self._world.rank, self._world.size
        if size == 1:
            return fault
        # One vector for both questions: how many ranks are at each place, and which ones are at fault.
        marks = torch.zeros(len(SyncPoint) + size, device=self._device)
        marks[place] = 1.0
        marks[len(SyncPoint) + rank] = float(fault is not None)
        marks_of_all = self._world.all_reduce(marks).tolist()
        if round(marks_of_all[place]) != size:
            return _APART
        faulty = [each for each in range(size) if marks_of_all[len(SyncPoint) + each]]
        return self._broadcast(fault, faulty[0]) if faulty else None


def end_training(trainer: Trainer, run: PrivateRun, reason: str = "privacy budget reached") -> None:
    """Stop the Trainer; no minimum of epochs or steps overrides a budget."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = 0
    trainer.fit_loop.epoch_loop.min_steps = None
    if run.stop_reason is None:
        run.stop_reason = reason
