"""DIFF2 beside what else is in a training run: dropout, metrics, logs, schedules, averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dp import FullBatch, Momentum
from lightning_dp.estimators import Diff2, Storm
from lightning_dp.schedules import Exponential
from tests.zoo import private

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")


def test_noise_schedule_and_momentum_compose_with_it(classifier, mlp, blobs, make_trainer):
    """z_t is the schedule's times the kind of step's; momentum averages the estimates."""
    options = {"noise_schedule": Exponential(rate=0.5), "postprocessing": [Momentum(0.9)]}
    privacy = private(estimator=Diff2(3), sampling=FullBatch(), **options)
    make_trainer(max_epochs=4, callbacks=[privacy]).fit(classifier(mlp()), DataLoader(blobs, 240))
    ratio = Diff2(3).relative_noise(1)
    charged = [event.noise_multiplier for event, _ in privacy._run.ledger.history()]
    shape = [torch.tensor(-0.5 * t).double().exp().item() for t in range(4)]
    expected = [shape[0], ratio * shape[1], ratio * shape[2], shape[3]]
    assert charged == pytest.approx(expected, rel=1e-6)


# -- a run with differences, resumed in any round, is the run that was not interrupted -----------


STEPS = 6


def options(estimator: Any, noise: float = 0.0) -> dict[str, Any]:
    return {
        "estimator": estimator,
        "noise_multiplier": noise,
        "sampling": FullBatch(),
        "trainer": {"max_epochs": STEPS},
        "batch_size": 25,
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("estimator", [Diff2(3, 1.2, 0.5), Storm(0.3)])
def test_resume_from_every_round(fit, tmp_path, estimator):
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = fit(callbacks=(saving,), **options(estimator)).model.flat
    for step in (1, 2, 3, 4) if isinstance(estimator, Diff2) else (1, 5):
        path: Path = tmp_path / f"step={step}.ckpt"
        resumed = fit(ckpt_path=path, **options(estimator))
        torch.testing.assert_close(resumed.model.flat, whole, rtol=0, atol=0)
        assert resumed.privacy._run.mechanism.step == STEPS


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("step", [3, 4, 5])
def test_the_noisy_estimate_is_carried_over(fit, tmp_path, step):
    """The checkpoint holds v with its noise, and the point where it was asked for."""
    estimator = Diff2(3, 1.2, 0.5)
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    before = fit(callbacks=(saving,), **options(estimator, noise=1.0)).privacy
    checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
    state = checkpoint["lightning_dp"]["mechanism"]
    weights = torch.cat([part.flatten() for part in checkpoint["state_dict"].values()])
    moved = weights - state["estimator"]["point"]
    torch.testing.assert_close(moved, -0.3 * state["estimator"]["estimate"])
    assert state["step"] == step

    path = tmp_path / f"step={step}.ckpt"
    resumed = fit(ckpt_path=path, **options(estimator, noise=1.0)).privacy
    assert resumed.steps == before.steps + STEPS - step  # both runs count
    assert resumed.epsilon > before.epsilon


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_larger_batches_of_restarts_go_on_where_they_were(fit, tmp_path, workers):
    """A resume, also in the middle of an epoch, draws each step at the rate that it is charged."""
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {
        "estimator": Diff2(3, restart_rate=5.0),
        "noise_multiplier": 2.0,
        "workers": workers,
        "trainer": {"max_epochs": 2},
    }
    fit(callbacks=(saving,), **options)
    for step in (2, 6):
        resumed = fit(ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        sizes = [len(batch) for batch in resumed.model.batches]
        is_whole = [size == 60 for size in sizes]  # 12 on average, 60 at restarts
        assert is_whole == [t % 3 == 0 for t in range(step, 10)]
