"""Private training, as a mixin over Lightning's strategies: the fit, the order of a step, the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._files import local_folder
from lightning_dp._refusals import RefusedRun, RefusedSetting, text_of, warn
from lightning_dp._world import World, gathered, scattered
from lightning_dp.accounting.base import epsilon_text
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.estimators import MeanGradient
from lightning_dp.gradients import AbstractGradientEngine, CoupledLossError, UnsupportedModelError
from lightning_dp.gradients.base import without_alone
from lightning_dp.gradients.batches import is_differentiable, loss_in, with_loss
from lightning_dp.gradients.graph import WaitingLosses
from lightning_dp.isolation.requirements import MisconfigurationError, check_model
from lightning_dp.mechanism import Mechanism
from lightning_dp.plan.advice import Setting, optimizer_setting
from lightning_dp.report.run_report import EarlierTraining
from lightning_dp.run import PrivateRun
from lightning_dp.sampling.stream import Stream
from lightning_dp.strategies.checks import (
    Monitors,
    Optimizers,
    check_estimator,
    check_sharding,
    check_trainer,
    check_trainer_and_strategy,
    find_optimizers,
    is_model_parallel,
    weak_settings,
)
from lightning_dp.strategies.data import (
    before_transfer,
    changed_rows,
    check_rate,
    chunk_in_hand,
    make_private_loader,
    private_loader_of,
)
from lightning_dp.strategies.hooks import PrivacyCallback
from lightning_dp.strategies.isolation import IsolationWatch
from lightning_dp.strategies.step import (
    Agreement,
    FitEngine,
    PrivateStep,
    RecordRuns,
    SyncPoint,
    end_training,
)
from lightning_dp.strategies.update_guard import (
    GradientGuard,
    ParameterGuard,
    StepGuard,
    watched,
)

if TYPE_CHECKING:
    from lightning_dp.report import PrivacyReport

__all__ = ["DifferentialPrivacyStrategy", "install"]

_OTHER_LOSS = (
    "backward() of {} starts from something else than the loss that it is given, once and as it is. "
    "The private gradient is that of the loss: scale it in training_step."
)
_REMINDER = "DifferentialPrivacy (training goes on WITHOUT PRIVACY if it is left out)"
_Kind = TypeVar("_Kind", bound="DifferentialPrivacyStrategy")


@dataclass(frozen=True)
class Fit:
    """The parts exist together or not at all.

    Args:
        trainer, module, run: of the fit.
        folder: where a new journal goes.
        step: the accounts of the current step, and the model under its engine.
        isolation: compares runs of a batch that differ in some of its records.
        monitors: watches who acts on metrics of the training data.
        earlier: knows which ledgers trained the model before.
        agree: ends the fit on all ranks, or on none.
        alone: runs the records of a batch one by one, if the engine asks for it.
        steps: lets the optimizer step with what was released, and raises at other steps.
        edits: compares the gradient that the optimizer uses with what was released.
        plugin: the strategy's precision plugin, whose clipping is seen.
        optimizers: the private one and the public ones.
        losses: those of a step with several optimizers; None with one.
    """

    trainer: Trainer
    module: LightningModule
    run: PrivateRun
    folder: Path
    step: PrivateStep
    isolation: IsolationWatch
    monitors: Monitors
    earlier: EarlierTraining
    agree: Agreement
    alone: RecordRuns
    steps: StepGuard
    edits: GradientGuard
    plugin: Precision
    optimizers: Optimizers
    losses: WaitingLosses | None

    @property
    def mechanism(self) -> Mechanism:
        """Makes the steps of the run, once the plan is declared."""
        if (mechanism := self.run.mechanism) is None:
            raise RefusedRun(
                "A private step needs a plan, which is declared when training starts.",
                topic="strategy-alone",
            )
        return mechanism


class DifferentialPrivacyStrategy(Strategy):
    """Makes the strategy it is mixed into train privately.

    The order of one step: ``on_train_batch_start`` charges the ledger, ``backward`` bounds each
    chunk's gradients, ``optimizer_step`` noises the sum and hands the optimizer an ordinary
    ``p.grad``.
    """

    global_rank: int
    world_size: int

    _run: PrivateRun | None = None  # until it is given
    _given: tuple[PrivacyCallback, ...] = ()  # with the run
    _callbacks: tuple[PrivacyCallback, ...] = ()  # of the latest fit: checkpoints may follow it
    _fit: Fit | None = None  # between fits
    _watch: IsolationWatch | None = None  # of the latest fit, whose model hooks may still write to
    _sharded: Sequence[
        Tensor
    ] = ()  # trained parameters of the latest fit: checkpoints may follow it

    # -- set-up ----------------------------------------------------------------------------

    def use_privacy(self, run: PrivateRun, *callbacks: PrivacyCallback) -> None:
        """Train under this configuration and charge this ledger.

        Args:
            run: configuration and ledger.
            callbacks: hear of the run; one gives way to one of its kind among the Trainer's.
        """
        if self._run is not None and self._run is not run:
            raise RefusedSetting(
                "Privacy is configured twice: on the strategy (privacy=...) and by a "
                "DifferentialPrivacy callback, or by two callbacks. Keep one of them.",
                topic="strategy-alone",
            )
        self._run, self._given = run, callbacks

    @property
    def private_run(self) -> PrivateRun:
        """Configuration and ledger; ε and the report are read from it."""
        if self._run is None:
            raise RefusedSetting(
                f"{type(self).__name__} has no privacy configuration: give it "
                "privacy=PrivacyConfig(...), or add the DifferentialPrivacy callback.",
                topic="strategy-alone",
            )
        return self._run

    @property
    def _module(self) -> LightningModule:
        if (module := self.lightning_module) is None:
            raise RefusedRun(
                f"{type(self).__name__} has no LightningModule: fit one with a Trainer.",
                topic="strategy-alone",
            )
        return module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _now(self) -> Fit:
        """The current fit."""
        if self._fit is None:
            raise RefusedRun(
                f"{type(self).__name__} trains only while its Trainer fits a model.",
                topic="strategy-alone",
            )
        return self._fit

    @cached_property
    def _folder(self) -> Path:
        """The folder of a new journal; found once in a fit, since the process may change folders."""
        return self.private_run.ledger_dir or _default_folder(self._trainer)

    @cached_property
    def _accumulate(self) -> int:
        """``accumulate_grad_batches`` as the user set it; during the fit it is the plan's."""
        return self._trainer.accumulate_grad_batches

    @property
    def precision_plugin(self) -> Precision:
        plugin = super().precision_plugin
        return plugin if self._fit is None else self._fit.plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        Strategy.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        run = self.private_run
        check_trainer(trainer, run.config)
        folder = self._folder
        self._callbacks = _among(trainer, self._given)
        super().setup(trainer)
        named = run.config.private_optimizer
        optimizers = find_optimizers(self.optimizers, self._module, named, self.world_size)
        check_sharding(self, self._module, run.config, optimizers)  # before anything is charged
        check_model(self._module, may_be_sharded=is_model_parallel(self))
        self._fit = self._begin(trainer, optimizers, folder)
        self._sharded = self._fit.step.params if self._fit.step.engine.is_sharded else ()
        check_estimator(run.config, self._fit.step, self._module, optimizers)

    def _begin(self, trainer: Trainer, optimizers: Optimizers, folder: Path) -> Fit:
        """Attach the gradient engine to the model, and put the parts together."""
        run, module, world, device = self.private_run, self._module, self._world(), self.root_device
        private, public = optimizers.private, optimizers.public_parameters
        parameters = ParameterGuard(module, private, public)
        trained = parameters.trained
        engine = FitEngine(module, run.config, world, trained, public, self.wrap_engine)
        run.engine, run.optimizers = engine.passes.description, optimizers.description
        if engine.passes.compiled_note is not None:
            rank_zero_info(f"privacy: {engine.passes.compiled_note}.")
        step = PrivateStep(module, parameters, engine, device)
        edits = GradientGuard(
            trainer, trained, is_declared=run.config.checks.gradient_edits is not None
        )
        return Fit(
            trainer,
            module,
            run,
            folder,
            step,
            IsolationWatch(trainer, step, run, world, self._step_again),
            Monitors(trainer, run),
            EarlierTraining(module, run),
            # A void run leaves the model at once: an error in on_exception would end the teardown.
            Agreement(run, world, device, self.broadcast, self._leave_the_model),
            RecordRuns(module),
            StepGuard(private),
            edits,
            watched(self.precision_plugin, edits, private),
            optimizers,
            WaitingLosses(trained, public) if optimizers.public else None,
        )

    def wrap_engine(self, engine: AbstractGradientEngine) -> AbstractGradientEngine:
        """Put something between the gradient engine and the clipping: an audit's canaries."""
        return engine

    def configure_ddp(self) -> None:
        """Give all ranks the weights of rank 0, without DDP's wrapper.

        Its reducer would add up raw gradients over the ranks.
        """
        # Not the state_dict: it leaves some buffers out.
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            torch.distributed.broadcast(tensor.detach(), 0)

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        if not (trainer.training and trainer.state.fn == TrainerFn.FITTING):
            return dataloader
        run = self.private_run
        loader = make_private_loader(dataloader, trainer, self._accumulate, run, self._world())
        assert run.batches is not None
        trainer.accumulate_grad_batches = run.batches.chunks_per_step  # FullBatch() has its own
        return loader

    def on_train_start(self) -> None:
        super().on_train_start()
        fit = self._now
        trainer, run = fit.trainer, fit.run
        private_loader_of(trainer)
        assert run.batches is not None
        for topic, message in weak_settings(run.config, run.batches):
            if self.is_global_zero:
                warn(message, topic=topic)
        fit.monitors.begin()
        steps_before = self._steps_before()
        planned_steps = self._planned_steps(steps_before)
        folder = None if trainer.fast_dev_run else fit.folder  # type: ignore[attr-defined]
        run.start(planned_steps, self._world(), folder, steps_before)
        run.setting = _setting_of(run, fit.optimizers, planned_steps, self.world_size)
        if self.is_global_zero and (line := fit.earlier.begin(folder)) is not None:
            rank_zero_info(line)
        for callback in self._callbacks:
            callback.on_privacy_start(trainer, run, fit.folder)
        if planned_steps and run.exhausted:
            _end_before_first_step(trainer, run, fit.mechanism)

    def _steps_before(self) -> int:
        """Return the private steps that this Trainer has made: it counts those of all optimizers."""
        steps = self._trainer.global_step
        return self.private_run.step_to_continue if steps and self._now.optimizers.public else steps

    def _planned_steps(self, steps_before: int) -> float:
        """Return the private steps that it is still going to make, or more where that is not known."""
        trainer = self._trainer
        planned = trainer.estimated_stepping_batches - steps_before
        if self._now.optimizers.public and trainer.max_steps != -1:
            # Of the steps that are left, all may be private ones.
            planned = min(planned, trainer.max_steps - trainer.global_step)
        return max(0, planned)

    def _world(self) -> World:
        shards = is_model_parallel(self)
        rank, size = self.global_rank, self.world_size
        return World(rank, size, self._sum_over_ranks, self.broadcast, is_sharded=shards)

    def _sum_over_ranks(self, vector: Tensor) -> Tensor:
        if self.world_size > 1:  # Strategy.reduce() has a barrier before each sum
            torch.distributed.all_reduce(vector)
        return vector

    def _step_again(self, batch: Any, *others: Any) -> Any:
        return super().training_step(batch, *others)

    # -- the order of a step ---------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        fit = self._now
        run, mechanism = fit.run, fit.mechanism
        fit.monitors.check()
        loader = private_loader_of(fit.trainer)
        chunk = chunk_in_hand(loader, batch_idx)
        if chunk.first and mechanism.is_begun:
            self._agree_without_step()
            self._replan_after_waste()
        if chunk.first and run.exhausted:
            end_training(fit.trainer, run)
            raise StopIteration  # what Lightning raises itself to leave the epoch
        if chunk.first:
            fit.step.parameters.check_optimizer(fit.optimizers.private)
            fit.step.parameters.check_model()
        fit.isolation.before_first_charge(chunk)
        check_rate(chunk, mechanism)
        if fit.losses is not None:
            fit.losses.drop()
        fit.step.begin(chunk)
        if chunk.first:
            mechanism.ask(fit.step.held)
            self.barrier("privacy charge")  # on the disk before any rank touches the batch
        if (fault := changed_rows(loader, look=not chunk.index)) is not None:
            fit.step.note(fault)
        fit.isolation.at_chunk(chunk)
        fit.isolation.stops.begin(batch_idx)

    def _agree_without_step(self) -> None:
        """Go on, or end the run, where a batch was charged and the optimizer did not step."""
        fit = self._now
        mechanism = fit.mechanism
        fault = fit.step.fault(mechanism)
        if fit.step.is_unreleased(mechanism):
            fault = fault or fit.edits.skip()
        fit.agree(fault, SyncPoint.NO_RELEASE)

    def _replan_after_waste(self) -> None:
        """Find again what the budget affords of the plan, after a charge that was spent on nothing."""
        warn(
            "A batch was charged and never released: optimizer.step() was not called for it. "
            "Call it once per batch; accumulate in automatic optimization, with "
            "Trainer(accumulate_grad_batches=...).",
            topic="batches-and-steps",
        )
        if self.private_run.replan(self._world()):
            for callback in self._callbacks:
                callback.on_privacy_replan(self._trainer, self.private_run)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        fit = self._now
        mechanism = fit.mechanism
        fit.isolation.stops.enter_forward()
        fit.isolation.before_forward(args)
        if fit.step.one_record:
            return self._one_by_one(*args, **kwargs)
        run, others = super().training_step, args[1:]
        fit.step.before_forward(
            mechanism, lambda batch: loss_in(run(batch, *others, **kwargs)), args[0]
        )
        fit.step.parameters.enter_forward()
        output = self._watched(*args, **kwargs)
        if fit.step.one_record:
            return output  # which took over
        fit.isolation.after_forward()
        if fit.losses is not None:
            self._answer_waiting(fit.losses)
        fit.step.leave_forward()
        fit.monitors.check()
        if fit.module.automatic_optimization:
            if loss_in(output) is None:
                fit.isolation.stops.after_forward(fit.step, run, *args)
            # Lightning's own errors, in some settings, would end the run without withdrawing ε; a
            # loss that gives no gradient is found at the end of the step.
            return with_loss(output, torch.zeros((), device=self.root_device))
        if fit.step.is_unreleased(mechanism):
            # Lightning is going to wait for all ranks, and another one may be at its release.
            fit.agree(fit.step.fault(mechanism), SyncPoint.NO_RELEASE)
        return output

    def _watched(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` under the engine; once more under the next, if that one refuses."""
        step, run = self._now.step, super().training_step
        if step.one_record:
            return self._one_by_one(batch, *args, **kwargs)
        try:
            return step.run(lambda batch: run(batch, *args, **kwargs), batch)
        except UnsupportedModelError as reason:
            step.pass_on(reason)
        step.begin_again()
        return self._watched(batch, *args, **kwargs)

    def _one_by_one(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` and the backward pass for each record of the batch alone."""
        fit, step = self._now, self._now.step
        records = private_loader_of(self._trainer).alone
        forwards = fit.alone.forwards(partial(self._forward_alone, args, kwargs), records)
        fit.step.parameters.enter_forward()
        is_first, mechanism = fit.run.steps_begun <= 1, fit.mechanism
        mechanism.begin_noise(step.held)
        try:
            step.answer_each(mechanism, forwards, is_first=is_first)
        except UnsupportedModelError as error:
            if is_first:
                raise
            step.note(error.text)
        fit.step.leave_forward()
        fit.monitors.check()
        return fit.alone.together(self.root_device)

    def _forward_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], record: Any) -> Any:
        """Run ``training_step`` on a batch of one record, which is not on the device yet."""
        record = before_transfer(self._trainer, self.precision_plugin.convert_input(record))
        return super().training_step(self.batch_to_device(record), *args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        fit = self._now
        if fit.losses is not None:
            return self._backward_of_several(fit.losses, closure_loss, args, kwargs)
        fit.step.leave_forward()  # in manual optimization training_step has not returned yet
        if not is_differentiable(closure_loss):
            return closure_loss  # a chunk with records stays without an answer
        if fit.step.one_record:  # they had theirs; this is for the hooks
            return self._backward_of_user(closure_loss, optimizer, *args, **kwargs)
        try:
            fit.step.check_loss(closure_loss)
            with fit.step.engine.passes.as_written():  # checkpoints run parts of the model again
                return self._answer(closure_loss, optimizer, *args, **kwargs)
        except UnsupportedModelError as error:
            self._note_refusal(error)
        return closure_loss

    def _backward_of_user(
        self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run what the module goes back by, and note a fault if it is not the gradient of the loss."""
        if not is_overridden("backward", self._module):
            return super().backward(loss, optimizer, *args, **kwargs)
        seeds: list[Tensor] = []
        handle = loss.register_hook(seeds.append)  # type: ignore[no-untyped-call]
        found = super().backward(loss, optimizer, *args, **kwargs)
        handle.remove()
        is_scaled = getattr(self.precision_plugin, "scaler", None) is not None
        if len(seeds) != 1 or not (is_scaled or bool((seeds[0] == 1).all())):
            self._now.step.note(_OTHER_LOSS.format(type(self._module).__name__))
        return found

    def _note_refusal(self, error: UnsupportedModelError) -> None:
        """Note a refusal that the records of a chunk show, or raise it: before anything is released."""
        if self.private_run.steps_begun > 1:
            self._now.step.note(error.text)
        elif type(error) is CoupledLossError or self._module.automatic_optimization:
            raise error
        else:
            raise UnsupportedModelError(without_alone(error.text), topic=error.topic) from error

    def _backward_of_several(
        self, losses: WaitingLosses, loss: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Go back to public parameters; what reaches private ones waits for their optimizer."""
        fit, module = self._now, self._module
        if args or kwargs.keys() - {"retain_graph"} or is_overridden("backward", module):
            raise MisconfigurationError(
                "With several optimizers, call self.manual_backward(loss), with no argument except "
                "retain_graph, and leave backward() of the LightningModule as it is.",
                topic="several-optimizers",
            )
        if not is_differentiable(loss):
            return loss
        waits = fit.step.awaits(fit.mechanism) and losses.reaches_private(loss)
        if waits:
            fit.step.leave_forward()
        return self._backward_by(partial(losses.add, waits=waits), loss)

    def _backward_by(self, go_back: Callable[[Tensor], None], loss: Tensor) -> Tensor:
        """``Strategy.backward`` with ``go_back(loss)`` in the place of ``loss.backward()``."""
        module, plugin = self._now.module, self.precision_plugin
        self.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        go_back(loss)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _answer_waiting(self, losses: WaitingLosses) -> None:
        """Answer from the losses of a step with several optimizers, in one backward pass."""
        fit, loss = self._now, losses.take()
        if loss is None or not fit.step.awaits(mechanism := fit.mechanism):
            return
        try:
            fit.step.check_loss(loss)
            mechanism.begin_noise(fit.step.held)
            fit.step.backward(loss, mechanism.query, keep_graph=False)
            fit.step.answer(mechanism, 1.0)
        except UnsupportedModelError as error:
            self._note_refusal(error)

    def _answer(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward pass and bound what it leaves."""
        fit = self._now
        mechanism = fit.mechanism
        step, is_automatic = fit.step, fit.module.automatic_optimization
        mechanism.begin_noise(step.held)
        # Lightning has divided the loss by it: not in manual optimization.
        divisor = float(fit.trainer.accumulate_grad_batches) if is_automatic else 1.0
        backward = partial(step.backward, query=mechanism.query, divisor=divisor)
        if args or kwargs or is_overridden("backward", fit.module):
            backward(closure_loss, keep_graph=True)
            with step.engine.passes.engine.repeating():
                loss = self._backward_of_user(closure_loss, optimizer, *args, **kwargs)
        else:
            loss = self._backward_by(partial(backward, keep_graph=False), closure_loss)
        step.answer(mechanism, divisor)
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        fit = self._now
        mechanism, run = fit.mechanism, fit.run
        if optimizer in fit.optimizers.public:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def private_closure() -> None:
            fit.edits.note_state(optimizer)  # an optimizer may begin its step before
            closure()  # its loss has no noise: an optimizer that sets its step size by it must not see it
            if fit.losses is not None:
                self._answer_waiting(fit.losses)
            fit.isolation.settle(fit.agree)
            fit.step.release(mechanism, optimizer, fit.agree)
            fit.steps.allow(check_update)
            fit.edits.begin()

        def check_update() -> None:
            fit.agree(fit.edits.fault(optimizer), SyncPoint.UPDATE, unused=fit.edits.skipped + 1)

        fit.isolation.before_hook("on_before_optimizer_step", optimizer)
        fit.edits.look_at_state(optimizer)
        fit.steps.expect()
        output = super().optimizer_step(optimizer, private_closure, model, **kwargs)
        fit.isolation.after_update()
        fit.edits.note_state(optimizer)
        if run.is_over_early:
            end_training(fit.trainer, run)
        for callback in self._callbacks:
            callback.on_privacy_step(fit.trainer, run)
        return output

    def on_train_end(self) -> None:
        super().on_train_end()
        fit = self._now
        trainer, run = fit.trainer, fit.run
        fit.monitors.check()
        if fit.mechanism.is_begun and not fit.isolation.stops.has_stopped:
            self._agree_without_step()
        fault = changed_rows(private_loader_of(trainer)) or fit.isolation.fault
        fit.agree(fault, SyncPoint.END)
        if self.is_global_zero:
            fit.earlier.released()
        for callback in self._callbacks:
            callback.on_privacy_end(trainer, run)

    # -- checkpoints and the end -----------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        run, fit = self.private_run, self._fit
        if run.voided is not None:
            raise VoidedRunError(run.voided)
        if fit is not None:
            fit.monitors.check()
        watch = self._watch if fit is None else fit.isolation
        if watch is not None and (reason := watch.unexplained()) is not None:
            raise MisconfigurationError(reason, topic="kept-records")
        if fit is not None and self.is_global_zero:
            fit.earlier.released(checkpoint.get("state_dict", {}))
        lead, params = self.is_global_zero, self._sharded
        content = _write_record(checkpoint, run, is_writer=lead, sharded=params)
        if content is not None:
            for callback in self._callbacks:
                callback.on_privacy_save(run, content)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if fit is not None and self.is_global_zero:
            run.ledger.note_saved(0 if run.mechanism is None else run.mechanism.ahead)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        with self._without_guard():
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if isinstance(checkpoint, Mapping):
            checkpoint.get("callbacks", {}).pop(_REMINDER, None)
        if self._trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        record = _record_in(checkpoint, checkpoint_path)
        if self._sharded:
            record = {**record, "mechanism": scattered(record["mechanism"], self._sharded)}
        self.private_run.load_state_dict(record, self._folder, self._world())
        return checkpoint

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._without_guard():
            state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    def _without_guard(self) -> AbstractContextManager[None]:
        """Let torch step an optimizer with zeros, to make the state that a sharded one is read into."""
        fit = self._fit if self._sharded else None
        return nullcontext() if fit is None else fit.steps.off()

    def _leave_the_model(self) -> None:
        if self._fit is not None:
            self._fit.step.detach()
            self._fit.steps.remove()
            if self.is_global_zero:
                self._fit.earlier.released()
        if self._run is not None:
            self._run.stop()

    def teardown(self) -> None:
        fit = self._fit
        self._leave_the_model()
        if "_accumulate" in vars(self):
            self._trainer.accumulate_grad_batches = self._accumulate
        for name in ("_fit", "_folder", "_accumulate"):
            vars(self).pop(name, None)
        if fit is not None:
            fit.isolation.end()
        stream = getattr(self._trainer.train_dataloader, "dataset", None)
        if isinstance(stream, Stream):
            stream.close()
        super().teardown()
        if fit is not None:
            fit.isolation.follow()
            self._watch = fit.isolation
            for callback in self._callbacks:
                callback.on_privacy_teardown(self._trainer, self.private_run)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: nothing of a fit, which holds what is not noised yet."""
        return {**super().__getstate__(), "_fit": None, "_watch": None, "_sharded": ()}


def _among(trainer: Trainer, given: Sequence[PrivacyCallback]) -> tuple[PrivacyCallback, ...]:
    """Return the Trainer's own, and of those given the ones of another kind."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    own = [each for each in callbacks if isinstance(each, PrivacyCallback)]
    return (*own, *(new for new in given if not any(isinstance(each, type(new)) for each in own)))


def _end_before_first_step(trainer: Trainer, run: PrivateRun, mechanism: Mechanism) -> None:
    """Stop the Trainer where the budget does not allow one step, and warn."""
    z = f"{mechanism.next_noise_multiplier:.4g}"
    why = f"does not allow one step with noise multiplier {z}; raise target_epsilon or the noise"
    if z == "inf":  # it was to be calibrated, and an earlier fit took all
        why = (
            "leaves nothing to calibrate noise for; raise target_epsilon, or give noise_multiplier"
        )
    budget = f"the budget (ε = {run.config.target_epsilon} at δ = {run.config.target_delta}"
    end_training(trainer, run, f"{budget}, {epsilon_text(run.epsilon)} of it spent) {why}")
    if trainer.is_global_zero:
        warn(f"No training step was made: {run.stop_reason}.", topic="budget-exhausted")


def _setting_of(
    run: PrivateRun, optimizers: Optimizers, planned_steps: float, processes: int
) -> Setting:
    """Return the setting of a fit whose plan was declared, at its first step."""
    config, batches, mechanism = run.config, run.batches, run.mechanism
    assert batches is not None and mechanism is not None
    plan, is_alone = mechanism.plan, run.steps == mechanism.step and not run.ledger.runs.external
    estimator = config.resolved_estimator()
    optimizer, size, weight_size = optimizer_setting(optimizers.private)
    step = mechanism.step
    clips = estimator.traits.estimates_gradient
    fixed = vars(estimator).get("max_grad_norm", math.inf) if clips else math.inf
    noise = plan.noise_multiplier(step)
    return Setting(
        num_records=batches.num_records,
        batch_size=plan.rate(step) * batches.num_records,
        steps=step + run.remaining_steps,
        planned_steps=step + planned_steps,
        steps_per_epoch=batches.steps_per_epoch,
        noise_multiplier=noise if math.isfinite(noise) else 0.0,
        clip_norm=fixed if mechanism.clip_norm is None else mechanism.clip_norm,
        size=size,
        weight_size=weight_size,
        target_epsilon=config.target_epsilon,
        target_delta=config.target_delta,
        relation=config.relation,
        optimizer=None if optimizers.public else optimizer,
        is_constant=plan.is_plain
        and type(estimator) is MeanGradient
        and config.clipping.is_constant
        and is_alone,
        moves_clip_norm=not config.clipping.is_constant,
        steps_before=step,
        is_calibrated=config.noise_multiplier is None,
        processes=processes,
        unit=config.unit_word,
        growth=plan.noise.growth,
    )


# -- the record on disk ----------------------------------------------------------------------------


def _default_folder(trainer: Trainer) -> Path:
    """Return ``<default_root_dir>/privacy``, absolute, if it is one of this machine."""
    try:
        return local_folder("default_root_dir", trainer.default_root_dir) / "privacy"
    except ValueError as error:
        raise RefusedSetting(
            f"{text_of(error)} Or say where the privacy journal goes: "
            "DifferentialPrivacy(ledger_dir=...), a local folder; everything else stays in "
            "default_root_dir.",
            topic="journal-folder",
        ) from None


def _write_record(
    checkpoint: dict[str, Any],
    run: PrivateRun,
    *,
    is_writer: bool,
    sharded: Sequence[Tensor] = (),
) -> PrivacyReport | None:
    """Put the run's record into a checkpoint; on the process that writes it, return its report."""
    from lightning_dp.report.files import CHECKPOINT_KEY, in_checkpoint
    from lightning_dp.report.run_report import report_of_run

    record = run.state_dict()
    if sharded:  # whole vectors, for any number of processes
        record["mechanism"] = gathered(record["mechanism"], sharded)
    checkpoint[CHECKPOINT_KEY] = record
    if "callbacks" in checkpoint:  # those that a later Trainer misses are named in its warning
        checkpoint["callbacks"][_REMINDER] = {}
    if not is_writer:
        return None
    content = report_of_run(run)
    checkpoint[CHECKPOINT_KEY]["report"] = in_checkpoint(content)
    return content


def _record_in(checkpoint: Any, path: Any) -> dict[str, Any]:
    """Return the record of a checkpoint that a private run goes on from."""
    from lightning_dp.report.files import CHECKPOINT_KEY

    if not isinstance(checkpoint, Mapping) or CHECKPOINT_KEY not in checkpoint:
        raise RefusedSetting(
            f"The checkpoint {path} holds no privacy ledger: what it has spent is "
            "unknown, so training cannot go on from it privately. If its weights never saw "
            "private data, load them into the model and fit without ckpt_path.",
            topic="checkpoint-without-ledger",
        )
    record: dict[str, Any] = checkpoint[CHECKPOINT_KEY]
    return record


# -- installation ----------------------------------------------------------------------------------


def install(
    trainer: Trainer,
    run: PrivateRun,
    *callbacks: PrivacyCallback,
    kind: type[_Kind] = DifferentialPrivacyStrategy,  # type: ignore[assignment]
) -> _Kind:
    """Make a Trainer train privately; call it in a callback's ``setup``, before data is asked for.

    Args:
        trainer: whose fit is about to begin.
        run: configuration and ledger.
        callbacks: hear of the run without being among the Trainer's callbacks.
        kind: the mixin.

    Raises:
        MisconfigurationException: if its strategy cannot be made private.
    """
    check_trainer_and_strategy(trainer)
    strategy = _private(trainer.strategy, kind)
    strategy.use_privacy(run, *callbacks)
    return strategy


def _private(strategy: Strategy, kind: type[_Kind]) -> _Kind:
    """Make the strategy a private one in place, by its class."""
    # Another object would lose what the Trainer has connected to this one already.
    if not isinstance(strategy, DifferentialPrivacyStrategy):
        strategy.__class__ = _private_class(kind, type(strategy))
    assert isinstance(strategy, kind)
    return strategy


def _private_class(kind: type, base: type) -> Any:
    return type(f"Private{base.__name__}", (kind, base), {"__reduce_ex__": _reduce})


def _reduce(strategy: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle an object whose class has no name to import as what the class is made from."""
    reduced: Any = object.__reduce_ex__(strategy, max(2, protocol))  # (constructor, class, state)
    return _new, type(strategy).__bases__, *reduced[2:]


def _new(kind: type, base: type) -> Any:
    made = _private_class(kind, base)
    return made.__new__(made)
