"""The budget: what it affords is trained, what it does not afford never runs."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant as PLDReference
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dp import FullBatch
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.schedules import Exponential
from lightning_dp.warnings import PrivacyWarning

DELTA = 1e-5


def reference_epsilon(events, delta=DELTA, relation=NeighboringRelation.ADD_OR_REMOVE_ONE):
    """dp-accounting's PLD for the events that ran."""
    accountant = PLDReference(relation, value_discretization_interval=1e-3)
    for event in events:
        gaussian = dp_event.GaussianDpEvent(event.pair[0])
        accountant.compose(dp_event.PoissonSampledDpEvent(event.pair[1], gaussian))
    return accountant.get_epsilon(delta)


def test_a_calibrated_run_makes_every_planned_step_and_spends_the_target(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(target_epsilon=1.5, target_delta=DELTA)
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
    privacy = DifferentialPrivacy(target_epsilon=2.0, target_delta=DELTA)
    trainer = make_trainer(callbacks=[privacy], **limits)

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == privacy.steps == planned
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0


@pytest.mark.parametrize("minimum", [{}, {"min_epochs": 50}, {"min_steps": 500}])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_stops_before_the_first_step_that_would_exceed_the_target(
    minimum, accumulate, classifier, mlp, blobs, make_trainer, charges
):
    privacy = DifferentialPrivacy(target_epsilon=1.0, noise_multiplier=2.0, target_delta=DELTA)
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
    privacy = DifferentialPrivacy(target_epsilon=1.0, noise_multiplier=2.0, target_delta=DELTA)
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

    privacy = DifferentialPrivacy(target_epsilon=1.0, noise_multiplier=2.0, target_delta=DELTA)
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
    privacy = DifferentialPrivacy(target_epsilon=0.01, noise_multiplier=0.3, target_delta=DELTA)
    trainer = make_trainer(max_epochs=3, min_epochs=2, min_steps=5, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match=r"No training step was made.*ε = 0.01.*does not allow"):
        trainer.fit(model, loader, loader)

    assert trainer.global_step == privacy.steps == 0
    assert privacy.epsilon == 0.0
    assert weights(model).equal(before)
    assert charges() == []
    assert "does not allow one step with noise multiplier 0.3" in privacy.report().stop_reason


def test_calibration_without_a_last_step_is_refused(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(target_epsilon=1.0, target_delta=DELTA)
    trainer = make_trainer(max_epochs=-1, callbacks=[privacy])

    with pytest.raises(ValueError, match=r"target_epsilon=1.0 alone.*max_epochs=.*max_steps="):
        trainer.fit(classifier(mlp()), loader)

    assert privacy.steps == 0


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 3.0])
def test_epsilon_is_within_one_percent_above_dp_accounting(
    noise_multiplier, classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(noise_multiplier=noise_multiplier, target_delta=DELTA)

    make_trainer(max_epochs=3, callbacks=[privacy]).fit(classifier(mlp()), loader)

    reference = reference_epsilon(charges())
    # dp-accounting rounds up on its grid too, by at most a few 1e-4 here.
    assert reference * (1 - 1e-3) <= privacy.epsilon <= reference * 1.01


def test_epsilon_at_another_delta_belongs_to_the_same_events(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=DELTA)

    make_trainer(max_epochs=2, callbacks=[privacy]).fit(classifier(mlp()), loader)

    assert privacy.epsilon_at(DELTA) == privacy.epsilon
    for delta in (1e-3, 1e-7):
        reference = reference_epsilon(charges(), delta)
        assert reference * (1 - 1e-3) <= privacy.epsilon_at(delta) <= reference * 1.01


def test_replace_one_costs_twice_the_noise_in_full_batches(
    classifier, mlp, loader, make_trainer, charges
):
    noise = {}
    for relation in ("add_remove", "replace_one"):
        privacy = DifferentialPrivacy(
            target_epsilon=1.0, target_delta=DELTA, relation=relation, sampling=FullBatch()
        )
        make_trainer(max_epochs=3, callbacks=[privacy]).fit(classifier(mlp()), loader)
        assert 0.99 < privacy.epsilon <= 1.0
        assert privacy.report().relation == relation
        noise[relation] = privacy.noise_multiplier

    assert noise["replace_one"] == pytest.approx(2 * noise["add_remove"], rel=2e-3)


def test_replace_one_costs_more_noise_in_poisson_batches(classifier, mlp, loader, make_trainer):
    noise = {}
    for relation in ("add_remove", "replace_one"):
        privacy = DifferentialPrivacy(
            target_epsilon=1.0,
            target_delta=DELTA,
            relation=relation,
        )
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)
        assert 0.99 < privacy.epsilon <= 1.0
        noise[relation] = privacy.noise_multiplier

    assert noise["replace_one"] > 1.2 * noise["add_remove"]
    events = [PoissonGaussian(noise["replace_one"], 0.1)] * 10
    reference = reference_epsilon(events, relation=NeighboringRelation.REPLACE_ONE)
    assert reference * (1 - 1e-3) <= privacy.epsilon <= reference * 1.01


def test_a_second_fit_goes_on_spending_the_same_ledger(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=DELTA)
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])
    model = classifier(mlp())

    trainer.fit(model, loader)
    first = privacy.epsilon
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model, loader)

    assert trainer.global_step == privacy.steps == len(charges()) == 50
    assert privacy.epsilon > first
    assert privacy.epsilon == PLDAccountant().epsilon([(e, 1) for e in charges()], DELTA)


