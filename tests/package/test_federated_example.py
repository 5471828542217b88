"""The commands of the page on federated training, as printed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")


@pytest.fixture
def commands(blocks) -> list[list[str]]:
    """Return what follows `python` in each command."""
    lines = [line for block in blocks("docs/federated.md", "sh") for line in block.splitlines()]
    found = [line.split("python ")[1] for line in lines if "examples/federated/" in line]
    assert len(found) == 3
    return [shlex.split(command) for command in found]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A small a9a, and its own output folder."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 3000), ("test", 500)):
        x = (rng.random((count, 123)) < 0.1).astype(np.uint8)
        arrays[f"X_{part}"] = x
        arrays[f"y_{part}"] = np.where(x[:, :10].sum(1) > 1, 1, -1).astype(np.int8)
    np.savez(tmp_path / "a9a.npz", **arrays)
    return {**os.environ, "LIGHTNING_DP_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"}


def check(output: str, rounds: int) -> None:
    assert f"{rounds} rounds (all {rounds} rounds were made): test accuracy 0." in output
    epsilons = re.findall(r"client \d: 600 records, ε = ([\d.]+)", output)
    assert len(epsilons) == 5
    assert all(0.1 < float(epsilon) <= 2.0 for epsilon in epsilons)


def absolute(root: Path, command: list[str]) -> list[str]:
    return [sys.executable, str(root / command[0]), *command[1:]]


@pytest.mark.slow
def test_one_command_runs_the_example_in_simulation(root, commands, environment, tmp_path):
    pytest.importorskip("ray", reason="needs lightning-dp[federated-sim]")
    command = [*absolute(root, commands[0]), "--rounds", "3"]

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    check(done.stdout, 3)


@pytest.mark.slow
def test_two_commands_run_it_as_processes(root, commands, environment, tmp_path):
    start, submit = (absolute(root, command) for command in commands[1:])
    submit[-1] = "2"  # fewer rounds
    processes = subprocess.Popen(
        start, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert "SuperLink at 127.0.0.1:" in processes.stdout.readline()
        done = subprocess.run(submit, cwd=tmp_path, env=environment, capture_output=True, text=True)
    finally:
        processes.send_signal(signal.SIGTERM)
        processes.wait(60)

    assert done.returncode == 0, done.stderr
    check(done.stdout, 2)
