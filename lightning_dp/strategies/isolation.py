"""The watch over a fit's isolation: a dry run before the first charge, comparisons after it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from itertools import filterfalse, islice
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import Subset, default_collate

from lightning_dp._refusals import warn
from lightning_dp._world import World
from lightning_dp.boundary import Query
from lightning_dp.gradients import ALONE, UnsupportedModelError
from lightning_dp.gradients.base import without_alone
from lightning_dp.gradients.batches import DEFAULT_LAYOUT, leaves, loss_in
from lightning_dp.gradients.snapshot import (
    OWN_GENERATORS,
    RandomState,
    Snapshot,
    is_same_content,
)
from lightning_dp.isolation.check import (
    BY_CONSTRUCTION,
    Check,
    Outcome,
    Schedule,
    Settings,
    stand_by,
)
from lightning_dp.isolation.comparison import UnitRows, own_copies
from lightning_dp.isolation.dry_run import DryRun, find_layout
from lightning_dp.isolation.replay import HOOKS_OF_STEP, Pipeline, Runner
from lightning_dp.isolation.requirements import MisconfigurationError
from lightning_dp.isolation.state import Marks, TwinState, setting_in_words
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import FullBatch
from lightning_dp.sampling.loader import Chunk, PrivateDataLoader, collates_as_torch
from lightning_dp.strategies.data import before_transfer, private_loader_of
from lightning_dp.strategies.step import Agreement, PrivateStep, SyncPoint, end_training

__all__ = ["IsolationWatch"]

# Runs training_step, as the strategy does it, and returns what it does.
RunStep: TypeAlias = Callable[..., Any]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_FAULT = "{}: {}."
_LARGE = 64 << 20  # bytes of buffers
_BETWEEN = (*HOOKS_OF_STEP, "on_train_epoch_end", "on_train_epoch_start")
_OF_VALIDATION = [f"on_validation_{at}" for at in ("start", "epoch_start", "epoch_end", "end")]
_FEW = 4  # samples, where no gradients are compared
_UNEXPLAINED = (
    "The buffers or weights {} were written to, and no comparison of batches has shown that what "
    "is in them is the same with other records. They are saved without noise. Compute them from weights "
    "in a hook of the module (on_train_batch_end, on_train_epoch_end), where it can be compared; or, if "
    "a callback or validation writes them by weights and public numbers alone, say so: "
    "DifferentialPrivacy(checks=Checks(public_state=['their names'])), which the report prints."
)
_EDITED = (
    "A callback changes the batch in on_train_batch_start. Callbacks are never run twice, so what it "
    "does to a record cannot be compared with what it does to it among others. Do it in "
    "on_after_batch_transfer of the module or the data module."
)
_SET_BY_BATCH = (
    "validation_step, or a hook of its batches, sets {}, and what earlier records left is in the module "
    "then. Batches of validation are not run twice, so the two cannot be told apart. "
    "Set it in on_validation_epoch_end, by a metric of public validation data."
)
_FLAT = (
    "The loss of {} gives synthetic records no gradient: if it gives real ones none either, noise alone "
    "is trained, and ε is spent on it. Look for terms that cancel, as in loss / loss.mean(). (Nothing "
    "is wrong if it leaves out records like the synthetic ones.)"
)
_COUPLES = (
    "{} couples the records of a batch: {}. Clipping does not bound what a record does then, and ε "
    "would not hold.{} (Found on synthetic samples. If it is wrong, leave it out with "
    "checks=Checks(dry_run=False).)"
)


class IsolationWatch:
    """Compares runs of a batch that differ in some of its samples, on public steps.

    Args:
        trainer: of the fit.
        step: the model's side of the fit's steps; it notes faults.
        run: counts comparisons.
        world: the processes.
        run_step: runs ``training_step`` under the strategy's precision.
    """

    def __init__(
        self,
        trainer: Trainer,
        step: PrivateStep,
        run: PrivateRun,
        world: World,
        run_step: RunStep,
    ) -> None:
        self._trainer, self._step, self._run, self._world = trainer, step, run, world
        self._module: LightningModule = trainer.lightning_module
        self._run_step = run_step
        self._twins = TwinState(self._module)
        self.stops = PublicStops(trainer, run, self._twins)
        """Ends the fit where the user's code stops it, by a rule that reads no record."""
        self._is_first = True
        self._is_compared = False  # gradients, once
        self._since: int | None = None  # the plan's step at which the fit began
        self._looks = 0
        self._due: Chunk | None = None
        self._is_scheduled = False  # else a change led to the comparison, which is counted nowhere
        self._check: Check | None = None
        self._was_due = False  # a chunk of the step, on all ranks
        self._marks, self._buffers = Marks.of(self._module), self._copies()
        self._changed: set[str] = set()  # buffers and frozen weights that no comparison has cleared
        self._cleared: set[str] = set()
        self._was_isolated = False  # at a look of this fit: then it is known what follows records
        self._asked: set[str] = set()  # hooks of epochs that have shown what they write
        self._ran: set[str] = set()  # hooks of epochs that have shown what they read
        self._before: Snapshot | None = None  # at the last look
        self._validated: Snapshot | None = None  # at the first batch of a validation
        self._walk: object = None  # held, so that later snapshots are cheap
        self._weights: tuple[int, ...] | None = None  # versions of trained ones, after an update
        self.fault: str | None = None
        """The reason for which nothing more may be released: what a hook between two steps did."""
        self._callbacks = (
            _Calls(
                on_train_epoch_start=partial(self.before_hook_of_epoch, "on_train_epoch_start"),
                on_train_batch_start=self.before_callbacks,
                on_train_batch_end=partial(self.before_hook, "on_train_batch_end"),
                on_train_epoch_end=self.at_epoch_end,
                **{name: partial(self.before_hook, name) for name in _OF_VALIDATION},
                on_validation_batch_start=self.before_validation_batch,
            ),
            _Calls(on_train_batch_start=self.after_callbacks),
        )
        self._handed_over: list[tuple[Any, Any]] | None = None
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, self._callbacks[0])
        if names := run.config.checks.public_state:
            note = f"what callbacks and validation write into {', '.join(names)} (declared, not checked)"
            run.not_covered = (*run.not_covered, note)

    def end(self) -> None:
        """Take the hooks away; what was written until now is known."""
        self._note_changes()
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [each for each in callbacks if each not in self._callbacks]

    def follow(self) -> None:
        """Watch the model on, which was moved off its device: hooks may still write."""
        self._marks, self._buffers = Marks.of(self._module), self._copies()

    # -- before the first charge -------------------------------------------------------------------

    def before_first_charge(self, chunk: Chunk) -> None:
        """Run synthetic samples once in a fit: refuse what always couples, and settle the engine.

        Raises:
            UnsupportedModelError: if no engine takes the model.
            MisconfigurationException: if it couples records, or keeps what it saw of them.
        """
        if not self._is_first:
            return
        self._is_first = False
        engine, config = self._step.engine, self._run.config
        dry = like = None
        if config.checks.dry_run:
            with suppress(Exception):  # of which none can be read again
                like = self._read(chunk.records[:1])[0]
            dry = DryRun(
                like,
                have_lengths=not self._collates_as_torch,
                in_units=config.has_several_rows,
            )
        layout = DEFAULT_LAYOUT
        if not self._collates_as_torch:
            collate, transfer = self._collate_and_transfer(self._loader)
            layout = find_layout(dry, lambda samples: transfer(collate(samples)))
        engine.choice.layout = self._world.broadcast(layout)
        if dry is None:
            engine.settle()
            return
        takes_number = is_param_in_hook_signature(
            self._module.training_step, "batch_idx", min_args=2
        )
        runner = self._runner(self._loader, *((0,) if takes_number else ()))
        norms = config.resolved_estimator().traits.clip_norms
        found = dry.run(runner, self._settings, max(norms, default=math.inf), self._twins)
        found = self._world.broadcast(found)
        self._is_compared = found.kind == "isolated"
        engine.settle()
        self._run.engine = engine.passes.description
        self._run.isolation = "compared on synthetic samples"
        if engine.passes.engine.isolates and not self._needs_gradients:
            self._run.isolation = BY_CONSTRUCTION
        elif found.kind == "not compared":
            self._run.isolation = f"synthetic samples were not compared ({found.reason})"
        if found.kind == "coupled":
            alone = f" {ALONE}" if self._module.automatic_optimization else ""  # which it needs
            raise MisconfigurationError(
                _COUPLES.format(type(self._module).__name__, found.reason, alone),
                topic="coupled-records",
            )
        if not dry.has_gradients and self._world.is_lead:
            warn(_FLAT.format(type(self._module).__name__), topic="no-loss")
        if engine.passes.engine.one_record and engine.choice.reasons:
            cost, reason = dry.slowdown(runner), engine.choice.reasons[-1].text
            if self._world.is_lead:
                text = f"Each record runs alone, one after the other{cost}. {reason}"
                warn(text, topic="one-by-one")

    def _read(self, records: Sequence[int]) -> list[Any]:
        """Read records once more; the random numbers of the run go on unchanged."""
        dataset = self._loader.dataset
        kept = getattr(dataset, "__dict__", {})  # a list has none
        own = [each for each in kept.values() if isinstance(each, OWN_GENERATORS)]
        before = RandomState(self._trainer.strategy.root_device, own=own)
        try:
            return [dataset[record] for record in records]
        finally:
            before.restore()

    # -- at charged batches ------------------------------------------------------------------------

    def at_chunk(self, chunk: Chunk) -> None:
        """Find out whether this chunk is compared; the same on all ranks."""
        run, self._due = self._run, None
        if chunk.first:
            self._check = None
        config = run.config
        if not config.checks.comparisons or run.batches is None:
            return
        now, chunks = run.step, run.batches.chunks_per_step
        self._since = now if self._since is None else self._since
        self._note_changes()
        step = now - self._since
        if chunks > 1 and chunk.index % chunks != self._schedule.chunk(step, chunks):
            return
        if self._schedule.is_due(step, self._looks, begins_epoch=chunk.index < chunks):
            self._due, self._looks = chunk, self._looks + 1
            self._is_scheduled = True
            run.spot_checks += not self._step.one_record  # of which only the state is looked at
        elif self._changed or self._open_weights():
            self._due, self._is_scheduled = chunk, False

    def before_forward(self, args: tuple[Any, ...]) -> None:
        """Begin a comparison, if the chunk is due; its runs follow the step's own passes."""
        chunk, self._due = self._due, None
        if chunk is None:
            return
        self._was_due = True
        try:
            self._begin_check(chunk, args)
        except Exception as error:  # of the user's data set
            self._count(Outcome("not compared", type(error).__name__))

    def after_forward(self) -> None:
        """Note what the forward pass left, if a comparison has begun."""
        check = self._check
        if check is not None and check.step is not None and self._step.look is not None:
            check.step.after_forward()

    def _begin_check(self, chunk: Chunk, args: tuple[Any, ...]) -> None:
        mechanism, number = self._run.mechanism, self._run.step - (self._since or 0)
        query = None if mechanism is None else mechanism.query
        if query is None or chunk.size < 2:
            return
        loader, look = self._loader, self._looks - 1
        names = self._schedule.samples(number, look, chunk.size)
        was_written = bool(self._changed or self._written_since())
        if not self._compares_gradients:
            if not (self._keeps_something() or was_written):
                return
            names = names[:_FEW]
        units = [*map(chunk.units.__getitem__, names)]
        rows: Sequence[Any] = [row for unit in units for row in unit]
        if not _reads_together(loader):
            rows = self._read(rows)
        samples: Sequence[Any] = rows
        if chunk.owners:
            left = iter(rows)
            samples = [UnitRows(islice(left, len(unit))) for unit in units]
        runner = self._runner(loader, *args[1:])
        runner.without_dropout = look % 2 == 0
        if was_written:
            runner.hooks = _BETWEEN
        self._check = Check(
            runner,
            samples,
            self._settings(
                query=query,
                whole=chunk.size,
                seed=number,
                fewer=not self._schedule.takes_all(look),  # smaller batches show the same, for less
            ),
            partial(self._schedule.kept, number, look, len(samples)),
            self._twins,
        )
        self._walk = self._check.begin.walk
        if self._world.size == 1:  # ranks might differ in whether the step can stand for a run
            self._check.follow_step(args[0])
        self._step.look = None if self._check.step is None else self._check.step.after_backward

    def _note_changes(self) -> None:
        """Note which buffers and frozen weights were written to since the last look, and not cleared."""
        marks, before = Marks.of(self._module), self._buffers
        names = marks.changed_since(self._marks)
        if not names:
            return
        self._marks, self._buffers = marks, self._copies()
        for name in names:
            known, now = before.get(name), self._buffers.get(name)
            is_same = known is not None and now is not None and torch.equal(known, now)
            if not is_same and not self._is_public(name):  # passes that left no trace write, too
                self._changed.add(name)

    def after_update(self) -> None:
        """Remember the trained weights as the optimizer's step left them."""
        self._weights = self._versions()

    def _written_since(self) -> set[str]:
        """Return the names of trained weights that were written to since the optimizer's step."""
        now = self._versions()
        if (before := self._weights or now) == now:
            return set()
        each = zip(self._step.params, before, now, strict=True)
        moved = {id(param) for param, then, count in each if then != count}
        return {name for name, param in self._module.named_parameters() if id(param) in moved}

    def _open_weights(self) -> set[str]:
        """Return the names of those that no comparison has cleared and that are not declared."""
        return set(filterfalse(self._is_public, self._written_since()))

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(attrgetter("_version"), self._step.params))

    def _copies(self) -> dict[str, Tensor]:
        """Return copies of the buffers and frozen weights, but of very large ones."""
        buffers = dict(self._module.named_buffers())
        parameters = self._module.named_parameters()
        buffers |= {name: each for name, each in parameters if not each.requires_grad}
        if sum(each.nbytes for each in buffers.values()) > _LARGE:
            return {}
        return {name: each.detach().clone() for name, each in buffers.items()}

    def _is_public(self, name: str) -> bool:
        return name in self._cleared or any(
            map(partial(fnmatch, name), self._run.config.checks.public_state)
        )

    def unexplained(self) -> str | None:
        """Return why nothing may be saved, or said to be private, as the module is now; None if it may.

        A buffer or a frozen weight that was written to, or a trained one since the optimizer's step, and
        that no comparison has found to be the same with other records. Where nothing is compared,
        nothing is said.
        """
        if not self._run.config.checks.comparisons:
            return None
        self._note_changes()
        names = self._changed | self._open_weights()
        if self.fault is not None or not names:
            return self.fault
        return _UNEXPLAINED.format(sorted(names)[:5])

    def before_callbacks(self, batch: object, batch_idx: int) -> None:
        """Note what the Trainer's callbacks are handed, if one is of the user's; look again after it."""
        callbacks, last = self._trainer.callbacks, self._callbacks[1]  # type: ignore[attr-defined]
        if any(map(_starts_batches, callbacks)):
            self._handed_over = [(each, _copied(each)) for each in leaves(batch, rows=True)]
            if last not in callbacks:  # which are being called in their order
                callbacks.append(last)

    def after_callbacks(self, batch: object, batch_idx: int) -> None:
        """Note a fault if one of them has changed it: what runs once cannot be compared."""
        before, self._handed_over = self._handed_over, None
        if before is None:
            return
        now = leaves(batch, rows=True)
        # By content too: what numpy and .data write is not counted.
        is_same = len(now) == len(before) and all(
            leaf is given and (held is given or is_same_content(leaf, held))
            for leaf, (given, held) in zip(now, before, strict=True)
        )
        if self._run.config.checks.comparisons and not (is_same or self._step.one_record):
            self.fault = self.fault or _EDITED

    def before_validation_batch(self, *args: Any) -> None:
        """Note the settings of optimizers at the first batch, if records have left anything."""
        if self._validated is None and self._twins.has_ever:
            self._validated = Snapshot.of(self._module)

    def before_hook(self, name: str, *args: Any) -> None:
        """Run a hook of the module as it would run after other records; then Lightning runs it."""
        if name == "on_validation_epoch_end":
            self._look_at_validation()
        is_of_epoch = "epoch" in name or name in _OF_VALIDATION
        is_asked = self._twins.has_ever if is_of_epoch else self._twins.has_twins
        if is_of_epoch and not self._trainer.sanity_checking and name not in self._ran:
            self._ran.add(name)
            is_asked = True
        if is_asked and is_overridden(name, self._module):
            hook = getattr(self._module, name)
            fault = self._twins.run_hook(hook, *args, is_of_epoch=is_of_epoch)
            self.fault = self.fault or fault

    def _look_at_validation(self) -> None:
        before, self._validated = self._validated, None
        if before is not None:
            moved = before.differences(Snapshot.of(self._module))
            names = [setting_in_words(each.name) for each in moved if each.kind == "setting"]
            self.fault = self.fault or (_SET_BY_BATCH.format(names[0]) if names else None)

    def at_epoch_end(self) -> None:
        """End the fit if a public stop has ended the epoch; run the module's hook before it runs."""
        self.stops.at_epoch_end()
        self.before_hook_of_epoch("on_train_epoch_end")

    def before_hook_of_epoch(self, name: str) -> None:
        """Clear what a hook that is handed no record writes, if nothing that follows records is in it."""
        self.before_hook(name)
        is_open = name not in self._asked or bool(self._marks.names - self._cleared)
        if self._was_isolated and is_open and is_overridden(name, self._module):
            self._asked.add(name)
            self._cleared |= self._twins.written_alike(getattr(self._module, name))
            self._changed -= self._cleared

    def _keeps_something(self) -> bool:
        """Return False if nothing that the module keeps has changed since the last look."""
        before, self._before = self._before, Snapshot.of(self._module)
        return before is None or self._twins.has_twins or bool(before.differences(self._before))

    def settle(self, agree: Agreement) -> None:
        """Look closer at what moved, on all ranks, before the step is released.

        Raises:
            VoidedRunError: if the ranks are apart.
        """
        check, self._check = self._check, None
        was_due, self._was_due = self._was_due, False
        anyone = partial(agree.anyone, place=SyncPoint.SPOT_CHECK)
        if self.fault is not None:
            self._step.note(self.fault)
        if check is None:
            if was_due:  # the other ranks may have something to settle
                stand_by(anyone)
            return
        try:
            check.look()
        except Exception as error:  # of the user's code, or ours about it
            check.not_compared = type(error).__name__
            # Where each record is on its way alone, what the whole batch does is of no matter.
            if isinstance(error, UnsupportedModelError) and not self._step.one_record:
                self._step.note(without_alone(error.text))
        found = check.settle(anyone)
        self._count(found)
        if found.kind == "isolated":
            self._was_isolated = self._is_compared = True
            self._cleared |= check.same_in_both
            self._changed -= check.same_in_both
        if found.kind == "coupled":
            self._step.note(_FAULT.format(type(self._module).__name__, found.reason))
        if self._trainer.lr_scheduler_configs:
            steps_rate = self.lr_scheduler_step
            fault = self._twins.run_hook(steps_rate, is_of_epoch=True, is_trial=True)
            if fault is not None:
                self._step.note(fault)

    def lr_scheduler_step(self) -> None:
        """Step the schedulers, as Lightning does; their functions may read what records left."""
        for config in self._trainer.lr_scheduler_configs:
            if not config.reduce_on_plateau:
                self._module.lr_scheduler_step(config.scheduler, None)

    def _count(self, found: Outcome) -> None:
        if found.kind == "not compared" and self._is_scheduled and not self._step.one_record:
            reasons = self._run.not_compared
            reasons[found.reason] = reasons.get(found.reason, 0) + 1

    # -- the user's code ---------------------------------------------------------------------------

    @property
    def _schedule(self) -> Schedule:
        return Schedule(self._run.ledger.id)

    @property
    def _loader(self) -> PrivateDataLoader:
        return private_loader_of(self._trainer)

    @property
    def _needs_gradients(self) -> bool:
        """False if records ran alone, torch itself made the batch, and none decides another one's."""
        engine = self._step.engine.passes.engine
        is_plain = self._is_plain and self._chunks_by_place == 1
        return not (engine.isolates and (engine.one_record or is_plain))

    @property
    def _chunks_by_place(self) -> int:
        """The physical batches of a step, in one of which a record is by the number of those before."""
        run = self._run
        if run.batches is None or not run.config.sampling.cuts_by_place:
            return 1
        return run.batches.chunks_per_step

    @property
    def _compares_gradients(self) -> bool:
        """Also, until one comparison has passed, those of records that run alone in one pass."""
        return self._needs_gradients or not (self._is_compared or self._step.one_record)

    @property
    def _collates_as_torch(self) -> bool:
        return self._loader.collate_of_user is default_collate and collates_as_torch()

    @property
    def _made_by(self) -> str:
        """The user's code that makes a batch, in words; "" if there is none."""
        owners = (self._module, getattr(self._trainer, "datamodule", None))
        found = [
            f"{type(owner).__name__}.{hook}"
            for hook in _HOOKS
            for owner in owners
            if owner is not None and is_overridden(hook, owner, parent=DataHooks)
        ]
        if not self._collates_as_torch:
            collate: Any = self._loader.collate_of_user
            name = getattr(collate, "__qualname__", type(collate).__name__)
            found.insert(0, f"collate_fn ({name})")
        return ", ".join(found)

    @property
    def _is_plain(self) -> bool:
        owners = (self._module, *self._trainer.callbacks)  # type: ignore[attr-defined]
        starts = any(map(_starts_batches, owners))
        return not self._made_by and not starts and not _reads_together(self._loader)

    def _settings(self, *, query: Query, whole: int, seed: int, fewer: bool = True) -> Settings:
        is_count_public = isinstance(self._run.config.sampling, FullBatch)
        return Settings(
            query, whole, self._eps, seed, self._compares_gradients, is_count_public, fewer
        )

    @property
    def _eps(self) -> float:
        """The precision in which the model computes, the coarsest of its types."""
        types = {param.dtype for param in self._step.params}
        if "bf16" in str(self._trainer.precision):
            types.add(torch.bfloat16)
        elif "16" in str(self._trainer.precision):
            types.add(torch.float16)
        return max((torch.finfo(each).eps for each in types), default=0.0)

    def _runner(self, loader: PrivateDataLoader, *others: Any) -> Runner:
        step = self._step
        collate, transfer = self._collate_and_transfer(loader, *others)
        return Runner(
            self._module,
            step.engine.passes,
            step.params,
            Pipeline(
                collate,
                transfer,
                lambda batch: self._run_step(batch, *others),
                others[0] if others else 0,
                self._made_by,
                self._elsewhere(*others),
            ),
            self._trainer.strategy.root_device,
            step.engine.effects.count,
        )

    def _elsewhere(self, *others: Any) -> Callable[[Any], Any] | None:
        chunks = self._chunks_by_place
        if chunks == 1 or not others:
            return None
        at = others[0] + (1 if others[0] % chunks == 0 else -1)
        return lambda batch: self._run_step(batch, at, *others[1:])

    def _collate_and_transfer(
        self, loader: PrivateDataLoader, *others: Any
    ) -> tuple[Callable[[list[Any]], Any], Callable[[Any], Any]]:
        collate, dataset = loader.collate_of_user, loader.dataset

        def read_and_collate(records: list[Any]) -> Any:
            return collate(dataset.__getitems__(records))  # type: ignore[attr-defined]

        def collate_copies(samples: list[Any]) -> Any:
            return collate(own_copies(samples))

        def transfer(batch: Any) -> Any:
            strategy = self._trainer.strategy
            batch = strategy.precision_plugin.convert_input(batch)
            batch = strategy.batch_to_device(before_transfer(self._trainer, batch))
            if is_overridden("on_train_batch_start", self._module):
                self._module.on_train_batch_start(batch, *(others[:1] or (0,)))
            return batch

        if _reads_together(loader):
            return read_and_collate, transfer
        # Torch's own function copies all tensors into those of the batch.
        return (collate if self._collates_as_torch else collate_copies), transfer


