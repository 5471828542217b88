"""The whole package is installed, however that is done."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import lightning_dp

PARTS = (".ci", "benchmarks", "callbacks", "docs", "examples", "lightning_dp", "tests")
MADE = ("__pycache__", "venv", "*.egg-info", "*.pyc", "lightning_logs", "privacy", "_build")
WHERE = "import importlib.util as u; print(u.find_spec('lightning_dp.callbacks').origin)"
LOADS = """
import json, sys, lightning.pytorch
before = set(sys.modules)
import lightning_dp.callbacks as c
brought = set(sys.modules) - before
from lightning_dp.callbacks.differential_privacy import DifferentialPrivacy as D
import lightning_dp
is_one = lightning_dp.DifferentialPrivacy is c.DifferentialPrivacy is D
classes = {id(vars(m)["DifferentialPrivacy"]) for m in list(sys.modules.values())
           if "DifferentialPrivacy" in vars(m)}
found = {"home": D.__module__, "is_one": is_one, "classes": len(classes)}
print(json.dumps({**found, "brought": list(brought), "all": list(sys.modules)}))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    """The output of a command that must succeed, outside the checkout and its path."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    root = Path(__file__).parents[2]
    for name in PARTS:
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns(*MADE))
    for path in root.iterdir():
        if path.is_file() and path.name != ".git":  # which is a file in a linked worktree
            shutil.copy(path, copy / path.name)
    return copy


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source distribution and of the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(source), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_type_marker(root, wheel):
    modules = {path.relative_to(root).as_posix() for path in (root / "lightning_dp").rglob("*.py")}
    callbacks = {
        f"lightning_dp/callbacks/{path.name}" for path in (root / "callbacks").glob("*.py")
    }

    with zipfile.ZipFile(wheel) as archive:
        content = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]

    templates = (root / "lightning_dp/report/templates").iterdir()
    data = {path.relative_to(root).as_posix() for path in templates}
    data |= {"lightning_dp/py.typed", "lightning_dp/troubleshooting.md"}
    assert content == modules | callbacks | data
    assert len(licences) == 1


@pytest.mark.slow
def test_the_source_distribution_holds_the_whole_project(source, distributions):
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]

    content = {name.partition("/")[2] for name in files}
    made = {name for name in content if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    project = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and ".egg-info" not in str(path)
    }
    assert content - made == project
    named = {"tests/conftest.py", "docs/index.md", "CHANGELOG.md", "CITATION.cff", ".ci/run"}
    assert named <= content


@pytest.mark.slow
def test_an_installed_wheel_imports_from_itself(wheel, tmp_path):
    target = tmp_path / "installed"
    command = (sys.executable, "-m", "pip", "install", "--no-deps", "--quiet")
    run(*command, "--no-index", "--target", str(target), str(wheel), cwd=tmp_path)

    done = run(sys.executable, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(target))

    assert Path(done) == target / "lightning_dp" / "callbacks" / "__init__.py"


def test_a_checkout_works_without_an_installation(root, tmp_path):
    """``lightning_dp/callbacks`` is a link to ``callbacks``."""
    not_installed = "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]"
    code = f"import sys; {not_installed}; {WHERE}"

    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(root))

    assert Path(done).resolve() == (root / "callbacks" / "__init__.py").resolve()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The modules of a process that imports the callback outside the checkout."""
    return json.loads(run(sys.executable, "-c", LOADS, cwd=tmp_path_factory.mktemp("elsewhere")))


@pytest.mark.slow  # imports in a fresh process
def test_the_running_installation_has_one_class_of_the_callback_outside_the_checkout(root, loaded):
    assert loaded["home"] == "lightning_dp.callbacks.differential_privacy"
    assert loaded["is_one"] and loaded["classes"] == 1
    assert not {"callbacks", "flwr"} & {name.split(".")[0] for name in loaded["all"]}
    for path in (*root.glob("callbacks/*.py"), *root.glob("lightning_dp/**/*.py")):
        text = path.read_text("utf-8")
        assert "import callbacks" not in text and "from callbacks" not in text, path


@pytest.mark.slow
def test_the_callback_loads_few_modules(loaded):
    own = {name for name in loaded["all"] if name.startswith("lightning_dp")}
    assert "lightning_dp.callbacks" in own
    assert len(own) <= 54


def test_every_name_that_a_module_exports_is_there_once():
    has_flower = importlib.util.find_spec("flwr") is not None  # it needs Python 3.11
    of_flower = "lightning_dp.federated.flower"
    for found in pkgutil.walk_packages(lightning_dp.__path__, "lightning_dp."):
        if found.name.startswith(of_flower) and not has_flower:
            continue
        module = importlib.import_module(found.name)
        names = getattr(module, "__all__", [])
        assert sorted(names) == sorted(set(names)), found.name
        assert [name for name in names if not hasattr(module, name)] == [], found.name


@pytest.mark.slow
def test_every_test_in_the_source_distribution_is_known_to_git(root, distributions):
    """A stray file would be grafted along."""
    known = subprocess.run(["git", "ls-files", "tests"], cwd=root, capture_output=True, text=True)
    if known.returncode:
        pytest.skip("this is no checkout")
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    tests = {name for name in names if name.startswith("tests/") and name.endswith(".py")}
    assert tests == {name for name in known.stdout.split() if name.endswith(".py")}


@pytest.mark.slow
def test_the_callbacks_bring_nothing_that_lightning_does_not(loaded):
    """Importing them costs less than a tenth of a second beyond Lightning: their own modules alone."""
    packages = {name.split(".")[0] for name in loaded["brought"]}
    assert packages <= {"lightning_dp", "filelock"}  # some version of torch brings it
    own = [name for name in loaded["brought"] if name.startswith("lightning_dp")]
    assert len(own) < 70  # how many the others have is their versions' matter


def test_the_oldest_libraries_that_are_tried_are_those_allowed(root):
    oldest = runpy.run_path(str(root / ".ci/pythons.py"))["OLDEST"]
    project = (root / "pyproject.toml").read_text("utf-8")
    dependencies = project.split("\ndependencies = [")[1].split("]")[0]
    floors = dict(re.findall(r'"([\w-]+)>=([\d.]+)', dependencies))

    assert oldest.keys() == floors.keys()
    for name, floor in floors.items():
        assert f"{oldest[name]}.".startswith(f"{floor}."), name
