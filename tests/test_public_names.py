"""The public names: complete, at home where they say, documented, and imported only when asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import lightning_dp


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running ``code``."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_lightning():
    loaded = loaded_by("import lightning_dp; dir(lightning_dp)")
    assert not loaded & {"torch", "lightning", "pytorch_lightning", "opacus", "flwr", "numpy"}


def test_a_name_of_the_root_loads_what_it_needs_only():
    loaded = loaded_by("from lightning_dp import Diff2, Exponential, FullBatch, Momentum")
    assert "torch" in loaded
    assert not loaded & {"lightning", "pytorch_lightning", "opacus", "flwr"}


def test_the_callback_can_be_imported_from_the_root():
    code = """
from lightning_dp import *
from lightning_dp import DifferentialPrivacy as of_the_root
from lightning_dp.callbacks import DifferentialPrivacy as of_its_home
assert of_the_root is of_its_home is DifferentialPrivacy
"""
    assert "lightning" in loaded_by(code)


def test_a_name_that_is_not_there_is_an_ordinary_error():
    with pytest.raises(ImportError, match="Diff3"):
        exec("from lightning_dp import Diff3")
    with pytest.raises(AttributeError, match=r"module 'lightning_dp' has no attribute 'Diff3'"):
        lightning_dp.Diff3  # noqa: B018
    assert importlib.import_module("lightning_dp._validate").__name__ == "lightning_dp._validate"


def test_the_root_lists_what_can_be_imported_from_it():
    assert lightning_dp.__all__ == sorted(lightning_dp.__all__)
    assert set(lightning_dp.__all__) <= set(dir(lightning_dp))
    assert all(getattr(lightning_dp, name).__name__ == name for name in lightning_dp.__all__)
