"""A fit on the device is the fit on the CPU: no tensor of one meets those of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import DEVICE

from lightning_dp import Checks, CubicNewton, Diff2, FullBatch, LaplacianSmoothing, Momentum, Storm

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
REST = {
    "full batch": {"sampling": FullBatch()},
    "smoothing": {"postprocessing": [LaplacianSmoothing(1.0), Momentum(0.9)]},
    "rough smoothing": {"postprocessing": [LaplacianSmoothing(50.0)]},
    "count": {"count_clipped": True},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}},
}
CASES = {**ENGINES, **ESTIMATORS, **REST}
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
