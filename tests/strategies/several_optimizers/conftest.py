"""Private fits of models with several optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy


@pytest.fixture
def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(48, 6, generator=generator)), batch_size=12)


@pytest.fixture
def fit(loader: DataLoader[Any], make_trainer: Any) -> Any:
    """``fit(model, ...)``: one private fit with little else looked at."""

    def run(model: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        trainer = {"max_epochs": 1, **settings.pop("trainer", {})}
        size = settings.pop("batch_size", 12)
        arguments = {
            "noise_multiplier": 1.0,
            "target_delta": 1e-3,
            "private_optimizer": "critic",
            "isolation_probe": False,
            "spot_checks": False,
            **settings,
        }
        if arguments.get("target_epsilon"):
            del arguments["noise_multiplier"]
        if budget := arguments.pop("budget", None):
            arguments["target_epsilon"] = budget
        privacy = DifferentialPrivacy(**arguments)
        run.trainer = make_trainer(callbacks=[privacy, *callbacks], **trainer)
        run.privacy = privacy
        data = DataLoader(loader.dataset, batch_size=size)
        run.trainer.fit(model, data, ckpt_path=ckpt_path)
        return privacy

    return run
