"""Run the notebooks, and keep what they print and draw.

    python docs/notebooks/make.py                # each NAME.py here becomes NAME.ipynb next to it
    python docs/notebooks/make.py --to FOLDER    # or in another folder: do they still run?

The sources are scripts with cells (``# %%``), as editors and Jupytext know them. Noise comes from
the operating system, so no two runs print the same. Needs ``pip install -e ".[notebooks]"``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SOURCES = sorted(set(HERE.glob("*.py")) - {Path(__file__)})


def read(source: Path) -> Any:
    """Return the notebook of a script: its cells, numbered, and nothing of this machine."""
    notebook = jupytext.read(source, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return notebook


def run(notebook: Any) -> None:
    """Run a notebook in an empty folder, whose name is left out of what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        context = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, record_timing=False, resources=context).execute()
    notebook.metadata.pop("language_info", None)  # the version of this Python
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = output["text"].replace(f"{folder}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of notebooks; all by default")
    parser.add_argument("--to", type=Path, default=HERE, help="where the notebooks are written")
    options = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # widgets, which we do not use
    for source in SOURCES:
        if source.stem in (options.names or [source.stem]):
            begin, notebook = time.perf_counter(), read(source)
            run(notebook)
            nbformat.write(notebook, options.to / f"{source.stem}.ipynb")
            print(f"{source.stem}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
