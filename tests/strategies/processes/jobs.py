"""Scenarios of several processes, one after another; each rank saves what it saw.

Usage, in the root of the project: python -m tests.strategies.processes.jobs FOLDER PROCESSES SCENARIO
[SCENARIO ...]. Lightning starts the other processes itself.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dp import (
    AdaptiveQuantile,
    BandedNoise,
    Checks,
    CubicNewton,
    CyclicPoisson,
    Diff2,
    FixedOrder,
    FullBatch,
    PrivacyConfig,
    UserLevel,
)
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.accounting.journal import read_journal
from lightning_dp.callbacks import DifferentialPrivacy, PrivateDDPStrategy
from tests.older_torch import fsdp_on_cpu
from tests.zoo import WholeSet, flat, private, records


def numbered(n: int) -> TensorDataset:
    """n records: index, 6 features, one of 3 classes."""
    return TensorDataset(torch.arange(n), *records(n))


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

    def on_fit_start(self) -> None:
        self.at_start = self.everything()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.write_down(batch[0])
        return self.loss(*batch[1:])

    def write_down(self, index: Tensor) -> None:
        is_real = self.trainer.train_dataloader.current.size > 0
        self.chunks.append((self.global_step, index.tolist() if is_real else []))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


class ByRecord(Model):
    """Records that run alone leave nothing behind in training_step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.write_down(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch[1:])


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
    """One fit on two ranks, without comparisons; with privacy=None the strategy has it."""
    callback = None
    if privacy is not None:
        callback = private(**privacy)
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


def saw(model: Any, trainer: L.Trainer, callback: Any = None) -> dict[str, Any]:
    """Everything that a rank saw in a fit of a model."""
    run = trainer.strategy.private_run
    history = run.ledger.history()
    found = {
        "at_start": model.at_start,
        "flat": flat(model.net),
        "chunks": model.chunks,
        "strategy": type(trainer.strategy).__name__,
        "wrapped": type(trainer.model).__name__,
        "global_step": trainer.global_step,
        "steps": run.steps,
        "engine": run.engine,
        "charged": [(*event.pair, count) for event, count in history],
        "shares": [getattr(each, "share", None) for each in getattr(run.signal, "stretches", ())],
    }
    if callback is not None:
        report = callback.report()
        found |= {"epsilon": callback.epsilon, "noise_multiplier": callback.noise_multiplier}
        found |= {"stop_reason": report.stop_reason, "records": report.num_records}
    return found


SILENT = {"noise_multiplier": 0.0, "sampling": FullBatch()}
IN_ORDER = {"sampling": FixedOrder(), "relation": "zero_out"}
TWO_CHUNKS = {"max_epochs": 2, "accumulate_grad_batches": 2}
OWNERS = [row * row // 60 for row in range(51)]
FITS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    # records, batch size, privacy and the Trainer's options; 51 in chunks of 8 are shards that differ
    "plain": (51, 8, {**SILENT, "max_grad_norm": math.inf, "checks": Checks()}, {"max_epochs": 5}),
    # users of one to six rows, each on one rank
    "users": (
        51, 4, {**SILENT, "max_grad_norm": 0.8, "unit": UserLevel(OWNERS, most_rows=9)},
        {"max_epochs": 2},
    ),
    # a clip norm that follows the noised count of the records of both ranks
    "adaptive": (
        60, 6, {"noise_multiplier": 1.0, "clipping": AdaptiveQuantile(0.5, 0.3)}, {"max_epochs": 4},
    ),
    # a fixed order without noise and clipping
    "ordered": (
        51, 8, {**IN_ORDER, "noise_multiplier": 0.0, "max_grad_norm": math.inf}, {"max_epochs": 3},
    ),
    # noise that is found for the steps of all epochs, which then use up the budget
    "calibrated": (60, 3, {"target_epsilon": 3.0}, TWO_CHUNKS),
}  # fmt: skip


class EachNorm(L.Callback):
    """Writes down the clip norm after each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.found.append(trainer.strategy.private_run.mechanism.clip_norm)


def one_fit(folder: Path) -> dict[str, Any]:
    n, batch_size, privacy, options = FITS[folder.name]
    model, norms = Model(rank()), EachNorm()
    before = model.everything()
    options = {"enable_checkpointing": False, **options}
    fitted = fit(model, numbered(n), batch_size, privacy, folder, norms, **options)
    more = {"before": before, "clip_norms": norms.found, "owners": OWNERS}
    return {**saw(model, *fitted), **more}


def clipped(folder: Path, engine: str = "auto", kind: type[Model] = Model) -> dict[str, Any]:
    """No noise, Poisson batches, the strategy's own door."""
    model = kind(rank())
    privacy = PrivacyConfig(
        target_delta=1e-5, noise_multiplier=0.0, max_grad_norm=1.4, engine=engine
    )
    strategy = PrivateDDPStrategy(privacy=privacy, process_group_backend="gloo")
    fitted = fit(model, numbered(60), 3, None, folder, strategy=strategy, **TWO_CHUNKS)
    return saw(model, *fitted)


