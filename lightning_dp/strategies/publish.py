"""ε and the noise multiplier, where users look: progress bar, loggers, other callbacks."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import Trainer

from lightning_dp.private_run import PrivateRun

__all__ = ["EPSILON", "NOISE_MULTIPLIER", "Publisher"]

EPSILON = "privacy/epsilon"
NOISE_MULTIPLIER = "privacy/noise_multiplier"


class Publisher:
    """Keeps ``privacy/epsilon`` and ``privacy/noise_multiplier`` current.

    ε is exact at every ``log_every_n_steps``-th noised step, at validation, at the last batch of
    an epoch, at the stop and at the end. In between it is the ε of the next such step: an upper
    bound, found once per interval instead of at each step. Written directly, since ``self.log``
    costs more than a private step of a small model.

    Args:
        trainer: whose metrics and loggers are written.
        run: whose ε.
    """

    def __init__(self, trainer: Trainer, run: PrivateRun) -> None:
        self._trainer = trainer
        self._run = run
        self._bound = (-1, 0.0)  # (ledger steps, ε at that many)
        self._logged_at = -1

    def publish(self, *, exact: bool, to_loggers: bool = False) -> None:
        """Bring the metrics up to date; write them to the loggers when a step to log is reached."""
        run, mechanism = self._run, self._run.mechanism
        if mechanism is None:
            return
        every: int = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_log_step = every > 0 and mechanism.step > 0 and mechanism.step % every == 0
        exact = exact or is_log_step or self._trainer.is_last_batch
        metrics = {
            EPSILON: self._epsilon_at(run.steps if exact else self._next_exact(every)),
            NOISE_MULTIPLIER: run.noise_multiplier or 0.0,
        }
        self._trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
        self._trainer.progress_bar_metrics[EPSILON] = metrics[EPSILON]
        stopped = run.stop_reason is not None
        if (
            (is_log_step or to_loggers or stopped)
            and mechanism.step
            and self._logged_at != run.steps
        ):
            self._logged_at = run.steps
            self._to_loggers(metrics, mechanism.step - 1)

    def _next_exact(self, every: int) -> int:
        """The ledger size at the next step whose ε is computed exactly."""
        run, trainer = self._run, self._trainer
        assert run.mechanism is not None
        chunks_left = trainer.num_training_batches - trainer.fit_loop.batch_idx - 1
        ahead = [run.remaining_steps, math.ceil(chunks_left / trainer.accumulate_grad_batches)]
        if every > 0:
            ahead.append(every - run.mechanism.step % every)
        return run.steps + int(max(0, min(ahead)))

    def _epsilon_at(self, ledger_steps: int) -> float:
        if self._bound[0] != ledger_steps:
            self._bound = (ledger_steps, self._run.epsilon_after(ledger_steps - self._run.steps))
        return self._bound[1]

    def _to_loggers(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=step)
            logger.save()
