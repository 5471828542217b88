"""A fit whose loss mixes records by more than sums: refused before the first release, void after it."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.gradients import CoupledLossError


class Flooded(L.LightningModule):
    """Flooding from some step on, at a level that synthetic records may never come to."""

    def __init__(self, first: int, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.first, self.automatic_optimization = first, not by_hand

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.trainer.global_step >= self.first:
            loss = (loss - 1e-3).abs() + 1e-3
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(make_trainer, first: int, by_hand: bool, engine: str) -> None:
    settings = {"isolation_probe": False, "spot_checks": False, "engine": engine}
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5, **settings)
    records = TensorDataset(torch.rand(60, 3), torch.arange(60) % 2)
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])
    trainer.fit(Flooded(first, by_hand), DataLoader(records, batch_size=20))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_it_is_refused_at_the_first_batch(engine, by_hand, make_trainer):
    with pytest.raises(CoupledLossError, match="abs"):
        fit(make_trainer, 0, by_hand, engine)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_after_a_release_the_run_is_void(engine, by_hand, make_trainer):
    with pytest.raises(VoidedRunError, match=r"abs.*mean over the records"):
        fit(make_trainer, 3, by_hand, engine)
