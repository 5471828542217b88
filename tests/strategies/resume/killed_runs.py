"""Trains, is killed, resumes: each time in a new process, forked from the test's."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import BandedNoise, Checks, CyclicPoisson, FixedOrder, RandomAllocation
from lightning_dp.callbacks import DifferentialPrivacy

BLOCKS: dict[str, dict[str, Any]] = {
    "in turns": {"sampling": CyclicPoisson(4), "noise": BandedNoise(4)},
    "allocated": {"sampling": RandomAllocation()},
    "in order": {"sampling": FixedOrder(), "relation": "zero_out"},
}


@dataclass
class Round:
    """One life: where it ends, and in which folder."""

    folder: str
    place: str = ""  # where the process dies; "random" is wherever it is
    step: int = -1  # in which optimizer step (0, 1, ...)
    accumulate: int = 1
    save_every: int = 3
    sampling: str = ""  # a key of BLOCKS
    epochs: int = 1

    def reached(self, place: str, step: int) -> None:
        """Die here, if this is the place."""
        if (place, step) == (self.place, self.step):
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def path(self) -> Path:
        return Path(self.folder)


class LoggedSGD(torch.optim.SGD):
    """Writes a line to disk for every step that it completed."""

    round: Round
    done = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.round.reached("optimizer before closure", self.done)
        loss = closure()
        self.round.reached("optimizer after closure", self.done)
        super().step()
        with open(self.round.path / "optimizer.log", "a") as log:
            log.write("step\n")
            log.flush()
            os.fsync(log.fileno())
        self.round.reached("optimizer done", self.done)
        self.done += 1
        return loss


class Model(L.LightningModule):
    def __init__(self, round_: Round) -> None:
        super().__init__()
        self.round = round_
        self.net = nn.Linear(6, 3)

    def reached(self, place: str) -> None:
        """Die here, if this is the place, and the model is the one that trains, no copy of it."""
        if isinstance(self._trainer, L.Trainer):
            self.round.reached(place, self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.fit_loop.epoch_loop.batch_idx % self.round.accumulate == 0:
            self.reached("charged")
        if self.round.place == "random":
            time.sleep(0.003)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.reached("training_step")
        return loss

    def on_after_backward(self) -> None:
        self.reached("backward")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reached("before charge")
        is_real = isinstance(self._trainer, L.Trainer)
        if is_real and (self.round.place, self.round.step) == ("disk full", self.global_step):
            (journal,) = (self.round.path / "privacy").glob("*.journal")
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 7, hard))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reached("batch end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reached("saving")

    def configure_optimizers(self) -> Any:
        optimizer = LoggedSGD(self.parameters(), lr=0.1)
        optimizer.round = self.round
        return optimizer


def train(round_: Round, resume: Path | None) -> None:
    """One process: train to the planned end, or die on the way."""
    warnings.resetwarnings()  # errors in the test's process; a resume may have nothing left to do
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6), torch.arange(48) % 3)
    quiet = {"checks": Checks(dry_run=False, comparisons=False)}
    sampling = BLOCKS.get(round_.sampling, {})
    privacy = DifferentialPrivacy(3.0, target_delta=1e-5, **sampling, **quiet)
    saving = ModelCheckpoint(
        round_.path, "{step}", save_top_k=-1, every_n_train_steps=round_.save_every
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=round_.epochs,
        accumulate_grad_batches=round_.accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=round_.path,
        callbacks=[privacy, saving],
    )
    model = Model(round_)
    result: dict[str, Any] = {"error": None}
    try:
        trainer.fit(model, DataLoader(data, batch_size=4), ckpt_path=resume)
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        result["error"] = f"{type(error).__name__}: {error}"
        assert error.__cause__ is not None  # what the disk said
        result["error while cleaning up"] = repr(error.__cause__.__context__)
        result["error of a new fit"] = fit_again(privacy, round_)
    result |= {
        "steps": privacy.steps,
        "epsilon": privacy.epsilon,
        "noise_multiplier": privacy.noise_multiplier,
        "global_step": trainer.global_step,
        "not_covered": " ".join(privacy.report().not_covered),
        "journal": str(privacy._run.ledger.journal_path),
    }
    name = "first" if resume is None else "resumed"
    (round_.path / f"{name}.json").write_text(json.dumps(result))


def fit_again(privacy: DifferentialPrivacy, round_: Round) -> str | None:
    """Return the error of using the same callback again in this process; None if there is none."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=round_.path,
        callbacks=[privacy],
    )
    try:
        trainer.fit(
            Model(Round(round_.folder)), DataLoader([(torch.zeros(6), 0)] * 48, batch_size=4)
        )
    except Exception as error:
        return repr(error)
    return None


def in_new_process(round_: Round, resume: Path | None) -> int:
    """Fork, train there, and give the signal that ended it (0: none)."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            train(round_, resume)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if round_.place == "random":
        while not list(round_.path.glob("*.ckpt")):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def run(round_: Round) -> None:
    """Kill a run, keep what it left, and resume it."""
    round_.path.mkdir()
    ended_by = in_new_process(round_, None)
    (round_.path / "ended_by").write_text(str(ended_by))
    (journal,) = (round_.path / "privacy").glob("*.journal")
    (round_.path / "journal_after_kill").write_bytes(journal.read_bytes())
    log = round_.path / "optimizer.log"
    (round_.path / "optimizer_after_kill.log").write_bytes(log.read_bytes())
    last = max(round_.path.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    in_new_process(replace(round_, place=""), last)
