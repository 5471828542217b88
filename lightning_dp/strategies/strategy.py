"""The order of one private step, as a mixin over Lightning's strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._checks import MisconfigurationError
from lightning_dp._training_step import is_differentiable, loss_in, with_loss
from lightning_dp._waiting_losses import WaitingLosses
from lightning_dp._warnings import warn
from lightning_dp.gradients import CoupledLossError, UnsupportedModelError
from lightning_dp.gradients.base import without_alone
from lightning_dp.strategies.data import (
    before_transfer,
    changed_rows,
    check_rate,
    chunk_in_hand,
    private_loader_of,
)
from lightning_dp.strategies.early_end import Place, end_training
from lightning_dp.strategies.private_fit import PrivateFitStrategy
from lightning_dp.strategies.update_guard import evaluated_once

__all__ = ["DifferentialPrivacyStrategy"]


class DifferentialPrivacyStrategy(PrivateFitStrategy):
    """Makes the strategy it is mixed into train privately.

    The order of one step: ``on_train_batch_start`` charges the ledger, ``backward`` bounds each
    chunk's gradients, ``optimizer_step`` noises the sum and hands the optimizer an ordinary
    ``p.grad``.
    """

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
        if not chunk.index and (fault := changed_rows(loader)) is not None:
            fit.step.note(fault)
        fit.isolation.at_chunk(chunk)
        fit.isolation.stops.begin(batch_idx)

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
            "Call it once per batch; accumulate with Trainer(accumulate_grad_batches=...).",
            topic="batches-and-steps",
        )
        if self.private_run.replan(self._world()):
            for callback in self._callbacks:
                callback.on_privacy_replan(self._trainer, self.private_run)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        mechanism, fit = self._mechanism, self._now
        fit.isolation.stops.enter_forward()
        fit.isolation.before_forward(args)
        if fit.step.one_record:
            return self._one_by_one(*args, **kwargs)
        run, others = super().training_step, args[1:]
        fit.step.before_forward(
            mechanism, lambda batch: loss_in(run(batch, *others, **kwargs)), args[0]
        )
        fit.weights.enter_forward()
        output = self._watched(*args, **kwargs)
        if fit.step.one_record:
            return output  # which took over
        fit.isolation.after_forward()
        self._answer_waiting()
        self._leave_forward()
        fit.monitors.check()
        if self._is_automatic:
            if loss_in(output) is None:
                fit.isolation.stops.after_forward(fit.step, run, *args)
            # Lightning's own errors, in some settings, would end the run without withdrawing ε; a
            # loss that gives no gradient is found at the end of the step.
            return with_loss(output, torch.zeros((), device=self.root_device))
        if fit.step.is_unreleased(mechanism):
            # Lightning is going to wait for all ranks, and another one may be at its release.
            fit.agree(fit.step.fault(mechanism), Place.NO_RELEASE)
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
        fit.weights.enter_forward()
        is_first = self.private_run.steps <= 1
        self._mechanism.begin_noise(step.held)
        try:
            step.answer_each(self._mechanism, forwards, is_first=is_first)
        except UnsupportedModelError as error:
            if is_first:
                raise
            step.note(error.text)
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
        fault = fit.weights.leave_forward()
        if fault is not None:
            fit.step.note(fault)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        fit = self._now
        if fit.losses is not None:
            return self._backward_of_several(fit.losses, closure_loss, args, kwargs)
        self._leave_forward()  # in manual optimization training_step has not returned yet
        if not is_differentiable(closure_loss):
            return closure_loss  # a chunk with records stays without an answer
        if fit.step.one_record:  # they had theirs; this is for the hooks
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with self._noting_refusals():
            fit.step.check_loss(closure_loss)
            with fit.step.engine.watched.as_written():  # checkpoints run parts of the model again
                return self._answer(closure_loss, optimizer, *args, **kwargs)
        return closure_loss

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        """Note a refusal that the records of a chunk show, or raise it: before anything is released."""
        try:
            yield
        except UnsupportedModelError as error:
            if self.private_run.steps > 1:
                self._now.step.note(error.text)
            elif type(error) is CoupledLossError or self._is_automatic:
                raise
            else:
                text = without_alone(error.text)
                raise UnsupportedModelError(text, topic=error.topic) from error

    def _backward_of_several(
        self, losses: WaitingLosses, loss: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Go back to public parameters; what reaches private ones waits for their optimizer."""
        fit, module = self._now, self._module
        if args or kwargs.keys() - {"retain_graph"} or is_overridden("backward", module):
            raise MisconfigurationError(
                "With several optimizers, a loss goes back as self.manual_backward(loss): without "
                "arguments but retain_graph, and without a backward() of the LightningModule's own.",
                topic="several-optimizers",
            )
        if not is_differentiable(loss):
            return loss
        waits = fit.step.awaits(self._mechanism) and losses.reaches_private(loss)
        if waits:
            self._leave_forward()
        return self._backward_by(partial(losses.add, waits=waits), loss)

    def _backward_by(self, go_back: Callable[[Tensor], None], loss: Tensor) -> Tensor:
        """``Strategy.backward`` with ``go_back(loss)`` in the place of ``loss.backward()``."""
        module, plugin = self._module, self.precision_plugin
        self.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        go_back(loss)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _answer_waiting(self) -> None:
        """Answer from the losses of a step with several optimizers, in one backward pass."""
        fit, mechanism = self._now, self._mechanism
        loss = None if fit.losses is None else fit.losses.take()
        if loss is None or not fit.step.awaits(mechanism):
            return
        with self._noting_refusals():
            fit.step.check_loss(loss)
            mechanism.begin_noise(fit.step.held)
            fit.step.backward(loss, mechanism.query, keep_graph=False)
            fit.step.answer(mechanism, 1.0)

    def _answer(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward pass and bound what it leaves."""
        mechanism, step = self._mechanism, self._now.step
        mechanism.begin_noise(step.held)
        backward = partial(step.backward, query=mechanism.query)
        if args or kwargs or is_overridden("backward", self.lightning_module):
            backward(closure_loss, keep_graph=True)
            with step.engine.watched.engine.repeating():
                loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        else:
            loss = self._backward_by(partial(backward, keep_graph=False), closure_loss)
        # Lightning has divided the loss by it: not in manual optimization.
        divisor = self._trainer.accumulate_grad_batches if self._is_automatic else 1
        step.answer(mechanism, float(divisor))
        return loss

    @property
    def _is_automatic(self) -> bool:
        return self._module.automatic_optimization

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        mechanism, fit, run = self._mechanism, self._now, self.private_run
        if any(optimizer is each for each in fit.optimizers.public):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        once = evaluated_once(closure, optimizer)

        def private_closure() -> None:
            fit.edits.note_state(optimizer)  # an optimizer may begin its step before
            once()  # its loss has no noise: an optimizer that sets its step size by it must not see it
            self._answer_waiting()
            fit.isolation.settle(fit.agree)
            fit.step.release(mechanism, optimizer, fit.agree)
            fit.steps.allow(check_update)
            fit.edits.begin()

        def check_update() -> None:
            fit.agree(fit.edits.fault(optimizer), Place.UPDATE, unused=fit.edits.skipped + 1)

        fit.isolation.before_hook("on_before_optimizer_step", optimizer)
        fit.edits.look_at_state(optimizer)
        fit.steps.expect()
        output = super().optimizer_step(optimizer, private_closure, model, **kwargs)
        fit.isolation.after_update()
        fit.edits.note_state(optimizer)
        if run.is_over_early:
            end_training(self._trainer, run)
        for callback in self._callbacks:
            callback.on_privacy_step(self._trainer, run)
        return output

    def on_train_end(self) -> None:
        super().on_train_end()
        trainer, run, fit = self._trainer, self.private_run, self._now
        fit.monitors.check()
        if self._mechanism.is_begun and not fit.isolation.stops.has_stopped:
            self._agree_without_step()
        fault = changed_rows(private_loader_of(trainer)) or fit.isolation.fault
        fit.agree(fault, Place.END)
        for callback in self._callbacks:
            callback.on_privacy_end(trainer, run)
