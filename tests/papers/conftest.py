"""Runs the scripts of examples/papers, as modules and as a user does, on something like MNIST."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PAPERS = Path(__file__).parents[2] / "examples" / "papers"


@pytest.fixture
def import_paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of examples/papers by name; it and its neighbours are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(PAPERS))
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(PAPERS)):
            del sys.modules[name]


@pytest.fixture
def run_paper(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script of examples/papers as a user does, from a temporary folder."""

    def run(name: str, *arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(PAPERS / name), *arguments],
            cwd=tmp_path,
            env={**os.environ, "LIGHTNING_DP_DATA": str(data), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """A folder with something of the shape of MNIST: ten noisy patterns."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 160, (10, 28, 28))
    labels = rng.integers(0, 10, 7000).astype(np.uint8)
    images = (patterns[labels] + rng.integers(0, 96, (7000, 28, 28))).astype(np.uint8)
    np.savez(
        tmp_path / "mnist.npz",
        **{"X_train": images[:6000], "y_train": labels[:6000]},
        **{"X_test": images[6000:], "y_test": labels[6000:]},
    )
    return tmp_path
