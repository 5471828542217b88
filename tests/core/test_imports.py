"""Imports point one way, and every public name is there and says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import lightning_dp
import lightning_dp.callbacks

ENGINE = Path(lightning_dp.__file__).parent
CALLBACKS = Path(lightning_dp.callbacks.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, with its file."""
    found = {}
    for root, prefix in ((ENGINE, "lightning_dp"), (CALLBACKS, "lightning_dp.callbacks")):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()
PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all imports in a file, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers_of(library: str) -> set[str]:
    """The modules of this package that import a library, or a part of this package."""
    return {
        name
        for name, path in MODULES.items()
        if any(target == library or target.startswith(f"{library}.") for target in imported(path))
    }


def inside(*places: str) -> set[str]:
    return {
        name
        for name in MODULES
        for place in places
        if name == f"lightning_dp.{place}" or name.startswith(f"lightning_dp.{place}.")
    }


NEEDS_FLOWER = importers_of("flwr") | inside("federated.flower", "testing")


def test_the_modules_were_found():
    assert {"lightning_dp", "lightning_dp.mechanism", "lightning_dp.callbacks"} <= set(MODULES)
    assert importers_of("torch") > {"lightning_dp.mechanism", "lightning_dp._noise"}


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("opacus", ("gradients", "accounting")),
        (
            "lightning",
            (
                "strategies",
                "callbacks",
                "audit",
                "isolation",
                "federated.local",
                "_training_step",
                "_checks",
            ),
        ),
        ("flwr", ("federated.flower", "testing")),
        ("pytorch_lightning", ()),
        ("lightning_dp.callbacks", ("callbacks", "audit")),
        ("callbacks", ()),
        ("lightning_dp.strategies", ("strategies", "callbacks", "audit")),
    ],
)
def test_a_library_is_imported_in_its_place_only(library, places):
    # The root names everything, and imports it when it is asked for.
    assert importers_of(library) - {"lightning_dp"} <= inside(*places)


# What the privacy boundary may rest on, from the bottom up.
@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("functional", ()),
        ("_world", ()),
        ("_noise", ()),
        ("boundary", ("functional", "_noise", "_world")),
        ("sparsify", ()),
        (
            "estimators",
            (
                "boundary",
                "functional",
                "_warnings",
                "accounting",
                "estimators",
                "sparsify",
            ),
        ),
        ("postprocessing", ("boundary", "functional")),
        ("schedules", ("boundary", "schedules")),
        ("sampling", ("_noise", "sampling", "accounting")),
        ("gradients", ("boundary", "functional", "gradients")),
        ("accounting", ("accounting", "_files", "_warnings")),
    ],
)
def test_the_core_rests_on_what_is_below_it_only(module, allowed):
    own = {
        target
        for name in inside(module)
        for target in imported(MODULES[name])
        if target.startswith("lightning_dp.") and target in MODULES
    }
    assert own <= inside("_validate", "_files", *allowed)  # checks of arguments: below everything


def test_importing_the_package_loads_neither_lightning_nor_callbacks_nor_flower():
    code = """
import sys
import lightning_dp
print(*sorted(name for name in sys.modules if name in ("lightning", "pytorch_lightning", "flwr")
      or name.startswith(("lightning.", "lightning_dp.callbacks", "lightning_dp.strategies"))))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


def loaded(name: str) -> ModuleType:
    if name in NEEDS_FLOWER:
        pytest.importorskip("flwr", reason="needs lightning-dp[federated] and Python 3.11")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_name_in_all_is_there(name):
    module = loaded(name)
    public = getattr(module, "__all__", [])
    assert len(set(public)) == len(public)
    for item in public:
        assert hasattr(module, item), f"{name}.__all__ has {item!r}, which is not there"


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_says_what_it_is(name):
    package = loaded(name)
    assert package.__doc__
    for item in package.__all__:
        thing = getattr(package, item)
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and (
            thing.__module__.startswith("lightning_dp")
        ):
            assert inspect.getdoc(thing), f"{name}.{item} has no docstring"
            automatic = f"{thing.__name__}("  # what a dataclass writes itself
            assert not (thing.__doc__ or "").startswith(automatic), f"{name}.{item}"
