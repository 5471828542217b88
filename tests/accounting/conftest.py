"""Slow, obvious answers to compare the accountants with, as fixtures."""

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as dp_pld
from scipy.stats import norm

from lightning_dp.accounting import History, Relation
from lightning_dp.accounting.base import FloatArray

logging.getLogger().setLevel(logging.ERROR)


def _profile_by_integration(
    z: float, q: float, epsilon: float, relation: Relation = "add_remove"
) -> float:
    """delta of one step: the integral of (p - e^epsilon r)+, the larger of both directions."""

    x = np.linspace(-1 - 12 * z, 1 + 12 * z, 400_001)
    without = norm.pdf(x, 0, z)
    new = (1 - q) * without + q * norm.pdf(x, 1, z)
    old = (1 - q) * without + q * norm.pdf(x, -1, z)

    def hockey_stick(p: FloatArray, r: FloatArray) -> float:
        return float(np.maximum(p - math.exp(epsilon) * r, 0.0).sum() * (x[1] - x[0]))

    if relation == "replace_one":
        return hockey_stick(new, old)
    return max(hockey_stick(new, without), hockey_stick(without, new))


def _dp_accounting_brackets(
    history: History, delta: float, h: float, relation: Relation = "add_remove"
) -> tuple[float, float]:
    """Lower and upper bound of epsilon by dp-accounting's optimistic and pessimistic PLD."""
    relations = {
        "add_remove": dp_pld.NeighborRel.ADD_OR_REMOVE_ONE,
        "replace_one": dp_pld.NeighborRel.REPLACE_ONE,
    }
    bounds = []
    for pessimistic in (False, True):
        total = None
        for event, count in history:
            z, q = event.pair
            step = dp_pld.from_gaussian_mechanism(
                z,
                sampling_prob=q,
                value_discretization_interval=h,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
                neighboring_relation=relations[relation],
            )
            part = step.self_compose(count)
            total = part if total is None else total.compose(part)
        assert total is not None
        bounds.append(float(total.get_epsilon_for_delta(delta)))
    return bounds[0], bounds[1]


@pytest.fixture
def profile_by_integration() -> Callable[..., float]:
    """``(z, q, epsilon, relation)`` to delta of one step."""
    return _profile_by_integration


@pytest.fixture
def dp_accounting_brackets() -> Callable[..., tuple[float, float]]:
    """``(history, delta, h, relation)`` to a lower and an upper bound of epsilon."""
    return _dp_accounting_brackets
