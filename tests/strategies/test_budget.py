"""A run spends what ran; what the budget affords is trained, and nothing more ever runs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant as PLDReference
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dp import (
    AbstractSampling,
    Diff2,
    FixedOrder,
    FullBatch,
    LambdaCGD,
    Poisson,
    PrivacyConfig,
)
from lightning_dp._refusals import PrivacyWarning
from lightning_dp._world import World
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import CyclicRound
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan
from lightning_dp.schedules import Constant, Exponential
from tests.zoo import private

DELTA = 1e-5


@pytest.fixture
def model(classifier, mlp):
    return classifier(mlp())


def epsilon(events):
    return PLDAccountant().epsilon([(event, 1) for event in events], DELTA)


# -- ε ------------------------------------------------------------------------------------------


def assert_is_reference(found, events, delta=DELTA, relation="ADD_OR_REMOVE_ONE"):
    """Within one percent above dp-accounting's PLD, which rounds up on its grid as well."""
    accountant = PLDReference(NeighboringRelation[relation], value_discretization_interval=2e-3)
    for (noise_multiplier, sample_rate), count in Counter(event.pair for event in events).items():
        gaussian = dp_event.GaussianDpEvent(noise_multiplier)
        accountant.compose(dp_event.PoissonSampledDpEvent(sample_rate, gaussian), count)
    reference = accountant.get_epsilon(delta)
    assert reference * (1 - 1e-3) <= found <= reference * 1.01


@pytest.mark.parametrize("noise_multiplier", [0.7, 3.0])
def test_epsilon_is_that_of_another_library(noise_multiplier, model, fit, charges):
    privacy = private(noise_multiplier=noise_multiplier)
    fit(model, privacy, max_steps=8)

    assert privacy.epsilon_at(DELTA) == privacy.epsilon
    for delta in (DELTA, 1e-3):
        assert_is_reference(privacy.epsilon_at(delta), charges(), delta)


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, FullBatch()])
def test_replace_one_costs_more_noise(sampling, model, fit):
    noise = {}
    for relation in ("add_remove", "replace_one"):
        options = {} if sampling is None else {"sampling": sampling}
        privacy = private(target_epsilon=1.0, relation=relation, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # trained before under another ledger
            fit(model, privacy, max_epochs=1)
        assert 0.99 < privacy.epsilon <= 1.0
        assert privacy.report().relation == relation
        noise[relation] = privacy.noise_multiplier

    if sampling is not None:
        assert noise["replace_one"] == pytest.approx(2 * noise["add_remove"], rel=2e-3)
    else:
        assert noise["replace_one"] > 1.2 * noise["add_remove"]
        events = [PoissonGaussian(noise["replace_one"], 0.1)] * 10
        assert_is_reference(privacy.epsilon, events, relation="REPLACE_ONE")


@pytest.mark.few(1)
@pytest.mark.parametrize("rate", [0.05, -0.02])
def test_a_noise_schedule_is_what_was_charged_and_meets_the_target(rate, model, fit, charges):
    privacy = private(target_epsilon=2.0, noise_schedule=Exponential(rate=rate))
    fit(model, privacy, max_steps=6)

    events = charges()
    scale = events[0].noise_multiplier
    expected = [scale * math.exp(-rate * step) for step in range(6)]
    assert [event.noise_multiplier for event in events] == pytest.approx(expected, rel=1e-12)
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0
    assert_is_reference(privacy.epsilon, events)


# -- the budget -----------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("limits", "planned"),
    [
        ({"max_epochs": 2}, 20),
        ({"max_epochs": 3, "limit_train_batches": 7, "accumulate_grad_batches": 2}, 12),
        ({"max_steps": 13, "max_epochs": -1}, 13),
    ],
)
def test_calibration_makes_the_steps_of_this_trainer_and_spends_the_target(
    limits, planned, model, fit, charges
):
    privacy = private(target_epsilon=2.0)
    trainer = fit(model, privacy, **limits)

    assert trainer.global_step == privacy.steps == len(charges()) == planned
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0
    assert privacy.report().stop_reason is None


