"""The Lightning side: one mixin over Lightning's strategies, through public methods only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.accounting.voided import VoidedRunError
from lightning_dp.gradients import AbstractGradientEngine, UnsupportedModelError
from lightning_dp.private_run import PrivateRun
from lightning_dp.query import Query
from lightning_dp.report.documents import in_checkpoint
from lightning_dp.report.of_run import report
from lightning_dp.sampling.loader import PrivateDataLoader
from lightning_dp.strategies.checks import (
    check_model,
    check_optimizers,
    check_single_loader,
    check_trainer,
    check_training_mode,
)
from lightning_dp.strategies.data import make_private_loader
from lightning_dp.strategies.earlier_training import EarlierTraining
from lightning_dp.strategies.first_step import FirstStep
from lightning_dp.strategies.fit_reports import FitReports
from lightning_dp.strategies.ignored_targets import IGNORED, IgnoredTargets
from lightning_dp.strategies.journal_folder import default_folder
from lightning_dp.strategies.monitors import Monitors
from lightning_dp.strategies.private_step import PrivateStep
from lightning_dp.strategies.probe import heed, probe
from lightning_dp.strategies.publish import Publisher
from lightning_dp.strategies.together import Place, common_fault
from lightning_dp.strategies.weak_settings import weak_settings
from lightning_dp.training_step import is_differentiable, loss_in
from lightning_dp.warnings import warn
from lightning_dp.world import World

__all__ = ["CHECKPOINT_KEY", "DifferentialPrivacyStrategy"]

CHECKPOINT_KEY = "lightning_dp"

_BUDGET_REACHED = "privacy budget reached"

_BETWEEN_FITS: dict[str, Any] = {
    "_step": None,
    "_first": None,
    "_loader": None,
    "_publisher": None,
    "_monitors": None,
    "_earlier": None,
    "_step_arguments": ((), {}),
}


class DifferentialPrivacyStrategy(Strategy):
    """Makes the strategy it is mixed into train privately.

    The order of one step: ``on_train_batch_start`` charges the ledger, ``backward`` bounds each
    chunk's gradients, ``optimizer_step`` noises the sum and hands the optimizer an ordinary
    ``p.grad``.
    """

    global_rank: int
    world_size: int

    _run: PrivateRun | None = None
    _step: PrivateStep | None = None
    _first: FirstStep | None = None
    _loader: PrivateDataLoader | None = None
    _publisher: Publisher | None = None
    _reports: FitReports | None = None
    _monitors: Monitors | None = None
    _earlier: EarlierTraining | None = None
    _ledger_dir: Path | None = None
    _accumulate_before: int | None = None
    _is_probed: bool = False
    _ignored: IgnoredTargets | None = None
    _step_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    # -- set-up ----------------------------------------------------------------------------

    def use_privacy(self, run: PrivateRun) -> None:
        """Train under this configuration and charge this ledger."""
        if self._run is not None and self._run is not run:
            raise ValueError(
                "Privacy is configured twice: on the strategy (privacy=...) and by a "
                "DifferentialPrivacy callback, or by two callbacks. Keep one of them."
            )
        self._run = run

    @property
    def private_run(self) -> PrivateRun:
        """Ledger, ε and report of this strategy."""
        if self._run is None:
            raise ValueError(
                f"{type(self).__name__} has no privacy configuration: give it "
                "privacy=PrivacyConfig(...), or add the DifferentialPrivacy callback."
            )
        return self._run

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        run = self.private_run
        check_trainer(trainer)
        self._journal_folder()
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        check_optimizers(self.optimizers, module)
        check_model(module)
        optimizer, engine = self.optimizers[0], run.config.engine
        self._step = PrivateStep(module, optimizer, engine, self.root_device, self.wrap_engine)
        run.engine = self._step.engine_description
        self._step.check(run.config.resolved_estimator())
        self._first = FirstStep(module, optimizer)

    def wrap_engine(self, engine: AbstractGradientEngine) -> AbstractGradientEngine:
        """What stands between the gradient engine and the clipping: an audit's canaries."""
        return engine

    def make_reports(self) -> FitReports | None:
        """The report files of the fit; an audit has none."""
        return FitReports(self._trainer, self.private_run, self._journal_folder())

    def configure_ddp(self) -> None:
        """No DDP wrapper: its reducer would all-reduce raw gradients. Rank 0's weights for all."""
        module = self.lightning_module
        assert module is not None
        for tensor in (*module.parameters(), *module.buffers()):  # buffers that are not saved too
            torch.distributed.broadcast(tensor.detach(), 0)

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        if not (trainer.training and trainer.state.fn == TrainerFn.FITTING):
            return dataloader
        run = self.private_run
        if self._accumulate_before is None:
            self._accumulate_before = trainer.accumulate_grad_batches
        self._loader = make_private_loader(
            dataloader, trainer, self._accumulate_before, run, self._world()
        )
        assert run.batches is not None
        trainer.accumulate_grad_batches = run.batches.chunks_per_step  # FullBatch() has its own
        return self._loader

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, run = self._trainer, self.private_run
        check_single_loader(trainer.train_dataloader, self._loader)
        check_training_mode(trainer.lightning_module)
        assert run.batches is not None
        self._warn(weak_settings(run.config, run.batches))
        self._monitors = Monitors(trainer, run, self._warn)
        self._monitors.begin()
        planned_steps = max(0, trainer.estimated_stepping_batches - trainer.global_step)
        folder = None if trainer.fast_dev_run else self._journal_folder()  # type: ignore[attr-defined]
        earlier = EarlierTraining(trainer.lightning_module, run)
        run.start(planned_steps, self._world(), folder, trainer.global_step)
        if self.is_global_zero:
            earlier.begin(folder)
            self._earlier = earlier
        self._publisher = Publisher(trainer, run)
        self._publisher.publish()
        self._reports = self.make_reports()
        if planned_steps and run.mechanism is not None and run.exhausted:
            self._stop(
                f"the budget (ε = {run.config.target_epsilon} at δ = {run.config.target_delta}, "
                f"{epsilon_text(run.epsilon)} of it spent) does not allow one step with noise multiplier "
                f"{run.mechanism.next_noise_multiplier:.4g}; raise target_epsilon or the noise"
            )
            if self.is_global_zero:
                warn(f"No training step was made: {run.stop_reason}.")

    def _world(self) -> World:
        return World(
            rank=self.global_rank,
            size=self.world_size,
            all_reduce=self._sum_over_ranks,
            broadcast=self.broadcast,
        )

    def _sum_over_ranks(self, vector: Tensor) -> Tensor:
        total: Tensor = self.reduce(vector, reduce_op="sum")
        return total

    def _journal_folder(self) -> Path:
        """Where a new journal goes: found once in a fit, since the process may change its directory."""
        if self._ledger_dir is None:
            given = self.private_run.ledger_dir
            self._ledger_dir = default_folder(self._trainer) if given is None else given
        return self._ledger_dir

    # -- one step --------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._check_monitors()
        run, mechanism = self.private_run, self.private_run.mechanism
        assert self._loader is not None and self._step is not None and mechanism is not None
        assert self._first is not None
        chunk = self._loader.current
        if chunk is None or chunk.index != batch_idx:
            raise RuntimeError(
                f"Batch {batch_idx} of the epoch is not the one that the loader handed out last. "
                "Something fetches batches ahead or skips them; private batches go one by one."
            )
        if chunk.first and mechanism.is_under_way:
            self._agree(self._step.fault(mechanism), Place.NO_RELEASE)
            self._replan_after_waste()
        if chunk.first and run.exhausted:
            self._stop(_BUDGET_REACHED)
            raise StopIteration  # what Lightning raises itself to leave the epoch
        if chunk.first:
            self._step.parameters.check_optimizer(self.optimizers[0])
            self._step.parameters.check_model()
            self._warn(self._first.between_steps())
        self._probe_isolation(batch)
        planned = mechanism.plan.rate(mechanism.step)
        if chunk.sample_rate != planned:
            raise RuntimeError(
                f"The batch was drawn with rate {chunk.sample_rate}, but step {mechanism.step} is "
                f"planned with {planned}: an optimizer step was left out. "
                f"{mechanism.plan.estimator} needs one for each batch."
            )
        self._step.begin(chunk)
        if chunk.first:
            mechanism.ask(self._step.params)
            self.barrier("privacy charge")  # on the disk before any rank touches the batch

    def _probe_isolation(self, batch: Any) -> None:
        """Once in a fit, before anything is charged: refuse a model that couples records."""
        if self._is_probed or not self.private_run.config.isolation_probe:
            return
        self._is_probed = True
        module, step, run = self.lightning_module, self._step, self.private_run
        assert module is not None and step is not None
        found = self.broadcast(probe(module, batch, step, run.config.engine))
        run.isolation = str(found)
        heed(found, may_warn=self.is_global_zero)
        self._ignored = IgnoredTargets(found)

    def _replan_after_waste(self) -> None:
        """A charge was spent on nothing: find anew what the budget affords of the same plan."""
        warn(
            "A batch was charged and never released: optimizer.step() was not called for it. "
            "Call it once per batch; accumulate with Trainer(accumulate_grad_batches=...)."
        )
        if self.private_run.replan(self._world()):
            self._publisher = Publisher(self._trainer, self.private_run)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._step is not None and self.private_run.mechanism is not None
        assert self._first is not None
        self._step_arguments = (args, kwargs)
        if self._ignored is not None and args:
            self._suspect(self._ignored.in_batch(args[0]))
        self._step.before_forward(self.private_run.mechanism)
        self._first.enter_forward()
        with self._step.watching():
            output = super().training_step(*args, **kwargs)
        self._first.leave_forward()
        self._check_monitors()
        if self._is_automatic:
            return self._with_loss(output)
        if self._step.is_unreleased(self.private_run.mechanism):
            # Lightning is going to wait for all ranks, and another one may be at its release.
            self._agree(self._step.fault(self.private_run.mechanism), Place.NO_RELEASE)
        return output

    def _suspect(self, found: list[Tensor]) -> None:
        mechanism, step = self.private_run.mechanism, self._step
        assert step is not None and mechanism is not None
        step.suspect(mechanism, found, IGNORED.format(type(self.lightning_module).__name__))

    def _with_loss(self, output: Any) -> Any:
        """Where there is no loss, one that gives no gradient: found at the end of the step.

        Lightning's own errors, in some settings, would end the run without withdrawing ε.
        """
        none = torch.zeros((), device=self.root_device)
        if output is None:
            return none
        if isinstance(output, Mapping) and output.get("loss") is None:
            return {**output, "loss": none}
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        mechanism, step = self.private_run.mechanism, self._step
        assert step is not None and mechanism is not None and self._first is not None
        self._first.leave_forward()  # in manual optimization training_step has not returned yet
        if not is_differentiable(closure_loss):
            return closure_loss  # a chunk with records stays without an answer
        if self._ignored is not None:
            self._suspect(self._ignored.in_loss(closure_loss))
        try:
            return self._answer(closure_loss, optimizer, *args, **kwargs)
        except UnsupportedModelError as error:  # shown by the records of this chunk
            if self.private_run.steps <= 1:
                raise  # nothing was released, so there is nothing to withdraw
            step.note(str(error))
            return closure_loss

    def _answer(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward pass and bound what it leaves."""
        mechanism, step = self.private_run.mechanism, self._step
        assert step is not None and mechanism is not None
        if not step.runs_backward:
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        elif args or kwargs or is_overridden("backward", self.lightning_module):
            step.backward(closure_loss, mechanism.query, keep_graph=True)
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        else:
            loss = self._backward_of_the_engine(closure_loss, mechanism.query)
        args, kwargs = self._step_arguments
        forward_again = partial(self._forward_again, args, kwargs)
        step.answer(mechanism, self._undo_loss_division(), forward_again)
        return loss

    def _backward_of_the_engine(self, loss: Tensor, query: Query | None) -> Tensor:
        """``Strategy.backward`` with the engine in the place of ``loss.backward()``."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None and self._step is not None
        self.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        self._step.backward(loss, query, keep_graph=False)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _undo_loss_division(self) -> float:
        """Lightning divides the loss by accumulate_grad_batches in automatic optimization."""
        return float(self._trainer.accumulate_grad_batches) if self._is_automatic else 1.0

    @property
    def _is_automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    def _forward_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        loss: Tensor | None = loss_in(super().training_step(*args, **kwargs))
        return loss

    def _agree(self, fault: str | None, place: Place = Place.RELEASE) -> None:
        """All ranks go on, or real records failed a check on one of them, and the run is void.

        Raises:
            VoidedRunError: on all ranks.
        """
        if (voided := self.private_run.voided) is not None:  # and somebody caught the error
            raise VoidedRunError(voided)
        reason = common_fault(
            fault,
            place,
            rank=self.global_rank,
            size=self.world_size,
            device=self.root_device,
            sum_over_ranks=lambda vector: self.reduce(vector, reduce_op="sum"),
            broadcast=self.broadcast,
        )
        if reason is None:
            return
        try:
            self.private_run.void(reason)
        finally:  # also if the disk is full
            self._leave_the_model()  # an error while callbacks hear of this one ends the teardown
        raise VoidedRunError(reason)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        step, mechanism, first = self._step, self.private_run.mechanism, self._first
        assert step is not None and mechanism is not None and first is not None
        evaluated = False

        def private_closure() -> Any:
            nonlocal evaluated
            if evaluated:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluated its closure twice; each evaluation would "
                    "use the data again. Use an optimizer that evaluates it once."
                )
            evaluated = True
            result = closure()
            step.release(mechanism, optimizer, self._agree)
            first.enter_update()
            return result

        output = super().optimizer_step(optimizer, private_closure, model, **kwargs)
        self._warn(first.leave_update(optimizer))
        self._after_step()
        return output

    def _check_monitors(self) -> None:
        if self._monitors is not None:
            self._monitors.check()

    def _warn(self, messages: Iterable[str]) -> None:
        for message in messages:
            if self.is_global_zero:
                warn(message)

    def _after_step(self) -> None:
        run, publisher = self.private_run, self._publisher
        assert publisher is not None
        if run.is_over_early:
            self._stop(_BUDGET_REACHED)
        publisher.publish(final=run.stop_reason is not None)

    def _stop(self, reason: str) -> None:
        """End training as EarlyStopping does; no minimum of epochs or steps overrides a budget."""
        trainer = self._trainer
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        if self.private_run.stop_reason is None:
            self.private_run.stop_reason = reason

    def on_train_end(self) -> None:
        super().on_train_end()
        self._check_monitors()
        mechanism = self.private_run.mechanism
        if self._step is not None and mechanism is not None and mechanism.is_under_way:
            self._agree(self._step.fault(mechanism), Place.NO_RELEASE)
        if self._publisher is not None:
            self._publisher.publish(final=True)
        if self._reports is not None:
            self._reports.finish(may_warn=True)

    # -- checkpoints and the end -----------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if (reason := self.private_run.voided) is not None:
            raise VoidedRunError(reason)
        self._check_monitors()
        checkpoint[CHECKPOINT_KEY] = self.private_run.state_dict()
        if self.is_global_zero:  # who writes the file
            content = report(self.private_run)
            checkpoint[CHECKPOINT_KEY]["report"] = in_checkpoint(content)
            if self._reports is not None:
                self._reports.write(content)
            if self._earlier is not None:
                self._earlier.released(checkpoint.get("state_dict", {}))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if not isinstance(checkpoint, Mapping) or CHECKPOINT_KEY not in checkpoint:
            raise ValueError(
                f"The checkpoint {checkpoint_path} holds no privacy ledger: what it has spent is "
                "unknown, so training cannot go on from it privately. If its weights never saw "
                "private data, load them into the model and fit without ckpt_path."
            )
        state = checkpoint[CHECKPOINT_KEY]
        self.private_run.load_state_dict(state, self._journal_folder(), self._world())
        return checkpoint

    def _leave_the_model(self) -> None:
        if self._step is not None:
            self._step.detach()
        if self._earlier is not None:
            self._earlier.released()
        if self._run is not None:
            self._run.stop()

    def teardown(self) -> None:
        self._leave_the_model()
        if self._accumulate_before is not None:
            self._trainer.accumulate_grad_batches = self._accumulate_before
        self.__dict__.update(_BETWEEN_FITS)
        self._accumulate_before, self._is_probed, self._ledger_dir = None, False, None
        super().teardown()
        if self._reports is not None:
            self._reports.finish(may_warn=False)  # an exception may be on its way

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: nothing of a fit under way, which holds what is not noised yet."""
        return {**super().__getstate__(), **_BETWEEN_FITS}
