"""The number of times that the host waits for the device in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from device import DEVICE

from lightning_dp import CubicNewton, Diff2, LaplacianSmoothing, Momentum, Storm

STEPS = 8
INNER = 3


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp-sgd": (0, {}),
    "convolutions": (0, {"name": "cnn"}),
    "ghost": (0, {"name": "cnn", "engine": "ghost"}),
    "attention": (0, {"name": "attention"}),
    "records": (0, {"name": "raw"}),
    "hooks": (1, {"engine": "hooks"}),  # whether Opacus saw all uses of the parameters
    "rest": (
        0,
        {
            "count_clipped": True,
            "postprocessing": [LaplacianSmoothing(1.0), Momentum(0.9)],
        },
    ),
    "diff2": (1, {"estimator": Diff2(restart_every=STEPS)}),
    "storm": (1, {"estimator": Storm(momentum=0.5)}),
    "cubic": (INNER, {"estimator": CubicNewton(1.0, 1.0, INNER, keep=20)}),
}


SLOW = ("hooks", "convolutions", "ghost", "attention", "records", "rest", "storm")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_steps_wait_for_the_device_as_often_as_they_must(
    case: str, fit: Callable[..., Any], phases: Any
) -> None:
    waits, settings = CASES[case]
    trainer = {"max_steps": STEPS, "callbacks": [phases], **settings.get("trainer", {})}
    with phases.counting as counting:
        fit(DEVICE, **{"noise_multiplier": 0.001, **settings, "trainer": trainer})
    assert len(phases.ordinary) >= 2
    for step in phases.ordinary:
        found = counting.of("wait", step)
        assert sum(found.values()) == waits, "\n".join(f"{each.where}" for each in found)
