"""The budget as a metric: the accountant's number, kept like any metric's state."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.accounting import Gaussian, PoissonGaussian, epsilon
from lightning_dp.metrics import PrivacyBudget


def test_epsilon_is_the_accountants():
    budget = PrivacyBudget(target_delta=1e-6)
    budget.update(1.0, 0.01, steps=300)
    budget.update(1.0, 0.01, steps=200)
    budget.update(4.0, 1.0)

    history = [(PoissonGaussian(1.0, 0.01), 500), (Gaussian(4.0), 1)]
    assert float(budget.compute()) == pytest.approx(epsilon(history, 1e-6), rel=1e-9)
    assert len(budget.counts) == 2


def test_nothing_spent_is_zero_and_no_noise_is_infinite():
    budget = PrivacyBudget(target_delta=1e-5)
    assert float(budget.compute()) == 0
    budget.update(0.0, 0.5)
    assert float(budget.compute()) == float("inf")
    budget.reset()
    assert float(budget.compute()) == 0


def test_state_survives_a_checkpoint(tmp_path):
    budget = PrivacyBudget(target_delta=1e-5)
    budget.update(2.0, 0.1, steps=10)
    torch.save(budget.state_dict(), tmp_path / "state.pt")
    other = PrivacyBudget(target_delta=1e-5)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    other.update(2.0, 0.1)
    budget.update(2.0, 0.1)
    assert float(other.compute()) == float(budget.compute()) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((float("nan"), 0.1), "noise_multiplier"),
        ((-1.0, 0.1), "noise_multiplier"),
        ((1.0, 1.5), "sample_rate"),
        ((1.0, 0.1, -1), "steps"),
    ],
)
def test_bad_steps_are_refused_and_change_nothing(arguments, message):
    budget = PrivacyBudget(target_delta=1e-5)
    with pytest.raises(ValueError, match=message):
        budget.update(*arguments)
    assert float(budget.compute()) == 0
