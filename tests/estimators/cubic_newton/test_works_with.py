"""Cubic Newton rounds beside what else is in a training run."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, CubicNewton, FullBatch
from tests.zoo import private


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


# -- resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "fresh"),
    [
        (None, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
        (2, True),
    ],
)
def test_a_run_resumed_after_any_step_is_the_run_that_was_not_interrupted(
    fit, tmp_path, fresh, keep
):
    """With fresh batches a checkpoint may be inside a round."""
    estimator = CubicNewton(0.7, 1.5, 3, 0.8, 0.4, keep=keep, fresh_batches=fresh)
    options = {"sampling": FullBatch(), "noise_multiplier": 0.0, "batch_size": 20}
    options["trainer"] = {"max_epochs": 7}
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = fit(estimator, callbacks=(saving,), **options).model.flat
    for step in (1, 2, 3, 5) if fresh else (1, 6):
        path: Path = tmp_path / f"step={step}.ckpt"
        resumed = fit(estimator, ckpt_path=path, **options)
        torch.testing.assert_close(resumed.model.flat, whole, rtol=0, atol=0)
        assert resumed.privacy._run.mechanism.step == 7


def test_what_is_saved_inside_a_round_are_released_values(fit, tmp_path):
    estimator = CubicNewton(0.7, 1.5, 3, keep=2, fresh_batches=True)
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = {"max_epochs": 2}
    fit(estimator, noise_multiplier=1.0, callbacks=(saving,), trainer=trainer)
    saved = torch.load(tmp_path / "step=5.ckpt", weights_only=True)["lightning_dp"]["mechanism"]
    state = saved["estimator"]
    assert (saved["step"], state["round"], state["inner"]) == (5, 1, 2)
    assert state["offset"].shape == state["average"].shape == (2,)
    assert set(state) == {"round", "inner", "offset", "distance", "average"}


# -- further passes leave no trace ---------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:A batch was charged")
def test_chunks_of_a_batch_that_was_never_released_are_not_in_the_next_round(
    classifier, mlp, blobs, make_trainer
):
    passes: list[int] = []  # in a closure, which no snapshot holds

    class Skips(classifier):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(mlp(), plain_sgd)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            passes.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
        ) -> None:
            if batch_idx > 1:
                super().optimizer_step(epoch, batch_idx, optimizer, closure)
            else:  # the first batch of two chunks gets no step
                closure()

    model = Skips()
    privacy = private(
        estimator=CubicNewton(1.0, 1.0, 3),
        checks=Checks(
            dry_run=False, comparisons=False, gradient_edits="the first batch is left out"
        ),
    )
    options = {"limit_train_batches": 4, "max_epochs": 1, "accumulate_grad_batches": 2}
    make_trainer(callbacks=[privacy], **options).fit(model, DataLoader(blobs, 60))
    assert passes == [0, 1, 2, 3, 2, 3, 2, 3]
    assert privacy.steps == 2


def test_engines_agree(classifier, mlp, blobs, make_trainer):
    results = []
    for engine in ("bookkeeping", "auto"):
        model = classifier(mlp(), plain_sgd)
        privacy = private(seed=3, engine=engine, estimator=CubicNewton(2.0, 1.0, 4, keep=11))
        trainer = make_trainer(max_steps=4, callbacks=[privacy])
        trainer.fit(model, DataLoader(blobs, 24))
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-4)


# -- size ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_million_parameters_with_ten_thousand_kept_need_no_gradient_per_record(make_trainer):
    """64 gradients of a million entries would be 256 MB; 64 times ten thousand are 2.6 MB."""

    class Wide(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(1000, 990), nn.Tanh(), nn.Linear(990, 10))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return plain_sgd(self.parameters())

    model = Wide()
    size = sum(param.numel() for param in model.parameters())
    assert size > 1_000_000
    privacy = private(estimator=CubicNewton(5.0, 1.0, 3, keep=10_000, max_step_size=0.1))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(128, 1000, generator=generator), torch.arange(128) % 10)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    trainer = make_trainer(max_steps=3, callbacks=[privacy])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.fit(model, DataLoader(data, 64))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak  # KiB
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    moved = int(torch.count_nonzero(after - before))
    assert 10_000 < moved <= 30_000 and bool(torch.isfinite(after).all())
    assert grown < 220_000, f"{grown} KiB"
    assert np.isfinite(privacy.epsilon)
