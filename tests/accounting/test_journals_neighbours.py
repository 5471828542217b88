"""Other journals in a folder, as a fit looks at them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting._grouping import coarse
from lightning_dp.accounting.charges import JournalError
from lightning_dp.accounting.journal import Journal
from lightning_dp.accounting.journals import neighbours, union

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
OWN, ONE, TWO = "0" * 16, "1" * 16, "2" * 16


def write(
    path: Path, ledger_id: str, runs: dict[str, list[PoissonGaussian]], *weights: str
) -> None:
    journal = Journal(path, ledger_id)
    journal.extend({run: [(event, 1) for event in events] for run, events in runs.items()})
    journal.note_weights(weights)
    journal.close()


def test_a_folder_that_is_not_there_or_holds_its_own_journal_alone_has_none(tmp_path):
    assert neighbours(tmp_path / "nowhere", OWN, set()).count == 0
    write(tmp_path / "own.journal", OWN, {"r": [A]}, "ab")
    assert neighbours(tmp_path, OWN, {"ab"}).count == 0


def test_a_run_that_two_journals_know_counts_once_and_federations_of_one_name_twice(tmp_path):
    run = "a" * 16
    write(tmp_path / "1.journal", ONE, {run: [A, A], "trial#0": [B]})
    write(tmp_path / "2.journal", TWO, {run: [A, A, A], "trial#0": [B]})
    found = neighbours(tmp_path, OWN, set())
    assert dict(union(found.written).history()) == {A: 3, B: 2}
    write(tmp_path / "3.journal", "3" * 16, {run: [B]})
    with pytest.raises(JournalError, match="contradict"):
        union(neighbours(tmp_path, OWN, set()).written)


def test_weights_are_found_also_in_a_journal_too_long_to_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_dp.accounting.journals._READ", 0)
    write(tmp_path / "1.journal", ONE, {"r": [A]}, "aa", "bb")
    write(tmp_path / "2.journal", TWO, {"r": [A]}, "cc")
    assert neighbours(tmp_path, OWN, set()).unread == 2
    found = neighbours(tmp_path, OWN, {"bb", "dd"})
    assert [each.ledger_id for each in found.trained] == [ONE] and found.unread == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes are POSIX's")
def test_what_is_no_file_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.journal")
    (tmp_path / "b.journal").mkdir()
    (tmp_path / "c.journal").symlink_to(tmp_path / "gone")
    assert neighbours(tmp_path, OWN, set()).count == 0


def test_few_events_cost_what_they_do_and_many_no_less():
    few = [(A, 3), (B, 1)]
    assert coarse(few) == few
    many = [(PoissonGaussian(1 + i * 1e-3, 0.01), 2) for i in range(1000)]
    merged = coarse([*many, (PoissonGaussian(0.0, 0.01), 1), (Gaussian(3.0), 1)])
    assert sum(count for _, count in merged) == 2002 and len(merged) < 60
    for event, _ in many:  # each has a cheaper one nearby
        assert any(
            0 <= event.pair[0] / other.pair[0] - 1 < 0.02 for other, _ in merged if other.pair[0]
        )
