"""Random numbers on the device: further passes draw the same ones, and nothing else moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from device import DEVICE
from scipy import stats
from torch import Tensor, nn

from lightning_dp import Checks, Diff2
from lightning_dp._noise import NoiseSource
from lightning_dp.gradients.snapshot import RandomState

THERE = torch.device(DEVICE, 0)


def draw() -> Tensor:
    return torch.rand(4, device=THERE)


def test_a_random_state_brings_the_devices_generator_back() -> None:
    before = RandomState(THERE)
    first = draw()
    assert not before.is_same(RandomState(THERE))
    with before.again():
        assert torch.equal(draw(), first)
    later = draw()
    assert not torch.equal(later, first)
    before.restore()
    assert before.is_same(RandomState(THERE))
    assert torch.equal(draw(), first)


def test_seeded_states_differ_and_leave_those_of_now() -> None:
    now = RandomState(THERE)
    states = [RandomState.seeded(THERE, seed) for seed in (1, 2, 1)]
    assert now.is_same(RandomState(THERE))
    drawn = []
    for state in states:
        with state.again():
            drawn.append(draw())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


class Dropping(nn.Module):
    """Notes which entries each run drops; the probe runs on the CPU."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.note = lambda mask: masks.append(mask.cpu()) if mask.device == THERE else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.first(x), training=self.training)
        self.note(hidden == 0)
        return self.last(hidden)


@pytest.mark.parametrize("engine", ["auto", pytest.param("hooks", marks=pytest.mark.slow)])
def test_both_points_of_a_difference_see_one_dropout_mask(
    engine: str, fit: Callable[..., Any]
) -> None:
    masks: list[Tensor] = []
    settings = {"checks": Checks(dry_run=False, comparisons=False), "engine": engine}
    estimator = Diff2(restart_every=3)
    fit(DEVICE, net=lambda: Dropping(masks), estimator=estimator, **settings)
    _, here, there, *rest = masks
    assert torch.equal(here, there) and torch.equal(*rest)
    assert not torch.equal(here[:1], rest[0][:1])


def test_noise_is_drawn_on_the_device_and_by_no_global_generator() -> None:
    torch.manual_seed(0)
    before, size = RandomState(THERE), 40_000
    first, second = (torch.zeros(size, device=THERE) for _ in range(2))
    for vector in (first, second):
        NoiseSource().add_normal(vector, 2.0)
    assert before.is_same(RandomState(THERE))
    for vector in (first, second):
        assert stats.kstest(vector.cpu().numpy() / 2.0, "norm").pvalue > 1e-4
        assert stats.kstest(vector.cpu().numpy() / 4.0, "norm").pvalue < 1e-4
    assert abs(np.corrcoef(first.cpu().numpy(), second.cpu().numpy())[0, 1]) < 0.03
