"""Every benchmark runs; what it measures is not judged here."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

COMMANDS = {
    "step.py": ["--rounds", "1", "--steps", "20", "--models", "logistic regression"],
    "diff2.py": ["--quick", "--models", "logistic regression"],
    "memory.py": ["--models", "logistic regression"],
    "overhead.py": [],
    "engine.py": ["--quick", "--models", "logistic regression"],
    "isolation.py": ["time", "--quick", "MLP"],
    "false_alarms.py": ["--count", "1"],
    "alone.py": ["--models", "logistic regression"],
    "import_time.py": [],
    "federated.py": ["--clients", "2", "--size", "1000", "--rounds", "1"],
    "flower_dp.py": ["--rounds", "2", "--seeds", "1"],
    "noise.py": ["--quick"],
    "units.py": ["--quick"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", COMMANDS)
def test_it_runs(script, root):
    done = subprocess.run(
        [sys.executable, root / "benchmarks" / script, *COMMANDS[script]],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = ("goal", "MiB", "ns a value", "ratio", "ms a record", "ms a client", "ε by Flower")
    words += ("against the first", "false alarms")
    assert any(word in done.stdout for word in words)


def test_the_table_of_models_is_that_of_the_kept_runs(root, monkeypatch, capsys):
    """Else: python benchmarks/models_that_work.py --print, all but its last line."""
    monkeypatch.setattr(sys, "argv", ["models_that_work.py", "--print"])
    monkeypatch.syspath_prepend(root / "benchmarks")
    monkeypatch.delitem(
        sys.modules, "models", raising=False
    )  # another one, of the tests of devices
    runpy.run_path(str(root / "benchmarks/models_that_work.py"), run_name="__main__")
    printed = capsys.readouterr().out
    table = (root / "benchmarks/models_that_work.md").read_text("utf-8")
    assert printed.rpartition("\n\n")[0].strip() == table.strip()
