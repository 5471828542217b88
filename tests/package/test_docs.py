"""The pages of the documentation say what is so, and each leads to the others."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md"] + [  # CONTRIBUTING's snippets have their own tests
    f"docs/{path.name}"
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.stem != "index" and "```python\n" in path.read_text("utf-8")
]


def comparable(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


FIRST = ("README.md", "docs/quickstart.md")


def marks(page: str) -> list[pytest.MarkDecorator]:
    """Those of a page's test: CI runs the snippets of all pages when it builds them."""
    found = importlib.util.find_spec("flwr") is not None or page != "docs/federated.md"
    needs_flower = pytest.mark.skipif(not found, reason="needs lightning-dp[federated]")
    return [needs_flower] if page in FIRST else [needs_flower, pytest.mark.slow]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:This model, or a part of it, was trained before")  # in turn
@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in PAGES])
def test_the_snippets_of_a_page_run_and_print_what_they_say(
    page, blocks, names, monkeypatch, capsys
):
    until = "## Hugging Face"  # tests/models/test_huggingface.py has models for these snippets
    for configuration in blocks(page, "yaml"):
        Path("config.yaml").write_text(configuration, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", "config.yaml"])

    for snippet in blocks(page, "python", until=until):
        said = [line.partition("#")[2] for line in snippet.splitlines() if "print(" in line]
        capsys.readouterr()
        if "recover_journal(" in snippet:
            shutil.rmtree("privacy")  # it was lost

        exec(compile(snippet, page, "exec"), names)

        printed = capsys.readouterr().out.splitlines()
        if any(comparable(comment) for comment in said):
            for comment, line in zip(said, printed, strict=True):
                expected = comparable(comment)
                assert comparable(line)[: len(expected)] == pytest.approx(expected, abs=0.051)
        assert "LightningCLI(" not in snippet or Path("lightning_logs").exists()

    if page == "docs/runs.md":
        assert len(list(Path("privacy").glob("*.journal"))) == 1


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "examples/*/*.md"]
)
def test_every_link_into_the_project_leads_somewhere(document, root):
    """Sphinx checks those of the documentation as well, also where they lead inside a page."""
    for page in root.glob(document):
        links = re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", page.read_text("utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def page_names(root: Path) -> set[str]:
    """The pages that people write: below ``docs``, without the API."""
    docs = root / "docs"
    found = [*docs.glob("*.md"), *docs.glob("notebooks/*.ipynb")]
    return {str(path.relative_to(docs).with_suffix("")) for path in found}


@pytest.mark.parametrize("document", ["docs/index.md", "README.md"])
def test_the_first_pages_lead_to_every_page(document, root):
    text = (root / document).read_text("utf-8")
    linked = {
        Path(link).with_suffix("").as_posix()
        for link in re.findall(r"\]\((?:docs/)?([\w/]+\.(?:md|ipynb))[^)]*\)", text)
    }
    assert page_names(root) - {"index"} - linked == set()


def test_the_picture_of_the_planner_is_drawn(root, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.syspath_prepend(root / "docs")
    importlib.import_module("pictures").draw(tmp_path / "planning.png")
    assert (tmp_path / "planning.png").stat().st_size > 10_000


def test_no_row_of_a_table_stands_alone(root):
    """A blank line inside of a table ends it, and the rest is printed with its bars."""
    for page in (root / "README.md", *root.glob("docs/*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"(?:\A|\n\n)(\|[^\n]*)\n(?!\| ?-)", text) == [], page
