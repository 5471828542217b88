"""What is installed is the whole package, however it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_dp

PARTS = ("lightning_dp", "callbacks", "pyproject.toml", "README.md", "LICENSE")
IMPORT = "from lightning_dp.callbacks import DifferentialPrivacy as D; print(D.__module__)"


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
        if (root / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, copy / name, ignore=ignored)
        else:
            shutil.copy(root / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet")
    run(*command, "--disable-pip-version-check", "-w", str(folder), str(source), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def packages_in_the_checkout(root: Path) -> set[str]:
    inside = {
        ".".join(path.parent.relative_to(root).parts)
        for path in (root / "lightning_dp").rglob("__init__.py")
    }
    return inside | {"lightning_dp.callbacks"}


def test_the_list_of_packages_is_the_folders(root):
    text = (root / "pyproject.toml").read_text("utf-8")
    listed = text.split("packages = [")[1].split("]")[0].replace('"', "").replace(",", " ").split()

    assert set(listed) == packages_in_the_checkout(root)
    assert listed == sorted(set(listed))


def test_every_folder_with_modules_is_a_package(root):
    folders = {path.parent for path in (root / "lightning_dp").rglob("*.py")}

    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_wheel_holds_every_module_and_the_type_marker(root, wheel):
    modules = {path.relative_to(root).as_posix() for path in (root / "lightning_dp").rglob("*.py")}
    callbacks = {
        f"lightning_dp/callbacks/{path.name}" for path in (root / "callbacks").glob("*.py")
    }

    with zipfile.ZipFile(wheel) as archive:
        content = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]

    assert content == modules | callbacks | {"lightning_dp/py.typed"}
    assert len(licences) == 1


def test_an_installed_wheel_imports_from_itself(wheel, tmp_path):
    target = tmp_path / "installed"
    command = (sys.executable, "-m", "pip", "install", "--no-deps", "--quiet")
    run(*command, "--no-index", "--target", str(target), str(wheel), cwd=tmp_path)
    where = f"{IMPORT}; import lightning_dp.callbacks as c; print(c.__file__)"

    done = run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(target))

    module, file = done.splitlines()
    assert module == "lightning_dp.callbacks.differential_privacy"
    assert Path(file) == target / "lightning_dp" / "callbacks" / "__init__.py"


def test_the_running_installation_has_one_class_of_the_callback_outside_the_checkout(
    root, tmp_path
):
    code = (
        f"{IMPORT}\n"
        "import sys, lightning_dp, lightning_dp.callbacks as c\n"
        "from lightning_dp.callbacks.differential_privacy import DifferentialPrivacy\n"
        "assert c.DifferentialPrivacy is DifferentialPrivacy\n"
        "classes = {id(vars(m)['DifferentialPrivacy']) for m in list(sys.modules.values())\n"
        "           if 'DifferentialPrivacy' in vars(m)}\n"
        "assert len(classes) == 1, classes\n"
        "assert 'callbacks' not in sys.modules and 'flwr' not in sys.modules\n"
    )
    module = run(sys.executable, "-c", code, cwd=tmp_path)
    assert module == "lightning_dp.callbacks.differential_privacy"
    for path in (*root.glob("callbacks/*.py"), *root.glob("lightning_dp/**/*.py")):
        text = path.read_text("utf-8")
        assert "import callbacks" not in text and "from callbacks" not in text, path


def test_every_public_name_can_be_imported():
    has_flower = importlib.util.find_spec("flwr") is not None  # it needs Python 3.11
    of_flower = ("lightning_dp.federated.flower", "lightning_dp.federated.testing")
    for found in pkgutil.walk_packages(lightning_dp.__path__, "lightning_dp."):
        if found.name.startswith(of_flower) and not has_flower:
            continue
        module = importlib.import_module(found.name)
        names = getattr(module, "__all__", [])
        assert sorted(names) == sorted(set(names)), found.name
        assert [name for name in names if not hasattr(module, name)] == [], found.name
    assert len(lightning_dp.__all__) <= 15
