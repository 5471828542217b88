"""A Trainer with schedules: its journal follows the schedule, and spends the budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.journal import read_journal
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import (
    Constant,
    Cosine,
    DynamicGD,
    DynamicMomentum,
    Exponential,
    FromInfluence,
    Polynomial,
    StepDecay,
)
from tests.zoo import private

STEPS, DELTA = 6, 1e-5

SCHEDULES = [
    Constant(),
    Exponential(rate=0.1),
    FromInfluence(tuple(1.0 + t for t in range(STEPS))),
    # A plan knows no more of a schedule than its values, which the contract tests for each of them.
    *(
        pytest.param(schedule, marks=pytest.mark.slow)
        for schedule in (
            Cosine(steps=15, end=0.5),
            DynamicGD(kappa=10.0),
            DynamicMomentum(kappa=50.0, eta0=1.0, beta=0.9, steps=STEPS),
            Polynomial(steps=STEPS, end=0.3, power=2.0),
            StepDecay(every=7, factor=0.8),
        )
    ),
]


def events(folder: Path) -> list[Gaussian | PoissonGaussian]:
    """All events in the journal on the disk, in order."""
    (path,) = (folder / "privacy").glob("*.journal")
    return [e for run in read_journal(path)[1].values() for e, n in run for _ in range(n)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_the_journal_follows_the_schedule_and_spends_the_target(
    schedule, classifier, mlp, loader, make_trainer, tmp_path
):
    target = 3.0
    privacy = private(target_epsilon=target, noise_schedule=schedule)
    make_trainer(max_steps=STEPS, callbacks=[privacy]).fit(classifier(mlp()), loader)

    charged = events(tmp_path)
    assert len(charged) == STEPS
    assert {event.sample_rate for event in charged} == {0.1}
    multipliers = np.array([event.noise_multiplier for event in charged])
    shape = np.array([schedule(step) for step in range(STEPS)])
    np.testing.assert_allclose(multipliers, multipliers[0] * shape, rtol=1e-12)
    spent = PLDAccountant().epsilon([(event, 1) for event in charged], DELTA)
    assert 0.99 * target < spent <= target
    assert privacy.epsilon == pytest.approx(spent, rel=1e-9)


def test_full_batches_follow_it_too_and_add_up_exactly(
    classifier, mlp, blobs, make_trainer, tmp_path
):
    from lightning_dp.accounting.gdp import gdp_epsilon

    schedule = DynamicGD(kappa=5.0)
    privacy = private(target_epsilon=2.0, noise_schedule=schedule, sampling=FullBatch())
    loader = DataLoader(blobs, batch_size=240)
    make_trainer(max_epochs=6, callbacks=[privacy]).fit(classifier(mlp()), loader)

    multipliers = np.array([event.noise_multiplier for event in events(tmp_path)])
    np.testing.assert_allclose(multipliers / multipliers[0], [schedule(t) for t in range(6)])
    exact = gdp_epsilon(float(np.sqrt(np.sum(multipliers**-2.0))), DELTA)
    assert 0.99 * 2.0 < exact <= 2.0


def test_a_given_noise_multiplier_is_the_noise_of_the_first_step(
    classifier, mlp, loader, make_trainer, tmp_path
):
    privacy = private(noise_multiplier=1.5, noise_schedule=Polynomial(10, 0.5))
    make_trainer(max_steps=STEPS, callbacks=[privacy]).fit(classifier(mlp()), loader)
    multipliers = [event.noise_multiplier for event in events(tmp_path)]
    assert multipliers == pytest.approx([1.5 * max(0.5, 1 - 0.05 * t) for t in range(STEPS)])


def test_a_resumed_run_goes_on_in_the_schedule(classifier, mlp, loader, make_trainer, tmp_path):
    schedule = Exponential(rate=0.1)

    def fit(steps: int, **more: object) -> None:
        privacy = private(noise_multiplier=2.0, noise_schedule=schedule)
        trainer = make_trainer(max_steps=steps, callbacks=[privacy])
        trainer.fit(classifier(mlp()), loader, **more)
        trainer.save_checkpoint(tmp_path / "last.ckpt")

    fit(STEPS // 2)
    fit(STEPS, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    multipliers = [event.noise_multiplier for event in events(tmp_path)]
    assert multipliers == pytest.approx([2.0 * schedule(step) for step in range(STEPS)])


def test_an_influence_shorter_than_the_run_is_refused_before_any_data_is_used(
    classifier, mlp, loader, make_trainer, tmp_path
):
    privacy = private(target_epsilon=3.0, noise_schedule=FromInfluence((1.0,) * (STEPS - 1)))
    model = classifier(mlp())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"none for step {STEPS - 1}"):
        make_trainer(max_steps=STEPS, callbacks=[privacy]).fit(model, loader)
    assert privacy.steps == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
