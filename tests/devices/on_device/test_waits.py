"""How often the host waits for the device in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from counting import Counting
from device import DEVICE

from lightning_dp import CubicNewton, Diff2, LaplacianSmoothing, Momentum, Storm

STEPS = 8
INNER = 3


class Phases(L.Callback):
    """Counts each step by itself."""

    def __init__(self, counting: Counting) -> None:
        self.counting, self.steps = counting, 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.counting.phase = f"step {self.steps}"

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        self.counting.phase = "between steps"

    @property
    def ordinary(self) -> list[str]:
        """The steps after the first one without a spot check, which runs the batch once more."""
        names = [f"step {step}" for step in range(1, self.steps)]
        losses = [sum(self.counting.of("loss", name).values()) for name in names]
        return [name for name, runs in zip(names, losses, strict=True) if runs == min(losses)]


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp-sgd": (0, {}),
    "convolutions": (0, {"name": "cnn"}),
    "attention": (1, {"name": "attention"}),  # whether its second run gave the same output
    "traced": (0, {"name": "raw"}),
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


@pytest.mark.parametrize("case", CASES)
def test_steps_wait_for_the_device_as_often_as_they_must(
    case: str, fit: Callable[..., Any]
) -> None:
    waits, settings = CASES[case]
    counting = Counting()
    phases = Phases(counting)
    trainer = {"max_steps": STEPS, "callbacks": [phases], **settings.get("trainer", {})}
    with counting:
        fit(DEVICE, **{"noise_multiplier": 0.001, **settings, "trainer": trainer})
    assert len(phases.ordinary) >= 2
    for step in phases.ordinary:
        found = counting.of("wait", step)
        assert sum(found.values()) == waits, "\n".join(f"{each.where}" for each in found)
