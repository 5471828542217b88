"""The command prints a report, names each contradiction, adds ledgers up, and writes a page."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_dp import UserLevel
from lightning_dp.accounting import PoissonGaussian, epsilon, epsilon_text
from lightning_dp.accounting.journal import Journal, read_journal
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.report.files import read_report
from tests.zoo import private

EVENT = PoissonGaussian(1.5, 0.1)
TWELVE = epsilon([(EVENT, 12)], 1e-5)


@pytest.mark.slow  # imports in a fresh process
def test_it_runs_as_a_module_and_loads_nothing_that_trains(saved):
    _, path = saved

    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lightning_dp.report", path],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0
    assert f"ε = {epsilon_text(TWELVE)} at δ = 1e-05 (add_remove), 12 steps" in done.stdout
    assert done.stdout.rstrip().endswith("all agrees")
    printed = done.stderr.splitlines()
    assert [line for line in printed if not line.startswith("import time:")] == []
    loaded = {line.rpartition("|")[2].strip() for line in printed}
    assert "lightning_dp.report.content" in loaded
    for package in ("federated", "strategies", "callbacks", "audit", "isolation", "gradients"):
        assert f"lightning_dp.{package}" not in loaded


def test_a_folder_is_checked_as_a_whole_and_left_as_it_is(saved, command, tmp_path):
    _, path = saved
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    status, output = command(tmp_path, "--json")

    found = json.loads(output)
    assert status == 0 and found["agrees"] and found["total"] is None
    assert sorted(each["kind"] for each in found["documents"]) == ["checkpoint", "report"]
    for each in found["documents"]:
        assert each["epsilon"] == pytest.approx(TWELVE) and each["journal_steps"] == 12
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert command(path.parent)[0] == 0


def test_a_moved_journal_is_found_below_the_folder_or_by_its_option(saved, command):
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


def test_a_journal_by_itself_needs_delta_and_has_no_page(saved, command, tmp_path):
    journal, page = saved[0].journal, tmp_path / "page.html"

    status, output = command(journal)
    assert status == 2 and "a journal does not record δ: give --delta" in output
    status, output = command(journal, "--delta", "1e-5")
    assert status == 0
    assert f"ε = {epsilon_text(TWELVE)} at δ = 1e-05 (add_remove), 12 steps" in output
    assert command(journal, "--delta", "2")[0] == 2
    status, output = command(journal, "--delta", "1e-5", "--html", page)
    assert status == 2 and "holds no report" in output and not page.exists()


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
def test_a_path_without_a_record_of_privacy_is_refused(tmp_path, command, name):
    (tmp_path / "empty").mkdir()
    for text in ("text.ckpt", "text.json"):
        (tmp_path / text).write_text("[]")

    status, output = command(tmp_path / name)

    assert status == 2 and name in output


def test_files_that_cannot_be_checked_are_named(saved, command, at_run_time):
    """A checkpoint without privacy is a note; one that could run code, or is damaged, is a problem."""
    path = saved[1]
    plain, code = path.with_name("baseline.ckpt"), path.with_name("code.ckpt")
    torch.save({"state_dict": {}}, plain)
    status, output = command(path.parent)
    assert status == 0
    assert "baseline.ckpt is not a checkpoint of a private run: it holds no ledger" in output
    assert command(plain)[0] == 2

    content = torch.load(path, weights_only=True)
    torch.save({**content, "hyper_parameters": at_run_time}, code)
    (path.parent / "bad.ckpt").write_text("")
    status, output = command(code)
    assert status == 2 and "could run code" in output and "run's report file" in output
    status, output = command(path.parent)
    assert status == 1 and "2 PROBLEMS FOUND" in output and "bad.ckpt" in output


# -- several ledgers ---------------------------------------------------------------------------


def test_the_total_of_a_folder_counts_every_ledger_once(fit, command, tmp_path):
    """Also one without a report here, by its journal."""
    trials = [fit() for _ in range(3)]
    trials[0].trainer.save_checkpoint(tmp_path / "saved" / "first.ckpt")
    next(path for path in trials[2].reports if trials[2].id in path.name).unlink()

    status, output = command(tmp_path)

    together = epsilon([(EVENT, 36)], 1e-5)
    assert status == 0
    assert (
        f"total of 3 ledgers, if they are about the same records: ε = {epsilon_text(together)} at "
        "δ = 1e-05 (add_remove), 36 steps"
    ) in output
    found = json.loads(command(tmp_path, "--json")[1])["total"]
    assert found["epsilon"] == pytest.approx(together) and found["ledgers"] == 3


@pytest.mark.parametrize("has_report", [True, False])
def test_users_are_not_added_up_with_records(fit, command, tmp_path, has_report):
    """A row more or less of a user is no user more or less: ε of users says nothing about it."""
    unit = UserLevel(ids=lambda data: [row // 2 for row in range(len(data))], most_rows=2)
    users = [fit(privacy=private(unit=unit, noise_multiplier=1.5)) for _ in range(2)]
    assert json.loads(command(tmp_path, "--json")[1])["total"]["apart"] == []
    fit()
    for each in () if has_report else users:
        next(path for path in each.reports if each.id in path.name).unlink()

    found = json.loads(command(tmp_path, "--json")[1])["total"]

    assert found["apart"] == sorted(each.id for each in users)
    assert found["epsilon"] == "inf" and found["epsilon_of_others"] == pytest.approx(TWELVE)


def test_the_total_of_noise_chosen_at_run_time_is_that_of_whole_budgets(
    fit, command, tmp_path, at_run_time
):
    for _ in range(2):
        fit(privacy=private(target_epsilon=1.0, noise_schedule=at_run_time), max_steps=3)
    fit()

    assert command(tmp_path)[0] == 0
    found = json.loads(command(tmp_path, "--json")[1])["total"]
    assert found["delta"] == pytest.approx(3e-5)
    assert found["epsilon"] == pytest.approx(2.0 + TWELVE)


def test_the_journal_of_a_refused_fit_is_a_note(saved, command, tmp_path):
    Journal(saved[0].journal.with_name("0" * 16 + ".journal"), "0" * 16).close()

    status, output = command(tmp_path)

    assert status == 0 and "total of" not in output
    assert "0.journal: no charges, as after a fit that was refused" in output


@pytest.mark.parametrize(
    "options", [{"seed": 3, "noise_multiplier": 1.0}, {"noise_multiplier": 0.0}]
)
def test_a_ledger_without_a_guarantee_leaves_none_and_the_others_stand_beside(
    options, fit, command, tmp_path
):
    fit()
    privacy = private(**options)
    fit(privacy=privacy)
    name = privacy.report().ledger_id

    total = json.loads(command(tmp_path, "--json")[1])["total"]

    assert total["epsilon"] == "inf" and total["apart"] == [name]
    assert total["seeded"] == ([name] if "seed" in options else [])
    assert total["epsilon_of_others"] == pytest.approx(TWELVE)
    line = command(tmp_path)[1].rpartition("== total")[2]
    assert "ε = inf" in line and f"ε = {epsilon_text(TWELVE)} without {name}, if nobody saw" in line
    assert ("NOT PRIVATE (a seed was set" in line) == ("seed" in options)


# -- contradictions ----------------------------------------------------------------------------


def report_field(**values):
    """Change the report, in its file or in the checkpoint."""
    return lambda record: record.get("report", record).update(values)


def first_charge(record, change):
    (charges,) = record["ledger"]["runs"].values()
    change(charges[0])


def with_less_charges(record):
    first_charge(record, lambda charge: charge.__setitem__(1, charge[1] - 1))


def with_more_noise(record):
    first_charge(record, lambda charge: charge[0].update(noise_multiplier=3.0))


def of_an_older_version(record):
    with_less_charges(record)
    record.pop("report")


EDITED_REPORTS = [
    (report_field(epsilon=1.01 * TWELVE), f"its events give ε = {epsilon_text(TWELVE, 6)}"),
    (report_field(epsilon=0.99 * TWELVE), f"its events give ε = {epsilon_text(TWELVE, 6)}"),
    (report_field(steps=11), "it says 11 steps, its events are 12"),
    (report_field(delta=1e-3), "its events give ε"),
    (report_field(relation="replace_one"), "its events give ε"),
    (report_field(private=False), "it says private: False"),
    (report_field(seeded=True), "it says private: True"),
    (report_field(epsilon_of_plan=0.1), "it says ε = 0.1 for the whole plan"),
    (report_field(accountant="other", epsilon=0.5 * TWELVE), "its events give ε"),
]
EDITED_FILES = [*EDITED_REPORTS, (report_field(ledger_id="0123"), "belongs to ledger")]
EDITED_CHECKPOINTS = [
    *EDITED_REPORTS[:2],
    (report_field(ledger_id="0123"), "its report says ledger_id=0123, its ledger and"),
    (report_field(delta=2e-5), "its report says delta=2e-05"),
    (with_less_charges, "it says 12 steps, its events are 11"),
    (of_an_older_version, "its weights went through 12 private steps, 11 are charged"),
    (with_more_noise, "contradict each other"),
]


@pytest.mark.parametrize(
    ("kind", "edits"), [("report", EDITED_FILES), ("checkpoint", EDITED_CHECKPOINTS)]
)
def test_an_edited_document_is_found(kind, edits, saved, command, edit_json, edit_checkpoint):
    path = saved[1] if kind == "checkpoint" else saved[0].reports[0]
    original = path.read_bytes()
    for edit, problem in edits:
        (edit_checkpoint if kind == "checkpoint" else edit_json)(path, edit)

        status, output = command(path)

        assert status == 1 and "PROBLEM: " in output and problem in output
        path.write_bytes(original)


def lose_charges(fitted, fit):
    """Lose the last charges, and what says which weights were released."""
    lines = fitted.journal.read_bytes().splitlines(True)
    charges = [line for line in lines if b"[null," not in line]
    fitted.journal.write_bytes(b"".join(charges[:-2]))


def take_another(fitted, fit):
    shutil.copy(fit().journal, fitted.journal)


def lose_the_file(fitted, fit):
    fitted.journal.unlink()


def damage(fitted, fit):
    fitted.journal.write_bytes(fitted.journal.read_bytes().replace(b"1.5", b"9.5"))


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lose_charges, ["has 12 charges here and 10 in the journal"]),
        (take_another, ["belongs to ledger"]),
        (lose_the_file, ["does not exist", "is unknown", "--journal"]),
        (damage, ["checksum", "is unknown", "--journal"]),
    ],
)
def test_a_journal_that_holds_less_than_its_documents_is_found(
    change, problems, saved, fit, command
):
    fitted, path = saved
    documents = (path, fitted.reports[0])
    change(fitted, fit)

    for document in documents:
        status, output = command(document)
        assert status == 1 and all(problem in output for problem in problems)


def test_steps_beyond_a_checkpoint_are_noted_and_counted(fit, saved, command):
    path = saved[1]
    fit(path, max_steps=20)
    fit(path, max_steps=15)

    status, output = command(path)

    assert status == 0
    assert "note: the journal has 11 steps beyond this checkpoint" in output
    assert f"ε = {epsilon_text(epsilon([(EVENT, 23)], 1e-5))} at δ = 1e-05, 23 steps" in output
    assert f"its own events: ε = {epsilon_text(TWELVE)}" in output


def test_a_run_with_noise_chosen_at_run_time_claims_its_whole_budget(
    fit, command, edit_json, at_run_time
):
    privacy = private(target_epsilon=3.0, noise_multiplier=1.5, noise_schedule=at_run_time)
    (path,) = fit(privacy=privacy).reports
    assert read_report(path).claims_budget
    assert command(path)[0] == 0

    edit_json(path, report_field(epsilon=2.0))
    assert command(path)[0] == 1


def test_a_journal_of_such_a_run_claims_the_budget_by_itself(fit, command, at_run_time):
    privacy = private(target_epsilon=3.0, noise_multiplier=1.5, noise_schedule=at_run_time)
    fitted = fit(privacy=privacy)
    other = fit(privacy=private(noise_multiplier=1.0)).journal
    for path in fitted.reports:
        path.unlink()  # as after a crash

    def said(place: Path, *options: str) -> str:
        return command(place, "--delta", *options)[1]

    assert "its own events: ε = 3 at" in said(fitted.journal, "1e-5")
    assert "its own events: ε = 6 at" in said(fitted.journal, "1e-3", "--relation", "replace_one")
    assert "its own events: ε = inf at" in said(fitted.journal, "1e-6")
    alone = epsilon(read_journal(other)[1].history(), 1e-5)
    folder = Path(os.path.commonpath([fitted.journal, other]))
    assert f"ε = {epsilon_text(3 + alone)} at δ = 2e-05" in said(folder, "1e-5")


def test_an_accountant_of_another_version_may_be_less_tight(saved, command, edit_json):
    path = saved[0].reports[0]
    edit_json(path, report_field(accountant="other", epsilon=1.5 * TWELVE))
    status, output = command(path)
    assert status == 0
    assert "note: its accountant 'other' is not of this version: compared with PLD" in output


# -- the page ----------------------------------------------------------------------------------


def test_a_page_is_written_for_its_reader_alone(saved, command, tmp_path):
    fitted, path = saved
    page = tmp_path / "page.html"
    stated = {
        "data-set": "visits of 2024",
        "record": "one visit",
        "controller": "City clinic",
        "trained-by": "Institute",
    }

    def written(*arguments):
        assert command(path, "--html", page, *arguments)[0] == 0
        return page.read_text("utf-8")

    text = written(*(word for name, words in stated.items() for word in (f"--{name}", words)))
    assert all(f"{word} (stated, not checked)" in text for word in stated.values())
    assert "ε was computed again from the list of all steps, and it agrees" in text
    assert "holds all these steps" in text and fitted.id in text
    assert "What is promised" in text and "<h2>Annex for engineers</h2>" in text
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    text = written("--for", "people")
    assert "What is promised" in text and "noise schedule" not in text and fitted.id in text
    text = written("--for", "engineers")
    assert "What is promised" not in text and "noise schedule" in text and fitted.id in text

    for unusable in (["--for", "lawyers"], ["--record", ""]):
        assert command(path, "--html", page, *unusable)[0] == 2
    status, output = command(path, "--html", tmp_path / "pages" / "run.html")
    assert status == 2
    assert output.strip().endswith(f"there is no folder {tmp_path / 'pages'}.")
