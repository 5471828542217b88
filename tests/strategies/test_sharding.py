"""What sharded parameters do not allow is refused by name, before anything is charged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import (
    CubicNewton,
    Diff2,
    LaplacianSmoothing,
    MeanGradient,
    Momentum,
    Storm,
)
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.strategies.checks import check_strategy
from tests.older_torch import fsdp_on_cpu


@pytest.fixture(autouse=True)
def _no_processes_are_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Sharded(L.LightningModule):
    """One layer, sharded as a function says, over one process."""

    def __init__(self, shard: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.net, self.shard = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), shard

    def configure_model(self) -> None:
        self.shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def whole(net: nn.Module, mesh: Any) -> object:
    return fully_shard(net, mesh=mesh)


def fit(
    folder: Path,
    privacy: dict[str, Any],
    shard: Callable[[nn.Module, Any], object] = whole,
) -> DifferentialPrivacy:
    callback = DifferentialPrivacy(
        target_delta=1e-5, **{"noise_multiplier": 1.0, "isolation_probe": False, **privacy}
    )
    trainer = L.Trainer(
        max_steps=3,
        accelerator="cpu",
        devices=1,
        strategy=ModelParallelStrategy(1, 1),
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    records = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
    trainer.fit(Sharded(shard), DataLoader(records, batch_size=8))
    return callback


def refused(folder: Path, match: str, privacy: dict[str, Any], **options: Any) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        fit(folder, privacy, **options)
    assert not list(folder.rglob("*.journal"))


@pytest.mark.parametrize(
    ("privacy", "name"),
    [
        ({"estimator": CubicNewton(1.0, 1.0, 3)}, "CubicNewton"),
        ({"postprocessing": [Momentum(0.5), LaplacianSmoothing(1.0)]}, "LaplacianSmoothing"),
        ({"count_clipped": True}, "count_clipped=True"),
        ({"engine": "one_by_one"}, "engine='one_by_one'"),
    ],
)
def test_what_needs_more_than_an_entry_is_refused_by_name(tmp_path, privacy, name):
    refused(tmp_path, f"{name}.* does not work on sharded parameters.*strategy='ddp'", privacy)


def test_a_model_that_is_not_sharded_is_refused(tmp_path):
    match = r"\['net\.0\.weight', .* are trained and not sharded.*fully_shard\(self\.model"
    refused(tmp_path, match, {}, shard=lambda net, mesh: None)


def test_other_ways_to_shard_are_refused_with_the_way_out():
    match = r"FSDPStrategy is not supported.*ModelParallelStrategy\(data_parallel_size"
    with pytest.raises(MisconfigurationException, match=match):
        check_strategy(FSDPStrategy())


@fsdp_on_cpu
@pytest.mark.parametrize("estimator", [MeanGradient(1.0), Diff2(2, 1.0), Storm(0.5, 1.0)], ids=repr)
def test_what_works_entry_by_entry_trains(tmp_path, estimator):
    privacy = {"postprocessing": [Momentum(0.5)], "estimator": estimator}
    assert fit(tmp_path, privacy).steps == 3
