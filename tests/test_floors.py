"""Every file stands on a floor, and imports what stands below it only.

Counted are all imports: those inside functions, those for type checkers, and the modules that a
package names for loading later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning_dp
import lightning_dp.callbacks

PACKAGE = Path(lightning_dp.__file__).parent
CALLBACKS = Path(lightning_dp.callbacks.__file__).parent

# From the ground up. Rooms of one floor do not import each other; "gradients" is a room with its
# whole folder. The root holds lazy names of everything, and nobody imports it.
FLOORS = (
    ("_refusals",),
    ("_validate", "_lazy", "help"),
    ("_files", "_world"),
    ("functional", "_noise"),
    ("boundary",),
    ("accounting", "clipping"),
    ("noise",),
    ("sampling", "estimators", "search"),
    ("schedules", "postprocessing"),
    ("config", "optimizers"),
    ("noise_plan",),
    ("plan",),
    ("mechanism",),
    ("run",),
    ("gradients",),
    ("isolation",),
    ("metrics", "plotting"),
    ("report",),
    ("strategies", "federated"),
    ("callbacks",),
    ("audit",),
)
LIGHTNING = ("strategies", "callbacks", "audit", "isolation")
NUMPY_ONLY = {*FLOORS[0], *FLOORS[1], "_files", "accounting", "plan"}
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, with its file."""
    found = {}
    for root, prefix in ((PACKAGE, "lightning_dp"), (CALLBACKS, "lightning_dp.callbacks")):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def named(path: Path) -> Iterator[str]:
    """Dotted names of all imports in a file, wherever they stand, and of modules named in text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("lightning_dp."):
            yield str(node.value)


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(named(path))


@cache
def imported_modules(name: str) -> set[str]:
    """The modules of this package that a module imports; of a package and its part, the part."""
    found = {target for target in names_in(MODULES[name]) if target in MODULES} - {name}
    return {
        target for target in found if not any(other.startswith(f"{target}.") for other in found)
    }


def importers_of(library: str) -> set[str]:
    return {
        name
        for name, path in MODULES.items()
        if any(target == library or target.startswith(f"{library}.") for target in names_in(path))
    }


def inside(*places: str) -> set[str]:
    return {
        name
        for name in MODULES
        for place in places
        if name == f"lightning_dp.{place}" or name.startswith(f"lightning_dp.{place}.")
    }


def test_every_room_stands_on_a_floor():
    assert {room_of(name) for name in MODULES} - {""} == set(FLOOR_OF)


def test_no_import_climbs():
    climbing = [
        (name, target)
        for name in MODULES.keys() - {"lightning_dp", "lightning_dp.strategies"}
        for target in imported_modules(name)
        if room_of(target) != room_of(name)
        and (target == "lightning_dp" or FLOOR_OF[room_of(target)] >= FLOOR_OF[room_of(name)])
    ]
    assert climbing == []


def test_no_file_imports_itself_through_others():
    """A package's ``__init__`` stands above its files: none of them imports it."""
    unfinished, done = [], set()

    def visit(name: str) -> None:
        assert name not in unfinished, f"a circle: {' -> '.join([*unfinished, name])}"
        if name not in done:
            unfinished.append(name)
            for target in sorted(imported_modules(name)):
                visit(target)
            unfinished.pop()
            done.add(name)

    for name in sorted(MODULES):
        visit(name)


PLACES: dict[str, tuple[str, ...]] = {
    "opacus": ("gradients.opacus_hooks", "gradients.fix"),
    "torch": (
        *set(FLOOR_OF) - NUMPY_ONLY,
        "accounting.ledger",  # it reads a checkpoint
        *("plan.advice", "plan.signal"),  # of a run, with its releases
    ),
    "lightning": (
        *(*LIGHTNING, "federated.local"),
        *(f"gradients.{file}" for file in ("batches", "fix", "side_effects", "snapshot")),
    ),
    "flwr": ("federated.flower",),
    "dp_accounting": ("accounting.events",),
    **dict.fromkeys(("pytorch_lightning", "optuna", "callbacks"), ()),
}


def test_a_library_is_imported_in_its_place_only():
    for library, places in PLACES.items():
        assert importers_of(library) <= inside(*places), library
