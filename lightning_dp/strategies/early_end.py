"""Ends of a fit before its plan's: the budget's, and that of a void run, on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

import torch
from lightning.pytorch import Trainer

from lightning_dp._checks import MisconfigurationError
from lightning_dp._warnings import warn
from lightning_dp._world import World
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.mechanism import Mechanism
from lightning_dp.run import PrivateRun

__all__ = ["BUDGET_REACHED", "Agreement", "Place", "end_before_first_step", "end_training"]


BUDGET_REACHED = "privacy budget reached"


def end_training(trainer: Trainer, run: PrivateRun, reason: str = BUDGET_REACHED) -> None:
    """Stop the Trainer; no minimum of epochs or steps overrides a budget."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = 0
    trainer.fit_loop.epoch_loop.min_steps = None
    if run.stop_reason is None:
        run.stop_reason = reason


def end_before_first_step(trainer: Trainer, run: PrivateRun, mechanism: Mechanism) -> None:
    """Stop the Trainer where the budget does not allow one step, and warn."""
    end_training(
        trainer,
        run,
        f"the budget (ε = {run.config.target_epsilon} at δ = {run.config.target_delta}, "
        f"{epsilon_text(run.epsilon)} of it spent) does not allow one step with noise multiplier "
        f"{mechanism.next_noise_multiplier:.4g}; raise target_epsilon or the noise",
    )
    if trainer.is_global_zero:
        warn(f"No training step was made: {run.stop_reason}.", topic="budget-exhausted")


_APART = (
    "the ranks diverged: one of them stepped the optimizer, and another did not. Call "
    "optimizer.step() for every batch, whatever its records are."
)


class Place(IntEnum):
    """Meeting places of the ranks in a step."""

    NO_RELEASE = 0
    RELEASE = 1
    UPDATE = 2
    SAVE = 3
    SPOT_CHECK = 4
    END = 5


class Agreement:
    """The decision of all ranks to go on, or to end a void run; each calls it with what it found.

    It takes one small sum at each place. A rank at another place than the others is a fault, where it
    would be a dead-lock.

    Args:
        run: is voided if real records failed a check on any rank.
        world: the processes of the job.
        device: where tensors must be to be summed.
        broadcast: gives every rank the text of one of them.
        leave: called when the run is void, whatever else fails then.
    """

    def __init__(
        self,
        run: PrivateRun,
        world: World,
        device: torch.device,
        broadcast: Callable[[str | None, int], str | None],
        leave: Callable[[], None],
    ) -> None:
        self._run, self._world, self._device = run, world, device
        self._broadcast, self._leave = broadcast, leave

    def __call__(self, fault: str | None, place: Place = Place.RELEASE, *, unused: int = 0) -> None:
        """Go on, or end the run.

        Args:
            fault: what this rank found, or None.
            place: where it is.
            unused: charges of which nothing was used so far.

        Raises:
            VoidedRunError: on all ranks.
            MisconfigurationException: instead, if those are all charges: there is nothing to withdraw.
        """
        if (voided := self._run.voided) is not None:  # and somebody caught the error
            raise VoidedRunError(voided)
        reason = self._common(fault, place)
        if reason is None:
            return
        if self._run.steps <= unused:
            raise MisconfigurationError(reason, topic="voided-run")
        self._end(reason)

    def anyone(self, found: bool, place: Place) -> bool:
        """Tell every rank whether one of them found something.

        Raises:
            VoidedRunError: on all ranks, if one of them is at another place.
        """
        reason = self._common("" if found else None, place)
        if reason is not None and reason != "":
            self._end(reason)
        return reason is not None

    def _end(self, reason: str) -> NoReturn:
        try:
            self._run.void(reason)
        finally:  # also if the disk is full
            self._leave()
        raise VoidedRunError(reason)

    def _common(self, fault: str | None, place: Place) -> str | None:
        """Return the first rank's fault on every rank; None if there is none anywhere."""
        rank, size = self._world.rank, self._world.size
        if size == 1:
            return fault
        # One vector for both questions: how many ranks are at each place, and which ones are at fault.
        marks = torch.zeros(len(Place) + size, device=self._device)
        marks[place] = 1.0
        marks[len(Place) + rank] = float(fault is not None)
        marks_of_all = self._world.all_reduce(marks).tolist()
        if round(marks_of_all[place]) != size:
            return _APART
        faulty = [each for each in range(size) if marks_of_all[len(Place) + each]]
        return self._broadcast(fault, faulty[0]) if faulty else None
