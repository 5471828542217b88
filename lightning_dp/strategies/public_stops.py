"""Stops of a fit by a rule that reads no record: the run ends there, and keeps ε of what was charged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, cast

from lightning.pytorch import LightningModule, Trainer

from lightning_dp._training_step import loss_in
from lightning_dp.isolation.state import TwinState
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.early_end import end_training
from lightning_dp.strategies.step import PrivateStep

__all__ = ["PublicStops"]

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
        if not self._run.config.spot_checks:
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
