"""Private training on an accelerator: a pretended one, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import device
import pytest
from torch.utils.cpp_extension import get_default_build_root

SUITE = Path(__file__).parent / "on_device"


@pytest.fixture(scope="module")
def library() -> Path:
    """The compiled device, in the folder where torch keeps what it compiles for this user."""
    if (reason := device.why_not()) is not None:
        pytest.skip(f"No device: {reason}.")
    return device.built(Path(get_default_build_root()) / "lightning_dp")


def run_suite(library: Path, marker: str) -> None:
    """Run the tests of ``on_device`` in a process that knows the device from the start."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(SUITE)],
        env={**os.environ, "LIGHTNING_DP_PRETENDED_DEVICE": str(library), "OMP_NUM_THREADS": "1"},
        cwd=SUITE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


@pytest.mark.slow  # with the compiler half a minute
def test_private_training_runs_on_a_device(library: Path) -> None:
    run_suite(library, "not slow")


@pytest.mark.slow
def test_more_of_private_training_runs_on_a_device(library: Path) -> None:
    run_suite(library, "slow")
