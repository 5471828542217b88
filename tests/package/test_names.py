"""Every file and every name of the package that a document mentions exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/papers/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = r"\.ci|lightning_dp|callbacks|tests|examples|benchmarks|docs"


def paths_in(text: str) -> Iterator[str]:
    """Paths from the root of the checkout, and names of Python files alone."""
    yield from re.findall(rf"(?<![\w./-])(?:\.\./)?((?:{FOLDERS})/[\w./*-]*[\w*])", text)
    yield from re.findall(r"`(\w+\.py)`", text)


def exists(path: str) -> bool:
    parts = Path(path).parts
    return any(ROOT.glob(path if len(parts) > 1 else f"*/**/{path}"))


def is_there(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    name, attributes = dotted, list[str]()
    while True:
        try:
            thing = importlib.import_module(name)
            break
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "-"):  # an extra that is not installed
                return True
            name, _, attribute = name.rpartition(".")
            attributes.insert(0, attribute)
    for attribute in attributes:
        if not hasattr(thing, attribute):
            return False
        thing = getattr(thing, attribute)
    return True


def test_every_path_and_every_dotted_name_of_a_document_is_there():
    made_by_a_command = {"docs/_build"}
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        missing = {path for path in paths_in(text) if not exists(path)} - made_by_a_command
        names = set(re.findall(r"\blightning_dp(?:\.\w+)+\b(?!\.py)", text))
        missing |= {name for name in names if not name.endswith(".py") and not is_there(name)}
        assert missing == set(), document


def test_a_missing_path_or_name_is_found():
    assert list(paths_in("see `lightning_dp/x/y.py`, [t](../tests/a.py) and `b.py`")) == [
        "lightning_dp/x/y.py",
        "tests/a.py",
        "b.py",
    ]
    assert not exists("lightning_dp/nowhere.py") and not exists("nowhere.py")
    assert exists("conftest.py") and exists("lightning_dp/accounting")
    assert is_there("lightning_dp.accounting.epsilon")
    assert not is_there("lightning_dp.accounting.nowhere") and not is_there("lightning_dp.nowhere")
