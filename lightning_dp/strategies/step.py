"""The accounts of a private step: every record is answered for once, then the sum is released."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._checks import MisconfigurationError
from lightning_dp._fix import normalises_over_the_batch
from lightning_dp._refusals import RefusedRun
from lightning_dp._snapshot import RandomState
from lightning_dp._world import as_shard, held_here
from lightning_dp.boundary import Query
from lightning_dp.functional import unflatten
from lightning_dp.gradients import OtherRowsError, Replay, UnsupportedModelError
from lightning_dp.gradients.base import OTHER_ROWS, UNANSWERED, AbstractPerSampleGradients, Forward
from lightning_dp.gradients.batches import leaves, loss_in
from lightning_dp.gradients.passes import passes_of
from lightning_dp.mechanism import Mechanism
from lightning_dp.sampling.loader import Chunk
from lightning_dp.strategies.engine import FitEngine
from lightning_dp.strategies.update_guard import SameParameters

__all__ = ["PrivateStep"]

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
        parameters: SameParameters,
        engine: FitEngine,
        device: torch.device,
    ) -> None:
        self.parameters, self.params = parameters, parameters.trained
        self.engine, self._passes, self._watched = engine, engine.passes, engine.watched
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
    def held(self) -> list[Tensor]:
        """The trained parameters as this process holds them, of sharded ones its part."""
        return held_here(self.params)

    @property
    def one_record(self) -> bool:
        """True if each record must run alone, by :meth:`answer_each`."""
        return self._watched.engine.one_record

    def run(self, forward: Forward, batch: object) -> Any:
        """Run the chunk's forward pass under the engine, and return what ``training_step`` does."""
        chunk, effects = self._batch.chunk, self.engine.effects
        size = 1 if chunk is None else max(1, chunk.size)
        if not self._watched.engine.runs_parts:
            return self._watched.run(forward, batch, size)
        with effects.of_step() as around:
            output = self._watched.run(forward, batch, size, around)
        if effects.state_differs is not None:
            self.note(effects.state_differs)
        return output

    def has_no_loss(self, forward: Forward, batch: object) -> bool:
        """Return True if records, which run alone, have no loss, whatever their values are."""
        watched, chunk = self._watched, self._batch.chunk
        if not watched.engine.runs_parts or chunk is None:
            return False
        loss = loss_in(watched.run(forward, batch, chunk.size))
        watched.drop()
        return loss is None and not watched.engine.has_asked

    def begin(self, chunk: Chunk) -> None:
        """Open the accounts of the next physical batch."""
        self._check_process()
        self._is_passed_on, self.look = False, None
        if self._batch.chunk is not None:
            self._watched.drop()  # what a batch without a backward pass left
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
        size = 0 if self._batch.chunk is None else self._batch.chunk.size
        if not self.one_record and _is_one_row(batch, size):
            self.note(OTHER_ROWS)
        if not self._module.automatic_optimization:
            return  # the optimizer would step again
        self._forward_again = forward_again
        if (query is not None and query.runs_again) or _has_rounds(mechanism):
            self._randomness = RandomState(self._device)
        else:
            self._randomness = self._watched.randomness

    def _check_norms(self) -> None:
        """Note that a layer that was constant as the fit began normalises over the batch by now."""
        if any(part.training for part in self._norms):
            self.note(_NORMS)

    def pass_on(self, reason: UnsupportedModelError) -> None:
        """Leave the chunk to the next engine, which runs it again, if that can be.

        The step stays charged once and is released once. Shapes and the graph decide; a rank does it
        without the others, since every engine gives the same sum.

        Raises:
            UnsupportedModelError: if there is no engine that may do better.
        """
        if self._forward_again is None:
            raise reason
        self._watched.go_down(reason)

    def begin_again(self) -> None:
        """Draw the random numbers of the chunk once more from here on."""
        if self._randomness is not None:
            self._randomness.restore()

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that mixes the chunk's records by more than sums.

        Raises:
            CoupledLossError: naming the node of its graph, and the cure.
        """
        if self._batch.chunk is not None:
            self._watched.check_loss(loss, self._batch.chunk.size)

    def backward(self, loss: Tensor, query: Query | None, *, keep_graph: bool) -> None:
        """Run the backward pass as the engine does it."""
        if self._batch.chunk is None:
            raise RefusedRun(_AGAIN, topic="batches-and-steps")
        if self._batch.faults:  # nothing of it will be released
            return
        combined = query is not None and len(passes_of(query)) > 1
        try:
            self._watched.backward(loss, keep_graph=keep_graph, combined=combined)
        except UnsupportedModelError as reason:
            self.pass_on(reason)
            self._is_passed_on = True

    def _take(self, scale: float) -> AbstractPerSampleGradients | None:
        """Take what the backward pass left; None if nothing, or if the next engine has to run."""
        if not self._is_passed_on and not self._batch.faults:
            try:
                return self._watched.take(scale)
            except UnsupportedModelError as reason:
                self.pass_on(reason)
                self._is_passed_on = True
        self._watched.drop()
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
        replay = Replay(self._forward_again, self._records, chunk.size, self._randomness)
        if gradients is None or not chunk.size:
            self._add_nothing(mechanism, replay)
        if gradients is None and not self._is_passed_on:
            return  # nothing was back-propagated, so the records stay without an answer
        if chunk.size == 0 or mechanism.query is None:
            return  # the gradient of a stand-in record, or one that nobody asked for, ends here
        if _has_rounds(mechanism):
            batch.answered.append(replay)
        batch.owed -= chunk.size
        with self.engine.unchanged() if gradients is None else nullcontext():
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
            raise RefusedRun("training_step ran twice for one batch.", topic="batches-and-steps")
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
        self._watched.drop()

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
        """Answer a query from one chunk; it stays owed if not each of its records has a gradient.

        But a record that runs alone and has none contributes zero.

        Args:
            here: its gradients at the present parameters, where they are known already.

        Returns:
            True if there were gradients.
        """
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
            self._batch.owed += 0 if self.one_record else replay.size
        return found is not None

    def _add_nothing(self, mechanism: Mechanism, replay: Replay | None = None) -> None:
        """Let the other processes add up their parts of a sum over shards, where this one has none.

        Args:
            replay: runs what stands for records in passes that the others make first.
        """
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
        for param, gradient in zip(self.params, unflatten(estimate, held), strict=True):
            param.grad = as_shard(gradient, param)

    def detach(self) -> None:
        """Leave the model as it was."""
        self._watched.detach()
        self._batch, self._forward_again, self._records = _BatchAccounts(), None, None


def _seeds(count: int) -> list[int]:
    """Return a seed for each record; the global generator moves on alike for every number of them."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return [int(seed) for seed in torch.randint(2**32, (count,), generator=generator)]


def _is_one_row(batch: object, size: int) -> bool:
    """Tell whether a batch of several records holds nothing but tensors of one row.

    An engine would take such a row for one that all records share and no record is in.
    """
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return size > 1 and bool(tensors) and all(len(leaf) == 1 for leaf in tensors)


def _has_rounds(mechanism: Mechanism) -> bool:
    return mechanism.plan.traits.queries_per_step > 1