class _Calls(Callback):
    """Calls functions in hooks of the Trainer, with what these are given besides Trainer and module.

    Args:
        acts: by the hook.
    """

    # At each step Lightning opens a profiler's context for every hook that can be called.
    on_before_zero_grad = on_before_backward = None  # type: ignore[assignment]
    on_after_backward = on_before_optimizer_step = None  # type: ignore[assignment]

    def __init__(self, **acts: Callable[..., object]) -> None:
        for hook, act in acts.items():
            setattr(self, hook, self._calling(act))

    @staticmethod
    def _calling(act: Callable[..., object]) -> Callable[..., None]:
        def call(trainer: Trainer, module: LightningModule, *given: Any) -> None:
            act(*given)

        return call


def _starts_batches(owner: object) -> bool:
    """Return whether a module or callback has code of the user's for the start of a batch."""
    hook = "on_train_batch_start"
    # Of the function, not of the class: a LambdaCallback's is the user's.
    by = getattr(getattr(owner, hook), "__module__", None) or ""
    return not by.startswith(("lightning.", "lightning_dp.")) and is_overridden(hook, owner)


def _copied(leaf: Any) -> Any:
    """Return a copy of what may be written to; all else is compared by identity."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf) if isinstance(leaf, np.ndarray | list) else leaf


def _reads_together(loader: PrivateDataLoader) -> bool:
    """Return True if a data set of the user's reads all records of a batch in one call."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


