"""What was written about a run, edited or incomplete, is found by the command."""

from __future__ import annotations

import shutil

import pytest

from lightning_dp.accounting import PoissonGaussian, epsilon, epsilon_text
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report.files import read_report

EVENT = PoissonGaussian(1.5, 0.1)


def only_report(fitted):
    (report,) = fitted.reports
    return report


def cut_journal(path, lines):
    """Lose the last charges, and what says which weights were released."""
    charges = [line for line in path.read_bytes().splitlines(True) if b"[null," not in line]
    path.write_bytes(b"".join(charges[:-lines]))


def test_steps_beyond_a_checkpoint_are_said_and_counted(fit, saved, command):
    first, path = saved
    fit(path, max_steps=20)
    fit(path, max_steps=15)

    status, output = command(path)

    assert status == 0
    assert "note: the journal has 11 steps beyond this checkpoint" in output
    assert f"ε = {epsilon_text(epsilon([(EVENT, 23)], 1e-5))} at δ = 1e-05, 23 steps" in output
    assert f"its own events: ε = {epsilon_text(first.privacy.epsilon)}" in output


@pytest.mark.parametrize("factor", [0.99, 1.01, 0.5])
def test_an_edited_epsilon_is_found(saved, command, edit_json, edit_checkpoint, factor):
    fitted, path = saved

    def edit(content):
        content["epsilon"] *= factor

    report = only_report(fitted)
    edit_json(report, edit)
    edit_checkpoint(path, lambda record: edit(record["report"]))
    for edited in (path, report):
        status, output = command(edited)
        assert status == 1
        wrong, right = factor * fitted.privacy.epsilon, fitted.privacy.epsilon
        says, gives = epsilon_text(wrong, 6), epsilon_text(right, 6)
        assert f"PROBLEM: it says ε = {says}, its events give ε = {gives}" in output


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("steps", 11, "it says 11 steps, its events are 12"),
        ("delta", 1e-3, "its events give ε"),
        ("relation", "replace_one", "its events give ε"),
        ("private", False, "it says private: False"),
        ("seeded", True, "it says private: True"),
        ("epsilon_of_plan", 0.1, "it says ε = 0.1 for the whole plan"),
        ("ledger_id", "0123", "belongs to ledger"),
    ],
)
def test_an_edited_field_of_a_report_is_found(saved, command, edit_json, field, value, problem):
    path = only_report(saved[0])
    edit_json(path, lambda content: content.update({field: value}))

    status, output = command(path)

    assert status == 1 and problem in output


def test_a_report_of_another_run_inside_a_checkpoint_is_found(saved, command, edit_checkpoint):
    path = saved[1]
    edit_checkpoint(path, lambda record: record["report"].update(ledger_id="0123", delta=2e-5))

    status, output = command(path)

    assert status == 1
    assert f"its report says ledger id 0123, its ledger and configuration {saved[0].id}" in output
    assert "its report says δ 2e-05" in output


def test_a_charge_removed_from_the_journal_is_found(saved, command):
    fitted, path = saved
    cut_journal(fitted.journal, 2)

    for document in (path, only_report(fitted)):
        status, output = command(document)
        assert status == 1
        assert "has 12 charges here and 10 in the journal" in output


def test_a_charge_removed_from_a_checkpoint_is_found(saved, command, edit_checkpoint):
    path = saved[1]

    def remove(record):
        (charges,) = record["ledger"]["runs"].values()
        charges[0][1] -= 1

    edit_checkpoint(path, remove)
    status, output = command(path)
    assert status == 1
    assert "it says 12 steps, its events are 11" in output

    edit_checkpoint(path, lambda record: record.pop("report"))  # as older versions saved it
    status, output = command(path)
    assert status == 1
    assert "its weights went through 12 private steps, 11 are charged" in output
    assert "note: it holds no report" in output


def test_a_charge_with_more_noise_than_the_journal_has_is_found(saved, command, edit_checkpoint):
    path = saved[1]

    def relabel(record):
        (charges,) = record["ledger"]["runs"].values()
        charges[0][0]["noise_multiplier"] = 3.0

    edit_checkpoint(path, relabel)
    status, output = command(path)

    assert status == 1
    assert "contradict each other" in output and "its events give ε" in output


def test_the_journal_of_another_run_is_found(fit, saved, command):
    first, path = saved
    other = fit()
    shutil.copy(other.journal, first.journal)

    status, output = command(path)

    assert status == 1
    assert f"belongs to ledger {other.id}, not to {first.id}" in output


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_journal_that_cannot_be_used_is_found(saved, command, how):
    fitted, path = saved
    if how == "missing":
        fitted.journal.unlink()
    else:
        fitted.journal.write_bytes(fitted.journal.read_bytes().replace(b"1.5", b"9.5"))

    status, output = command(path)

    assert status == 1
    assert ("does not exist" if how == "missing" else "checksum") in output
    assert "is unknown" in output and "--journal" in output


def test_a_run_with_noise_chosen_at_run_time_claims_its_whole_budget(
    fit, command, edit_json, at_run_time
):
    privacy = DifferentialPrivacy(
        target_epsilon=3.0,
        noise_multiplier=1.5,
        noise_schedule=at_run_time,
        target_delta=1e-5,
        isolation_probe=False,
    )
    (path,) = fit(privacy=privacy).reports
    assert read_report(path).claims_budget
    assert command(path)[0] == 0

    edit_json(path, lambda content: content.update(epsilon=2.0))
    assert command(path)[0] == 1


def test_an_accountant_that_is_not_known_here_is_compared_with_pld(saved, command, edit_json):
    fitted, _ = saved
    path = only_report(fitted)

    def claim(factor):
        edit_json(path, lambda content: content.update(accountant="other"))
        edit_json(path, lambda content: content.update(epsilon=factor * fitted.privacy.epsilon))
        return command(path)

    status, output = claim(1.5)  # it may be less tight
    assert status == 0
    assert "note: its accountant 'other' is not known here: compared with PLD" in output
    status, output = claim(0.5)
    assert status == 1 and "its events give ε" in output
