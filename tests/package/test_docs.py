"""The pages of the documentation say what is so, and each leads to the others."""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
import runpy
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


def needs_flower(page: str) -> list[pytest.MarkDecorator]:
    found = importlib.util.find_spec("flwr") is not None or page != "docs/federated.md"
    return [pytest.mark.skipif(not found, reason="needs lightning-dp[federated]")]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:This model, or a part of it, was trained before")  # in turn
@pytest.mark.parametrize("page", [pytest.param(page, marks=needs_flower(page)) for page in PAGES])
def test_the_snippets_of_a_page_run_and_print_what_they_say(
    page, blocks, names, monkeypatch, capsys
):
    for configuration in blocks(page, "yaml"):
        Path("config.yaml").write_text(configuration, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", "config.yaml"])

    for snippet in blocks(page, "python"):
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


def test_the_documentation_begins_as_the_readme_does(blocks):
    (snippet,) = blocks("docs/index.md", "python")
    assert snippet == blocks("README.md", "python")[0]


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "examples/*/*.md"]
)
def test_every_link_into_the_project_leads_somewhere(document, root):
    """Sphinx checks those of the documentation as well, also where they lead inside a page."""
    for page in root.glob(document):
        links = re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", page.read_text("utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def test_the_table_of_contents_holds_every_page(root):
    pages = {path.stem for path in (root / "docs").glob("*.md")} - {"index"}

    listed = re.search(r"```{toctree}\n(.*?)```", (root / "docs/index.md").read_text("utf-8"), re.S)
    assert listed is not None
    assert pages == set(re.findall(r"^(\w+)$", listed[1], re.MULTILINE))


def test_every_page_is_in_the_built_site(root, tmp_path):
    """Also where a theme or an extension writes pages: ``search`` and ``genindex`` are Sphinx'."""
    build = pytest.importorskip("sphinx.cmd.build", reason="needs lightning-dp[docs]")
    pages_alone = ("-D", "extensions=myst_parser", "-D", "exclude_patterns=api")

    build.main(["-q", *pages_alone, "-D", "html_theme=basic", str(root / "docs"), str(tmp_path)])

    for page in (root / "docs").glob("*.md"):
        title = page.read_text("utf-8").splitlines()[0].removeprefix("# ")
        built = tmp_path / f"{page.stem}.html"
        assert f"<h1>{html.escape(title)}" in built.read_text("utf-8"), f"{page.name} is not built"


def test_a_link_that_leads_nowhere_is_found(root, tmp_path):
    spec = importlib.util.spec_from_file_location("check_links", root / "docs/check_links.py")
    assert spec is not None and spec.loader is not None
    check_links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_links)
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#there">b</a></p>')
    (tmp_path / "b.html").write_text(
        '<a href="a.html#here"></a><a href="#gone"></a><a href="c.html"></a>'
        '<a href="https://example.org/x"></a><img src="a.html">'
    )

    found = check_links.broken_links(Path(tmp_path))

    assert sorted(found) == ["a.html: b.html#there", "b.html: #gone", "b.html: c.html"]


def test_the_table_of_searches_is_what_the_benchmark_prints(root, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["search.py"])
    runpy.run_path(str(root / "benchmarks/search.py"), run_name="__main__")

    one_run, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 6
    text = (root / "docs/searching.md").read_text("utf-8")
    assert "\n".join(rows) in text
    assert one_run.removeprefix("one run: ") in text
