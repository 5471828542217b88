"""A fit on the device is the fit on the CPU: no tensor of one meets those of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import DEVICE

from lightning_dp import (
    AdaptiveQuantile,
    Automatic,
    Checks,
    CubicNewton,
    Diff2,
    DPAdamW,
    FullBatch,
    LaplacianSmoothing,
    Momentum,
    PerGroup,
    Storm,
)

ENGINES = {
    "layers": {"name": "cnn"},
    "ghost": {"name": "cnn", "engine": "ghost"},
    "attention": {"name": "attention"},
    "records": {"name": "raw"},
    "hooks": {"engine": "hooks"},
    "one by one": {"engine": "one_by_one"},
}
ESTIMATORS = {
    "diff2": {"estimator": Diff2(restart_every=2)},
    "storm": {"estimator": Storm(momentum=0.5)},
    "cubic": {"estimator": CubicNewton(1.0, 1.0, inner_steps=3, keep=20)},
}
GROUPS = {"clipping": PerGroup({"*.weight": 0.3, "*": 0.2}), "max_grad_norm": None}
RULES = {
    "groups": GROUPS,
    "groups, ghost": {**GROUPS, "engine": "ghost"},
    "groups, one by one": {**GROUPS, "engine": "one_by_one"},
    "automatic": {"clipping": Automatic()},
    "adaptive": {"clipping": AdaptiveQuantile()},
}
REST = {
    "full batch": {"sampling": FullBatch()},
    "smoothing": {"postprocessing": [LaplacianSmoothing(1.0), Momentum(0.9)]},
    "rough smoothing": {"postprocessing": [LaplacianSmoothing(50.0)]},
    "count": {"count_clipped": True},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}},
}
CASES = {**ENGINES, **ESTIMATORS, **RULES, **REST}
UNCHECKED = {"checks": Checks(dry_run=False, comparisons=False), "advice": False}


@pytest.mark.parametrize("case", CASES)
def test_fit_equals_that_on_the_cpu(case: str, fit: Callable[..., Any]) -> None:
    there, here = (fit(where, **CASES[case], **UNCHECKED) for where in (DEVICE, "cpu"))
    assert there.privacy.steps == here.privacy.steps == 3
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "records")) for case in CASES]
)
def test_checks_run_on_the_device_and_change_nothing(case: str, fit: Callable[..., Any]) -> None:
    there, here = fit(DEVICE, **CASES[case]), fit("cpu", **CASES[case], **UNCHECKED)
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=1e-5)


def test_an_optimizer_subtracts_noise_on_the_device_as_on_the_cpu() -> None:
    start, found = torch.randn(7, 3), []
    for where in (DEVICE, "cpu"):
        weight = torch.nn.Parameter(start.to(where))
        optimizer = DPAdamW([weight], lr=0.1)
        for step in range(3):
            optimizer.param_groups[0]["noise_variance"] = 0.5
            weight.grad = (start * (step + 1)).to(where)
            optimizer.step()
        found.append(weight.detach().cpu())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
