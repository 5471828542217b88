"""``--html`` writes a page of what was found and checked, for each reader."""

from __future__ import annotations

import stat

import pytest

from lightning_dp.accounting import epsilon_text

STATED = {
    "data-set": "visits of 2024",
    "record": "one visit",
    "controller": "City clinic",
    "trained-by": "Institute",
}


def stated():
    return [word for name, text in STATED.items() for word in (f"--{name}", text)]


def test_a_page_is_written_for_its_reader_alone(saved, command, tmp_path):
    fitted, path = saved
    page = tmp_path / "page.html"

    status, output = command(path, "--html", page, *stated())
    assert status == 0 and f"page: {page}" in output
    text = page.read_text("utf-8")
    assert all(f"{word} (stated, not checked)" in text for word in STATED.values())
    assert "ε was computed again from the list of all steps, and it agrees" in text
    assert "knows all these steps" in text and fitted.id in text
    assert "What is promised" in text and "<h2>Annex for engineers</h2>" in text
    assert stat.S_IMODE(page.stat().st_mode) == 0o600

    command(path, "--html", page, "--for", "people")
    text = page.read_text("utf-8")
    assert "What is promised" in text and "noise schedule" not in text and fitted.id in text
    command(path, "--html", page, "--for", "engineers")
    text = page.read_text("utf-8")
    assert "What is promised" not in text and "noise schedule" in text and fitted.id in text


def test_the_page_counts_the_steps_that_the_journal_has_and_the_checkpoint_has_not(
    fit, saved, command, tmp_path
):
    _, path = saved
    longer = fit(path, max_steps=30).privacy
    page = tmp_path / "page.html"

    assert command(path, "--html", page)[0] == 0
    text = page.read_text("utf-8")
    assert f"ε = {epsilon_text(longer.epsilon)} (epsilon)" in text
    assert "The journal knows of more training from the same ledger" in text


def test_other_ledgers_of_the_folder_are_named(fit, command, tmp_path):
    one = fit()
    fit()
    page = tmp_path / "page.html"

    command(one.reports[0], "--html", page)
    text = page.read_text("utf-8")
    assert "1 other ledger was found next to this one" in text
    assert "they promise together ε = " in text


def test_what_does_not_agree_is_on_the_page(saved, command, tmp_path, edit_json):
    fitted, _ = saved
    report, page = fitted.reports[0], tmp_path / "page.html"
    edit_json(report, lambda content: content.update(epsilon=0.5))

    assert command(report, "--html", page)[0] == 1
    text = page.read_text("utf-8")
    assert text.index("This does not agree, so do not rely on this page") < text.index("In short")
    assert "it agrees" not in text


def test_a_journal_by_itself_has_no_page(saved, command, tmp_path):
    fitted, _ = saved
    page = tmp_path / "page.html"

    status, output = command(fitted.journal, "--delta", "1e-5", "--html", page)
    assert status == 2 and "holds no report" in output and not page.exists()


@pytest.mark.parametrize("arguments", [["--for", "lawyers"], ["--record", ""]])
def test_words_that_cannot_be_used_are_refused(saved, command, tmp_path, arguments):
    _, path = saved

    assert command(path, "--html", tmp_path / "page.html", *arguments)[0] == 2
