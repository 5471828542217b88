"""The README is short, and its table and commands are those of the project."""

from __future__ import annotations

import inspect
import re

import pytest

from lightning_dp.callbacks import DifferentialPrivacy


def arguments_in(text: str) -> list[str]:
    """The arguments that a table explains."""
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_it_is_read_in_one_go(root):
    assert len((root / "README.md").read_text("utf-8").splitlines()) <= 160


@pytest.mark.parametrize("document", ["README.md", "docs/runs.md"])
def test_the_table_of_arguments_is_of_the_constructor(document, root):
    named = arguments_in((root / document).read_text("utf-8"))

    signature = list(inspect.signature(DifferentialPrivacy).parameters)
    assert named == [name for name in signature if name in named], "unknown, or in another order"
    assert document == "README.md" or named == signature


def test_its_rows_are_a_part_of_the_whole_table(root):
    """Two tables, one meaning: only what the README shortens may differ."""
    short, whole = (
        dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (root / page).read_text("utf-8"), re.MULTILINE))
        for page in ("README.md", "docs/runs.md")
    )
    shortened = {"noise_schedule", "estimator"}
    assert shortened < short.keys() < whole.keys()
    assert {name: short[name] for name in short.keys() - shortened} == {
        name: whole[name] for name in short.keys() - shortened
    }


def test_the_commands_are_those_that_ci_runs(root, blocks):
    first, second, *_ = (command.strip() for command in blocks("README.md", "sh"))
    ci = (root / ".ci/run").read_text("utf-8")

    example, tests = (command.split(" && ")[1] for command in (first, second))
    assert example in ci
    assert ci.rstrip().endswith(tests)


def test_what_is_not_covered_is_the_same_everywhere(root):
    def items(document: str) -> int:
        (part,) = re.findall(
            r"^## What [^\n]*not cover.*?(?=^## )",
            (root / document).read_text("utf-8"),
            re.DOTALL | re.MULTILINE,
        )
        return len(re.findall(r"^- ", part, re.MULTILINE))

    privacy = DifferentialPrivacy(3.0, target_delta=1e-6)
    of_report = len(privacy.report().not_covered)
    assert items("README.md") == items("docs/epsilon.md") == of_report == 6
