"""The Lightning side: one mixin over Lightning's strategies, through public methods only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._checks import check_model, check_training_mode
from lightning_dp._training_step import loss_in, with_loss
from lightning_dp._warnings import warn
from lightning_dp._world import World
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.boundary import Query
from lightning_dp.gradients import AbstractGradientEngine, UnsupportedModelError
from lightning_dp.gradients.passes import is_differentiable
from lightning_dp.mechanism import Mechanism
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.checks import (
    check_optimizers,
    check_trainer,
    evaluated_once,
    weak_settings,
)
from lightning_dp.strategies.data import (
    before_transfer,
    check_rate,
    chunk_in_hand,
    make_private_loader,
    private_loader_of,
)
from lightning_dp.strategies.early_end import Place, end_before_first_step, end_training
from lightning_dp.strategies.hooks import PrivacyCallback, among
from lightning_dp.strategies.storage import default_folder, record_in, write_record

if TYPE_CHECKING:
    from lightning_dp.strategies.fit import Fit

__all__ = ["DifferentialPrivacyStrategy"]


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

    # -- set-up ----------------------------------------------------------------------------

    def use_privacy(self, run: PrivateRun, *callbacks: PrivacyCallback) -> None:
        """Train under this configuration and charge this ledger.

        Args:
            run: configuration and ledger.
            callbacks: hear of the run; one gives way to one of its kind among the Trainer's.
        """
        if self._run is not None and self._run is not run:
            raise ValueError(
                "Privacy is configured twice: on the strategy (privacy=...) and by a "
                "DifferentialPrivacy callback, or by two callbacks. Keep one of them."
            )
        self._run, self._given = run, callbacks

    @property
    def private_run(self) -> PrivateRun:
        """Configuration and ledger; ε and the report are read from it."""
        if self._run is None:
            raise ValueError(
                f"{type(self).__name__} has no privacy configuration: give it "
                "privacy=PrivacyConfig(...), or add the DifferentialPrivacy callback."
            )
        return self._run

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError(
                f"{type(self).__name__} has no LightningModule: fit one with a Trainer."
            )
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _now(self) -> Fit:
        """The current fit."""
        if self._fit is None:
            raise RuntimeError(f"{type(self).__name__} trains only while its Trainer fits a model.")
        return self._fit

    @property
    def _mechanism(self) -> Mechanism:
        if self.private_run.mechanism is None:
            raise RuntimeError(
                "A private step needs a plan, which is declared when training starts."
            )
        return self.private_run.mechanism

    @cached_property
    def _folder(self) -> Path:
        """The folder of a new journal; found once in a fit, since the process may change folders."""
        return self.private_run.ledger_dir or default_folder(self._trainer)

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
        from lightning_dp.strategies.fit import begin_fit  # all that only a fit needs

        run = self.private_run
        check_trainer(trainer)
        folder = self._folder
        self._callbacks = among(trainer, self._given)
        super().setup(trainer)
        check_optimizers(self.optimizers, self._module)
        check_model(self._module)
        # A void run leaves the model at once: an error in on_exception would end the teardown.
        leave = self._leave_the_model
        world, wrap = self._world(), self.wrap_engine
        self._fit = begin_fit(trainer, run, world, folder, wrap, leave, self._forward_again)
        self._fit.step.check(run.config.resolved_estimator())

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
        trainer, run, fit = self._trainer, self.private_run, self._now
        private_loader_of(trainer)
        if not fit.step.one_record:
            check_training_mode(trainer.lightning_module)
        assert run.batches is not None
        self._warn(weak_settings(run.config, run.batches))
        fit.monitors.begin()
        planned_steps = max(0, trainer.estimated_stepping_batches - trainer.global_step)
        folder = None if trainer.fast_dev_run else fit.folder  # type: ignore[attr-defined]
        run.start(planned_steps, self._world(), folder, trainer.global_step)
        if self.is_global_zero:
            fit.earlier.begin(folder)
        for callback in self._callbacks:
            callback.on_privacy_start(trainer, run, fit.folder)
        if planned_steps and run.exhausted:
            end_before_first_step(trainer, run, self._mechanism)

    def _world(self) -> World:
        return World(self.global_rank, self.world_size, self._sum_over_ranks, self.broadcast)

    def _sum_over_ranks(self, vector: Tensor) -> Tensor:
        total: Tensor = self.reduce(vector, reduce_op="sum")
        return total

    # -- one step --------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        run, mechanism, fit = self.private_run, self._mechanism, self._now
        fit.monitors.check()
        loader = private_loader_of(self._trainer)
        chunk = chunk_in_hand(loader, batch_idx)
        if chunk.first and mechanism.is_begun:
            self._agree_without_step()
            self._replan_after_waste()
        if chunk.first and run.exhausted:
            end_training(self._trainer, run)
            raise StopIteration  # what Lightning raises itself to leave the epoch
        if chunk.first:
            fit.step.parameters.check_optimizer(self.optimizers[0])
            fit.step.parameters.check_model()
            self._warn(fit.first.between_steps())
        fit.probe.at_first_batch(batch)
        fit.records.at_first_batch(loader, chunk)
        check_rate(chunk, mechanism)
        fit.step.begin(chunk)
        if chunk.first:
            fit.probe.at_new_phase(batch)
            mechanism.ask(fit.step.params)
            self.barrier("privacy charge")  # on the disk before any rank touches the batch
        fit.records.after_charge(loader, chunk)
        fit.spots.at_chunk(chunk)

    def _agree_without_step(self) -> None:
        """Go on, or end the run, where a batch was charged and the optimizer did not step."""
        fit, mechanism = self._now, self._mechanism
        fault = fit.step.fault(mechanism)
        if fit.step.is_unreleased(mechanism):
            fault = fault or fit.edits.skip()
        fit.agree(fault, Place.NO_RELEASE)

    def _replan_after_waste(self) -> None:
        """Find again what the budget affords of the plan, after a charge that was spent on nothing."""
        warn(
            "A batch was charged and never released: optimizer.step() was not called for it. "
            "Call it once per batch; accumulate with Trainer(accumulate_grad_batches=...)."
        )
        if self.private_run.replan(self._world()):
            for callback in self._callbacks:
                callback.on_privacy_replan(self._trainer, self.private_run)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        mechanism, fit = self._mechanism, self._now
        if fit.step.one_record:
            return self._one_by_one(*args, **kwargs)
        if args:
            fit.probe.watch_batch(args[0])
            fit.latest.see(args[0])
        fit.spots.before_forward(args)
        fit.step.before_forward(mechanism, partial(self._forward_again, args, kwargs))
        fit.first.enter_forward()
        fit.later.enter_forward()
        with fit.step.watching():
            output = super().training_step(*args, **kwargs)
        self._leave_forward()
        fit.monitors.check()
        if self._is_automatic:
            # Lightning's own errors, in some settings, would end the run without withdrawing ε; a
            # loss that gives no gradient is found at the end of the step.
            return with_loss(output, torch.zeros((), device=self.root_device))
        if fit.step.is_unreleased(mechanism):
            # Lightning is going to wait for all ranks, and another one may be at its release.
            fit.agree(fit.step.fault(mechanism), Place.NO_RELEASE)
        return output

    def _one_by_one(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` and the backward pass for each record of the batch alone."""
        fit, step = self._now, self._now.step
        fit.latest.see(batch)
        records = private_loader_of(self._trainer).alone
        forwards = fit.alone.forwards(partial(self._forward_alone, args, kwargs), records)
        fit.first.enter_forward()
        fit.later.enter_forward()
        is_first = self.private_run.steps <= 1
        try:
            step.answer_each(self._mechanism, forwards, is_first=is_first)
        except UnsupportedModelError as error:
            if is_first:
                raise
            step.note(str(error))
        self._leave_forward()
        fit.monitors.check()
        return fit.alone.together(self.root_device)

    def _forward_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], record: Any) -> Any:
        """Run ``training_step`` on a batch of one record, which is not on the device yet."""
        record = before_transfer(self._trainer, self.precision_plugin.convert_input(record))
        return super().training_step(self.batch_to_device(record), *args, **kwargs)

    def _leave_forward(self) -> None:
        """Compare the parameters with what they were when training_step began."""
        fit = self._now
        fit.first.leave_forward()
        fit.spots.leave_forward()
        if (fault := fit.later.fault()) is not None:
            fit.step.note(fault)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        fit = self._now
        self._leave_forward()  # in manual optimization training_step has not returned yet
        if not is_differentiable(closure_loss):
            return closure_loss  # a chunk with records stays without an answer
        if fit.step.one_record:  # they had theirs; this is for the hooks
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        fit.probe.watch_loss(closure_loss)
        try:
            fit.step.check_loss(closure_loss)
            return self._answer(closure_loss, optimizer, *args, **kwargs)
        except UnsupportedModelError as error:  # shown by the records of this chunk
            if self.private_run.steps <= 1:
                raise  # nothing was released, so there is nothing to withdraw
            fit.step.note(str(error))
            return closure_loss

    def _answer(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward pass and bound what it leaves."""
        mechanism, step = self._mechanism, self._now.step
        if not step.runs_backward:
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        elif args or kwargs or is_overridden("backward", self.lightning_module):
            step.backward(closure_loss, mechanism.query, keep_graph=True)
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        else:
            loss = self._backward_of_the_engine(closure_loss, mechanism.query)
        step.answer(mechanism, self._undo_loss_division())
        return loss

    def _backward_of_the_engine(self, loss: Tensor, query: Query | None) -> Tensor:
        """``Strategy.backward`` with the engine in the place of ``loss.backward()``."""
        module, plugin = self._module, self.precision_plugin
        self.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        self._now.step.backward(loss, query, keep_graph=False)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _undo_loss_division(self) -> float:
        """Return the number by which Lightning divides the loss: not in manual optimization."""
        return float(self._trainer.accumulate_grad_batches) if self._is_automatic else 1.0

    @property
    def _is_automatic(self) -> bool:
        return self._module.automatic_optimization

    def _forward_again(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Tensor | None:
        loss: Tensor | None = loss_in(super().training_step(*args, **kwargs))
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        mechanism, fit, run = self._mechanism, self._now, self.private_run
        once = evaluated_once(closure, optimizer)

        def private_closure() -> None:
            fit.edits.note_state(optimizer)  # an optimizer may begin its step before
            once()  # its loss has no noise: an optimizer that sets its step size by it must not see it
            fit.spots.settle(fit.agree)
            fit.step.release(mechanism, optimizer, fit.agree, check_update)
            fit.edits.begin()
            fit.first.enter_update()

        def check_update() -> None:
            fit.agree(fit.edits.fault(optimizer), Place.UPDATE, unused=fit.edits.skipped + 1)

        fit.edits.look_at_state(optimizer)
        fit.step.expect_update()
        output = super().optimizer_step(optimizer, private_closure, model, **kwargs)
        self._warn(fit.first.leave_update(optimizer))
        fit.edits.note_state(optimizer)
        if run.is_over_early:
            end_training(self._trainer, run)
        for callback in self._callbacks:
            callback.on_privacy_step(self._trainer, run)
        return output

    def _warn(self, messages: Iterable[str]) -> None:
        for message in messages:
            if self.is_global_zero:
                warn(message)

    def on_train_end(self) -> None:
        super().on_train_end()
        trainer, run, fit = self._trainer, self.private_run, self._now
        fit.monitors.check()
        if self._mechanism.is_begun:
            self._agree_without_step()
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
            fit.agree(fit.latest.fault(checkpoint), Place.SAVE)
        content = write_record(checkpoint, run, is_writer=self.is_global_zero)
        if content is not None:
            for callback in self._callbacks:
                callback.on_privacy_save(run, content)
        if fit is not None and self.is_global_zero:
            fit.earlier.released(checkpoint.get("state_dict", {}))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        record = record_in(checkpoint, checkpoint_path)
        self.private_run.load_state_dict(record, self._folder, self._world())
        return checkpoint

    def _leave_the_model(self) -> None:
        if self._fit is not None:
            self._fit.step.detach()
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
        super().teardown()
        if fit is not None:
            for callback in self._callbacks:
                callback.on_privacy_teardown(self._trainer, self.private_run)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: nothing of a fit, which holds what is not noised yet."""
        return {**super().__getstate__(), "_fit": None}
