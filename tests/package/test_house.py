"""The size and the shape of the house: a commit that raises a number here says why."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES, LINES, STEP = 118, 41_597, 43  # what training logged; physical batches and ranks


def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / ".ci" / "house.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    spec.loader.exec_module(module)
    return module


def test_it_does_not_grow():
    files = house().python_files(*house().PACKAGE)
    templates = (ROOT / "lightning_dp").rglob("*.j2")
    assert len(files) <= FILES
    assert sum(len(path.read_text("utf-8").splitlines()) for path in (*files, *templates)) <= LINES


def test_a_step_visits_few_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where the fit writes its journal
    exec(house().STEP.replace("{root}", str(ROOT)), {})
    assert 30 < len(capsys.readouterr().out.splitlines()[-1].split()) <= STEP
