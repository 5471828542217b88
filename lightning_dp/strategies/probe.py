"""The isolation probe at the first batch of a fit, and the watch over the batches after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp._checks import MisconfigurationError
from lightning_dp._warnings import warn
from lightning_dp._world import World
from lightning_dp.gradients import ALONE, UnsupportedModelError
from lightning_dp.gradients.base import without_alone
from lightning_dp.isolation import BY_CONSTRUCTION, Isolation, probe_isolation
from lightning_dp.isolation.collated import CollatedPool
from lightning_dp.isolation.ignored import CURE, target_means
from lightning_dp.isolation.kinds import NO_KINDS
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.phases import Phases
from lightning_dp.isolation.probe import probe_again
from lightning_dp.isolation.synthetic import leaves_of
from lightning_dp.isolation.transfer import TransferHooks
from lightning_dp.isolation.undone import UNDONE, changed_by_a_record, times_alone
from lightning_dp.isolation.whole_copies import whole_copy
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import FullBatch
from lightning_dp.strategies.host_copies import HostCopies
from lightning_dp.strategies.step import PrivateStep

__all__ = ["Probe"]

Seen: TypeAlias = Callable[[Tensor], Tensor]  # returns the same tensor, or one like it on the host

_IGNORED = (
    "{}: the loss divides by the number of targets that it does not ignore (ignore_index) in the "
    f"whole batch, and a batch has ignored ones, so records change each other's gradients. {CURE}."
)
_SYNTHETIC = (
    "(Found on a synthetic batch. If it is wrong, leave the check out with isolation_probe=False.)"
)
_LATER = (
    "{}: since its attributes changed (a phase, a weight, a counter), records of one batch change each "
    "other's gradients or what outlives the step, on synthetic records: {}."
)
_ALONE = f"{ALONE} A loss that compares records then compares a record with itself."


class Probe:
    """Refuses a model that couples records, at the first batch; of what it allows, watches the next.

    Args:
        module: the user's model.
        step: the model's side of the fit's steps.
        run: is told the outcome.
        world: the processes; the outcome of the lead one holds for all.
    """

    def __init__(
        self, module: LightningModule, step: PrivateStep, run: PrivateRun, world: World
    ) -> None:
        self._module, self._step, self._run, self._world = module, step, run, world
        self._is_first = True
        self._ignored = _IgnoredTargets()
        self.has_folded_rows = False  # rows of a batch are not records
        self.kinds = NO_KINDS  # of synthetic records, which the model took
        self._phases: Phases | None = None
        trainer = module.trainer
        hooks = TransferHooks(module, trainer.datamodule, trainer)  # type: ignore[attr-defined]
        self.copies = HostCopies(is_plain=not hooks.overridden)

    def at_first_batch(self, batch: Any, pools: Callable[[], list[CollatedPool] | None]) -> None:
        """Refuse a model that couples records, once in a fit and before anything is charged.

        Args:
            batch: of which shapes are used.
            pools: returns synthetic batches where the rows of one are not records, else None.
        """
        if self._step.one_record:
            self._run.isolation = BY_CONSTRUCTION
        if self._is_first:
            self._is_first = False
            self._look(batch, pools)

    def _look(self, batch: Any, pools: Callable[[], list[CollatedPool] | None]) -> None:
        if self._step.one_record:
            if self._run.config.isolation_probe:
                self._warn_of_undone_state(batch)
            return
        made = None
        if self._run.config.isolation_probe or self._run.config.spot_checks:
            made = pools()
            self.has_folded_rows = self._world.broadcast(made is not None)
        if not self._run.config.isolation_probe:
            self._step.engine.settle(self._world)
            return
        found = self._world.broadcast(self._found(batch, made))
        self._step.engine.settle(self._world)
        self._run.isolation = str(found)
        # Synthetic records may have shown another engine.
        self._run.engine = self._step.engine.watched.description
        if self._step.one_record:
            self._run.isolation = BY_CONSTRUCTION
            self._warn_of_time(batch, made)
        _raise_or_warn(found, self._module, may_warn=self._world.is_lead)
        self.kinds = found.kinds
        self._ignored = _IgnoredTargets(found.is_mean_of_targets, found.ignored, found.sentinels)
        if found.outcome == "isolated" and not (self.has_folded_rows or self._world.is_sharded):
            self._phases = Phases(self._module)

    def _found(self, batch: Any, pools: list[CollatedPool] | None) -> Isolation | None:
        """Probe the model; of a sharded one a whole copy, on rank 0."""
        step, run, size = self._step, self._run, self._world.size
        module: LightningModule | None = self._module
        if self._world.is_sharded:
            with step.engine.off():
                module = whole_copy(self._module, is_wanted=self._world.is_lead)
        return None if module is None else _probe(module, batch, pools, step, run, size)

    def at_new_phase(self, batch: Any) -> None:
        """Probe in short again when the model's public attributes say that something new begins.

        What is found voids the run with this step. No process asks another whether it is due: they
        may see other attributes.
        """
        if self._phases is None or not self._phases.is_new():
            return
        with self._step.engine.off():
            found = probe_again(
                self._module,
                batch,
                engine=self._step.engine.choice,
                trained=self._step.engine.trained_names,
                trainer=self._module.trainer,
                alone=self._world.size > 1,
                is_count_public=isinstance(self._run.config.sampling, FullBatch),
            )
        if found.outcome in ("coupled", "kept"):
            self._step.note(_LATER.format(type(self._module).__name__, found.reason))

    def _warn_of_time(self, batch: Any, pools: list[CollatedPool] | None) -> None:
        """Warn that the records run one after the other, and how much longer that takes."""
        if not self._world.is_lead:
            return
        with self._step.engine.off():
            passes = Passes(self._module, "one_by_one", (), self._module.trainer, made_up=True)
            times = times_alone(passes, batch, pools)
        longer = (
            "" if times is None else f", about {times:.1f} times as long (forward passes, made up)"
        )
        reason = self._step.engine.choice.reasons[-1].text
        warn(f"Each record runs alone, one after the other{longer}. {reason}", topic="one-by-one")

    def _warn_of_undone_state(self, batch: Any) -> None:
        if not self._world.is_lead:
            return
        with self._step.engine.off():
            passes = Passes(self._module, "one_by_one", (), self._module.trainer)
            names = changed_by_a_record(passes, batch)
        if names:
            warn(UNDONE.format(", ".join(names[:5])), topic="one-by-one")

    def watch_batch(self, batch: Any) -> None:
        """Suspect a batch of what would couple its records, by its values."""
        self._suspect(self._ignored.in_batch(batch, self.copies.of))

    def watch_loss(self, loss: Tensor) -> None:
        """Suspect a batch by its loss, before the backward pass."""
        if n := self._step.records_in_hand:
            self._suspect(self._ignored.in_loss(loss, n, self.copies.of))

    def _suspect(self, found: list[Tensor]) -> None:
        self._step.suspect(found, _IGNORED.format(type(self._module).__name__))


def _probe(
    module: LightningModule,
    batch: Any,
    pools: list[CollatedPool] | None,
    step: PrivateStep,
    run: PrivateRun,
    processes: int,
) -> Isolation:
    """Probe the model with synthetic records of the batch's shapes; nothing of it is changed."""
    plan = run.batches
    chunks = 1 if plan is None else plan.chunks_per_step * processes
    expected = 0 if plan is None else round(plan.expected_batch_size / chunks)
    with step.engine.off():
        return probe_isolation(
            module,
            batch,
            engine=step.engine.choice,
            trained=step.engine.trained_names,
            trainer=module.trainer,
            expected=expected,
            pools=pools,
            loss_graph_check=run.config.loss_graph_check,
            is_count_public=isinstance(run.config.sampling, FullBatch),
        )