def ghost(folder: Path) -> dict[str, Any]:
    """The same with two backward passes."""
    return clipped(folder, "ghost")


def by_record(folder: Path) -> dict[str, Any]:
    """The same with each record alone."""
    return clipped(folder, "records", ByRecord)


def diff2(folder: Path) -> dict[str, Any]:
    """Each rank is a worker: differences at two points, then the same with noise and Poisson."""
    model, noisy, estimator = Model(rank()), Model(rank()), Diff2(3, 1.2, 0.4)
    fit(model, numbered(51), 8, {**SILENT, "estimator": estimator}, folder, max_epochs=7)
    privacy = {"estimator": estimator, "noise_multiplier": 0.5}
    fitted = fit(noisy, numbered(60), 3, privacy, folder, **TWO_CHUNKS)
    found = saw(noisy, *fitted)
    more = {"at_start": model.at_start, "flat": flat(model.net), "noisy": flat(noisy.net)}
    return {**found, **more}


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
        fit(model, numbered(51), 8, {**SILENT, "estimator": estimator}, folder, max_epochs=6)
        results[name] = {"at_start": model.at_start, "flat": flat(model.net)}
    noisy = PlainSGD(rank())
    privacy = {"estimator": newton, "noise_multiplier": 0.5}
    fitted = fit(noisy, numbered(40), 1, privacy, folder, **{**TWO_CHUNKS, "max_epochs": 1})
    empty = sum(not indices for _, indices in noisy.chunks)
    return {**saw(noisy, *fitted), **results, "noisy": flat(noisy.net), "empty": empty}


def noise(folder: Path, **secure: bool) -> dict[str, Any]:
    """One step of pure noise, by the registered name of the strategy."""
    torch.manual_seed(0)
    L.seed_everything(7)
    model = Flat()
    before = flat(model.net)
    checks = Checks(dry_run=False)
    privacy = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "checks": checks, **secure}
    fit(model, numbered(40), 5, privacy, folder, strategy="private_ddp", max_steps=1)
    return {"moved": flat(model.net) - before}


def secure(folder: Path) -> dict[str, Any]:
    """The same from ciphers, each rank with its own key."""
    return noise(folder, secure_noise=True)


def correlated(folder: Path) -> dict[str, Any]:
    """Twelve steps of noise that remembers, and the records of each on this rank."""
    torch.manual_seed(0)
    model, moved = Flat(), []
    seen: list[list[int]] = []

    def note(batch: Any, batch_idx: int) -> None:
        is_real = model.trainer.train_dataloader.current.size > 0
        seen.append(batch[0].tolist() if is_real else [])
        moved.append(flat(model.net))

    model.on_train_batch_start = note  # type: ignore[method-assign]
    privacy = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 0.5,
        "sampling": CyclicPoisson(4),
        "noise": BandedNoise(4, coefficients=(1.0, 0.7, 0.4, 0.1)),
    }
    _, callback = fit(model, numbered(40), 2, privacy, folder, max_steps=12)
    return {
        "moved": torch.stack([*moved, flat(model.net)]).double().diff(dim=0),
        "seen": seen,
        "steps": callback.steps,
        "charges": sum(count for _, count in callback._run.ledger.history()),
        "past": [len(past) for past in callback._run.mechanism.noise._past],
    }


