"""The parts of one fit, from ``setup`` to ``teardown``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision

from lightning_dp._waiting_losses import WaitingLosses
from lightning_dp._world import World
from lightning_dp.gradients.watched_model import WrapEngine
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.alone import RecordsAlone
from lightning_dp.strategies.earlier_training import EarlierTraining
from lightning_dp.strategies.early_end import Agreement
from lightning_dp.strategies.engine import engine_for
from lightning_dp.strategies.isolation import IsolationWatch, RunStep
from lightning_dp.strategies.monitors import Monitors
from lightning_dp.strategies.optimizers import Optimizers
from lightning_dp.strategies.step import PrivateStep
from lightning_dp.strategies.update_guard import (
    GradientGuard,
    SameParameters,
    StepGuard,
    UnwrittenWeights,
    watched,
)

__all__ = ["Fit", "begin_fit"]


@dataclass(frozen=True)
class Fit:
    """The parts exist together or not at all.

    Args:
        folder: where a new journal goes.
        step: the accounts of the current step, and the model under its engine.
        weights: watches which parameters training_step writes to.
        isolation: compares runs of a batch that differ in some of its records.
        monitors: watches who acts on metrics of the training data.
        earlier: knows which ledgers trained the model before.
        agree: ends the fit on all ranks, or on none.
        alone: runs the records of a batch one by one, if the engine asks for it.
        steps: lets the optimizer step with what was released, and raises at other steps.
        edits: compares the gradient that the optimizer uses with what was released.
        plugin: the strategy's precision plugin, whose clipping is seen.
        optimizers: the private one and the public ones.
        losses: those of a step with several optimizers.
    """

    folder: Path
    step: PrivateStep
    weights: UnwrittenWeights
    isolation: IsolationWatch
    monitors: Monitors
    earlier: EarlierTraining
    agree: Agreement
    alone: RecordsAlone
    steps: StepGuard
    edits: GradientGuard
    plugin: Precision
    optimizers: Optimizers
    losses: WaitingLosses


def begin_fit(
    trainer: Trainer,
    run: PrivateRun,
    world: World,
    folder: Path,
    wrap: WrapEngine,
    leave: Callable[[], None],
    run_step: RunStep,
    optimizers: Optimizers,
) -> Fit:
    """Attach the gradient engine to the model, and put the parts together.

    Args:
        trainer: its model and its optimizers are set up and checked.
        run: is told which engine was chosen.
        world: the processes of the job.
        folder: where a new journal goes.
        wrap: puts something between the engine and the clipping.
        leave: called when the run is void.
        run_step: runs training_step.
        optimizers: which one is private.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    optimizer, public = optimizers.private, optimizers.public_parameters
    parameters = SameParameters(module, optimizer, public)
    engine = engine_for(run, trainer, world, parameters.trained, optimizers, wrap)
    step = PrivateStep(module, parameters, engine, strategy.root_device)
    run.optimizers = optimizers.description
    edits = GradientGuard(trainer, step.params, is_declared=run.config.gradient_edits is not None)
    return Fit(
        folder,
        step,
        UnwrittenWeights(module, public),
        IsolationWatch(trainer, step, run, world, run_step),
        Monitors(trainer, run),
        EarlierTraining(module, run),
        Agreement(run, world, strategy.root_device, strategy.broadcast, leave),
        RecordsAlone(module),
        StepGuard(optimizer),
        edits,
        watched(strategy.precision_plugin, edits, optimizer),
        optimizers,
        WaitingLosses(step.params, public),
    )
