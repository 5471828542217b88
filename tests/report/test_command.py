"""The command prints a report, and names what does not agree."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from lightning_dp.accounting import PoissonGaussian, epsilon, epsilon_text
from lightning_dp.accounting.journal import Journal
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.federated.ledger import ReleaseLedger, Spending

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
    assert f"charged: 12 × {EVENT}" in done.stdout
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
    assert status == 2 and "a journal does not know δ: give --delta" in output

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
    assert "baseline.ckpt is no checkpoint of a private run: it holds no ledger" in output
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