def _raise_or_warn(found: Isolation, module: LightningModule, *, may_warn: bool) -> None:
    """Go on, with a warning where the data decide, or raise.

    Raises:
        UnsupportedModelError: if no gradient engine handles the model.
        MisconfigurationException: if it couples records, keeps what it saw of them, or could not
            be probed.
    """
    if found.is_doubtful and may_warn:
        warn(
            "The loss divides by the number of targets that are not ignored (-100) in the whole "
            "batch, so an ignored target of one record changes the gradients of the others. If "
            "your data has such targets, the run ends at the first batch that has one, and its ε "
            f"is withdrawn. {CURE}.",
            topic="ignored-targets",
        )
    alone = f" {_ALONE}" if module.automatic_optimization else ""  # which it needs
    if found.outcome == "refused":
        reason = found.reason if module.automatic_optimization else without_alone(found.reason)
        raise UnsupportedModelError(reason, topic=found.topic)
    if found.outcome == "coupled":
        raise MisconfigurationError(
            f"Records of one batch change each other's gradients: {found.reason}. Clipping "
            f"does not bound what a record does then, and ε would not hold.{alone} {_SYNTHETIC}",
            topic="coupled-records",
        )
    if found.outcome == "not probed":
        raise MisconfigurationError(
            f"Isolation could not be probed: {found.reason}. Whether records of one batch change each "
            "other's gradients (a contrastive loss, statistics of the batch) is unknown, and if they "
            "do, ε does not hold. Look at it with lightning_dp.audit.check_isolation() on "
            "records that are not private; then leave the probe out with isolation_probe=False, "
            f"which the report says.{alone}",
            topic="not-probed",
        )
    if found.outcome == "kept":
        raise MisconfigurationError(
            f"ε would not hold: {found.reason}. {_SYNTHETIC}", topic="kept-records"
        )


@dataclass(frozen=True)
class _IgnoredTargets:
    """Looks for targets that the loss ignores, where the isolation probe found that they couple records.

    What it finds stays a tensor, so that no device is waited for until the step ends; and not then,
    where the targets came with the batch as they are.

    Args:
        is_mean_of_targets: the loss is a mean over targets by torch's own functions.
        by_model: how many targets of every record the model itself ignores, for each mean.
        sentinels: for losses written by hand, places in a batch and values that may not stand there.
    """

    is_mean_of_targets: bool = False
    by_model: tuple[int, ...] = ()
    sentinels: tuple[tuple[int, int], ...] = ()

    def in_loss(self, loss: Tensor, n: int, seen: Seen) -> list[Tensor]:
        """Tell for each mean over targets whether it ignores one more; before the backward pass."""
        means = target_means(loss) if self.is_mean_of_targets else []
        allowed = self.by_model if len(self.by_model) == len(means) else (0,) * len(means)
        pairs = zip(means, allowed, strict=True)
        return [mean.ignores_other_than(number, n, seen) for mean, number in pairs]

    def in_batch(self, batch: Any, seen: Seen) -> list[Tensor]:
        """Tell the same for losses written by hand, by the values that the probe tried."""
        leaves = leaves_of(batch) if self.sentinels else []
        return [
            (seen(leaves[place]) == sentinel).any()
            for place, sentinel in self.sentinels
            if place < len(leaves) and not torch.is_floating_point(leaves[place])
        ]
