"""The hooks through which a batch goes to the device, run on copies as Lightning runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dp.isolation.collation import Collate, Trial, try_collate
from lightning_dp.isolation.copies import Copies
from lightning_dp.isolation.prepared import prepared, show_trainer
from lightning_dp.isolation.stand_ins import RUN, Now, StandInTrainer

__all__ = ["HOOKS", "TransferHooks"]

_LATE = Now(epoch=1000, step=1_000_000)
HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class TransferHooks:
    """The work of a user's model or data module on a batch between ``collate_fn`` and ``training_step``.

    Args:
        module: the model.
        datamodule: the data module, or None; its hooks go before the model's.
        trainer: whose public state the hooks may read.
        now: the moment of the run that it shows.
    """

    module: LightningModule
    datamodule: LightningDataModule | None
    trainer: Trainer
    now: Now = RUN

    @property
    def overridden(self) -> tuple[str, ...]:
        """The hooks that are not Lightning's, as code."""
        owners = [(self._owner(hook), hook) for hook in HOOKS]
        return tuple(
            f"{type(owner).__name__}.{hook}" for owner, hook in owners if owner is not None
        )

    def _owner(self, hook: str) -> Any:
        """Return whose hook is called; None if it is Lightning's own, which mixes nothing."""
        for owner in (self.datamodule, self.module):
            if owner is not None and is_overridden(hook, owner, parent=DataHooks):
                return owner
        return None

    def tried(
        self,
        collate: Copies,
        sample: Any,
        batch_size: int,
        wrap: Callable[[Collate], Collate],
    ) -> Trial:
        """Try the hooks as they are now, and as they are late in a run.

        Args:
            collate: of the function that comes before them.
            sample, batch_size: see :func:`check_collate_fn`.
            wrap: calls it all as the run does.
        """
        trial = Trial("apart")
        for now in (self.now, _LATE):
            at = replace(self, now=now)
            trial = try_collate(partial(_wrapped, wrap, at, collate), sample, batch_size)
            if trial.outcome != "apart":
                return trial
        return trial

    def fresh(self, collate: Copies) -> Collate:
        """Return a copy of the hooks, behind a copy of a ``collate_fn``, all on the CPU."""
        hooks, trainer = [], StandInTrainer(self.trainer, self.now)
        copies: dict[int, Any] = {}
        for name in HOOKS:
            owner = self._owner(name)
            if owner is None:
                continue
            if id(owner) not in copies:
                copies[id(owner)] = self._copied(owner, trainer)
            hooks.append((name, copies[id(owner)]))
        return _Chain(collate.fresh(), hooks)

    def _copied(self, owner: Any, trainer: StandInTrainer) -> Any:
        if isinstance(owner, LightningModule):
            return show_trainer(
                prepared(copy.deepcopy(owner)), trainer
            )  # Lightning leaves its trainer out
        new = Copies(owner, closes_datasets=True).fresh()
        if new is not owner:
            new.trainer = trainer
        return new


def _wrapped(wrap: Callable[[Collate], Collate], hooks: TransferHooks, collate: Copies) -> Collate:
    return wrap(hooks.fresh(collate))


class _Chain:
    """Calls the hooks on what a ``collate_fn`` makes."""

    def __init__(self, collate: Collate, hooks: Sequence[tuple[str, Any]]) -> None:
        self._collate, self._hooks = collate, tuple(hooks)

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        for name, owner in self._hooks:
            middle = (torch.device("cpu"),) if name == "transfer_batch_to_device" else ()
            batch = getattr(owner, name)(batch, *middle, 0)
        return batch
