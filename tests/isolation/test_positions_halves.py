"""Statistics of a batch that its halves share are found by leaving out a single record."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_dp.audit import check_isolation


class SharesOfLabels(L.LightningModule):
    """Weighs records by their labels, and divides by the weights of the batch: constants of autograd."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weight = nn.Linear(3, 2), weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weights = torch.where(y == 1, self.weight, 1.0)
        losses = nn.functional.cross_entropy(self.layer(x), y, reduction="none")
        return (losses * weights).sum() / weights.sum()


def test_weights_whose_mean_is_that_of_each_half():
    batch = torch.eye(8)[:, :3], torch.arange(8) % 2  # two halves of one label each
    assert check_isolation(SharesOfLabels(1.0), batch).outcome == "isolated"
    assert check_isolation(SharesOfLabels(9.0), batch).outcome == "coupled"
