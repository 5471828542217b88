"""Fits of models with activation checkpoints: the same weights as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_dp import Diff2, FullBatch
from lightning_dp.callbacks import DifferentialPrivacy


class Blocks(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            plain = self.reentrant is None
            x = x + (block(x) if plain else checkpoint(block, x, use_reentrant=self.reentrant))
        return self.head(x)


@pytest.mark.parametrize("engine", ["auto", pytest.param("one_by_one", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"isolation_probe": False, "spot_checks": False, "max_grad_norm": 0.5},
        pytest.param({"max_grad_norm": 0.5}, marks=pytest.mark.slow),
        pytest.param(
            {
                "estimator": Diff2(restart_every=2),
                "sampling": FullBatch(),
                "isolation_probe": False,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "probed", "two passes"],
)
def test_a_fit_is_the_same_with_checkpoints(
    options: dict[str, Any], engine, classifier, blobs, make_trainer
):
    weights = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        model = classifier(Blocks(reentrant))
        settings = {"noise_multiplier": 1.0, "seed": 3, "engine": engine}
        privacy = DifferentialPrivacy(target_delta=1e-5, **settings, **options)
        torch.manual_seed(1)
        accumulate = 1 if "sampling" in options else 2
        trainer = make_trainer(
            max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[privacy]
        )
        trainer.fit(model, DataLoader(blobs, 60))
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        assert all(
            param.grad is None or param.grad.isfinite().all() for param in model.parameters()
        )
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reentrant_checkpoints_are_refused_with_the_cure(classifier, blobs, make_trainer):
    privacy = DifferentialPrivacy(target_delta=1e-5, noise_multiplier=1.0)
    with pytest.raises(TypeError, match=r"reentrant activation checkpoints.*use_reentrant=False"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(
            classifier(Blocks(True)), DataLoader(blobs, 60)
        )
    assert privacy.epsilon == 0
