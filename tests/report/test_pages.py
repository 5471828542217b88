"""Page one, the annex and the HTML file: what comes first, and nothing that is not known."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import matplotlib
import pytest

from lightning_dp.accounting import (
    ApproximateDP,
    Gaussian,
    epsilon,
    epsilon_text,
    trade_off,
)
from lightning_dp.accounting.events import Voided
from lightning_dp.accounting.journal import Charges
from lightning_dp.report.content import Page, render
from tests.report.conftest import EVENTS, ID

matplotlib.use("Agg")

DELTA = 1e-5


def section(report, title, **found):
    """The text of a section of page one."""
    text = render([Page(report, **found)], "md")
    return re.search(rf"^## {title}\n(.*?)(?=^#|\Z)", text, re.M | re.S)[1]


def promise(report, **found):
    return section(report, "What is promised", **found)


class Outline(HTMLParser):
    """Collects what a browser would meet, and checks that elements close in order."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def test_page_one_says_what_tests_can_do_by_the_trade_off_of_the_events(report_of):
    found, tests = promise(report_of()), trade_off(EVENTS, DELTA)

    rates = {"10 %": 0.1, "1 %": 0.01, "1 in 1,000": 1e-3, "1 in 10,000": 1e-4}
    rows = re.findall(r"^\| (1[^|]*) \| at most ([\d.]+) % \|$", found, re.M)
    assert [words for words, _ in rows] == [*rates]
    for words, number in rows:
        exact = 100 * tests.true_positive_rate(rates[words])
        assert exact <= float(number) <= exact * 1.011
    right = float(re.search(r"right at most ([\d.]+) % of the time", found)[1])
    exact = 50 * (1 + tests.advantage)
    assert exact <= right <= exact + 0.1
    assert "plus a probability of 0.00001 (1 in 100,000)" in found
    assert "0.0000003 (1 in 3,333,333)" in promise(report_of(delta=3e-7))


def test_page_one_asks_what_the_relation_is_about(report_of):
    """Whoever has a place in a fixed order is not hidden: only what the record says is."""
    questions = {
        "add_remove": "certain record was in the training data or not.",
        "replace_one": "certain record was in the training data, or another one in its place.",
        "zero_out": "certain record was in the training data, or its place was empty.",
    }
    for relation, words in questions.items():
        found = " ".join(promise(report_of(relation=relation)).split())
        assert words in found
        assert ("which of them, is not protected" in found) == (relation == "zero_out")


@pytest.mark.parametrize("claims_budget", [True, False])
def test_where_one_pair_is_known_alone_the_words_come_from_it(claims_budget, report_of):
    changes = {"claims_budget": True} if claims_budget else {"epsilon_of_plan": 3.0}
    spent = 3.0 if claims_budget else epsilon(EVENTS, DELTA)
    found = promise(report_of(epsilon=spent, **changes))

    assert "ε = 3 (epsilon)" in found
    # (1 + tanh(3 / 2)) / 2 = .9526, and δ
    assert "right at most 95.3 % of the time" in found
    assert ("stopped before its plan had ended" in found) is not claims_budget
    if not claims_budget:
        assert f"ε = {epsilon_text(epsilon(EVENTS, DELTA))} may be claimed" in found


def test_what_the_journal_holds_besides_counts(report_of):
    report, more = report_of(), [(EVENTS[0][0], 258)]
    found = promise(report, epsilon=epsilon(more, DELTA), charges=Charges({"a" * 16: more}))

    assert f"ε = {epsilon_text(epsilon(more, DELTA))} (epsilon)" in found
    right = epsilon_text(50 * (1 + trade_off(more, DELTA).advantage), 3)
    assert f"right at most {right} % of the time" in found
    assert "The journal holds more training" in found

    # ε of the same charges by another computer's rounding
    same = epsilon(EVENTS, DELTA) * (1 + 1e-15)
    found = promise(report, epsilon=same, charges=Charges({"a" * 16: EVENTS}))
    assert "The journal holds" not in found


VOIDED = Charges({"a" * 16: [*EVENTS, (Voided("a.b couples records"), 1)]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeded": True}, "NOT PRIVATE (a seed was set). Anyone who knows or guesses the seed"),
        ({"events": VOIDED, "epsilon": math.inf}, "VOIDED, NOT PRIVATE (a.b couples records)"),
        (
            {"events": Charges({"b" * 16: [(Gaussian(0.0), 5)]}), "epsilon": math.inf},
            "NOT PRIVATE (no noise). The training added no noise",
        ),
    ],
)
def test_a_run_that_promises_nothing_says_so_first_and_promises_nothing(changes, words, report_of):
    report = report_of(private=False, **changes)
    text = report.markdown()

    assert text.index("Nothing is promised about this model") < text.index("## In short")
    assert words in text
    one = text[: text.index("# Annex")]
    assert (
        "in at most" not in one and "ε =" not in one and "To whom" not in one and "50 %" not in one
    )
    outline = Outline(report.html())
    assert outline.all("p")[0] == {"class": "warning"}