def test_a_second_fit_of_another_trainer_cannot_exceed_the_budget(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(target_epsilon=1.0, noise_multiplier=3.0, target_delta=DELTA)
    model = classifier(mlp())

    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    assert privacy.steps == 10
    second = make_trainer(max_epochs=100, callbacks=[privacy])
    second.fit(model, loader)

    assert 0 < second.global_step == privacy.steps - 10
    events = charges()
    assert privacy.epsilon <= 1.0
    assert PLDAccountant().epsilon([(e, 1) for e in [*events, events[0]]], DELTA) > 1.0


def test_a_second_fit_with_nothing_left_trains_nothing(
    classifier, mlp, loader, make_trainer, weights
):
    privacy = DifferentialPrivacy(target_epsilon=1.0, target_delta=DELTA)
    model = classifier(mlp())
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    before, spent = weights(model), privacy.epsilon

    second = make_trainer(max_epochs=1, callbacks=[privacy])
    with pytest.warns(PrivacyWarning, match="No training step was made"):
        second.fit(model, loader)

    assert second.global_step == 0
    assert (privacy.steps, privacy.epsilon) == (10, spent)
    assert weights(model).equal(before)


def test_a_fit_after_an_exception_keeps_what_was_charged(
    classifier, mlp, loader, make_trainer, charges
):
    class Fails(classifier):
        fails_at = 4

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == self.fails_at:
                raise ArithmeticError("planted")
            return loss

    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=DELTA)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])
    model = Fails(mlp())
    with pytest.raises(ArithmeticError, match="planted"):
        trainer.fit(model, loader)
    assert trainer.global_step == 4
    assert privacy.steps == len(charges()) == 5  # the fifth batch was looked at

    model.fails_at = -1
    again = make_trainer(max_epochs=1, callbacks=[privacy])
    again.fit(model, loader)

    assert again.global_step == 10
    assert privacy.steps == len(charges()) == 15


@pytest.mark.parametrize("rate", [0.05, -0.02])
def test_a_noise_schedule_is_what_was_charged_and_meets_the_target(
    rate, classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        target_epsilon=2.0, target_delta=DELTA, noise_schedule=Exponential(rate=rate)
    )

    make_trainer(max_epochs=2, callbacks=[privacy]).fit(classifier(mlp()), loader)

    events = charges()
    scale = events[0].noise_multiplier
    assert [event.noise_multiplier for event in events] == pytest.approx(
        [scale * math.exp(-rate * step) for step in range(20)], rel=1e-12
    )
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0
    assert reference_epsilon(events) == pytest.approx(privacy.epsilon, rel=1e-2)


def test_a_noise_schedule_stops_before_the_step_that_would_exceed_the_target(
    classifier, mlp, loader, make_trainer, charges
):
    schedule = Exponential(rate=0.05)
    privacy = DifferentialPrivacy(
        target_epsilon=2.0, noise_multiplier=3.0, target_delta=DELTA, noise_schedule=schedule
    )
    trainer = make_trainer(max_epochs=20, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    events = charges()
    following = PoissonGaussian(3.0 * schedule(len(events)), 0.1)
    assert trainer.global_step == privacy.steps == len(events) < 200
    assert privacy.epsilon <= 2.0
    assert PLDAccountant().epsilon([(e, 1) for e in [*events, following]], DELTA) > 2.0


def test_without_noise_epsilon_is_infinite_and_the_report_says_so(
    classifier, mlp, loader, make_trainer
):
    privacy = DifferentialPrivacy(noise_multiplier=0.0, target_delta=DELTA)
    assert privacy.epsilon == 0.0

    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)

    report = privacy.report()
    assert math.isinf(privacy.epsilon) and math.isinf(report.epsilon)
    assert not report.private
    assert str(report).startswith("NOT PRIVATE (no noise)")


def test_without_noise_a_target_trains_nothing(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(target_epsilon=1.0, noise_multiplier=0.0, target_delta=DELTA)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match="No training step was made"):
        trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == 0
    assert privacy.epsilon == 0.0


def test_report_tells_what_ran(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(
        target_epsilon=3.0, noise_multiplier=1.5, max_grad_norm=0.4, target_delta=DELTA
    )
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)

    report = privacy.report()

    assert report.private and not report.seeded
    assert (report.steps, report.delta, report.target_epsilon) == (10, DELTA, 3.0)
    assert report.epsilon == report.epsilon_of_plan == privacy.epsilon
    assert (report.sample_rate, report.expected_batch_size, report.num_records) == (0.1, 24, 240)
    assert report.noise_multiplier == 1.5
    assert report.mechanism["estimator"] == "MeanGradient(max_grad_norm=0.4)"
    assert report.accountant == PLDAccountant().name
    assert any("validation" in item for item in report.not_covered)
    assert report.to_dict()["versions"]["lightning"] == L.__version__
    assert f"ε = {report.epsilon:.4g} at δ = 1e-05 (add_remove), 10 steps" in str(report)


def test_report_of_a_seeded_run_is_tainted(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=DELTA, seed=0)
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)

    report = privacy.report()

    assert not report.private
    assert report.seeded
    assert str(report).startswith("NOT PRIVATE (a seed was set)")


def test_report_names_the_epsilon_of_the_whole_plan_when_a_result_stopped_the_run(
    classifier, mlp, loader, make_trainer
):
    privacy = DifferentialPrivacy(target_epsilon=2.0, target_delta=DELTA)
    never_good_enough = EarlyStopping("val_loss", min_delta=1e9, patience=2)
    trainer = make_trainer(max_epochs=10, callbacks=[privacy, never_good_enough])

    trainer.fit(classifier(mlp()), loader, loader)

    report = privacy.report()
    assert trainer.global_step == privacy.steps == report.steps == 30
    assert report.epsilon == privacy.epsilon < 1.5
    assert 0.99 * 2.0 < report.epsilon_of_plan <= 2.0
    assert f"ε = {report.epsilon_of_plan:.4g} (whole plan)" in str(report)
