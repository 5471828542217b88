"""The notebooks that are kept hold what their sources say, and what a run of them printed and drew."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
SOURCES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "make")


def kept(source: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(source.with_suffix(".ipynb").read_text("utf-8"))[
        "cells"
    ]
    return cells


def sources(script: str) -> list[str]:
    """The cells of a script, as Jupytext reads them: text is in comments."""
    cells = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        cells.append(body.strip())
    return cells


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_is_its_source(source):
    """Else: python docs/notebooks/make.py, and look at what it printed."""
    cells = ["".join(cell["source"]).strip() for cell in kept(source)]
    assert cells == sources(source.read_text("utf-8"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_was_run_and_names_no_machine(source):
    cells = [cell for cell in kept(source) if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]

    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert printed
    assert not re.search(r"/(home|root|tmp|work|opt|Users|var)/|\b[A-Z]:\\", printed)
    assert "Warning" not in printed


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_picture_is_described_for_those_who_do_not_see_it(source):
    pictures = [
        cell["metadata"].get("alt", "")
        for cell in kept(source)
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures
    assert all(len(description) > 20 for description in pictures)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_checks_what_its_text_says(source):
    tree = ast.parse(source.read_text("utf-8"))
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def test_cells_are_told_apart():
    assert sources("# %% [markdown]\n# a\n#\n# b\n\n# %%\nx = 1  # %%\n") == [
        "a\n\nb",
        "x = 1  # %%",
    ]
