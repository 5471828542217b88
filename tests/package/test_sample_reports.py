"""The pages of a report that the documentation shows are those that the code writes today."""

from __future__ import annotations

import contextlib
import getpass
import io
import math
import re
import runpy
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from lightning_dp.accounting import epsilon, epsilon_text, trade_off
from lightning_dp.report.__main__ import main
from lightning_dp.report.files import PATTERN, read_report

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(__file__).parents[2] / "docs" / "reports"


@pytest.fixture(scope="module")
def make(folder: Path) -> dict[str, Any]:
    return runpy.run_path(str(folder / "make.py"))


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """The committed files for readers."""
    return {path.name: path.read_text("utf-8") for path in folder.glob("[ep]*.[mh]*")}


def without_pictures(text: str) -> str:
    """Other versions of matplotlib draw the same curves by other bytes."""
    return re.sub(r'base64,[^"]+', "", text)


def test_the_pages_are_what_the_code_writes_today(make, texts):
    """Else: ``python docs/reports/make.py --render``."""
    written = make["files"](make["rendered"]())

    assert sorted(texts) == ["engineers.html", "engineers.md", "people.html", "people.md"]
    for name, text in texts.items():
        assert without_pictures(written[name]) == without_pictures(text), name
        assert len(text) < 150_000
    assert "base64," in texts["engineers.html"]


def test_they_are_of_one_run_and_their_numbers_are_never_too_low(folder, texts):
    (path,) = folder.glob(PATTERN)
    report = read_report(path)
    events = report.history()
    exact, tests = epsilon(events, report.delta), trade_off(events, report.delta)
    assert main([str(folder)]) == 0

    for name, text in texts.items():
        assert report.ledger_id in text, name
        # The first is the claim; with two records it is twice as much.
        said = [float(number) for number in re.findall(r"ε = ([\d.]+) (?:at|\()", text)]
        assert said[0] == float(epsilon_text(exact)) >= exact
        assert min(said) >= exact
    people = texts["people.md"]
    assert f"right at most {epsilon_text(50 * (1 + tests.advantage), 3)} % of the time" in people
    found = float(re.search(r"1 in 1,000 \| at most ([\d.]+) %", people)[1])
    assert found == float(epsilon_text(100 * tests.true_positive_rate(1e-3), 3))
    twice = (1 + math.exp(exact)) * report.delta
    assert f"ε = {epsilon_text(2 * exact)} at δ = {epsilon_text(twice, 3)}" in people


def test_nothing_of_the_machine_is_in_them(folder, texts):
    own = {*texts.values(), *(path.read_text("utf-8") for path in folder.glob("*.j*"))}
    assert len(own) == 6
    for text in own:
        assert not re.search(r"(?<![\w.<:])/[a-z]\w*/|[A-Z]:\\\\|~/", without_pictures(text))
        for name in {getpass.getuser(), Path.home().name} - {"root"}:  # :root is a word of CSS
            assert not re.search(rf"\b{name}\b", without_pictures(text))


def test_the_annex_computes_what_page_one_says(folder, texts, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", texts["engineers.md"], re.S)
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})

    found, advantage, _ = (float(word) for word in printed.getvalue().split())
    for part in (
        f"ε = {epsilon_text(found)} (epsilon)",
        f"at most {epsilon_text(50 * (1 + advantage), 3)}",
    ):
        assert part in texts["people.md"]


def test_the_page_about_reports_shows_the_short_form(folder):
    """Else: print(read_report(...)) of the run in docs/reports."""
    (path,) = folder.glob(PATTERN)
    page = (folder.parent / "epsilon.md").read_text("utf-8")
    assert f"```text\n{read_report(path)}\n```" in page
    assert len(str(read_report(path)).splitlines()) == 9
