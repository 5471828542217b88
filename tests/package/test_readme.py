"""Every snippet and every link of the README works as printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:This model, or a part of it, was trained before")  # in turn
def test_the_python_snippets_run_in_order(blocks, names, monkeypatch, capsys):
    (yaml,) = blocks("README.md", "yaml")
    Path("config.yaml").write_text(yaml, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", "config.yaml"])
    snippets = blocks("README.md", "python")
    assert len(snippets) == 14

    for snippet in snippets:
        if "recover_journal(" in snippet:
            shutil.rmtree("privacy")  # it was lost
        exec(compile(snippet, "README.md", "exec"), names)
        if "LightningCLI(" in snippet:
            assert Path("lightning_logs").exists()

    assert "ε = " in capsys.readouterr().out
    assert 0 < names["privacy"].epsilon <= 3.0
    assert len(list(Path("privacy").glob("*.journal"))) == 1


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_into_the_project_leads_somewhere(document, root):
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", (root / document).read_text("utf-8"))

    assert [link for link in links if not (root / link).exists()] == []


def test_the_table_of_arguments_is_the_constructor(root, names):
    import inspect

    text = (root / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)

    signature = inspect.signature(names["DifferentialPrivacy"])
    assert sorted(rows) == sorted(signature.parameters)


def test_the_commands_are_those_that_ci_runs(root, blocks):
    first, second, *_ = (command.strip() for command in blocks("README.md", "sh"))
    ci = (root / ".ci/run").read_text("utf-8")

    example, tests = (command.split(" && ")[1] for command in (first, second))
    assert example in ci
    assert ci.rstrip().endswith(tests)
