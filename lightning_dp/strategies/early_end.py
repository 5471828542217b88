"""Ends of a fit before its plan's: by the budget, by a public stop, and of a void run on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, NoReturn, cast

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_dp._checks import MisconfigurationError
from lightning_dp._refusals import warn
from lightning_dp._world import World
from lightning_dp.accounting.base import epsilon_text
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.gradients.batches import loss_in
from lightning_dp.isolation.state import TwinState
from lightning_dp.mechanism import Mechanism
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.step import PrivateStep

__all__ = ["Agreement", "Place", "PublicStops", "end_before_first_step", "end_training"]


def end_training(trainer: Trainer, run: PrivateRun, reason: str = "privacy budget reached") -> None:
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
        run: is told of the end.
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
            return False  # nobody knows what follows the records
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


# -- one decision on all ranks --------------------------------------------------------------------

_APART = (
    "the ranks diverged: one of them stepped the optimizer, and another did not. Call "
    "optimizer.step() for every batch, whatever its records are."
)


class Place(IntEnum):
    """Meeting places of the ranks in a step."""

    NO_RELEASE = 0
    RELEASE = 1
    UPDATE = 2
    SPOT_CHECK = 3
    END = 4


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
        if self._run.steps_begun <= unused:
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
