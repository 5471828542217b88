"""Random chains of interruptions and resumes, run by a plain or a private Trainer."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["RECORDS", "Chain", "Interrupt", "Planted", "Stage", "Stepping", "Trail"]

RECORDS, BATCH = 24, 2  # a multiple of 1, 2 and 3 batches: private epochs are as long as plain ones


class Planted(Exception):
    """What ends a fit in the middle."""


class Stepping(L.LightningModule):
    """Counts the optimizer's steps and notes what each of them saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.chunks: list[Any] = []  # since the last step
        self.seen: list[list[Any]] = []  # the chunks of each step

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(RECORDS, 2)), BATCH)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(RECORDS, 2)), RECORDS // 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.chunks.append(getattr(self.trainer.train_dataloader, "current", None))
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(self._after_step)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
                "interval": "step",
            },
        }

    def _after_step(self, *_: Any) -> None:
        self.seen.append(self.chunks)
        self.chunks = []


HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class Interrupt(L.Callback):
    """Ends a fit when a hook is called for the n-th time."""

    def __init__(self, hook: str, after: int, error: BaseException | None) -> None:
        self.after, self.error, self.calls = after, error, 0
        setattr(self, hook, self._called)

    def _called(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls == self.after:
            if self.error is not None:
                raise self.error
            trainer.should_stop = True


@dataclass(frozen=True)
class Stage:
    """One fit of a chain: how it ends, and who saves what the next one resumes from."""

    hook: str
    after: int
    ending: str  # "error", "ctrl-c", "stop", or "end": at a limit
    limits: dict[str, int]  # how much more than the checkpoint has
    saves_after: bool  # trainer.save_checkpoint() when the fit is over


@dataclass(frozen=True)
class Trail:
    """Where a Trainer is after a fit: whether it raised, its steps, epoch and all its progress."""

    ended: str
    global_step: int
    epoch: int
    progress: Any = field(repr=False)
    is_resumed: bool = field(repr=False)


@dataclass(frozen=True)
class Chain:
    """Settings of a run and six interruptions, all chosen by a seed."""

    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    saving: dict[str, Any] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()

    @classmethod
    def of(cls, seed: int) -> Chain:
        rng = random.Random(seed)
        per_epoch = rng.choice([{}, {}, {"limit_train_batches": 7}, {"limit_train_batches": 0.45}])
        options: dict[str, Any] = {
            "accumulate_grad_batches": rng.choice([1, 2, 3]),
            "reload_dataloaders_every_n_epochs": rng.choice([0, 0, 1, 2]),
            **per_epoch,
            **rng.choice(
                [
                    {},
                    {"limit_val_batches": 0},
                    {"val_check_interval": 3},
                    {"val_check_interval": 0.4},
                    {"val_check_interval": 4, "check_val_every_n_epoch": None},
                    {"check_val_every_n_epoch": 2},
                ]
            ),
        }
        saving = rng.choice(
            [
                {"every_n_train_steps": 1},
                {"every_n_train_steps": 3},
                {"every_n_train_steps": 2, "save_on_train_epoch_end": True},
                {"every_n_epochs": 1},
                {"every_n_epochs": 1, "save_on_train_epoch_end": True},
                {"every_n_epochs": 1, "save_on_train_epoch_end": False},
            ]
        )
        saving = {**saving, "exceptions": rng.random() < 0.5}
        stages = tuple(cls._stage(rng, number) for number in range(6))
        return cls(seed, options, saving, stages)

    @staticmethod
    def _stage(rng: random.Random, number: int) -> Stage:
        limits = rng.choice([{"max_epochs": rng.randrange(3)}, {"max_steps": rng.randrange(1, 15)}])
        return Stage(
            hook=rng.choice(HOOKS),
            after=rng.randrange(1, 14),
            ending=rng.choice(["error", "error", "ctrl-c", "stop", "end"]),
            limits=limits,
            saves_after=rng.random() < 0.5,
        )

    def run(
        self,
        folder: Path,
        make_trainer: Callable[..., L.Trainer],
        privacy: Callable[[], L.Callback] | None = None,
    ) -> Iterator[tuple[Trail, Stepping, Any]]:
        """Each fit in turn: where the Trainer is afterwards, its model and its privacy."""
        newest: Path | None = None
        for number, stage in enumerate(self.stages):
            place, model = folder / str(number), Stepping()
            ours = None if privacy is None else privacy()
            trainer = make_trainer(
                callbacks=[*self._callbacks(stage, place), *([ours] if ours else [])],
                enable_checkpointing=True,
                default_root_dir=folder,
                num_sanity_val_steps=0,
                **{**self.options, **_limits(stage, newest)},
            )
            ended = "at a limit"
            with _keyboard_kept():
                try:
                    trainer.fit(model, ckpt_path=newest, weights_only=True)
                except (Planted, SystemExit) as error:
                    ended = type(error).__name__
            if stage.saves_after:
                trainer.save_checkpoint(place / "after.ckpt")
            is_resumed = newest is not None
            newest = max(place.glob("*.ckpt"), key=_saved_at, default=newest)
            progress = trainer.fit_loop.state_dict()
            progress["state_dict"].pop("combined_loader", None)
            steps, epoch = trainer.global_step, trainer.current_epoch
            yield Trail(ended, steps, epoch, progress, is_resumed), model, ours

    def _callbacks(self, stage: Stage, place: Path) -> list[L.Callback]:
        saving = dict(self.saving)
        watching: list[L.Callback] = []
        if saving.pop("exceptions"):
            watching.append(OnExceptionCheckpoint(place, "raised"))
        errors = {"error": Planted(), "ctrl-c": KeyboardInterrupt(), "stop": None}
        if stage.ending != "end":
            watching.append(Interrupt(stage.hook, stage.after, errors[stage.ending]))
        return [ModelCheckpoint(place, save_last=True, **saving), *watching]


def _limits(stage: Stage, checkpoint: Path | None) -> dict[str, int]:
    done = {"epoch": 0, "global_step": 0}
    if checkpoint is not None:
        done = torch.load(checkpoint, weights_only=True)
    if "max_steps" in stage.limits:
        return {"max_epochs": -1, "max_steps": done["global_step"] + stage.limits["max_steps"]}
    return {"max_epochs": done["epoch"] + 1 + stage.limits["max_epochs"]}


def _saved_at(path: Path) -> int:
    return path.stat().st_mtime_ns


@contextmanager
def _keyboard_kept() -> Iterator[None]:
    """Lightning ignores Ctrl+C for the rest of the process once it was pressed."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