# -- stops by the user's code ---------------------------------------------------------------------

_STOPPED = "{} at batch_idx={}, by a rule that reads no record"
_STEPS = {"current_epoch", "global_step", "is_last_batch", "num_training_batches", "training"}
_PLAN = {"max_epochs", "max_steps", "min_epochs", "min_steps", "estimated_stepping_batches"}
_RANKS = {"global_rank", "is_global_zero", "local_rank", "node_rank", "num_nodes", "world_size"}
_COUNTERS = _STEPS | _PLAN | _RANKS
_ALL = frozenset(name for kind in (complex, dict, int, list, str) for name in dir(kind))
_OPERATORS = {*_ALL, "__bool__", "__matmul__"} - {*dir(object)} | {"__eq__", "__getattribute__"}


class _Read(BaseException):
    """A rule that is asked has read something; no ``except Exception`` of the user's catches it."""


class PublicStops:
    """Finds that a stop reads no record: the rule is asked once more, and given nothing to read.

    ``on_train_batch_start`` that returns -1 and ``training_step`` that returns None leave a charged
    batch without a release. Which batches these are can come from the records; then nothing can be
    said of ε, and the run is void. But the rule may also be one of counters. It is asked again at the
    same counters of the Trainer, of which all else is out of reach, with a batch of which nothing can
    be read, in the present state of the module and in two others, in which what follows the records is
    far away. Only if it stops each time, having tried to read nothing, is the stop public.

    Args:
        trainer: of the fit.
        run: notes the end.
        twins: what follows the records in the module, as far as comparisons have found it.
    """

    def __init__(self, trainer: Trainer, run: PrivateRun, twins: TwinState) -> None:
        self._trainer, self._run, self._twins = trainer, run, twins
        self._module: LightningModule = trainer.lightning_module
        self._batch_idx: int | None = None  # of a batch that training_step has not been given
        self.has_stopped = False
        """The fit is over by a public stop, with a charge that was spent on nothing."""

    def begin(self, batch_idx: int) -> None:
        """Note that a batch is charged."""
        self._batch_idx = batch_idx

    def enter_forward(self) -> None:
        """Note that ``training_step`` is given the batch."""
        self._batch_idx = None

    def at_epoch_end(self) -> None:
        """End the fit if ``on_train_batch_start`` has ended the epoch, by a rule that reads no record."""
        index, hook = self._batch_idx, self._module.on_train_batch_start
        if index is not None and self._is_public(lambda batch: hook(batch, index) == -1):
            self._stop("on_train_batch_start returned -1", index)

    def after_forward(
        self, step: PrivateStep, training_step: Callable[..., Any], batch: object, *others: Any
    ) -> None:
        """End the fit if ``training_step`` returns no loss, by a rule that reads no record.

        Where records run alone it may use the batch, as long as it asks for no value of them.

        Args:
            step: runs the chunk again.
            training_step: has returned no loss.
            batch: its first argument.
            others: the rest of them.

        Raises:
            StopIteration: which ends Lightning's epoch.
        """

        def forward(batch: object) -> Any:
            return training_step(batch, *others)

        is_public = self._is_public(lambda nothing: loss_in(forward(nothing)) is None)
        if is_public or self._is_public(lambda _: step.has_no_loss(forward, batch)):
            self._stop("training_step returned None", others[0] if others else "?")
            raise StopIteration

    def _stop(self, event: str, batch_idx: object) -> None:
        self.has_stopped = True
        end_training(self._trainer, self._run, _STOPPED.format(event, batch_idx))

    def _is_public(self, stops: Callable[[object], bool]) -> bool:
        if not self._run.config.checks.comparisons:
            return False  # what follows the records is unknown
        return all(self._stops_where(sign, stops) for sign in (0.0, 1.0, -1.0))

    def _stops_where(self, sign: float, stops: Callable[[object], bool]) -> bool:
        reads: list[str] = []
        module, trainer = self._module, self._trainer
        with self._twins.far(sign):
            try:
                module.trainer = cast(Trainer, _Counters(trainer, reads))
                with suppress(Exception, _Read):
                    return stops(_unreadable(reads)) and not reads
            finally:
                module.trainer = trainer
        return False


class _Counters:
    """A Trainer of which only the counters can be read."""

    def __init__(self, trainer: Trainer, reads: list[str]) -> None:
        self.__dict__.update(_trainer=trainer, _reads=reads)

    def __getattr__(self, name: str) -> Any:
        if name in _COUNTERS:
            return getattr(self._trainer, name)
        self._reads.append(name)
        raise _Read

    def __setattr__(self, name: str, value: object) -> None:
        self.__getattr__("")


def _unreadable(reads: list[str]) -> object:
    """Return what stands for a batch; an attempt to read anything of it is noted and is an error."""

    def read(*args: object) -> NoReturn:
        reads.append("batch")
        raise _Read

    return type("_Unreadable", (), dict.fromkeys(_OPERATORS, read))()
