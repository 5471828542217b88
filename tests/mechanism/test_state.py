"""The state that a mechanism saves: enough to go on, and released values only."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from lightning_dp._noise import NoiseSource
from lightning_dp.boundary import BoundedSum
from lightning_dp.mechanism import Mechanism
from lightning_dp.postprocessing import Momentum
from lightning_dp.schedules import Exponential


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("saved_after", [0, 1, 3])
def test_a_resumed_mechanism_continues_the_trajectory_of_the_uninterrupted_one(saved_after, trial):
    totals = [torch.randn(trial.size, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def fresh(noise: NoiseSource) -> Mechanism:
        return trial.make(
            noise=noise,
            schedule=Exponential(0.3),
            estimator=trial.Asking(),
            postprocessing=(Momentum(0.8),),
        )

    whole = fresh(NoiseSource(5))
    expected = [trial.step(whole, total) for total in totals]

    noise = NoiseSource(5)
    first = fresh(noise)
    before = [trial.step(first, total) for total in totals[:saved_after]]
    resumed = fresh(noise)
    resumed.load_state_dict(through_a_checkpoint(first.state_dict()))
    after = [trial.step(resumed, total) for total in totals[saved_after:]]

    torch.testing.assert_close(torch.stack(before + after), torch.stack(expected))
    assert resumed.step == 6
    assert resumed.state_dict()["estimator"] == {"told": 6}


def test_a_state_saved_is_not_changed_by_the_steps_after_it(trial):
    mechanism = trial.make(postprocessing=(Momentum(0.8),))
    trial.step(mechanism, torch.ones(trial.size))
    state = mechanism.state_dict()
    before = state["postprocessing"][0]["average"].clone()

    trial.step(mechanism, torch.ones(trial.size))

    assert state["step"] == 1
    assert torch.equal(state["postprocessing"][0]["average"], before)


def test_in_the_middle_of_a_step_the_state_holds_released_values_only(trial):
    mechanism = trial.make(postprocessing=(Momentum(0.5),))
    trial.step(mechanism, torch.ones(trial.size))
    before = through_a_checkpoint(mechanism.state_dict())
    mechanism.ask(trial.params)
    mechanism.answer(BoundedSum(torch.full((trial.size,), 12345.0), 1.0))

    state = mechanism.state_dict()

    assert set(state) == {
        "step",
        "estimator",
        "postprocessing",
        "schedule",
        "unasked",
        "signal",
    }
    assert repr(state) == repr(before)


def test_a_sum_that_is_not_noised_does_not_print_its_values(trial):
    total = BoundedSum(torch.full((trial.size,), 12345.0), 1.0)
    assert "12345" not in repr(total)
    assert repr(total) == "BoundedSum(clip_norm=1.0, noise_std=None)"
    mechanism = trial.make()
    mechanism.ask(trial.params)
    mechanism.answer(total)
    assert "12345" not in repr(mechanism)