def test_calibration_without_a_last_step_is_refused(model, fit):
    privacy = private(target_epsilon=1.0)
    with pytest.raises(ValueError, match=r"target_epsilon=1.0 alone.*max_epochs=.*max_steps="):
        fit(model, privacy, max_epochs=-1)
    assert privacy.steps == 0


@pytest.mark.parametrize(
    ("limits", "schedule"),
    [
        ({"max_epochs": 100, "min_epochs": 50, "accumulate_grad_batches": 4}, None),
        ({"max_epochs": -1}, None),
        ({"max_epochs": 20}, Exponential(rate=0.2)),
    ],
)
def test_training_stops_before_the_first_step_that_would_exceed_the_target(
    limits, schedule, model, blobs, fit, charges
):
    accumulate = limits.get("accumulate_grad_batches", 1)
    options = {} if schedule is None else {"noise_schedule": schedule}
    privacy = private(target_epsilon=1.0, noise_multiplier=2.0, **options)
    trainer = fit(model, privacy, DataLoader(blobs, batch_size=24 // accumulate), **limits)

    events = charges()
    assert 2 < trainer.global_step == privacy.steps == len(events) < 200
    assert trainer.current_epoch <= 2  # no empty epochs either, to reach a minimum
    assert privacy.epsilon <= 1.0
    scale = 1.0 if schedule is None else schedule(len(events))
    assert epsilon([*events, PoissonGaussian(2.0 * scale, 24 / 240)]) > 1.0
    assert "privacy budget reached" in privacy.report().stop_reason


def test_final_validation_and_checkpoint_run_after_the_stop(model, loader, fit, tmp_path):
    validated_at = []
    model.on_validation_end = lambda: validated_at.append(model.global_step)
    privacy = private(target_epsilon=1.0, noise_multiplier=2.0)
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, save_top_k=-1)
    limits = {"max_epochs": 100, "min_epochs": 50, "enable_checkpointing": True}
    trainer = fit(model, privacy, validate=loader, callbacks=[saver], **limits)

    assert trainer.global_step % 10 != 0  # it stopped inside an epoch
    assert validated_at[-1] == trainer.global_step
    saved = torch.load(saver.last_model_path, weights_only=True)
    assert saved["global_step"] == trainer.global_step
    assert saved["lightning_dp"]["mechanism"]["step"] == privacy.steps


@pytest.mark.parametrize("noise_multiplier", [0.3, 0.0])
def test_a_budget_too_small_for_one_step_trains_nothing_and_says_why(
    noise_multiplier, model, loader, fit, charges, weights
):
    before = weights(model)
    privacy = private(target_epsilon=0.01, noise_multiplier=noise_multiplier)
    limits = {"max_epochs": 3, "min_epochs": 2, "min_steps": 5}
    with pytest.warns(PrivacyWarning, match=r"No training step was made.*ε = 0.01.*does not allow"):
        trainer = fit(model, privacy, validate=loader, **limits)

    assert trainer.global_step == privacy.steps == 0
    assert privacy.epsilon == 0.0
    assert weights(model).equal(before)
    assert charges() == []
    reason = f"does not allow one step with noise multiplier {noise_multiplier:g}"
    assert reason in privacy.report().stop_reason


# -- another fit, also after an exception, goes on spending the same ledger -------------------------


def test_a_second_fit_of_another_trainer_cannot_exceed_the_budget(model, fit, charges, weights):
    privacy = private(target_epsilon=1.0, noise_multiplier=3.0)
    fit(model, privacy, max_epochs=1)
    assert privacy.steps == 10
    second = fit(model, privacy, max_epochs=100)

    assert 0 < second.global_step == privacy.steps - 10
    events = charges()
    assert privacy.epsilon <= 1.0 < epsilon([*events, events[0]])

    before, spent = weights(model), (privacy.steps, privacy.epsilon)
    with pytest.warns(PrivacyWarning, match="No training step was made"):
        third = fit(model, privacy, max_epochs=1)
    assert third.global_step == 0
    assert (privacy.steps, privacy.epsilon) == spent
    assert weights(model).equal(before)


def test_a_fit_after_an_exception_keeps_what_was_charged(classifier, mlp, fit, charges):
    class Fails(classifier):
        fails_at = 4

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == self.fails_at:
                raise ArithmeticError("planted")
            return loss

    model, privacy = Fails(mlp()), private()
    with pytest.raises(ArithmeticError, match="planted"):
        fit(model, privacy, max_epochs=1)
    assert privacy.steps == len(charges()) == 5  # the fifth batch was looked at

    model.fails_at = -1
    assert fit(model, privacy, max_epochs=1).global_step == 10
    assert privacy.steps == len(charges()) == 15


@pytest.mark.parametrize(("delta", "warned"), [(0.01, True), (1 / 240, True), (1 / 241, False)])
def test_a_delta_that_may_publish_a_record_warns_once(delta, warned, model, fit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, private(target_delta=delta), max_steps=1)
    said = [str(each.message) for each in caught if each.category is PrivacyWarning]
    assert len(said) == warned
    for text in said:
        assert f"target_delta={delta:g} is not below 1/N = 0.00417 for the N = 240" in text
        assert "publishes a record" in text and "Choose δ well below 1/N, 0.0001 say" in text


# -- what was planned, and ended before ----------------------------------------------------------


class Ending:
    """Fits of one object without a Trainer, some of which end before their plan."""

    def __init__(self, folder, **arguments):
        self.folder = folder
        self.config = PrivacyConfig(target_delta=DELTA, **{"noise_multiplier": 1.0, **arguments})

    def fit(self, run, planned, made, steps_before=0, rate=0.1):
        run.use_batches(BatchPlan(1000, rate, 1, 10))
        run.start(planned, World(), self.folder, steps_before)
        for _ in range(made):
            run.mechanism.ask([torch.zeros(3)])
            run.mechanism.tell([torch.zeros(3)])
        run.stop()
        return run

    def resumed(self, state):
        run = PrivateRun(self.config)
        run.load_state_dict(state, self.folder, World())
        return run


def of(steps):
    return epsilon([PoissonGaussian(1.0, 0.1)] * steps)


def test_a_further_fit_does_not_take_back_the_plan_of_one_that_a_result_ended(tmp_path):
    ending = Ending(tmp_path)
    run = ending.fit(PrivateRun(ending.config), 200, 30)
    assert run.epsilon == of(30) and run.epsilon_of_plan == of(200)
    ending.fit(run, 10, 10)  # of another Trainer
    assert run.epsilon == of(40) and run.epsilon_of_plan == pytest.approx(of(210), rel=1e-6)
    again = ending.fit(ending.resumed(run.state_dict()), 10, 4)
    assert again.epsilon_of_plan == pytest.approx(of(220), rel=1e-6)
    assert PrivateRun(ending.config).epsilon_of_plan is None


def test_fewer_steps_than_were_planned_are_a_stop(tmp_path):
    ending = Ending(tmp_path)
    run = ending.fit(PrivateRun(ending.config), 200, 30)
    state = run.state_dict()
    ending.fit(run, 20, 20, steps_before=30)  # max_steps=50 now
    assert run.epsilon == of(50) and run.epsilon_of_plan == pytest.approx(of(200), rel=1e-6)
    shorter = ending.fit(ending.resumed(state), 10, 10)  # in another process: 30 + 20 + 10 are made
    assert shorter.epsilon_of_plan == pytest.approx(of(220), rel=1e-6)
    state.pop("last_step")  # an earlier version did not write it down
    assert ending.fit(ending.resumed(state), 10, 10).epsilon_of_plan == of(70)


def test_smaller_batches_do_not_take_back_the_plan_of_larger_ones(tmp_path):
    ending = Ending(tmp_path)
    run = ending.fit(PrivateRun(ending.config), 200, 30)
    ending.fit(run, 170, 10, steps_before=30, rate=0.05)
    both = [PoissonGaussian(1.0, 0.1)] * 200 + [PoissonGaussian(1.0, 0.05)] * 170
    assert run.epsilon_of_plan == pytest.approx(epsilon(both), rel=1e-6)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_new_block_of_cheaper_passes_does_not_take_back_the_plan(is_resumed, tmp_path):
    ending = Ending(
        tmp_path,
        sampling=FixedOrder(),
        noise=LambdaCGD(0.95),
        relation="zero_out",
        noise_multiplier=9.0,
    )
    run = ending.fit(PrivateRun(ending.config), 50, 10)
    planned, state = run.epsilon_of_plan, run.state_dict()
    state["report"] = {"epsilon_of_plan": planned}  # as the strategy does
    run = ending.resumed(state) if is_resumed else run
    ending.fit(run, 40, 40, steps_before=10)
    assert run.epsilon_of_plan == planned > run.epsilon


@dataclass(frozen=True)
class HalfTheNoise(AbstractSampling):
    """Names an event that costs more than (z, q) does."""

    def draw(self, shard_size, sample_rate, rng):
        return Poisson().draw(shard_size, sample_rate, rng)

    def event(self, noise_multiplier, sample_rate):
        return PoissonGaussian(noise_multiplier / 2, sample_rate)


@pytest.mark.parametrize("schedule", [Constant(), Exponential(0.01)])
def test_own_events_are_planned_as_they_are_charged(schedule, tmp_path):
    ending = Ending(
        tmp_path,
        sampling=HalfTheNoise(),
        noise_schedule=schedule,
        noise_multiplier=None,
        target_epsilon=2.0,
    )
    run = ending.fit(PrivateRun(ending.config), 50, 20)
    assert run.remaining_steps == 30 and 1.99 < run.epsilon_of_plan <= 2.0
    assert run.epsilon_beside([]) == pytest.approx(run.epsilon_of_plan, rel=1e-6)


class EightInOne(HalfTheNoise):
    def event(self, noise_multiplier, sample_rate):
        return CyclicRound(noise_multiplier, sample_rate, steps=8)


def test_each_step_outside_of_a_block_is_charged_whatever_its_event_covers(tmp_path):
    ending = Ending(tmp_path, sampling=EightInOne())
    run = ending.fit(PrivateRun(ending.config), 16, 16)
    assert run.ledger.history() == [(CyclicRound(1.0, 0.1, 8), 16)]


def test_a_plan_that_the_budget_ends_is_whole(tmp_path):
    """A crash: steps that were lost are charged, so that fewer are left."""
    ending = Ending(tmp_path, target_epsilon=of(50) * 1.0001)
    run = ending.fit(PrivateRun(ending.config), 200, 20)
    state = run.state_dict()
    ending.fit(run, 180, 10, steps_before=20)
    resumed = ending.fit(ending.resumed(state), 180, 20)
    assert resumed.exhausted and resumed.epsilon == resumed.epsilon_of_plan == of(50)


def test_steps_that_asked_nothing_count_in_further_fits(tmp_path):
    ending = Ending(tmp_path, estimator=Diff2(restart_every=4))
    run = ending.fit(PrivateRun(ending.config), 8, 8)  # at rest: 2 restarts, and 6 that ask nothing
    alone = run.epsilon_of_plan
    assert run.steps == 2 and alone > run.epsilon
    ending.fit(run, 8, 8)
    assert run.epsilon_of_plan > alone
    twice = [*run.ledger.history(), *run.mechanism.uncharged]
    assert sum(count for _, count in twice) == 16
    assert run.epsilon_of_plan == PLDAccountant().epsilon(twice, DELTA)
