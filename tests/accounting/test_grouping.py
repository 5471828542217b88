"""Many distinct steps as mixtures of few: never better than the step itself, hardly worse."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dp.accounting._grouping import Mixture, as_mixture
from lightning_dp.accounting._pmf import backward_profile, forward_profile
from lightning_dp.accounting.steps import Steps

EPSILONS = np.concatenate(([0.0], np.geomspace(1e-3, 12.0, 40)))
PROFILES = (forward_profile, backward_profile)


def random_steps(seed: int, size: int = 600) -> Steps:
    rng = np.random.default_rng(seed)
    z = np.exp(rng.uniform(np.log(0.5), np.log(2.5), size))
    q = np.exp(rng.uniform(np.log(0.2), 0.0, size))
    return Steps(z, q, rng.integers(1, 9, size).astype(float))


def gap(steps: Steps, mixture: Mixture, relation: str) -> tuple[float, float]:
    """Least and largest (mixture - step) / step over all steps, directions and epsilons."""
    relative = []
    for cell in mixture.cells:
        nodes = [mixture.nodes[c] for c in cell.corners]
        for profile in PROFILES:
            corners = np.stack([profile(EPSILONS, z, q, relation)[0] for z, q in nodes])
            for row, z, q in zip(cell.weights(), *members(steps, cell, nodes), strict=True):
                own = profile(EPSILONS, z, q, relation)[0]
                seen = own > 1e-9
                relative.append((row @ corners - own)[seen] / own[seen])
    values = np.concatenate(relative)
    return float(values.min()), float(values.max())


def members(steps: Steps, cell: object, nodes: list[tuple[float, float]]) -> tuple[list, list]:
    """The steps inside a rectangle, in their order."""
    zs, qs = [z for z, _ in nodes], [q for _, q in nodes]
    z, q = steps.noise_multipliers, steps.sample_rates
    inside = (z >= min(zs) * (1 - 1e-12)) & (z <= max(zs) * (1 + 1e-12))
    inside &= (q >= min(qs) * (1 - 1e-12)) & (q <= max(qs) * (1 + 1e-12))
    return list(z[inside]), list(q[inside])


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mixture_of_corners_dominates_the_step(seed: int, relation: str) -> None:
    steps = random_steps(seed)
    mixture = as_mixture(steps, relation, spacing=0.3, exact=32)
    assert not mixture.is_exact
    least, most = gap(steps, mixture, relation)
    assert least >= -1e-9
    assert most > 0.01  # it is an interpolation, not the step itself


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_the_error_is_of_second_order_in_the_spacing(relation: str) -> None:
    steps = random_steps(2, size=4000)

    def error(spacing: float) -> float:
        return gap(steps, as_mixture(steps, relation, spacing, exact=32), relation)[1]

    assert error(0.1) < error(0.3) / 4


def test_all_steps_are_counted() -> None:
    steps = random_steps(3)
    assert as_mixture(steps, "add_remove", 0.3, exact=32).total == steps.total


def test_few_steps_are_left_alone() -> None:
    steps = random_steps(4, size=32)
    mixture = as_mixture(steps, "add_remove", 0.3, exact=32)
    assert mixture.is_exact
    assert mixture.nodes == list(
        zip(steps.noise_multipliers.tolist(), steps.sample_rates.tolist(), strict=True)
    )
