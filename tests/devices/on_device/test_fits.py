"""A fit on the device is the fit on the CPU: no tensor of one meets those of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import DEVICE
from models import CASES, UNCHECKED

from lightning_dp import DPAdamW


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
        weight = torch.nn.Parameter(start.clone().to(where))
        optimizer = DPAdamW([weight], lr=0.1)
        for step in range(3):
            optimizer.param_groups[0]["noise_variance"] = 0.5
            weight.grad = (start * (step + 1)).to(where)
            optimizer.step()
        found.append(weight.detach().cpu())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
