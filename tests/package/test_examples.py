"""The examples run as a user runs them."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dp import Checks


def run(script: Path, *arguments: str, cwd: Path, **environment: str) -> Any:
    clean = {k: v for k, v in os.environ.items() if k != "LIGHTNING_DP_DATA"}
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=cwd,
        env={**clean, "MPLBACKEND": "Agg", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def load(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example by name, for this test only."""
    monkeypatch.setenv("MPLBACKEND", "Agg")

    def load_example(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, root / "examples" / f"{name}.py")
        example = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, example)  # dataclasses look there
        spec.loader.exec_module(example)
        return example

    return load_example


@pytest.mark.slow
def test_quickstart_spends_its_budget_and_stays_accurate(root, tmp_path):
    done = run(root / "examples" / "quickstart.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    spent, target = map(
        float, re.search(r"ε = ([\d.]+) at .*target ε = (\d+)", done.stdout).groups()
    )
    assert 0.97 * target < spent <= target
    assert "privacy/epsilon" in done.stdout + done.stderr  # the progress bar, of whichever kind
    plain, private = map(float, re.findall(r"privat?e?\w*\s+([\d.]+)%", done.stdout))
    assert plain > 95
    assert private > 85
    output = tmp_path / "outputs" / "quickstart"
    assert (output / "quickstart.png").stat().st_size > 10_000
    assert list(output.glob("private/version_0/events.*"))


@pytest.mark.slow
def test_hospitals_promise_their_epsilon_to_patients(root, tmp_path):
    done = run(root / "examples" / "federated" / "users.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    spent = re.findall(r"hospital \d: 400 users, ε = ([\d.]+) of a user", done.stdout)
    assert len(spent) == 3 and all(2.9 < float(each) <= 3.0 for each in spent)
    assert float(re.search(r"30 rounds: accuracy ([\d.]+)", done.stdout).group(1)) > 0.85


@pytest.fixture
def global_settings() -> Iterator[None]:
    """Put back the settings of the whole process that an example makes."""
    logger, fused = (
        logging.getLogger("lightning.pytorch"),
        torch.backends.mha.get_fastpath_enabled(),
    )
    level = logger.level
    yield
    logger.setLevel(level)
    torch.backends.mha.set_fastpath_enabled(fused)


def test_adapters_are_fine_tuned_beside_a_frozen_backbone(
    load, global_settings, tmp_path, monkeypatch, capsys
):
    example = load("finetune_lora")
    monkeypatch.setattr(example, "DifferentialPrivacy", unchecked(example.DifferentialPrivacy))
    monkeypatch.chdir(tmp_path)
    options = ("--seeds", "1", "--epochs", "1", "--epsilon", "2")
    monkeypatch.setattr(sys, "argv", ["finetune_lora.py", *options])

    example.main()

    printed = capsys.readouterr().out
    rows = re.findall(r"([\d,]+) weights +[\d.]+% .* at ε = ([\d.]+)", printed)
    weights = [int(count.replace(",", "")) for count, _ in rows]
    backbone, head, adapters = 17_632, 165, 4 * 4 * (32 + 64)
    assert weights == [backbone + head, backbone + head, adapters + head, head]
    assert all(1.9 < float(epsilon) <= 2.0 for _, epsilon in rows)
    assert (tmp_path / "outputs" / "finetune_lora" / "finetune_lora.png").stat().st_size > 10_000


ARRAYS = {
    "train-images-idx3-ubyte": (600, 28, 28),
    "train-labels-idx1-ubyte": (600,),
    "t10k-images-idx3-ubyte": (100, 28, 28),
    "t10k-labels-idx1-ubyte": (100,),
}


def digits() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 256 if len(shape) == 3 else 10, shape).astype(np.uint8)
        for name, shape in ARRAYS.items()
    }


def write_npz(folder: Path) -> None:
    names = ("X_train", "y_train", "X_test", "y_test")
    np.savez(folder / "mnist.npz", **dict(zip(names, digits().values(), strict=True)))


def test_mnist_example_runs(load, global_settings, tmp_path, monkeypatch, capsys):
    write_npz(tmp_path)
    example = load("mnist_cnn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_DP_DATA", str(tmp_path))
    options = ("--epochs", "1", "--limit", "300", "--epsilon", "2")
    monkeypatch.setattr(sys, "argv", ["mnist_cnn.py", *options])

    example.main()

    printed = capsys.readouterr().out
    assert re.search(r"test accuracy [\d.]+% at ε = (1\.9\d+|2),", printed)


def test_mnist_gan_runs(load, global_settings, tmp_path, monkeypatch, capsys):
    write_npz(tmp_path)
    monkeypatch.setitem(sys.modules, "mnist_cnn", load("mnist_cnn"))
    example = load("mnist_gan")
    monkeypatch.setattr(example, "WIDTH", 8)
    monkeypatch.setattr(example, "BATCH_SIZE", 50)
    monkeypatch.setattr(example, "DifferentialPrivacy", unchecked(example.DifferentialPrivacy))
    monkeypatch.chdir(tmp_path)
    options = ("--data", str(tmp_path), "--epochs", "1", "--limit", "200", "--epsilon", "8")
    monkeypatch.setattr(sys, "argv", ["mnist_gan.py", *options])

    example.main()

    printed = capsys.readouterr().out
    assert re.search(r"4 steps of the discriminator at ε = (7\.9\d+|8),", printed)
    assert "private optimizer: Adam of discriminator" in printed
    (events,) = (tmp_path / "outputs").rglob("events.out.tfevents.*")
    assert b"samples" in events.read_bytes()


def unchecked(privacy: type[Any]) -> Callable[..., Any]:
    """The callback without checks, which take a minute here."""
    return lambda **arguments: privacy(**arguments, checks=Checks(dry_run=False, comparisons=False))
