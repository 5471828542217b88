"""The ε of a run is that of the events that ran, by another library."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant as PLDReference

from lightning_dp import FullBatch
from lightning_dp.accounting import PoissonGaussian
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.schedules import Exponential

DELTA = 1e-5


def reference_epsilon(events, delta=DELTA, relation=NeighboringRelation.ADD_OR_REMOVE_ONE):
    """dp-accounting's PLD for the events that ran."""
    accountant = PLDReference(relation, value_discretization_interval=1e-3)
    for (noise_multiplier, sample_rate), count in Counter(event.pair for event in events).items():
        gaussian = dp_event.GaussianDpEvent(noise_multiplier)
        accountant.compose(dp_event.PoissonSampledDpEvent(sample_rate, gaussian), count)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 3.0])
def test_epsilon_is_within_one_percent_above_dp_accounting(
    noise_multiplier, classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        noise_multiplier=noise_multiplier,
        target_delta=DELTA,
        isolation_probe=False,
        spot_checks=False,
    )

    make_trainer(max_epochs=3, callbacks=[privacy]).fit(classifier(mlp()), loader)

    reference = reference_epsilon(charges())
    # dp-accounting rounds up on its grid too, by at most a few 1e-4 here.
    assert reference * (1 - 1e-3) <= privacy.epsilon <= reference * 1.01


def test_epsilon_at_another_delta_belongs_to_the_same_events(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        noise_multiplier=1.0, target_delta=DELTA, isolation_probe=False, spot_checks=False
    )

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
            target_epsilon=1.0,
            target_delta=DELTA,
            relation=relation,
            sampling=FullBatch(),
            isolation_probe=False,
            spot_checks=False,
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
            isolation_probe=False,
            spot_checks=False,
        )
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)
        assert 0.99 < privacy.epsilon <= 1.0
        noise[relation] = privacy.noise_multiplier

    assert noise["replace_one"] > 1.2 * noise["add_remove"]
    events = [PoissonGaussian(noise["replace_one"], 0.1)] * 10
    reference = reference_epsilon(events, relation=NeighboringRelation.REPLACE_ONE)
    assert reference * (1 - 1e-3) <= privacy.epsilon <= reference * 1.01


@pytest.mark.parametrize("rate", [0.05, -0.02])
def test_a_noise_schedule_is_what_was_charged_and_meets_the_target(
    rate, classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        target_epsilon=2.0,
        target_delta=DELTA,
        noise_schedule=Exponential(rate=rate),
        isolation_probe=False,
        spot_checks=False,
    )

    make_trainer(max_epochs=2, callbacks=[privacy]).fit(classifier(mlp()), loader)

    events = charges()
    scale = events[0].noise_multiplier
    assert [event.noise_multiplier for event in events] == pytest.approx(
        [scale * math.exp(-rate * step) for step in range(20)], rel=1e-12
    )
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0
    assert reference_epsilon(events) == pytest.approx(privacy.epsilon, rel=1e-2)
