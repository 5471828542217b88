"""A fit of a small sharded model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from numpy.typing import NDArray
from sharded_models import Chain, in_blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import AbstractSampling
from lightning_dp._shards import is_sharded
from lightning_dp.accounting.events import AbstractEvent, Gaussian
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.sampling import BatchPlan

RECORDS = 51


@dataclass(frozen=True)
class WholeSet(AbstractSampling):
    """All records in every step: nothing is left to chance."""

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


def records() -> TensorDataset:
    """Six features, one of three classes."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(RECORDS) % 3
    return TensorDataset(
        torch.randn(RECORDS, 6, generator=generator) + nn.functional.one_hot(y, 6), y
    )


def chain() -> nn.Module:
    return Chain(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Small(L.LightningModule):
    """Sharded by two blocks and a root."""

    def __init__(self, net: Callable[[], nn.Module] = chain) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = net()
        self.begin: Tensor | None = None
        self.average: Tensor | None = None

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.shard(self.device_mesh["data_parallel"])

    def shard(self, mesh: Any) -> None:
        in_blocks(self.net, mesh)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.begin is None:
            self.begin = weights(self)
            states = self.trainer.strategy.private_run.mechanism.state_dict()["postprocessing"]
            self.average = states[0]["average"].clone() if states else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def weights(module: nn.Module) -> Tensor:
    """All weights, whole."""
    params = (param.detach() for param in module.parameters())
    return torch.cat([(p.full_tensor() if is_sharded(p) else p).flatten() for p in params])


def fit(
    folder: Path,
    processes: int,
    privacy: dict[str, Any],
    *,
    steps: int,
    model: Small | None = None,
    checks: bool = False,
    saves: bool = False,
    is_distributed: bool = True,
    shards: bool = True,
    precision: Any = "32-true",
    ckpt_path: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
) -> tuple[L.Trainer, DifferentialPrivacy]:
    """Make so many steps over all records, with or without the checks of isolation."""
    asked = {"isolation_probe": checks, "spot_checks": checks, "advice": False}
    callback = DifferentialPrivacy(target_delta=1e-5, sampling=WholeSet(), **asked, **privacy)
    parallel = ModelParallelStrategy(processes, 1, save_distributed_checkpoint=is_distributed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=parallel if shards else "ddp",
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[callback, *callbacks],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(records(), batch_size=math.ceil(RECORDS / processes))
    trainer.fit(Small() if model is None else model, loader, ckpt_path=ckpt_path)
    if saves:
        trainer.save_checkpoint(folder / "last.ckpt")
    return trainer, callback
