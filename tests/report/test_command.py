"""The command prints a report, names each contradiction, adds ledgers up, and writes a page."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys

import pytest
import torch

from lightning_dp.accounting import PoissonGaussian, epsilon, epsilon_text
from lightning_dp.accounting.journal import Journal
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.spending import Spending
from lightning_dp.report.files import read_report

EVENT = PoissonGaussian(1.5, 0.1)


def test_it_runs_as_a_module_and_loads_nothing_that_trains(saved):
    fitted, path = saved

    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lightning_dp.report", path],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0
    assert (
        f"ε = {epsilon_text(fitted.privacy.epsilon)} at δ = 1e-05 (add_remove), 12 steps"
        in done.stdout
    )
    assert done.stdout.rstrip().endswith("all agrees")
    said = done.stderr.splitlines()
    assert [line for line in said if not line.startswith("import time:")] == []
    loaded = {line.rpartition("|")[2].strip() for line in said}
    assert "lightning_dp.report.content" in loaded
    for package in ("federated", "strategies", "callbacks", "audit", "isolation", "gradients"):
        assert f"lightning_dp.{package}" not in loaded


def test_help_names_what_it_takes_and_how_it_ends(command):
    status, output = command("--help")

    assert status == 0
    for words in ("checkpoint", "journal", "folder", "--delta", "--json", "exit status"):
        assert words in output


def test_a_folder_is_checked_as_a_whole(saved, command, tmp_path):
    _, path = saved
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    status, output = command(tmp_path, "--json")

    found = json.loads(output)
    assert status == 0 and found["agrees"]
    assert sorted(each["kind"] for each in found["documents"]) == ["checkpoint", "report"]
    for each in found["documents"]:
        assert each["epsilon"] == pytest.approx(epsilon([(EVENT, 12)], 1e-5))
        assert each["journal_steps"] == 12
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert command(path.parent)[0] == 0


def test_a_moved_journal_is_found_below_the_folder_or_where_it_is_said_to_be(saved, command):
    fitted, path = saved
    moved = path.parent / "elsewhere" / fitted.journal.name
    moved.parent.mkdir()
    fitted.journal.rename(moved)
    assert command(path.parent)[0] == 0

    renamed = moved.rename(moved.with_name("x.journal"))
    assert command(path)[0] == 1
    assert command(path, "--journal", renamed)[0] == 0


def test_a_running_training_is_neither_disturbed_nor_misread(saved, command):
    fitted, path = saved
    running = Journal(fitted.journal, fitted.id)
    running.append("next run", 0, EVENT)
    written = fitted.journal.read_bytes()
    with fitted.journal.open("ab") as torn:
        torn.write(b'["next run",1,nu')
    before = fitted.journal.read_bytes()

    status, output = command(path)

    assert status == 0 and "the journal has 1 steps beyond" in output
    assert fitted.journal.read_bytes() == before
    fitted.journal.write_bytes(written)
    running.append("next run", 1, EVENT)
    running.close()


def test_a_journal_by_itself_needs_delta(saved, command):
    fitted, _ = saved

    status, output = command(fitted.journal)
    assert status == 2 and "a journal does not record δ: give --delta" in output

    status, output = command(fitted.journal, "--delta", "1e-5")
    assert status == 0
    assert (
        f"ε = {epsilon_text(fitted.privacy.epsilon)} at δ = 1e-05 (add_remove), 12 steps" in output
    )
    assert command(fitted.journal, "--delta", "2")[0] == 2


def test_a_federated_clients_journal_shows_epsilon_of_the_data_set_and_of_each_federation(
    tmp_path, command
):
    ledger = ReleaseLedger(tmp_path, "hospital A")
    for name, rounds in (("trial", 3), ("study", 5)):
        spending = Spending(name, rounds, lambda i: [EVENT], float("inf"), 1e-5)
        for i in range(rounds):
            ledger.release(spending, i, 0, lambda rng: b"noised")

    status, output = command(tmp_path, "--delta", "1e-5")

    assert status == 0
    assert "of hospital A" in output
    assert f"ε = {epsilon_text(ledger.epsilon(1e-5))} at δ = 1e-05 (add_remove), 8 steps" in output
    for name, rounds in (("trial", 3), ("study", 5)):
        assert f"run {name}: ε = {epsilon_text(epsilon([(EVENT, rounds)], 1e-5))}" in output


@pytest.mark.parametrize("name", ["nothing", "empty", "text.ckpt", "text.json"])
def test_what_is_no_record_of_privacy_is_refused(tmp_path, command, name):
    (tmp_path / "empty").mkdir()
    for text in ("text.ckpt", "text.json"):
        (tmp_path / text).write_text("[]")

    status, output = command(tmp_path / name)

    assert status == 2 and name in output


def test_a_checkpoint_that_could_run_code_is_not_loaded(saved, command, at_run_time):
    path = saved[1]
    content = torch.load(path, weights_only=True)
    torch.save({**content, "hyper_parameters": at_run_time}, path)

    status, output = command(path)

    assert status == 2
    assert "could run code" in output and "run's report file" in output


def test_a_checkpoint_of_a_run_without_privacy_is_a_note_in_a_folder(saved, command):
    path = saved[1]
    torch.save({"state_dict": {}}, path.with_name("baseline.ckpt"))

    status, output = command(path.parent)

    assert status == 0
    assert "baseline.ckpt is not a checkpoint of a private run: it holds no ledger" in output
    assert command(path.with_name("baseline.ckpt"))[0] == 2


def test_a_file_in_a_folder_that_cannot_be_read_is_named(saved, command):
    path = saved[1]
    (path.parent / "bad.ckpt").write_text("")

    status, output = command(path.parent)

    assert status == 1 and "PROBLEM" in output and "bad.ckpt" in output


def test_the_total_of_a_folder_counts_every_ledger_once(fit, command, tmp_path):
    trials = [fit() for _ in range(3)]
    trials[0].trainer.save_checkpoint(tmp_path / "saved" / "first.ckpt")

    status, output = command(tmp_path)

    together = epsilon([(EVENT, 36)], 1e-5)
    assert status == 0
    assert (
        f"total of 3 ledgers, if they are about the same records: ε = {epsilon_text(together)} at "
        "δ = 1e-05 (add_remove), 36 steps"
    ) in output
    found = json.loads(command(tmp_path, "--json")[1])["total"]
    assert found["epsilon"] == pytest.approx(together) and found["ledgers"] == 3


def test_the_total_counts_a_journal_that_nothing_speaks_of(fit, command, tmp_path):
    first, second = fit(), fit()
    for path in second.reports:
        if second.id in path.name:
            path.unlink()

    status, output = command(tmp_path)

    assert status == 0 and first.id != second.id
    together = epsilon_text(epsilon([(EVENT, 24)], 1e-5))
    assert f"ε = {together} at δ = 1e-05 (add_remove), 24 steps" in output


def test_the_total_of_noise_chosen_at_run_time_is_that_of_whole_budgets(
    fit, command, tmp_path, at_run_time
):
    for _ in range(2):
        privacy = DifferentialPrivacy(
            target_epsilon=1.0,
            target_delta=1e-5,
            noise_schedule=at_run_time,
            isolation_probe=False,
        )
        fit(privacy=privacy, max_steps=3)
    fit()

    assert command(tmp_path)[0] == 0
    found = json.loads(command(tmp_path, "--json")[1])["total"]
    assert found["delta"] == pytest.approx(3e-5)
    assert found["epsilon"] == pytest.approx(2.0 + epsilon([(EVENT, 12)], 1e-5))


def test_one_ledger_has_no_total(saved, command, tmp_path):
    assert "total of" not in command(tmp_path)[1]


def test_the_total_of_a_folder_with_a_seeded_training_promises_nothing(fit, command, tmp_path):
    fit()
    seeded = DifferentialPrivacy(
        target_delta=1e-5, noise_multiplier=1.0, seed=3, isolation_probe=False
    )
    fit(privacy=seeded)

    total = json.loads(command(tmp_path, "--json")[1])["total"]
    assert total["epsilon"] == "inf" and total["seeded"] == [seeded.report().ledger_id]
    assert "ε = inf" in (text := command(tmp_path)[1].rpartition("== total")[2])
    assert f"NOT PRIVATE (a seed was set: {total['seeded'][0]})" in text


def test_a_page_for_a_folder_that_is_not_there_is_refused_by_its_name(saved, command, tmp_path):
    status, output = command(saved[1], "--html", tmp_path / "pages" / "run.html")
    assert status == 2
    assert output.strip().endswith(f"there is no folder {tmp_path / 'pages'}.")


# -- contradictions ----------------------------------------------------------------------------


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
    assert f"its report says ledger_id=0123, its ledger and configuration {saved[0].id}" in output
    assert "its report says delta=2e-05" in output


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


# -- the page ----------------------------------------------------------------------------------

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
    assert "holds all these steps" in text and fitted.id in text
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
    assert "The journal holds more training from the same ledger" in text


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
