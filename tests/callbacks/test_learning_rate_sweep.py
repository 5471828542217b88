"""A learning rate found in one short training: charged where it is private; weights come back."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy
from lightning_dp.accounting import sweep_history
from lightning_dp.callbacks import LearningRateSweep

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
Y = X @ torch.arange(8.0)


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 1), nn.Dropout(0.1))

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0])[:, 0] - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def public_loss(model):
    assert not model.training and not torch.is_grad_enabled()
    return float((model.layer(X)[:, 0] - Y).square().mean())


def run(folder, *callbacks, accumulate=1):
    trainer = Trainer(
        default_root_dir=folder,
        max_epochs=100,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accumulate_grad_batches=accumulate,
    )
    torch.manual_seed(0)
    model = Regression()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.fit(model, DataLoader(TensorDataset(X, Y), batch_size=32))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return trainer


def test_without_noise_it_finds_a_rate_that_trains(tmp_path):
    sweep = LearningRateSweep(public_loss, low=1e-4, high=100.0, steps=60)
    trainer = run(tmp_path, sweep)
    assert trainer.global_step == len(sweep.scores) < 60  # it diverged, and was stopped
    assert sweep.rates == [sweep.rate(step) for step in range(len(sweep.rates))]
    assert 1e-3 < sweep.suggestion < 0.5  # of least squares, beyond 1 it diverges


def test_with_privacy_its_steps_are_charged(tmp_path):
    privacy = DifferentialPrivacy(
        noise_multiplier=0.5, target_delta=1e-5, isolation_probe=False, spot_checks=False
    )
    sweep = LearningRateSweep(public_loss, low=1e-3, high=10.0, steps=20)
    run(tmp_path, sweep, privacy, accumulate=2)
    assert privacy.steps == len(sweep.scores) == 20
    assert sum(count for _, count in sweep_history(tmp_path / "privacy")) == 20
    assert sweep.suggestion in sweep.rates
    assert privacy.report().private


def test_where_nothing_is_learnt_there_is_no_suggestion():
    sweep = LearningRateSweep(public_loss)
    assert sweep.suggestion is None
    sweep.scores, sweep.rates = [1.0, 1.5, 2.0, math.nan], [1.0, 2.0, 3.0, 4.0]
    assert sweep.suggestion is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"low": 0.0}, "low=0.0"),
        ({"high": math.nan}, "high=nan"),
        ({"low": 1.0, "high": 1.0}, "smaller than high"),
        ({"steps": 3}, "steps=3"),
    ],
    ids=str,
)
def test_what_makes_no_sweep_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        LearningRateSweep(public_loss, **arguments)


def test_a_score_may_be_negative(tmp_path):
    """An accuracy, say, which is better the larger it is."""
    scores = iter([-0.5, -0.6, -0.55, -0.7, -0.65])
    sweep = LearningRateSweep(lambda model: next(scores), low=1e-4, high=1e-2, steps=5)
    run(tmp_path, sweep)
    assert len(sweep.scores) == 5 and sweep.suggestion is not None


def test_a_training_that_never_began_leaves_the_weights(tmp_path):
    sweep = LearningRateSweep(public_loss, steps=5)
    sweep.on_fit_end(Trainer(logger=False, default_root_dir=tmp_path), model := Regression())
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