@pytest.mark.parametrize("reader", [None, "people", "engineers"])
def test_what_makes_a_page_worthless_comes_first(reader, report_of):
    def first(*problems, **changes):
        page = Page(report_of(**changes), problems=problems)
        if problems:
            assert Outline(render([page], "html", reader)).all("p")[0] == {"class": "warning"}
        return render([page], "md", reader).split("\n\n")[1]

    assert first("x is missing") == (
        "> **This does not agree, so do not rely on this page: x is missing**"
    )
    assert "Nothing is promised about this model" in first(private=False, seeded=True)
    assert "so large that next to nothing is promised" in first(epsilon=4e6)


def test_users_words_cannot_be_html(report_of):
    evil = "<script>alert('x')</script><img src=x onerror=y>"
    report = report_of(
        about={"data_set": evil}, gradient_edits=evil, stop_reason=evil, versions={evil: evil}
    )
    text = report.html()

    outline = Outline(text)
    assert outline.all("script") == [] and len(outline.all("img")) == 1
    assert evil in "".join(outline.texts)
    assert "<script" not in report.markdown().replace("`", "")


def test_the_file_is_whole_and_loads_nothing(report_of):
    text = report_of().html()

    outline = Outline(text)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert [attrs for attrs in outline.all("meta") if "charset" in attrs] == [{"charset": "utf-8"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in outline.all(
        "meta"
    )
    (picture,) = outline.all("img")
    assert picture["src"].startswith("data:image/svg+xml;base64,") and picture["alt"]
    assert outline.all("link") == outline.all("script") == []
    assert "http" not in re.sub(r"base64,[^\"]+", "", text)
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert report_of().html() == text


def test_no_path_of_the_machine_is_on_a_page(report_of):
    report = report_of()
    for text in (report.html(), report.markdown(), str(report)):
        assert f"{ID}.journal" in text
        assert "alice" not in text and "/private/" not in text


def test_each_reader_has_a_page_by_itself(report_of):
    report = report_of(gradient_edits="halved")
    people, engineers = report.markdown("people"), report.markdown("engineers")

    assert "PoissonGaussian" not in people and "What is promised" not in engineers
    assert people.splitlines()[0] == "# Privacy report"
    assert engineers.splitlines()[0] == "# Privacy report: annex for engineers"
    for text in (people, engineers):  # the ledger says that they are of one run
        assert ID in text and f"ε = {epsilon_text(report.epsilon)} " in text
        assert len(re.findall("^# ", text, re.M)) == 1
    assert len(Outline(report.html("people")).all("img")) == 0
    outline = Outline(report.html("engineers"))
    assert len(outline.all("img")) == 1 and len(outline.all("h1")) == 1 and not outline.all("h3")
    with pytest.raises(ValueError, match="reader='lawyers' must be one of 'people', 'engineers'"):
        report.html("lawyers")


def test_what_others_released_is_named_and_is_no_run(report_of):
    table = ApproximateDP(0.5, 1e-7, relation="add_remove", what="table of ages")
    events = Charges({"a" * 16: EVENTS, table.key: [(table, 1)]})
    report = report_of(events=events)

    others = section(report, "What else ran on these data")
    assert "Counted as well: table of ages" in others and "(stated, not checked)" in others
    assert "includes no further use of the data" in others
    assert "1 run of the program" in section(report, "When, by whom, and with which software")
    assert "the other results that are counted" in promise(report)
    assert "runs: 1\n" in report.markdown("engineers")


@pytest.mark.parametrize(
    ("isolation", "spot_checks", "words"),
    [
        (
            "compared on synthetic samples",
            "compared at 3 of 4 steps",
            ("yes, with synthetic", "yes, at some"),
        ),
        (
            "synthetic samples were not compared (x)",
            "compared at 0 of 4",
            ("not with this", "no step was"),
        ),
        (
            "probed, isolated, provided that x",
            "at 3 steps",
            ("yes, with synthetic", "yes, at some"),
        ),
        ("by construction: each", "not needed: each", ("not needed", "not needed")),
        ("opted out", "opted out", ("no, those who", "no, those who")),
        ("not probed (no batch yet)", "at 0 steps since", ("not with this", "no step was")),
        ("probed, FAILED: x", "unknown", ("not with this", "no step was")),
    ],
)
def test_checks_are_named_in_plain_words_and_none_that_was_not_made(
    isolation, spot_checks, words, report_of
):
    report = report_of(isolation=isolation, spot_checks=spot_checks)
    found = section(report, "What it rests on")
    for when, begin in zip(("before", "during"), words, strict=True):
        assert f"- Checked {when} the training: {begin}" in found


def test_a_resumed_run_began_when_the_first_one_did(saved, fit, edit_checkpoint):
    _, path = saved
    edit_checkpoint(path, lambda record: record["report"].update(started="2020-02-03 04:05 UTC"))

    report = fit(path, max_steps=14).privacy.report()

    assert report.started == "2020-02-03 04:05 UTC" < report.ended
