"""The budget: what it affords is trained, what it does not afford never runs."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.schedules import Exponential

DELTA = 1e-5


def test_a_calibrated_run_makes_every_planned_step_and_spends_the_target(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        target_epsilon=1.5, target_delta=DELTA, isolation_probe=False, spot_checks=False
    )
    trainer = make_trainer(max_epochs=4, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == privacy.steps == len(charges()) == 40
    assert 0.99 * 1.5 < privacy.epsilon <= 1.5
    assert privacy.report().stop_reason is None


@pytest.mark.parametrize(
    ("limits", "planned"),
    [
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 15),
        ({"max_epochs": 3, "limit_train_batches": 7, "accumulate_grad_batches": 2}, 12),
        ({"max_steps": 13, "max_epochs": 2}, 13),
        ({"max_steps": 13, "max_epochs": -1}, 13),
    ],
)
def test_calibration_knows_the_steps_this_trainer_will_make(
    limits, planned, classifier, mlp, loader, make_trainer
):
    privacy = DifferentialPrivacy(
        target_epsilon=2.0, target_delta=DELTA, isolation_probe=False, spot_checks=False
    )
    trainer = make_trainer(callbacks=[privacy], **limits)

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == privacy.steps == planned
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0


@pytest.mark.parametrize("minimum", [{}, {"min_epochs": 50}, {"min_steps": 500}])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_stops_before_the_first_step_that_would_exceed_the_target(
    minimum, accumulate, classifier, mlp, blobs, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        target_epsilon=1.0,
        noise_multiplier=2.0,
        target_delta=DELTA,
        isolation_probe=False,
        spot_checks=False,
    )
    trainer = make_trainer(
        max_epochs=100, accumulate_grad_batches=accumulate, callbacks=[privacy], **minimum
    )

    trainer.fit(classifier(mlp()), DataLoader(blobs, batch_size=24 // accumulate))

    events = charges()
    assert 5 < trainer.global_step == privacy.steps == len(events) < 500
    assert trainer.current_epoch <= 2  # no empty epochs either, to reach a minimum
    assert privacy.epsilon <= 1.0
    next_event = PoissonGaussian(2.0, 24 / 240)
    assert PLDAccountant().epsilon([(e, 1) for e in [*events, next_event]], DELTA) > 1.0
    assert "privacy budget reached" in privacy.report().stop_reason


def test_an_endless_trainer_stops_at_the_budget(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(
        target_epsilon=1.0,
        noise_multiplier=2.0,
        target_delta=DELTA,
        isolation_probe=False,
        spot_checks=False,
    )
    trainer = make_trainer(max_epochs=-1, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == privacy.steps > 5
    assert 0.8 < privacy.epsilon <= 1.0


def test_final_validation_and_checkpoint_run_after_the_stop(
    classifier, mlp, loader, make_trainer, tmp_path
):
    validated_at = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                validated_at.append(trainer.global_step)

    privacy = DifferentialPrivacy(
        target_epsilon=1.0,
        noise_multiplier=2.0,
        target_delta=DELTA,
        isolation_probe=False,
        spot_checks=False,
    )
    checkpoint = ModelCheckpoint(
        dirpath=tmp_path, monitor="val_loss", save_last=True, save_top_k=-1
    )
    trainer = make_trainer(
        max_epochs=100,
        min_epochs=50,
        enable_checkpointing=True,
        callbacks=[Watch(), privacy, checkpoint],
    )

    trainer.fit(classifier(mlp()), loader, loader)

    assert trainer.global_step % 10 != 0  # it stopped inside an epoch
    assert validated_at[-1] == trainer.global_step
    saved = torch.load(checkpoint.last_model_path, weights_only=True)
    assert saved["global_step"] == trainer.global_step
    assert saved["lightning_dp"]["mechanism"]["step"] == privacy.steps


def test_a_budget_too_small_for_one_step_trains_nothing_and_says_why(
    classifier, mlp, loader, make_trainer, charges, weights
):
    model = classifier(mlp())
    before = weights(model)
    privacy = DifferentialPrivacy(
        target_epsilon=0.01,
        noise_multiplier=0.3,
        target_delta=DELTA,
        isolation_probe=False,
        spot_checks=False,
    )
    trainer = make_trainer(max_epochs=3, min_epochs=2, min_steps=5, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match=r"No training step was made.*ε = 0.01.*does not allow"):
        trainer.fit(model, loader, loader)

    assert trainer.global_step == privacy.steps == 0
    assert privacy.epsilon == 0.0
    assert weights(model).equal(before)
    assert charges() == []
    assert "does not allow one step with noise multiplier 0.3" in privacy.report().stop_reason


def test_calibration_without_a_last_step_is_refused(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(
        target_epsilon=1.0, target_delta=DELTA, isolation_probe=False, spot_checks=False
    )
    trainer = make_trainer(max_epochs=-1, callbacks=[privacy])

    with pytest.raises(ValueError, match=r"target_epsilon=1.0 alone.*max_epochs=.*max_steps="):
        trainer.fit(classifier(mlp()), loader)

    assert privacy.steps == 0


def test_a_noise_schedule_stops_before_the_step_that_would_exceed_the_target(
    classifier, mlp, loader, make_trainer, charges
):
    schedule = Exponential(rate=0.05)
    privacy = DifferentialPrivacy(
        target_epsilon=2.0,
        noise_multiplier=3.0,
        target_delta=DELTA,
        noise_schedule=schedule,
        isolation_probe=False,
        spot_checks=False,
    )
    trainer = make_trainer(max_epochs=20, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    events = charges()
    following = PoissonGaussian(3.0 * schedule(len(events)), 0.1)
    assert trainer.global_step == privacy.steps == len(events) < 200
    assert privacy.epsilon <= 2.0
    assert PLDAccountant().epsilon([(e, 1) for e in [*events, following]], DELTA) > 2.0


def test_without_noise_a_target_trains_nothing(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(
        target_epsilon=1.0,
        noise_multiplier=0.0,
        target_delta=DELTA,
        isolation_probe=False,
        spot_checks=False,
    )
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match="No training step was made"):
        trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == 0
    assert privacy.epsilon == 0.0
