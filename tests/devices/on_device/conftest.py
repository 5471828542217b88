"""Whole private fits, on the device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from device import DEVICE, there
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy

RECORDS, BATCH, STEPS = 40, 8, 3


class Model(L.LightningModule):
    """A classifier around any network."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.make_optimizer = net, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert x.device == self.device
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters(), lr=0.1)


@dataclass
class Fitted:
    """What a fit left."""

    model: Model
    trainer: L.Trainer
    privacy: DifferentialPrivacy

    @property
    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Fitted]:
    """``fit(where, net, ...)``: a private fit with batches that are the same every time."""

    def run(
        where: str,
        net: Callable[[], nn.Module],
        *,
        x: Callable[[], Tensor] = lambda: torch.randn(RECORDS, 6),
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        model: Callable[..., Model] = Model,
        trainer: dict[str, Any] | None = None,
        ckpt_path: Any = None,
        **settings: Any,
    ) -> Fitted:
        torch.manual_seed(0)
        made, inputs = model(net(), optimizer), x()
        data = TensorDataset(inputs, torch.arange(RECORDS) % 3)
        defaults: dict[str, Any] = {"target_delta": 1e-5, "noise_multiplier": 0.0, "seed": 7}
        if "estimator" not in settings:
            defaults["max_grad_norm"] = 0.5
        privacy = DifferentialPrivacy(**{**defaults, **settings})
        quiet = {
            **(there() if where == DEVICE else {"accelerator": "cpu", "devices": 1}),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path / where,
            "max_steps": STEPS,
            "max_epochs": -1,
        }
        given = dict(trainer or {})
        callbacks = [privacy, *given.pop("callbacks", ())]
        lightning = L.Trainer(**{**quiet, **given}, callbacks=callbacks)
        assert lightning.strategy.root_device.type == where
        lightning.fit(made, DataLoader(data, BATCH), ckpt_path=ckpt_path)
        return Fitted(made, lightning, privacy)

    return run
