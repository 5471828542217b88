"""The journals of a folder: neighbours of a fit, and the union of a sweep, every run once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_dp.accounting import (
    ApproximateDP,
    PoissonGaussian,
    calibrate,
    epsilon,
    sweep_history,
)
from lightning_dp.accounting.journal import Journal, JournalError
from lightning_dp.accounting.ledger import neighbours, union

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
OWN, ONE, TWO = "0" * 16, "1" * 16, "2" * 16


def write(
    path: Path, ledger_id: str, runs: dict[str, list[PoissonGaussian]], *weights: str
) -> None:
    journal = Journal(path, ledger_id)
    journal.extend({run: [(event, 1) for event in events] for run, events in runs.items()})
    journal.note("weights", *weights)
    journal.close()


def test_a_folder_that_is_not_there_or_holds_its_own_journal_alone_has_none(tmp_path):
    assert neighbours(tmp_path / "nowhere", OWN).count == 0
    write(tmp_path / "own.journal", OWN, {"r": [A]}, "ab")
    assert neighbours(tmp_path, OWN).count == 0


def test_a_run_that_two_journals_know_counts_once_and_federations_of_one_name_twice(tmp_path):
    run = "a" * 16
    write(tmp_path / "1.journal", ONE, {run: [A, A], "trial#0": [B]})
    write(tmp_path / "2.journal", TWO, {run: [A, A, A], "trial#0": [B]})
    found = neighbours(tmp_path, OWN)
    assert dict(union(found.written).history()) == {A: 3, B: 2}
    write(tmp_path / "3.journal", "3" * 16, {run: [B]})
    with pytest.raises(JournalError, match="contradict"):
        union(neighbours(tmp_path, OWN).written)


def test_journals_too_long_or_damaged_are_counted_and_weights_are_read(tmp_path, monkeypatch):
    write(tmp_path / "1.journal", ONE, {"r": [A]}, "aa", "bb")
    (tmp_path / "3.journal").write_text("damaged")
    found = neighbours(tmp_path, OWN)
    assert found.written[0].weights == {"aa", "bb"} and found.damaged == [tmp_path / "3.journal"]
    monkeypatch.setattr("lightning_dp.accounting.ledger._READ", 0)
    write(tmp_path / f"{OWN}.journal", OWN, {"r": [A]})
    assert neighbours(tmp_path, OWN).unread == found.count == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes are POSIX's")
def test_what_is_no_file_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.journal")
    (tmp_path / "b.journal").mkdir()
    (tmp_path / "c.journal").symlink_to(tmp_path / "gone")
    assert neighbours(tmp_path, OWN).count == 0


# -- sweeps ------------------------------------------------------------------------------------


def checkpoint(path: Path, state: object) -> Path:
    torch.save({"lightning_dp": {"ledger": state}}, path)
    return path


def test_trials_of_one_folder_and_of_many_add_up(tmp_path, books):
    for run, (folder, event) in enumerate((("a", A), ("a", B), ("b", A))):
        books.ended(books.ledger_with(tmp_path / folder, event, event, run=f"run-{run}"))
    assert dict(sweep_history(tmp_path / "a")) == {A: 2, B: 2}
    assert dict(sweep_history([tmp_path / "a", tmp_path / "b"])) == {A: 4, B: 2}


def test_a_run_that_several_files_know_of_counts_once(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path / "a", A, A))
    state = ledger.state_dict()
    saved = checkpoint(tmp_path / "x.ckpt", state)
    copy = shutil.copy(ledger.journal_path, tmp_path / "copy.journal")
    resumed = books.restored(state, tmp_path / "a")
    resumed.begin("resumed", tmp_path / "a")
    resumed.charge(B)
    resumed.end()

    assert dict(sweep_history([copy])) == {A: 2}
    assert dict(sweep_history([saved])) == {A: 2, B: 1}  # from its journal
    assert dict(sweep_history([copy, saved, tmp_path / "a", str(tmp_path / "a")])) == {A: 2, B: 1}
    ledger.journal_path.unlink()
    with pytest.raises(JournalError, match="recover_journal"):
        sweep_history(saved)


def test_federations_of_one_name_count_twice(tmp_path):
    write(tmp_path / "1.journal", ONE, {"trial#0": [A]})
    write(tmp_path / "2.journal", TWO, {"trial#0": [A]})
    assert dict(sweep_history(tmp_path)) == {A: 2}


def test_noise_chosen_at_run_time_counts_with_its_whole_budget(tmp_path):
    """Released noise bounds none that could have been; of copies of a journal the larger one counts."""
    write(tmp_path / "fixed.journal", TWO, {"c" * 16: [B]})
    for name, budget in (("copy", 2.0), (ONE, 3.0)):
        write(tmp_path / f"{name}.journal", ONE, {"a" * 16: [A]})
        journal = Journal(tmp_path / f"{name}.journal", ONE)
        journal.note("budget", budget, 1e-6, "add_remove")
        journal.close()
    whole = ApproximateDP(3.0, 1e-6, "add_remove", f"noise chosen at run time, ledger {ONE}")
    assert dict(sweep_history(tmp_path)) == {B: 1, whole: 1}
    state = {"id": ONE, "journal": str(tmp_path / f"{ONE}.journal"), "runs": {}}
    assert sweep_history(checkpoint(tmp_path / "x.ckpt", state)) == [(whole, 1)]


def test_what_is_not_a_record_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    for paths, error, match in (
        ([], ValueError, "paths is empty"),
        (tmp_path, JournalError, "no privacy journal"),
        (tmp_path / "lost.journal", JournalError, "does not exist"),
        (tmp_path / "plain.ckpt", ValueError, "not a checkpoint of a private run"),
        *((bad, TypeError, "paths=") for bad in ([None], [3], [b"a.ckpt"], [[1]])),
    ):
        with pytest.raises(error, match=match):
            sweep_history(paths)


def test_a_sweep_of_k_trials_is_calibrated_as_k_times_the_steps(tmp_path, books):
    z = calibrate(lambda step: 1.0, 0.1, steps=3 * 4, epsilon=2.0, delta=1e-5)
    for trial in range(3):
        events = [PoissonGaussian(z, 0.1)] * 4
        books.ended(books.ledger_with(tmp_path, *events, run=f"trial {trial}"))
    assert 0.998 * 2 <= epsilon(sweep_history(tmp_path), 1e-5) <= 2
