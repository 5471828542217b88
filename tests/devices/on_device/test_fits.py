"""A fit on the device is the fit on the CPU: no tensor of one meets those of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import DEVICE
from models import CASES, UNCHECKED


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
