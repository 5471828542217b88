"""Nothing of the model's size goes between host and device in a step, nor is made in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from device import DEVICE
from torch import nn

from lightning_dp import Checks, Diff2, LaplacianSmoothing

WIDTH, WIDER = (
    2100,
    4200,
)  # so that d is more than what is worked on at once; in float64 on a device


def wide(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3))


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        pytest.param({}, WIDTH, id="dp-sgd"),
        pytest.param(
            {"estimator": Diff2(restart_every=2)}, WIDER, id="diff2", marks=pytest.mark.slow
        ),
        pytest.param(
            {"postprocessing": [LaplacianSmoothing(1.0)]},
            WIDTH,
            id="smoothing",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_move_and_widen_no_vector_of_the_models_size(
    settings: dict[str, Any], width: int, fit: Callable[..., Any], phases: Any
) -> None:
    with phases.counting as counting:
        trainer = {"callbacks": [phases], "max_steps": 2}
        fit(
            DEVICE,
            net=partial(wide, width),
            checks=Checks(dry_run=False, comparisons=False),
            **{"noise_multiplier": 0.001, "trainer": trainer, **settings},
        )
    for kind in ("copy", "float64"):
        for step in ("step 0", "step 1"):
            assert not counting.of(kind, step, at_least=width**2)


@pytest.mark.slow
def test_a_fit_with_its_dry_run_brings_no_weight_to_the_host(
    fit: Callable[..., Any], phases: Any
) -> None:
    with phases.counting as counting:
        fit(DEVICE, net=partial(wide, 300), trainer={"callbacks": [phases], "max_steps": 3})
    moved = counting.of("copy", at_least=300**2)
    at = [event.where.split(":")[0].rsplit("/", 1)[-1] for event in moved.elements()]
    # Lightning brings the model there and back, as its parameters and as one of the Trainer's.
    assert at == ["strategy.py"] * 3
