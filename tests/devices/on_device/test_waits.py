"""How often the host waits for the device, and what is copied between them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from counting import Counting
from device import DEVICE
from torch import nn

from lightning_dp import CubicNewton, Diff2

STEPS = 14


class Phases(L.Callback):
    """Counts of each step, with its batch already on the device."""

    def __init__(self, counting: Counting) -> None:
        self.counting, self.step = counting, 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.step += 1
        self.counting.phase = f"{self.step}"

    def on_train_batch_end(self, *args: Any) -> None:
        self.counting.phase = "between"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


CASES = {
    "dp-sgd": {},
    "diff2": {"estimator": Diff2(restart_every=4)},
    "cubic": {"estimator": CubicNewton(1.0, 1.0, 3), "optimizer": torch.optim.SGD},
    "hooks": {"engine": "hooks"},
    "functional": {"engine": "functional"},
    "count": {"count_clipped": True},
    "nochecks": {"isolation_probe": False, "spot_checks": False, "advice": False},
}


@pytest.mark.parametrize("case", CASES)
def test_x(case, fit):
    with Counting() as counting:
        fit(
            DEVICE,
            mlp,
            noise_multiplier=0.001,
            trainer={"max_steps": STEPS, "callbacks": [Phases(counting)]},
            **CASES[case],
        )
    for step in range(1, STEPS + 1):
        w = counting.of("wait", str(step))
        print(step, sum(w.values()))
    for kind in ("wait",):
        tot = {}
        for (ph, e), n in counting.found.items():
            if e.kind == kind and ph not in ("start",):
                d = tot.setdefault((e.what, e.where), [0, set(), 0])
                d[0] += n
                d[1].add(ph)
                d[2] = max(d[2], e.entries)
        for k, v in tot.items():
            print(kind, k[0], k[1], v[0], sorted(v[1]) if len(v[1]) < 8 else len(v[1]), v[2])
