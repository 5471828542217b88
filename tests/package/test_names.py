"""Every file and every name of the package that a document mentions exists."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
                pytest.skip(str(error))
            name, _, attribute = name.rpartition(".")
            attributes.insert(0, attribute)
    for attribute in attributes:
        if not hasattr(thing, attribute):
            return False
        thing = getattr(thing, attribute)
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_leads_to_a_file(document):
    made_by_a_command = {"docs/_build"}

    missing = {path for path in paths_in(document.read_text("utf-8")) if not exists(path)}

    assert missing - made_by_a_command == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_dotted_name_is_there(document):
    names = set(re.findall(r"\blightning_dp(?:\.\w+)+\b(?!\.py)", document.read_text("utf-8")))
    files = {name for name in names if name.endswith(".py")}

    assert [name for name in sorted(names - files) if not is_there(name)] == []


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


def floors() -> dict[str, int]:
    """The floor of each module at the top, as the picture in docs/architecture.md draws it."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    (block,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    drawn = [
        (name, int(floor))
        for floor, row in re.findall(r"^ *(\d+) \|(.*?)\|", block, re.MULTILINE)
        for name in row.split()
    ]
    assert len(drawn) == len(dict(drawn)), "a module is drawn twice"
    return dict(drawn)


def test_the_picture_of_the_floors_holds_every_module_at_the_top():
    package = ROOT / "lightning_dp"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in package.glob("*/__init__.py")}

    assert modules | packages | {"callbacks"} == set(floors())


def imports_across() -> Iterator[tuple[str, str, str]]:
    """Who imports what of this package, lazily or for types alone too; and in which file."""
    for path in (*ROOT.glob("lightning_dp/**/*.py"), *ROOT.glob("callbacks/*.py")):
        inside = path.relative_to(ROOT).with_suffix("").parts
        own = inside[0] if inside[0] == "callbacks" else inside[1]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                if name.startswith("lightning_dp.") and own not in ("__init__", name.split(".")[1]):
                    yield own, name.split(".")[1], str(path.relative_to(ROOT))


def test_no_import_climbs_in_the_picture():
    height = floors()
    climbing = {each for each in imports_across() if height[each[1]] > height[each[0]]}
    assert climbing == set()


def test_modules_on_one_floor_do_not_import_each_other_in_a_circle():
    height = floors()
    level = {(a, b) for a, b, _ in imports_across() if height[a] == height[b]}
    left = {name for pair in level for name in pair}
    while free := {name for name in left if not any(a == name for a, _ in level)}:
        left -= free
        level = {(a, b) for a, b in level if b not in free}
    assert left == set()
