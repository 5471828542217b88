"""The report tells what ran, and what must be claimed."""

from __future__ import annotations

import math

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import EarlyStopping

from lightning_dp.accounting import PLDAccountant, PoissonGaussian, epsilon_text
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report import PrivacyReport
from lightning_dp.report.of_run import _version

DELTA = 1e-5


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
    assert f"ε = {epsilon_text(report.epsilon)} at δ = 1e-05 (add_remove), 10 steps" in str(report)


def test_packages_that_are_on_the_path_without_being_installed_have_no_version():
    assert _version("numpy") == np.__version__
    assert _version("a-package-that-nobody-installed") == "not installed as a package"


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
    assert f"ε = {epsilon_text(report.epsilon_of_plan)} (whole plan)" in str(report)


def fitted(classifier, mlp, loader, make_trainer, **arguments):
    privacy = DifferentialPrivacy(noise_multiplier=1.5, target_delta=DELTA, **arguments)
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)
    return privacy


def test_a_batch_that_ran_whole_has_epsilon_under_the_tolerance_of_comparisons(
    classifier, mlp, loader, make_trainer
):
    whole = fitted(classifier, mlp, loader, make_trainer, engine="layers").report()
    alone = fitted(classifier, mlp, loader, make_trainer, engine="records").report()

    weaker = [(PoissonGaussian(1.5 / 1.05, 0.1), 10)]
    exact = PLDAccountant().epsilon(weaker, DELTA)
    assert whole.epsilon < whole.epsilon_at_tolerance() == exact
    assert f"with noise multipliers z / 1.05: ε = {epsilon_text(exact)}" in str(whole)
    assert "1.05" not in str(alone) and "by construction" in alone.isolation


def test_steps_that_were_not_compared_are_counted_as_such_with_the_reason(
    classifier, mlp, loader, make_trainer
):
    privacy = fitted(classifier, mlp, loader, make_trainer, public_state=["teacher.*"])
    run = privacy._run
    looked = run.spot_checks
    assert privacy.report().spot_checks == (
        f"compared at {looked} of {looked} steps looked at since the last resume"
    )

    run.not_compared = {"it is coarse": 2, "an error": 1}

    report = privacy.report()
    assert report.spot_checks == (
        f"compared at {looked - 3} of {looked} steps looked at since the last resume; "
        "not compared: an error (1); it is coarse (2)"
    )
    assert "public state: teacher.* (declared by the user, not checked)" in str(report)
    assert PrivacyReport.from_dict(report.to_dict()).public_state == ("teacher.*",)
