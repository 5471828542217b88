"""Every refusal and every warning ends with a pointer to an entry of the troubleshooting page."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_dp
from lightning_dp import PrivacyWarning, help
from lightning_dp._refusals import Refusal, pointer, warn

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "lightning_dp").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")])
ENTRIES = help.entries()

# Errors that say nothing of a topic: a refusal is another class, in the same family.
BARE = {"RuntimeError", "MisconfigurationException", "PrivacyWarning"}
MIMICRY = {"lightning_dp/isolation/stand_ins.py"}  # raises what a real Trainer does
INTERNAL = "out-of-order"  # for those who call the parts themselves; its messages are not quoted


def refusals() -> dict[str, type[Refusal]]:
    """All classes of refusals, by name."""
    for found in pkgutil.walk_packages(lightning_dp.__path__, "lightning_dp."):
        if not found.name.startswith("lightning_dp.federated.flower"):
            importlib.import_module(found.name)
    kinds, todo = {}, [Refusal]
    while todo:
        kind = todo.pop()
        kinds[kind.__name__] = kind
        todo += kind.__subclasses__()
    return kinds


REFUSALS = refusals()
FIXED = {  # all of one topic, which the class itself names
    name for name, kind in REFUSALS.items() if "topic" not in inspect.signature(kind).parameters
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def calls(path: Path) -> Iterator[ast.Call]:
    yield from (node for node in nodes(path) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def topic_of(call: ast.Call) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == "topic"), None)


def place(path: Path, node: ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_refusal_and_every_warning_names_a_topic():
    must = (REFUSALS.keys() - FIXED) | {"warn"}
    without = [
        place(path, call)
        for path in SOURCES
        for call in calls(path)
        if name_of(call) in must and topic_of(call) is None
    ]
    assert without == [], 'give them topic="...", the anchor of an entry in troubleshooting.md'


def test_what_is_refused_is_a_refusal():
    """Errors about one argument are ValueError and TypeError, and say all there is to say."""
    bare = [
        place(path, call)
        for path in SOURCES
        for call in calls(path)
        if name_of(call) in BARE and path.relative_to(ROOT).as_posix() not in MIMICRY
    ]
    assert bare == [], "raise RefusedRun, RefusedSetting or MisconfigurationError; call warn()"


def named_topics() -> dict[str, str]:
    found = {}
    for path in SOURCES:
        for call in calls(path):
            topic = topic_of(call)
            if isinstance(topic, ast.Constant):
                found[topic.value] = place(path, call)
    return found


def test_every_topic_has_an_entry_and_every_entry_is_pointed_to():
    topics = named_topics()
    assert {topic: where for topic, where in topics.items() if topic not in ENTRIES} == {}
    words = {
        node.value
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert ENTRIES.keys() - words == set(), "entries that nothing points to"


# -- the messages, as the page quotes them -----------------------------------------------------


def as_text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """A message as it is written, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(as_text(each, constants) for each in node.values)
    if isinstance(node, ast.BinOp):
        return as_text(node.left, constants) + as_text(node.right, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return as_text(constants[node.id], constants)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "format":
        return re.sub(r"{[^}]*}", "…", as_text(node.func.value, constants))
    return "…"


def beginning(text: str) -> str:
    """Its first sentence, or the part before a colon or a semicolon."""
    text = re.sub(r"^…: ", "", re.sub(r"…[…\s]*…", "…", text))
    return re.split(r"(?<!\.\.)[.:;](?=\s|$)", text, maxsplit=1)[0].strip()


def quotes() -> list[tuple[str, str]]:
    """Topic and first words of every message that is written where it is raised."""
    found = []
    for path in SOURCES:
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        constants = {
            each.targets[0].id: each.value
            for each in module.body
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        }
        for call in calls(path):
            topic = topic_of(call)
            if isinstance(topic, ast.Constant) and topic.value != INTERNAL and call.args:
                text = beginning(as_text(call.args[0], constants))
                if len(re.sub(r"[…\W]", "", text)) >= 8:
                    found.append((topic.value, text))
    return found


def test_an_entry_quotes_the_beginning_of_each_of_its_messages():
    found = quotes()
    assert len(found) > 100
    missing = [
        f"({topic})=  - `{text}`"
        for topic, text in found
        if text not in re.sub(r"\s+", " ", ENTRIES.get(topic, ""))
    ]
    assert missing == []


# -- the pointer -------------------------------------------------------------------------------


def test_a_message_ends_with_its_pointer_also_after_pickling():
    for name, kind in REFUSALS.items():
        arguments = {} if name in FIXED else {"topic": "batch-norm"}
        required = [
            each
            for each in inspect.signature(kind).parameters.values()
            if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        error = kind(*["Cause. Cure."] * len(required), **arguments)

        assert error.topic in ENTRIES
        for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(same) is kind
            assert str(same).endswith(f" More: python -m lightning_dp.help {error.topic}")
            assert pointer(error.topic) not in same.text and str(same).startswith(same.text)


def test_a_warning_ends_with_its_pointer():
    with pytest.warns(
        PrivacyWarning, match=r"^Odd\. More: python -m lightning_dp\.help one-by-one$"
    ):
        warn("Odd.", topic="one-by-one")


# -- the command -------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lightning_dp.help", *arguments]
    return subprocess.run(line, capture_output=True, text=True, encoding="utf-8")


def test_the_command_shows_an_entry_or_lists_them_or_says_which_it_may_have_been():
    entry = command("batch-norm")
    assert entry.returncode == 0 and "nn.GroupNorm" in entry.stdout
    assert entry.stdout.startswith("BatchNorm and other layers")
    assert "max_norm" not in entry.stdout  # which is the next one

    every = command().stdout.splitlines()
    assert [line.split()[0] for line in every] == list(ENTRIES)

    other = command("bach-norm")
    assert other.returncode == 2 and "batch-norm" in other.stderr
