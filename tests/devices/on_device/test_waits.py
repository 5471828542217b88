"""The number of times that the host waits for the device in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from device import DEVICE
from models import CASES as FITS

from lightning_dp import Diff2

STEPS = 8
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp-sgd": (0, {}),
    **{name: (0, FITS[name]) for name in ("layers", "ghost", "attention", "records")},
    "hooks": (1, FITS["hooks"]),  # whether Opacus saw all uses of the parameters
    "rest": (0, {**FITS["count"], **FITS["smoothing"]}),
    "diff2": (1, {"estimator": Diff2(restart_every=STEPS)}),
    "storm": (1, FITS["storm"]),
    "cubic": (3, FITS["cubic"]),  # once an inner step
}
SLOW = ("hooks", "layers", "ghost", "attention", "records", "rest", "storm", "cubic")


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
