"""The budget ends training, as EarlyStopping would."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_dp._warnings import warn
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.private_run import PrivateRun

__all__ = ["BUDGET_REACHED", "end_before_first_step", "end_training"]

BUDGET_REACHED = "privacy budget reached"


def end_training(trainer: Trainer, run: PrivateRun, reason: str = BUDGET_REACHED) -> None:
    """Stop the Trainer; no minimum of epochs or steps overrides a budget."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = 0
    trainer.fit_loop.epoch_loop.min_steps = None
    if run.stop_reason is None:
        run.stop_reason = reason


def end_before_first_step(trainer: Trainer, run: PrivateRun) -> None:
    """Stop the Trainer where the budget does not allow one step, and warn."""
    assert run.mechanism is not None
    end_training(
        trainer,
        run,
        f"the budget (ε = {run.config.target_epsilon} at δ = {run.config.target_delta}, "
        f"{epsilon_text(run.epsilon)} of it spent) does not allow one step with noise multiplier "
        f"{run.mechanism.next_noise_multiplier:.4g}; raise target_epsilon or the noise",
    )
    if trainer.is_global_zero:
        warn(f"No training step was made: {run.stop_reason}.")
