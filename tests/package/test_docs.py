"""The pages of the documentation say what is so, and each leads to the others."""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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


def page_names(root: Path) -> set[str]:
    """The pages that people write: below ``docs``, without the API."""
    docs = root / "docs"
    found = [*docs.glob("*.md"), *docs.glob("notebooks/*.ipynb")]
    return {str(path.relative_to(docs).with_suffix("")) for path in found}


def test_the_table_of_contents_holds_every_page(root):
    tables = re.findall(
        r"```{toctree}\n(.*?)```", (root / "docs/index.md").read_text("utf-8"), re.S
    )
    listed = re.findall(r"^([\w/]+)$", "".join(tables), re.MULTILINE)
    assert sorted(listed) == sorted([*page_names(root) - {"index"}, "api/index"])


@pytest.mark.parametrize("document", ["docs/index.md", "README.md"])
def test_the_first_pages_lead_to_every_page(document, root):
    text = (root / document).read_text("utf-8")
    linked = {
        Path(link).with_suffix("").as_posix()
        for link in re.findall(r"\]\((?:docs/)?([\w/]+\.(?:md|ipynb))[^)]*\)", text)
    }
    assert page_names(root) - {"index"} - linked == set()


def names_of_sphinx(names: set[str]) -> set[str]:
    """The names among these that Sphinx or a theme writes pages under, so that ours would be lost."""
    taken = {"search", "genindex", "modindex", "py-modindex", "domainindex", "searchindex"}
    return {name for name in names if name.lower() in taken or name.startswith("_")}


def test_no_page_has_a_name_that_sphinx_takes(root):
    assert names_of_sphinx(page_names(root)) == set()
    assert names_of_sphinx({"search", "searching", "genindex"}) == {"search", "genindex"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as a site, without the API and the theme, which take a minute."""
    build = pytest.importorskip("sphinx.cmd.build", reason="needs lightning-dp[docs]")
    folder = tmp_path_factory.mktemp("site")
    pages_alone = (
        "extensions=myst_parser,notebook_pages",
        "exclude_patterns=api",
        "html_theme=basic",
    )
    options = [word for each in pages_alone for word in ("-D", each)]
    build.main(["-q", *options, str(ROOT / "docs"), str(folder)])
    return folder


def test_every_page_is_in_the_built_site(root, built):
    """Also where a theme or an extension writes pages: ``search`` and ``genindex`` are Sphinx'."""
    for name in page_names(root):
        (source,) = (root / "docs").glob(f"{name}.*[mn][db]")
        title = title_of(source)
        assert f"<h1>{html.escape(title)}" in (built / f"{name}.html").read_text("utf-8"), name


def test_the_sample_reports_are_in_the_built_site(built):
    for reader, title in (("people", "Privacy report"), ("engineers", "annex for engineers")):
        assert f"{title}<a" in (built / f"reports/{reader}.html").read_text("utf-8")
        (file,) = built.glob(f"_downloads/*/{reader}.html")  # as it is sent
        assert title in file.read_text("utf-8")


def title_of(source: Path) -> str:
    text = source.read_text("utf-8")
    if source.suffix == ".ipynb":
        return str(json.loads(text)["cells"][0]["source"][0]).strip().removeprefix("# ")
    if included := re.match(r"```{include} (.*)\n", text):
        text = (source.parent / included[1]).read_text("utf-8")
    return text.splitlines()[0].removeprefix("# ")


def test_every_page_can_be_read_and_is_reached(built, check_links):
    assert [each for each in check_links.faulty_pages(built) if not each.startswith("api/")] == []


def test_a_notebook_is_a_page_with_code_prints_and_pictures(built):
    page = (built / "notebooks/attack.html").read_text("utf-8")
    assert page.count('src="data:image/png;base64,') == 2
    assert "the claim stands" in page
    assert "highlight-python" in page


@pytest.fixture
def check_links(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("check_links", root / "docs/check_links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_link_that_leads_nowhere_is_found(check_links, tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#there">b</a></p>')
    (tmp_path / "b.html").write_text(
        '<a href="a.html#here"></a><a href="#gone"></a><a href="c.html"></a>'
        '<a href="https://example.org/x"></a><img src="a.html">'
    )

    found = check_links.broken_links(Path(tmp_path))

    assert sorted(found) == ["a.html: b.html#there", "b.html: #gone", "b.html: c.html"]


def test_a_page_that_cannot_be_read_is_found(check_links, tmp_path):
    (tmp_path / "index.html").write_text(
        '<h1>A</h1><p id="x">[see](b.md)</p><p id="x"></p><code>[a](b)</code><img src="a.png">'
    )
    (tmp_path / "lost.html").write_text("<h1>B</h1><h1>C</h1>")

    found = check_links.faulty_pages(tmp_path)

    assert [each.partition(": ")[2].split()[0] for each in found] == ["a", "a", "id", "2", "no"]


def luminance(colour: str) -> float:
    """The relative luminance of ``#rrggbb``, as WCAG 2.1 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", ["step", "gan"])
def test_a_picture_is_legible_on_white_and_on_black(root, name):
    """Text stands on boxes of the picture; what stands outside them is seen on any page."""
    picture = ElementTree.parse(root / f"docs/_static/{name}.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    style = picture.findtext(f"{space}style") or ""
    fills = dict(re.findall(r"\.?([\w]+) \{ fill: (#\w{6})", style))
    assert all(contrast(fills["text"], fills[box]) > 7 for box in ("card", "public", "sensitive"))

    boxes = [
        [float(rect.get(key, 0)) for key in ("x", "y", "width", "height")]
        for rect in picture.iter(f"{space}rect")
        if rect.get("class") in ("card", "public", "sensitive")
    ]
    for text in picture.iter(f"{space}text"):
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        assert any(a < x < a + w and b < y < b + h for a, b, w, h in boxes), text.text
    lines = re.findall(r"\.flow \{ stroke: (#\w{6})", style)
    assert all(contrast(lines[0], page) > 3 for page in ("#ffffff", "#000000", "#131416"))


def test_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_no_row_of_a_table_stands_alone(root):
    """A blank line inside of a table ends it, and the rest is printed with its bars."""
    for page in (root / "README.md", *root.glob("docs/*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"(?:\A|\n\n)(\|[^\n]*)\n(?!\| ?-)", text) == [], page
