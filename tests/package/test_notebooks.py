"""The notebooks that are kept hold what their sources say, and what a run of them printed and drew."""

from __future__ import annotations

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
