"""Spot checks on the real run: at random steps a batch is run once more with records exchanged."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.random_state import RandomState
from lightning_dp.isolation.answers import Call, watch_calls
from lightning_dp.isolation.module_state import ModuleState
from lightning_dp.isolation.nesting import copied, number_of_rows
from lightning_dp.isolation.record_gradients import Glimpse, Movement, Tolerance, glimpse, moved
from lightning_dp.isolation.spot_plan import Exchange, PartsSeen, SpotPlan
from lightning_dp.isolation.stand_in_optimizers import ByHand, Stills
from lightning_dp.isolation.stand_ins import RUN, StandInTrainer
from lightning_dp.run import PrivateRun
from lightning_dp.sampling.loader import Chunk
from lightning_dp.strategies.data import private_loader_of
from lightning_dp.strategies.early_end import Agreement, Place
from lightning_dp.strategies.known_norms import KnownNorms
from lightning_dp.strategies.probe import Probe
from lightning_dp.strategies.spot_evidence import (
    Check,
    Evidence,
    Seen,
    first_that_mixes,
    is_table,
)
from lightning_dp.strategies.step import PrivateStep

__all__ = ["SpotChecks"]

# Runs training_step, as the strategy does it, and returns the loss.
RunChunk: TypeAlias = Callable[[tuple[Any, ...]], Tensor | None]

_MOVED = (
    "{}: when some records of a batch are exchanged for others, gradients of the rest move{}, so "
    "clipping does not bound what a record does (found by a spot check). Use a loss of single records, "
    "layers that treat each record alone, and nothing that was kept from other records; "
    "lightning_dp.audit.check_isolation() shows more, on records that are not private."
)
_KEPT = (
    "training_step writes what it sees of the records into weights or buffers, without noise: {} "
    "(found by a spot check). They are in every checkpoint, and steer later steps. Leave them fixed, "
    "compute them from weights, or make them parameters that are trained."
)
# A fault shows in so many of the further exchanges; a tie does not come again.
_ATTEMPTS, _MUST_MOVE = 10, 3
_PARAMETERS, _ENTRIES = 8, 32  # of so many parameters, so many entries are compared


class SpotChecks:
    """Runs batches of some steps once more, before they are run, with some records exchanged.

    The gradients of the other records must not move, and neither may buffers and weights as they
    are after the forward pass. Before a fault is noted, further records are exchanged, of which some
    must show it too; before and after each the real batch is run again, and must give what it gave:
    numbers that come from outside (the clock, unseeded generators, iterators) or a tie are no fault.
    Where a pass raises or draws another number of random numbers, nothing is said; nor where it is
    not known which parts of a batch have one row per record. Records may be put in another order,
    and tables of the batch's length that are never saved may be kept.

    Nothing of a pass is left anywhere: not in the module, its metrics, logs and generators, nor in
    the global random states, gradients, or the Trainer.

    Args:
        trainer: of the fit.
        step: the model's side of the fit's steps.
        run: counts the steps with a check.
        probe: knows which synthetic records the model takes.
        run_chunk: runs ``training_step`` under the strategy's precision.
    """

    def __init__(
        self,
        trainer: Trainer,
        step: PrivateStep,
        run: PrivateRun,
        probe: Probe,
        run_chunk: RunChunk,
    ) -> None:
        self._trainer, self._step, self._run, self._probe = trainer, step, run, probe
        self._run_chunk = run_chunk
        self._module = trainer.lightning_module
        self._sizes = [param.numel() for param in step.params]
        self._first: int | None = None  # the plan's step at which the fit began
        self._made = 0
        self._size = 0  # of the chunk in hand
        self._due: Chunk | None = None  # the same, if it is to be run once more
        self._parts = PartsSeen()
        self._check: Check | None = None

    # -- what the strategy says ------------------------------------------------------------

    def at_chunk(self, chunk: Chunk) -> None:
        """Find out whether this chunk is run once more; the same on all ranks."""
        run, self._due, self._size = self._run, None, max(chunk.size, 1)
        if chunk.first:
            self._check = None
        if not run.config.spot_checks or run.batches is None:
            return
        if self._step.engine.watched.isolates:  # no record is there when another one runs
            return
        self._first = run.step if self._first is None else self._first
        since, chunks = run.step - self._first, run.batches.chunks_per_step
        if chunks > 1 and chunk.index % chunks != self._plan.chunk(since, chunks):
            return
        if self._plan.is_due(since, self._made, begins_epoch=chunk.index < chunks):
            self._due = chunk
            self._made += 1
            run.spot_checks += 1

    def before_forward(self, args: tuple[Any, ...]) -> None:
        """Run the chunk once more, with some of its records exchanged, if it is due."""
        chunk, self._due = self._due, None
        if args and self._run.config.spot_checks:
            self._parts.see(args[0], self._size)
        if chunk is None:
            return
        start = self._state()
        exchange = self._exchange(args[0], chunk.size)
        randomness = RandomState(self._trainer.strategy.root_device)
        self._check = check = Check(args, exchange, start, randomness, self._size)
        check.seen = self._pass(check, exchange, watch=False)
        start.drop_parameters()
        if exchange is not None and check.seen is not None:
            self._step.look_at_gradients(self._look)

    def leave_forward(self) -> None:
        """Compare what the module keeps when the real loss is there; once in a step."""
        check = self._check
        if check is None or check.seen is None or check.real_state is not None:
            return
        if not check.seen.drawn.is_now():
            check.seen = None  # how many random numbers are drawn depends on records
            return
        check.real_state = self._state(copies=False)
        if check.seen.state.drew(check.real_state):
            check.seen = None
            return
        check.kept = self._kept(check.seen.state, check.real_state)
        check.seen.state.drop_parameters()

    @property
    def is_checking(self) -> bool:
        """True if a pass was made for the step in hand."""
        return self._check is not None

    def settle(self, agree: Agreement) -> None:
        """Look closer at what moved, on all ranks, before the step is released.

        Raises:
            VoidedRunError: if the ranks are apart.
        """
        check, self._check = self._check, None
        if check is not None and agree.anyone(check.is_suspect, Place.SPOT_CHECK):
            self._judge(check, agree)

    # -- one check -------------------------------------------------------------------------

    @property
    def _plan(self) -> SpotPlan:
        return SpotPlan(self._run.ledger.id)

    @property
    def _since(self) -> int:
        return self._run.step - (self._first or 0)

    @property
    def _callbacks(self) -> Sequence[object]:
        callbacks: Sequence[object] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def _state(self, *, copies: bool = True) -> ModuleState:
        sharded = self._step.engine.is_sharded
        return ModuleState.of(
            self._module, self._callbacks, parameters=True, copies=copies, sharded=sharded
        )

    def _exchange(self, batch: Any, size: int, attempt: int = 0) -> Exchange | None:
        """Return the batch with records exchanged; None if rows are no records, or there are none."""
        try:
            if self._probe.has_folded_rows or not size:
                return None
            if number_of_rows(batch) != size or not self._has_known_parts:
                return None
            found = self._plan.exchange(
                batch, self._since, self._made - 1, self._probe.kinds, attempt
            )
        except Exception:  # a batch of a user's own making
            return None
        return found

    @property
    def _has_known_parts(self) -> bool:
        """True if it is known of each part of the batch whether its rows are records."""
        loader = private_loader_of(self._trainer)
        return loader.collate_of_user is default_collate or self._parts.are_known

    def _look(self, gradients: AbstractPerSampleGradients) -> AbstractPerSampleGradients:
        """Compare the gradients of the real records, before they are clipped."""
        check, mechanism = self._check, self._run.mechanism
        query = None if mechanism is None else mechanism.query
        if check is None or check.seen is None or check.exchange is None:
            return gradients
        known = gradients if query is None or query.runs_again else KnownNorms(gradients)
        try:
            check.real = self._glimpse(known)
            movement = self._moved(check.real, check.seen, check.exchange)
            check.is_suspect = movement > Movement.ORDER or bool(check.kept)
        except Exception:  # an engine without entries; nothing can be said
            check.is_suspect = False
        return known

    def _judge(self, check: Check, agree: Agreement) -> None:
        """Note a fault, if other exchanges show it too, and the real batch between them never does.

        All ranks make the same passes, whatever they found: user code may meet in them.
        """
        evidence = Evidence(is_open=check.is_suspect, kept=set(check.kept))
        for attempt in range(1, _ATTEMPTS + 1):
            if not agree.anyone(evidence.is_open, Place.SPOT_CHECK):
                return
            control = self._pass_again(check, None)
            exchange = None
            if check.exchange is not None:
                exchange = self._exchange(check.args[0], check.size, attempt)
            again = self._pass_again(check, exchange)
            if not self._repeats(check, control):
                evidence.is_open = False
            elif exchange is not None and again is not None:
                self._weigh(evidence, check, exchange, control, again)
        if self._repeats(check, self._pass_again(check, None)):
            self._note(evidence)

    def _weigh(
        self,
        evidence: Evidence,
        check: Check,
        exchange: Exchange,
        control: Seen | None,
        again: Seen,
    ) -> None:
        """Add what one exchange shows, after a control pass that gave what the real one gave."""
        if check.real is None or check.real_state is None or control is None:
            return
        evidence.kept -= set(self._kept(control.state, check.real_state))
        evidence.changed.update(self._kept(again.state, control.state))
        # Where the number of random numbers depends on records, who gets which does too.
        evidence.is_open &= control.draws_as(again)
        movement = self._moved(check.real, again, exchange)
        evidence.movements[movement] += 1
        if movement > Movement.ORDER and evidence.where is None:
            evidence.where = first_that_mixes(control, again, exchange.others)

    def _note(self, evidence: Evidence) -> None:
        """Note what all passes together show."""
        if not evidence.is_open:
            return
        kept = sorted(name for name in evidence.kept if evidence.changed[name] >= _MUST_MOVE)
        if kept:
            self._step.note(_KEPT.format(", ".join(kept[:5])))
        elif evidence.moved >= _MUST_MOVE:
            name = type(self._module).__name__
            self._step.note(_MOVED.format(name, evidence.where or ""))

    def _kept(self, seen: ModuleState, real: ModuleState) -> tuple[str, ...]:
        """Return the names of buffers and weights that differ, tables of positions apart."""
        differences = seen.differences(real)
        return tuple(
            each.name
            for each in differences
            if each.kind in ("buffer", "parameter") and not is_table(self._module, each)
        )

    def _repeats(self, check: Check, control: Seen | None) -> bool:
        """Tell whether the real batch gives the same gradients once more."""
        if check.real is None or control is None or control.gradients is None:
            return False
        everyone = tuple(range(len(check.real.norms)))
        return moved(check.real, control.gradients, everyone, self._tolerance) == Movement.NONE

    def _moved(self, real: Glimpse, seen: Seen, exchange: Exchange) -> Movement:
        if seen.gradients is None:  # then records decide whether the others are answered
            return Movement.MOVED if exchange.others else Movement.NONE
        return moved(real, seen.gradients, exchange.others, self._tolerance)

    @property
    def _tolerance(self) -> Tolerance:
        norms = self._run.config.resolved_estimator().traits.clip_norms
        is_half = "16" in str(self._trainer.precision) or any(
            param.dtype in (torch.float16, torch.bfloat16) for param in self._step.params
        )
        scale = max(norms, default=1.0)
        return Tolerance(relative=0.2, scale=scale) if is_half else Tolerance(scale=scale)

    # -- one pass --------------------------------------------------------------------------

    def _pass_again(self, check: Check, exchange: Exchange | None) -> Seen | None:
        """Run a batch from where the check began, and come back."""
        now = self._state()
        try:
            with check.randomness.again():
                check.start.restore()
                return self._pass(check, exchange, watch=True)
        finally:
            now.restore()

    def _pass(self, check: Check, exchange: Exchange | None, *, watch: bool) -> Seen | None:
        """Run a batch from the present state, leaving nothing; None if it raises.

        Args:
            exchange: the batch; None for the real one.
            watch: keep what goes in and out of modules.
        """
        batch = copied(check.args[0]) if exchange is None else exchange.batch
        calls: list[Call] = []
        noted: list[tuple[RandomState, ModuleState]] = []
        device = self._trainer.strategy.root_device

        def at_loss() -> None:
            noted.append((RandomState(device), self._state()))

        with _nowhere(self._module, self._trainer, device):
            hooks = watch_calls(self._module, calls) if watch else None
            try:
                forward = partial(self._forward, check.args[1:], at_loss)
                found = self._step.engine.run_once_more(forward, batch, check.size)
                gradients = None if found is None else self._glimpse(found)
                if found is not None:
                    found.discard()
                return Seen(gradients, *noted[0], tuple(calls))
            except Exception:  # of the model, which may hold anything
                return None
            finally:
                if hooks is not None:
                    hooks.take_off()
                check.start.restore()

    def _forward(
        self, others: tuple[Any, ...], at_loss: Callable[[], None], batch: Any
    ) -> Tensor | None:
        """Return the loss of a chunk, and say when it is there."""
        module, args = self._module, (batch, *others)
        if module.automatic_optimization:
            loss = self._run_chunk(args)
            at_loss()
            return loss
        real = self._trainer.optimizers
        groups = [[dict(group) for group in each.param_groups] for each in real]
        by_hand = ByHand(module, Stills.of(groups, self._step.params))
        note = module.manual_backward

        def note_and_say(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            note(loss)
            at_loss()

        module.manual_backward = note_and_say  # type: ignore[method-assign]
        self._run_chunk(args)
        return by_hand.loss

    def _glimpse(self, gradients: AbstractPerSampleGradients) -> Glimpse:
        places = self._plan.places(self._since, self._sizes, _PARAMETERS, _ENTRIES)
        return glimpse(gradients, places, sum(self._sizes))


@contextlib.contextmanager
def _nowhere(module: LightningModule, trainer: Trainer, device: torch.device) -> Iterator[None]:
    """Inside, what is printed and logged goes nowhere; random states and gradients stay as they are."""
    mute = StandInTrainer(trainer, RUN)
    mute.optimizers, mute.shown_to = trainer.optimizers, module
    gradients = [(param, param.grad, param.requires_grad) for param in module.parameters()]
    level = logging.root.manager.disable
    with RandomState(device).again(), contextlib.redirect_stdout(io.StringIO()):
        try:
            for param, *_ in gradients:
                param.grad = None
            logging.disable()
            module.trainer = mute  # type: ignore[assignment]
            yield
        finally:
            module.trainer = trainer
            logging.disable(level)
            for param, gradient, is_trained in gradients:
                param.grad = gradient
                param.requires_grad_(is_trained)  # a toggled optimizer, where a pass raised
