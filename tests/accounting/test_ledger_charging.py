"""Every charge is counted, and on the disk before it returns."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.ledger import Ledger

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
ROUND = PoissonRound((2.0, 3.0), 0.5)


def test_a_ledger_counts_every_charge(books):
    ledger = books.ledger_with(None, A, A, B, A)
    assert ledger.steps == 4
    assert books.counts(ledger) == {A: 3, B: 1}


def test_charging_needs_a_run(books):
    with pytest.raises(RuntimeError, match=r"Ledger\.begin\(\) must come before"):
        Ledger().charge(A)
    with pytest.raises(RuntimeError, match=r"Ledger\.begin\(\) must come before"):
        books.ended(books.ledger_with(None, A)).charge(A)


def test_a_charge_is_on_the_disk_before_it_returns(tmp_path, books):
    ledger = books.ledger_with(tmp_path)
    for number, event in enumerate([A, A, B, ROUND, A], start=1):
        ledger.charge(event)
        found, runs = read_journal(books.journal_of(ledger))
        assert found == ledger.id
        assert sum(count for _, count in runs["run-1"]) == ledger.steps == number
        assert runs["run-1"][-1][0] == event


def test_a_charge_waits_for_the_disk(tmp_path, monkeypatch, books):
    """Written is not enough: the system may lose power."""
    synced: list[int] = []
    ledger = books.ledger_with(tmp_path)
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    ledger.charge(A)

    assert synced == [books.journal_of(ledger).stat().st_size]


def test_the_journal_says_what_was_charged(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A, B, A, ROUND))
    assert read_journal(books.journal_of(ledger)) == (
        ledger.id,
        {"run-1": [(A, 2), (B, 1), (A, 1), (ROUND, 1)]},
    )


def test_a_second_run_goes_on_in_the_same_journal(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A))
    ledger.begin("run-2", tmp_path / "elsewhere")
    ledger.charge(B)
    ledger.end()

    assert ledger.steps == 3
    assert read_journal(books.journal_of(ledger))[1] == {"run-1": [(A, 2)], "run-2": [(B, 1)]}
    assert not (tmp_path / "elsewhere").exists()


def test_interleaved_processes_may_share_a_journal_one_after_the_other(tmp_path, books):
    """Resumed from one state, each appends to what the other wrote in between."""
    first = books.ended(books.ledger_with(tmp_path, A))
    state = first.state_dict()
    for run in ("run-2", "run-3"):
        ledger = books.restored(state, tmp_path)
        ledger.begin(run, tmp_path)
        ledger.charge(B)
        ledger.end()

    assert books.steps_in(books.journal_of(first)) == 3


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """A full disk, as the kernel knows it."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_charge_that_cannot_be_written_is_not_made(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    with no_file_may_grow(), pytest.raises(OSError, match="File too large"):
        ledger.charge(B)
    assert ledger.steps == 1


def test_a_failing_disk_does_not_keep_the_lock(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    with no_file_may_grow():
        with pytest.raises(OSError, match="File too large"):
            ledger.charge(B)
        ledger.end()

    again = books.ledger_with(None)
    again.restore(ledger.state_dict(), tmp_path)
    again.begin("run-2", tmp_path)
    again.charge(A)
    again.end()
    assert books.counts(again) == {A: 2}
