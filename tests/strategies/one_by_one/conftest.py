"""Private fits in which each record runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dp import FullBatch
from lightning_dp.callbacks import DifferentialPrivacy
from tests.strategies.one_by_one.models import C, records


@pytest.fixture
def fit(make_trainer):
    def run(
        model: L.LightningModule,
        data: Any = None,
        *,
        collate: Any = None,
        workers: int = 0,
        batch_size: int = 4,
        callbacks: Sequence[L.Callback] = (),
        trainer: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        settings = {
            "noise_multiplier": 0.0,
            "max_grad_norm": C,
            "target_delta": 1e-5,
            "sampling": FullBatch(),
            "engine": "one_by_one",
        }
        privacy = DifferentialPrivacy(**{**settings, **options})
        arguments = {"max_steps": 1, "callbacks": [privacy, *callbacks], **(trainer or {})}
        made = make_trainer(**arguments)
        data = records() if data is None else data
        made.fit(model, DataLoader(data, batch_size, collate_fn=collate, num_workers=workers))
        return made, privacy

    return run


@pytest.fixture
def released_sum(fit, weights):
    """lr = 1 and q = 1, so one update times N is the released sum."""

    def run(model: L.LightningModule, data: Any = None, **options: Any) -> Tensor:
        before = weights(model).double()
        fit(model, data, **options)
        return (before - weights(model).double()) * len(records() if data is None else data)

    return run
