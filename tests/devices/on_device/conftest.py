"""Whole private fits, on the device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from counting import Counting
from device import DEVICE, there
from models import BATCH, NETS, RECORDS, STEPS, Model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy


@dataclass
class Fitted:
    """The traces of a fit."""

    model: Model
    trainer: L.Trainer
    privacy: DifferentialPrivacy

    @property
    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Fitted]:
    """``fit(where, name, ...)``: a private fit with batches that are the same every time."""

    def run(
        where: str,
        name: str = "mlp",
        *,
        net: Callable[[], nn.Module] | None = None,
        x: Callable[[], Tensor] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        model: Callable[..., Model] = Model,
        trainer: dict[str, Any] | None = None,
        ckpt_path: Any = None,
        **settings: Any,
    ) -> Fitted:
        torch.manual_seed(0)
        known = {"x": lambda: torch.randn(RECORDS, 6), **NETS[name]}
        made, inputs = model((net or known["net"])(), optimizer), (x or known["x"])()
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


class Phases(L.Callback):
    """Counts each step by itself, from the end of the one before: a hook at its start has a cost."""

    def __init__(self, counting: Counting) -> None:
        self.counting, self.steps = counting, 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        self.counting.phase = f"step {self.steps}"

    @property
    def ordinary(self) -> list[str]:
        """The steps after the first one without a spot check, which runs the batch once more."""
        names = [f"step {step}" for step in range(1, self.steps)]
        losses = [sum(self.counting.of("loss", name).values()) for name in names]
        return [name for name, runs in zip(names, losses, strict=True) if runs == min(losses)]


@pytest.fixture(autouse=True)
def same_digits_as_on_the_cpu() -> Iterator[None]:
    """No TF32 in the model's own convolutions, which a CUDA device takes unless it is told not to."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def phases() -> Phases:
    return Phases(Counting())
