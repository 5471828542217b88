"""The documents of the project, as code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy

ROOT = Path(__file__).parents[2]


class Net(L.LightningModule):
    """The ``model`` of the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.layer = nn.Linear(4, 200), nn.Linear(200, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(self.hidden(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    """The ``train_loader`` of the documents."""

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(200, 4)
        return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20, shuffle=True)


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def blocks() -> Callable[..., list[str]]:
    """The code blocks of a language in a document, or in its beginning up to a line."""

    def find(document: str, language: str, *, until: str = "\0") -> list[str]:
        text = (ROOT / document).read_text(encoding="utf-8").partition(f"\n{until}\n")[0]
        return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)

    return find


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that the documents' code takes for granted; it runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return {
        "L": L,
        "model": Net(),
        "train_loader": Data().train_dataloader(),
        "MyModel": Net,
        "MyData": Data,
        "DifferentialPrivacy": DifferentialPrivacy,
    }
