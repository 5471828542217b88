"""What two processes do, one scenario after another; each rank saves what it saw.

Usage: python jobs.py FOLDER SCENARIO [SCENARIO ...]. Lightning starts the second process itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dp import AbstractSampling, CubicNewton, Diff2, FullBatch, PrivacyConfig
from lightning_dp.accounting.events import AbstractEvent, Gaussian
from lightning_dp.accounting.journal import read_journal
from lightning_dp.callbacks import DifferentialPrivacy, PrivateDDPStrategy
from lightning_dp.sampling import BatchPlan


@dataclass(frozen=True)
class WholeSet(AbstractSampling):
    """All records in every step, several steps per epoch: nothing is left to chance."""

    def plan(
        self,
        *,
        num_records: int,
        batch_size: int,
        accumulate: int,
        world_size: int,
        loader_length: int,
    ) -> BatchPlan:
        return BatchPlan(num_records, 1.0, accumulate, math.ceil(loader_length / accumulate))

    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        return np.arange(shard_size)

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        return Gaussian(noise_multiplier)


def records(n: int) -> TensorDataset:
    """n records: index, 6 features, one of 3 classes."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 3
    x = torch.randn(n, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6)
    return TensorDataset(torch.arange(n), x, y)


class Model(L.LightningModule):
    """Writes down the records of every chunk. Every rank starts from weights of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("saved", torch.randn(3))
        self.register_buffer("not_saved", torch.randn(3), persistent=False)
        transposed = torch.randn(4, 5).t()  # not contiguous
        self.frozen = nn.Parameter(transposed, requires_grad=False)
        self.chunks: list[tuple[int, list[int]]] = []
        self.at_start: Tensor | None = None

    def everything(self) -> Tensor:
        return torch.cat([t.detach().flatten() for t in [*self.parameters(), *self.buffers()]])

    def flat(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.net.parameters()).detach().clone()

    def on_fit_start(self) -> None:
        self.at_start = self.everything()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        is_real = self.trainer.train_dataloader.current.size > 0
        self.chunks.append((self.global_step, index.tolist() if is_real else []))
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


class Logging(Model):
    """Logs over the ranks in every step, and reads the journal that rank 0 writes."""

    def __init__(self, rank: int, journals: Path) -> None:
        super().__init__(rank)
        self.journals = journals
        self.ahead: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        (journal,) = self.journals.glob("*.journal")
        on_disk = read_journal(journal)[1].total
        self.ahead.append(on_disk - self.global_step)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Flat(L.LightningModule):
    """20,000 weights whose gradient is zero: what moves them is the noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(200, 100, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(torch.zeros(len(batch[0]), 200)).sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def rank() -> int:
    import os

    return int(os.environ.get("LOCAL_RANK", 0))


def fit(
    model: L.LightningModule,
    data: Dataset[Any],
    batch_size: int,
    privacy: dict[str, Any] | None,
    folder: Path,
    *callbacks: L.Callback,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[L.Trainer, DifferentialPrivacy | None]:
    """One fit on two ranks; with privacy=None the strategy has it."""
    callback = None
    if privacy is not None:
        callback = DifferentialPrivacy(**{"target_delta": 1e-5, **privacy})
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "logger": False,
        "enable_checkpointing": bool(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": [*callbacks, *([callback] if callback else [])],
    }
    trainer = L.Trainer(**{**quiet, **options})
    trainer.fit(model, DataLoader(data, batch_size=batch_size), ckpt_path=ckpt_path)
    return trainer, callback


def plain(folder: Path) -> dict[str, Any]:
    """No noise, no clipping, all records: 51 in chunks of 8, so the ranks' shards differ."""
    model = Model(rank())
    before = model.everything()
    privacy = {"noise_multiplier": 0.0, "max_grad_norm": math.inf, "sampling": FullBatch()}
    trainer, callback = fit(model, records(51), 8, privacy, folder, max_epochs=5)
    return {
        "before": before,
        "at_start": model.at_start,
        "flat": model.flat(),
        "steps": callback.steps,
        "strategy": type(trainer.strategy).__name__,
        "wrapped": type(trainer.model).__name__,
    }


def clipped(folder: Path, engine: str = "auto") -> dict[str, Any]:
    """No noise, Poisson batches, the strategy's own door."""
    model = Model(rank())
    privacy = PrivacyConfig(
        target_delta=1e-5, noise_multiplier=0.0, max_grad_norm=1.4, engine=engine
    )
    strategy = PrivateDDPStrategy(privacy=privacy, process_group_backend="gloo")
    options = {"strategy": strategy, "max_epochs": 2, "accumulate_grad_batches": 2}
    trainer, _ = fit(model, records(60), 3, None, folder, **options)
    run = trainer.strategy.private_run
    return {
        "at_start": model.at_start,
        "flat": model.flat(),
        "chunks": model.chunks,
        "sample_rates": [event.sample_rate for event, _ in run.ledger.history()],
        "steps": run.steps,
        "engine": run.engine,
    }


def ghost(folder: Path) -> dict[str, Any]:
    """The same with two backward passes."""
    return clipped(folder, "ghost")


def diff2(folder: Path) -> dict[str, Any]:
    """Each rank is a worker: differences at two points, then the same with noise and Poisson."""
    model = Model(rank())
    privacy = {"estimator": Diff2(3, 1.2, 0.4), "noise_multiplier": 0.0, "sampling": FullBatch()}
    fit(model, records(51), 8, privacy, folder, max_epochs=7)
    noisy, privacy = Model(rank()), {"estimator": Diff2(3, 1.2, 0.4), "noise_multiplier": 0.5}
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    _, callback = fit(noisy, records(60), 3, privacy, folder, **options)
    return {
        "at_start": model.at_start,
        "flat": model.flat(),
        "noisy": noisy.flat(),
        "charged": [(*event.pair, count) for event, count in callback._run.ledger.history()],
    }


class PlainSGD(Model):
    """Without buffers of its own, and with the optimizer that whole steps need."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        del self.saved, self.not_saved

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def cubic(folder: Path) -> dict[str, Any]:
    """Rounds over all records; then the same on Poisson batches, of which many chunks are empty."""
    results: dict[str, Any] = {}
    newton = CubicNewton(1.5, 1.0, 3, 1.2, 0.4, keep=40, box=2.0)
    for name, estimator in (("round", newton), ("fresh", replace(newton, fresh_batches=True))):
        model = PlainSGD(rank())
        privacy = {"estimator": estimator, "noise_multiplier": 0.0, "sampling": FullBatch()}
        fit(model, records(51), 8, privacy, folder, max_epochs=6)
        results[name] = {"at_start": model.at_start, "flat": model.flat()}
    noisy = PlainSGD(rank())
    privacy = {"estimator": newton, "noise_multiplier": 0.5}
    options = {"max_epochs": 1, "accumulate_grad_batches": 2}
    _, callback = fit(noisy, records(40), 1, privacy, folder, **options)
    return {
        **results,
        "noisy": noisy.flat(),
        "empty": sum(not indices for _, indices in noisy.chunks),
        "charged": [(*event.pair, count) for event, count in callback._run.ledger.history()],
    }


def noise(folder: Path) -> dict[str, Any]:
    """One step of pure noise, by the registered name of the strategy."""
    torch.manual_seed(0)
    L.seed_everything(7)
    model = Flat()
    before = model.net.weight.detach().clone()
    privacy = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "isolation_probe": False}
    options = {"strategy": "private_ddp", "max_steps": 1}
    trainer, _ = fit(model, records(40), 5, privacy, folder, **options)
    return {
        "moved": (model.net.weight.detach() - before).flatten(),
        "strategy": type(trainer.strategy).__name__,
    }


def sparse(folder: Path) -> dict[str, Any]:
    """Two records in four chunks per step, a budget that ends it, and folders of their own."""
    model = Logging(rank(), folder / "rank0" / "privacy")
    privacy = {"noise_multiplier": 1.0, "target_epsilon": 0.6}
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "min_steps": 90}
    trainer, callback = fit(model, records(400), 1, privacy, folder / f"rank{rank()}", **options)
    return {
        "flat": model.flat(),
        "chunks": model.chunks,
        "ahead": model.ahead,
        "global_step": trainer.global_step,
        "steps": callback.steps,
        "epsilon": callback.epsilon,
        "sample_rates": [event.sample_rate for event, _ in callback._run.ledger.history()],
        "stop_reason": callback.report().stop_reason,
        "has_journal": (folder / f"rank{rank()}" / "privacy").exists(),
        "reports": len(list((folder / f"rank{rank()}").rglob("privacy_report-*.json"))),
        "loss": float(trainer.callback_metrics["train_loss"]),
    }


def calibrated(folder: Path) -> dict[str, Any]:
    """The noise is found for the steps of all epochs, which then use up the budget."""
    model = Model(rank())
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    trainer, callback = fit(model, records(60), 3, {"target_epsilon": 3.0}, folder, **options)
    return {
        "flat": model.flat(),
        "steps": callback.steps,
        "global_step": trainer.global_step,
        "noise_multiplier": callback.noise_multiplier,
        "epsilon": callback.epsilon,
    }


def resumed(folder: Path) -> dict[str, Any]:
    """Without noise and chance: a run, the same run saved in mid-epoch, and its resume."""
    privacy = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "sampling": WholeSet()}
    results: dict[str, Any] = {}
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    for name, callbacks, path in [
        ("whole", (saving,), None),
        ("resumed", (), folder / "step=5.ckpt"),
        ("again", (), folder / "step=7.ckpt"),
    ]:
        model = Model(rank())
        trainer, callback = fit(
            model,
            records(48),
            4,
            privacy,
            folder,
            *callbacks,
            ckpt_path=path,
            max_epochs=3,
            accumulate_grad_batches=2,
        )
        results[name] = {
            "flat": model.flat(),
            "global_step": trainer.global_step,
            "steps": callback.steps,
            "chunks": len(model.chunks),
        }
    return results


class LogsOnly(Model):
    """Logs over the ranks, whatever their numbers of records are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True)
        return loss


def alone(folder: Path) -> dict[str, Any]:
    """Each record alone, and all together; then on batches of which many chunks are empty."""
    results: dict[str, Any] = {}
    for engine in ("auto", "one_by_one"):
        model = Model(rank())
        privacy = {"estimator": Diff2(3, 1.2, 0.4), "noise_multiplier": 0.0, "engine": engine}
        options = {"isolation_probe": False, "sampling": FullBatch()}
        fit(model, records(21), 4, {**privacy, **options}, folder, max_epochs=3)
        results[engine] = model.flat()
    noisy = LogsOnly(rank())
    privacy = {"noise_multiplier": 1.0, "engine": "one_by_one", "isolation_probe": False}
    options = {"max_steps": 8, "accumulate_grad_batches": 2}
    trainer, _ = fit(noisy, records(40), 1, privacy, folder, **options)
    return {
        **results,
        "flat": noisy.flat(),
        "loss": float(trainer.callback_metrics["train_loss"]),
    }


Scenario = Callable[[Path], dict[str, Any]]


def main(*scenarios: Scenario) -> None:
    """Run those that the command line names."""
    torch.set_num_threads(1)
    by_name = {scenario.__name__: scenario for scenario in scenarios}
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        (folder / name).mkdir(exist_ok=True)
        result = by_name[name](folder / name)
        torch.save(result, folder / f"{name}-{rank()}.pt")
    if torch.distributed.is_initialized():  # its threads would still run while Python ends
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(plain, clipped, ghost, diff2, cubic, noise, sparse, calibrated, resumed, alone)