def sparse(folder: Path) -> dict[str, Any]:
    """Two records in four chunks per step, a budget that ends it, and folders of their own."""
    own = folder / f"rank{rank()}"
    model = Logging(rank(), folder / "rank0" / "privacy")
    privacy = {"noise_multiplier": 1.0, "target_epsilon": 0.6, "checks": Checks()}
    options = {**TWO_CHUNKS, "max_epochs": 1, "min_steps": 90}
    trainer, callback = fit(model, numbered(400), 1, privacy, own, **options)
    return {
        **saw(model, trainer, callback),
        "ahead": model.ahead,
        "has_journal": (own / "privacy").exists(),
        "reports": len(list(own.rglob("privacy_report-*.json"))),
        "loss": float(trainer.callback_metrics["train_loss"]),
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
        model, options = Model(rank()), {**TWO_CHUNKS, "max_epochs": 3}
        fitted = fit(model, numbered(48), 4, privacy, folder, *callbacks, ckpt_path=path, **options)
        found = saw(model, *fitted)
        results[name] = {key: found[key] for key in ("flat", "global_step", "steps")}
        results[name]["chunks"] = len(model.chunks)
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
        options = {"checks": Checks(dry_run=False), "sampling": FullBatch()}
        fit(model, numbered(21), 4, {**privacy, **options}, folder, max_epochs=3)
        results[engine] = flat(model.net)
    noisy = LogsOnly(rank())
    privacy = {"noise_multiplier": 1.0, "engine": "one_by_one", "checks": Checks(dry_run=False)}
    options = {"max_steps": 8, "accumulate_grad_batches": 2}
    trainer, _ = fit(noisy, numbered(40), 1, privacy, folder, **options)
    return {
        **results,
        "flat": flat(noisy.net),
        "loss": float(trainer.callback_metrics["train_loss"]),
    }


# -- runs that must end early --------------------------------------------------------------------


def lengths(folder: Path) -> dict[str, Any]:
    """The ranks have data sets of different length, which ends the job."""
    model, privacy = Model(rank()), {"noise_multiplier": 1.0}
    try:
        fit(model, numbered(60 + rank()), 3, privacy, folder, max_epochs=1)
    finally:
        torch.save(len(model.chunks), folder / f"chunks-{rank()}.pt")
    return {}


def no_journal(folder: Path) -> dict[str, Any]:
    """The journal of a checkpoint is gone, which only rank 0 looks for and ends the job."""
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    privacy = {"noise_multiplier": 1.0}
    fit(Model(rank()), numbered(60), 3, privacy, folder, saving, max_steps=2)
    torch.distributed.barrier()
    if rank() == 0:
        for journal in (folder / "privacy").glob("*.journal"):
            journal.unlink()
    torch.distributed.barrier()
    model, checkpoint = Model(rank()), folder / "step=2.ckpt"
    try:
        fit(model, numbered(60), 3, privacy, folder, ckpt_path=checkpoint, max_steps=4)
    finally:
        torch.save(len(model.chunks), folder / f"chunks-{rank()}.pt")
    return {}


class Skips(Model):
    """Rank 1 gives no loss at its third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if self.global_step == 2 and rank() == 1 else loss


class SkipsByHand(Model):
    """Rank 1 does not step at its third batch, nor goes back."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2 and rank() == 1:
            return
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]


class Edits(Model):
    """Rank 1 changes the private gradient of a step."""

    at = 2

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == self.at and rank() == 1:
            self.net[0].weight.grad.mul_(2)  # type: ignore[union-attr,operator]


class EditsAtOnce(Edits):
    at = 0


class Mixes(Model):
    """Rank 1 mixes its records at its third batch; all ranks meet in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        self.seen = self.all_gather(x.sum().detach())
        if self.global_step == 2 and rank() == 1:
            x = x + 3 * x.mean(0)
        return super().training_step((index, x, y), batch_idx)


def voided(folder: Path, kind: type[Model] = Skips) -> dict[str, Any]:
    """End both ranks by what the records of one show; each says what it knows."""
    privacy = DifferentialPrivacy(
        target_delta=1e-5, noise_multiplier=1.0, checks=Checks(dry_run=False), sampling=WholeSet()
    )
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_exception=True)
    model, error = kind(rank()), ""
    try:
        fit(model, numbered(60), 3, None, folder, saving, privacy, max_epochs=1)
    except (VoidedRunError, MisconfigurationException) as raised:
        error = str(raised)
    return {"error": error, "epsilon": privacy.epsilon, "steps": privacy.steps}


def voided_apart(folder: Path) -> dict[str, Any]:
    return voided(folder, SkipsByHand)


def mixed(folder: Path) -> dict[str, Any]:
    return voided(folder, Mixes)


def edited(folder: Path) -> dict[str, Any]:
    return voided(folder, Edits)


def edited_at_once(folder: Path) -> dict[str, Any]:
    return voided(folder, EditsAtOnce)


# -- all ----------------------------------------------------------------------------------------------

ON_TWO: list[Callable[[Path], dict[str, Any]]] = [
    *(clipped, by_record, ghost, diff2, cubic, noise, secure, correlated, sparse, resumed, alone),
    *(lengths, no_journal, voided, voided_apart, mixed, edited, edited_at_once),
]


def main(folder: Path, processes: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    scenarios: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(one_fit, folder / name) for name in FITS
    }
    for scenario in ON_TWO:
        scenarios[scenario.__name__] = partial(scenario, folder / scenario.__name__)
    if not fsdp_on_cpu.args[0]:  # the condition to skip
        from tests.strategies.processes import sharded_jobs

        found = sharded_jobs.scenarios(folder, processes)
        scenarios |= {f"sharded {name}": scenario for name, scenario in found.items()}
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        torch.save(scenarios[name](), folder / f"{name}-{processes}-{rank()}.pt")
    if torch.distributed.is_initialized():  # its threads would still run while Python ends
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
