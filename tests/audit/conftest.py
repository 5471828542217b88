"""A model of any network and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn


class Model(L.LightningModule):
    """A network and a loss of its output and the rest of the batch."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, *others = batch
        return self.loss(self.net(x), *others)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def model_class() -> type[Model]:
    return Model
