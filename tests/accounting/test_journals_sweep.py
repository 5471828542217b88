"""The union of the journals of a sweep: every run, each once."""

from __future__ import annotations

import shutil

import pytest
import torch

from lightning_dp.accounting import PoissonGaussian, calibrate, epsilon, sweep_history
from lightning_dp.accounting.journal import JournalError

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)


def checkpoint(path, state):
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


def test_a_checkpoint_without_its_journal_is_refused(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A))
    saved = checkpoint(tmp_path / "x.ckpt", ledger.state_dict())
    ledger.journal_path.unlink()
    with pytest.raises(JournalError, match="recover_journal"):
        sweep_history(saved)


def test_what_is_not_a_record_is_refused(tmp_path):
    with pytest.raises(ValueError, match="paths is empty"):
        sweep_history([])
    with pytest.raises(JournalError, match="no privacy journal"):
        sweep_history(tmp_path)
    with pytest.raises(JournalError, match="does not exist"):
        sweep_history(tmp_path / "lost.journal")
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="not a checkpoint of a private run"):
        sweep_history(tmp_path / "plain.ckpt")


def test_a_sweep_of_k_trials_is_calibrated_as_k_times_the_steps(tmp_path, books):
    z = calibrate(lambda step: 1.0, 0.1, steps=3 * 4, epsilon=2.0, delta=1e-5)
    for trial in range(3):
        events = [PoissonGaussian(z, 0.1)] * 4
        books.ended(books.ledger_with(tmp_path, *events, run=f"trial {trial}"))
    assert 0.998 * 2 <= epsilon(sweep_history(tmp_path), 1e-5) <= 2
