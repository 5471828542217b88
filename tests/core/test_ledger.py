"""The ledger: it only grows, it is on the disk first, and damage is never read as less spent."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dp.accounting import AbstractEvent, Gaussian, PoissonGaussian, PoissonRound
from lightning_dp.accounting.journal import Journal, JournalError, longer_run, read_journal
from lightning_dp.accounting.ledger import Ledger, recover_journal

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
ROUND = PoissonRound((2.0, 3.0), 0.5)


def ledger_with(directory: Path | None, *events: AbstractEvent, run: str = "run-1") -> Ledger:
    """A ledger whose run is under way, with these charges."""
    ledger = Ledger()
    ledger.begin(run, directory)
    for event in events:
        ledger.charge(event)
    return ledger


def ended(ledger: Ledger) -> Ledger:
    ledger.end()
    return ledger


def restored(state: dict[str, Any], directory: Path) -> Ledger:
    ledger = Ledger()
    ledger.restore(state, directory)
    return ledger


def journal_of(ledger: Ledger) -> Path:
    assert ledger.journal_path is not None
    return ledger.journal_path


def counts(ledger: Ledger) -> dict[AbstractEvent, int]:
    return dict(ledger.history())


def steps_in(path: Path) -> int:
    return sum(count for charges in read_journal(path)[1].values() for _, count in charges)


# -- charging ------------------------------------------------------------------------------------


def test_a_ledger_counts_every_charge():
    ledger = ledger_with(None, A, A, B, A)
    assert ledger.steps == 4
    assert counts(ledger) == {A: 3, B: 1}


def test_charging_needs_a_run():
    with pytest.raises(RuntimeError, match=r"Ledger\.begin\(\) must come before"):
        Ledger().charge(A)
    with pytest.raises(RuntimeError, match=r"Ledger\.begin\(\) must come before"):
        ended(ledger_with(None, A)).charge(A)


def test_a_charge_is_on_the_disk_before_it_returns(tmp_path):
    ledger = ledger_with(tmp_path)
    for number, event in enumerate([A, A, B, ROUND, A], start=1):
        ledger.charge(event)
        found, runs = read_journal(journal_of(ledger))
        assert found == ledger.id
        assert sum(count for _, count in runs["run-1"]) == ledger.steps == number
        assert runs["run-1"][-1][0] == event


def test_a_charge_waits_for_the_disk(tmp_path, monkeypatch):
    """Written is not enough: the system may lose power."""
    synced: list[int] = []
    ledger = ledger_with(tmp_path)
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    ledger.charge(A)

    assert synced == [journal_of(ledger).stat().st_size]


def test_the_journal_says_what_was_charged(tmp_path):
    ledger = ended(ledger_with(tmp_path, A, A, B, A, ROUND))
    assert read_journal(journal_of(ledger)) == (
        ledger.id,
        {"run-1": [(A, 2), (B, 1), (A, 1), (ROUND, 1)]},
    )


def test_a_second_run_goes_on_in_the_same_journal(tmp_path):
    ledger = ended(ledger_with(tmp_path, A, A))
    ledger.begin("run-2", tmp_path / "elsewhere")
    ledger.charge(B)
    ledger.end()

    assert ledger.steps == 3
    assert read_journal(journal_of(ledger))[1] == {"run-1": [(A, 2)], "run-2": [(B, 1)]}
    assert not (tmp_path / "elsewhere").exists()


def test_interleaved_processes_may_share_a_journal_one_after_the_other(tmp_path):
    """Resumed from one state, each appends to what the other wrote in between."""
    first = ended(ledger_with(tmp_path, A))
    state = first.state_dict()
    for run in ("run-2", "run-3"):
        ledger = restored(state, tmp_path)
        ledger.begin(run, tmp_path)
        ledger.charge(B)
        ledger.end()

    assert steps_in(journal_of(first)) == 3


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


def test_a_charge_that_cannot_be_written_is_not_made(tmp_path):
    ledger = ledger_with(tmp_path, A)
    with no_file_may_grow(), pytest.raises(OSError, match="File too large"):
        ledger.charge(B)
    assert ledger.steps == 1


def test_a_failing_disk_does_not_keep_the_lock(tmp_path):
    ledger = ledger_with(tmp_path, A)
    with no_file_may_grow():
        with pytest.raises(OSError, match="File too large"):
            ledger.charge(B)
        with pytest.raises(OSError, match="File too large"):
            ledger.end()

    again = ledger_with(None)
    again.restore(ledger.state_dict(), tmp_path)
    again.begin("run-2", tmp_path)
    again.charge(A)
    again.end()
    assert counts(again) == {A: 2}


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, bytes, str]:
    """A journal of two runs with changing events: its path, content and ledger."""
    ledger = ended(ledger_with(tmp_path, A, A, B, ROUND))
    ledger.begin("run-2", tmp_path)
    ledger.charge(A)
    ledger.charge(A)
    ledger.end()
    return journal_of(ledger), journal_of(ledger).read_bytes(), ledger.id


def test_a_journal_cut_at_any_byte_is_a_beginning_of_it_or_no_journal(written):
    """A crash may leave any part of the line that was being written, and nothing else is lost."""
    path, content, ledger_id = written
    header = content.index(b"\n") + 1
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        if cut < header:
            with pytest.raises(JournalError, match="empty or not a journal"):
                read_journal(path)
            continue
        found, runs = read_journal(path)
        assert found == ledger_id
        assert sum(count for charges in runs.values() for _, count in charges) == (
            content[:cut].count(b"\n") - 1
        )


def test_charging_goes_on_after_a_cut_at_any_byte_of_the_last_line(written):
    path, content, ledger_id = written
    last = content[:-1].rindex(b"\n") + 1
    for cut in range(last, len(content)):
        path.write_bytes(content[:cut])
        journal = Journal(path, ledger_id)
        journal.append("run-3", 0, B)
        journal.close()
        assert read_journal(path)[1]["run-2"] == [(A, 1)]
        assert read_journal(path)[1]["run-3"] == [(B, 1)]


@pytest.mark.parametrize("damage", [1, 0x20, 0x80, 0xFF])
def test_a_journal_with_any_byte_changed_is_refused_or_reads_the_same(written, damage):
    path, content, _ = written
    truth = read_journal(path)
    for position in range(len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= damage
        path.write_bytes(changed)
        try:
            assert read_journal(path) == truth
        except JournalError:
            continue
    # Without its newline the last line is one that was being written.
    path.write_bytes(content[:-1] + b"x")
    assert steps_in(path) == steps_in_bytes(content) - 1


def steps_in_bytes(content: bytes) -> int:
    return content.count(b"\n") - 1


def test_a_byte_changed_in_an_unfinished_line_changes_nothing(written):
    path, content, _ = written
    cut = content[:-7]
    path.write_bytes(cut)
    truth = read_journal(path)
    for position in range(content[:-1].rindex(b"\n") + 1, len(cut)):
        changed = bytearray(cut)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert read_journal(path) == truth


@pytest.mark.parametrize("line", [0, 1, 2, 3, 5])
def test_a_journal_with_a_line_taken_out_is_refused(written, line):
    """Except the last line of a run: that is a cut, which only a checkpoint can tell."""
    path, content, _ = written
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(JournalError, match=r"damaged before line|not a privacy journal"):
        read_journal(path)


def test_a_journal_with_a_line_twice_is_refused(written):
    path, content, _ = written
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[2], *lines[3:]]))
    with pytest.raises(JournalError, match="damaged before line 4"):
        read_journal(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"hello\n", b'["other",1] 00000000\n'])
def test_a_file_that_is_no_journal_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="journal"):
        read_journal(path)
    assert path.read_bytes() == content


def test_a_missing_journal_is_refused(tmp_path):
    with pytest.raises(JournalError, match="does not exist"):
        read_journal(tmp_path / "nowhere")


def test_a_journal_of_another_ledger_is_refused(written):
    path, _, ledger_id = written
    with pytest.raises(JournalError, match=f"belongs to ledger {ledger_id}, not to other"):
        Journal(path, "other")


# -- merging -------------------------------------------------------------------------------------


def test_a_resumed_ledger_knows_what_the_journal_knows_beyond_the_checkpoint(tmp_path):
    ledger = ledger_with(tmp_path, A, A)
    state = ledger.state_dict()
    ledger.charge(B)  # after the checkpoint, before the crash
    ledger.end()

    assert counts(restored(state, tmp_path)) == {A: 2, B: 1}


def test_two_runs_resumed_from_one_state_both_count(tmp_path):
    first = ended(ledger_with(tmp_path, A, A))
    state = first.state_dict()
    states = []
    for run in ("left", "right"):
        ledger = restored(state, tmp_path)
        ledger.begin(run, tmp_path)
        ledger.charge(B)
        ledger.end()
        states.append(ledger.state_dict())

    merged = restored(states[0], tmp_path)
    merged.restore(states[1], tmp_path)

    assert merged.steps == 4
    assert counts(merged) == {A: 2, B: 2}


def test_an_older_state_never_shrinks_a_newer_ledger(tmp_path):
    ledger = ledger_with(tmp_path, A, A)
    older = ledger.state_dict()
    ledger.charge(A)
    ledger.charge(B)
    ledger.end()

    ledger.restore(older, tmp_path)

    assert counts(ledger) == {A: 3, B: 1}


def test_an_older_state_without_a_journal_never_shrinks_a_newer_ledger(tmp_path):
    ledger = ledger_with(None, A, A)
    older = ledger.state_dict()
    ledger.charge(B)
    ledger.restore(older, tmp_path)
    assert counts(ledger) == {A: 2, B: 1}


@pytest.mark.parametrize(
    ("ours", "theirs", "union"),
    [
        ([], [(A, 1)], [(A, 1)]),
        ([(A, 2)], [(A, 5)], [(A, 5)]),
        ([(A, 2)], [(A, 2), (B, 1)], [(A, 2), (B, 1)]),
        ([(A, 2), (B, 1)], [(A, 2), (B, 3), (A, 1)], [(A, 2), (B, 3), (A, 1)]),
        ([(A, 2), (B, 1)], [(A, 2), (B, 1)], [(A, 2), (B, 1)]),
        ([(A, 2)], [(B, 2)], None),
        ([(A, 1), (B, 1)], [(A, 5)], None),
        ([(A, 3)], [(A, 2), (B, 2)], None),
        ([(A, 1), (B, 1), (A, 1)], [(A, 1), (B, 4)], None),
        ([(A, 1), (B, 1)], [(A, 2)], None),
    ],
)
def test_the_union_of_two_records_of_a_run_is_the_longer_one_if_the_other_begins_it(
    ours, theirs, union
):
    for pair in ((ours, theirs), (theirs, ours)):
        if union is None:
            with pytest.raises(JournalError, match="Two records of run x contradict"):
                longer_run("x", *pair)
        else:
            assert longer_run("x", *pair) == union


def test_one_run_with_contradictory_content_is_refused(tmp_path):
    state = ended(ledger_with(None, A, A)).state_dict()
    other = ledger_with(None, B, B)
    with pytest.raises(JournalError, match="Two records of run run-1 contradict each other"):
        other.restore(state, tmp_path)


def test_the_other_processes_mirror_the_lead():
    lead = ledger_with(None, A, B)
    other = ledger_with(None, A, run="something of its own")
    other.mirror(lead.state_dict())
    assert counts(other) == {A: 1, B: 1}
    assert other.id == lead.id


# -- checkpoints ---------------------------------------------------------------------------------


def test_the_state_survives_a_checkpoint_of_plain_types(tmp_path):
    ledger = ended(ledger_with(tmp_path, A, A, ROUND, Gaussian(3.0)))
    file = io.BytesIO()
    torch.save(ledger.state_dict(), file)
    file.seek(0)

    state = torch.load(file, weights_only=True)

    assert state == ledger.state_dict()
    assert counts(restored(state, tmp_path)) == counts(ledger)


def test_a_moved_journal_is_found_in_the_ledger_folder(tmp_path):
    ledger = ended(ledger_with(tmp_path / "old", A, A))
    state = ledger.state_dict()
    (tmp_path / "old").rename(tmp_path / "new")

    found = restored(state, tmp_path / "new")

    assert found.steps == 2
    assert journal_of(found) == tmp_path / "new" / f"{ledger.id}.journal"


def test_a_missing_journal_is_an_error_that_names_the_way_out(tmp_path):
    ledger = ended(ledger_with(tmp_path, A))
    journal_of(ledger).unlink()
    with pytest.raises(
        JournalError, match=r"is missing .* lightning_dp\.accounting\.\s?recover_jou"
    ):
        restored(ledger.state_dict(), tmp_path)


@pytest.mark.parametrize("kept_lines", [1, 2, 3])
def test_a_journal_that_knows_less_than_the_checkpoint_is_refused(tmp_path, kept_lines):
    ledger = ended(ledger_with(tmp_path, A, A, B))
    path = journal_of(ledger)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept_lines]))
    with pytest.raises(JournalError, match="knows less than the checkpoint"):
        restored(ledger.state_dict(), tmp_path)


def test_a_damaged_journal_does_not_restore(tmp_path):
    ledger = ended(ledger_with(tmp_path, A, A, B))
    path = journal_of(ledger)
    path.write_bytes(path.read_bytes().replace(b"1.0", b"9.0"))
    with pytest.raises(JournalError, match="line 2 does not check"):
        restored(ledger.state_dict(), tmp_path)


def checkpoint_of(ledger: Ledger, folder: Path) -> Path:
    path = folder / "last.ckpt"
    torch.save({"lightning_dp": {"ledger": ledger.state_dict()}}, path)
    return path


@pytest.mark.parametrize("unrecorded", [0, 7])
def test_a_recovered_journal_charges_the_bound_on_what_was_lost(tmp_path, unrecorded):
    ledger = ended(ledger_with(tmp_path, A, A, B))
    checkpoint = checkpoint_of(ledger, tmp_path)
    journal_of(ledger).unlink()

    path = recover_journal(checkpoint, tmp_path / "new", unrecorded)

    again = restored(ledger.state_dict(), tmp_path / "new")
    assert journal_of(again) == path
    assert again.steps == 3 + unrecorded
    assert counts(again) == {A: 2, B: 1 + unrecorded}
    again.begin("run-2", tmp_path)
    again.charge(A)
    assert steps_in(path) == 4 + unrecorded
    again.end()


def test_recovering_does_not_overwrite_a_journal(tmp_path):
    ledger = ended(ledger_with(tmp_path, A))
    checkpoint = checkpoint_of(ledger, tmp_path)
    for directory in (tmp_path, tmp_path / "new"):
        with pytest.raises(JournalError, match=r"exists\. If it is damaged, move it away first"):
            recover_journal(checkpoint, directory, 0)


def test_recovering_from_nothing_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="not a checkpoint of a private run"):
        recover_journal(tmp_path / "plain.ckpt", tmp_path, 1)
    with pytest.raises(ValueError, match="unrecorded_steps=-1 must be a number of steps"):
        recover_journal(tmp_path / "plain.ckpt", tmp_path, -1)


# -- one process at a time -----------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.journal import Journal
journal = Journal(Path(sys.argv[1]), "shared")
journal.append("holder", 0, Gaussian(1.0))
print("held", flush=True)
sys.stdin.readline()
journal.close()
print("released", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Another process that has the journal open, and closes it when it reads a line."""
    path = tmp_path / "shared.journal"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield path, process
    process.kill()
    process.communicate()


def test_a_journal_in_use_by_another_process_is_refused_until_it_is_closed(holder):
    path, process = holder
    with pytest.raises(JournalError, match="in use by another run"):
        Journal(path, "shared")

    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "released\n"
    journal = Journal(path, "shared")
    assert journal.runs == {"holder": [(Gaussian(1.0), 1)]}
    journal.close()


def test_a_killed_process_gives_up_its_journal_with_all_its_charges(holder):
    path, process = holder
    process.kill()
    process.wait()

    journal = Journal(path, "shared")

    assert journal.runs == {"holder": [(Gaussian(1.0), 1)]}
    journal.close()


def test_two_ledgers_of_one_process_cannot_hold_one_journal(tmp_path):
    first = ledger_with(tmp_path, A)
    second = restored(first.state_dict(), tmp_path)
    with pytest.raises(JournalError, match="in use by another run"):
        second.begin("run-2", tmp_path)
    first.end()
    second.begin("run-2", tmp_path)
    second.end()


# -- size ----------------------------------------------------------------------------------------


def seconds_to_keep(steps: int, folder: Path) -> float:
    """Processor time to charge, write, read and merge that many distinct events."""
    events = [PoissonGaussian(1.0 + i * 1e-6, 0.01) for i in range(steps)]
    start = time.process_time()
    ledger = ledger_with(None, *events)
    journal = Journal(folder / f"{steps}.journal", ledger.id)
    journal.extend({"run-1": [(event, 1) for event in events]})
    journal.close()
    runs = read_journal(journal.path)[1]
    assert longer_run("run-1", runs["run-1"], runs["run-1"]) == [(event, 1) for event in events]
    assert len(ledger.history()) == ledger.steps == steps
    return time.process_time() - start


def test_twenty_thousand_distinct_events_cost_time_in_proportion(tmp_path):
    small = min(seconds_to_keep(2_000, tmp_path / f"{i}") for i in range(3))
    large = min(seconds_to_keep(20_000, tmp_path / f"{i}") for i in range(2))
    assert large < 40 * small  # a quadratic cost would be 100 times


def test_a_constant_run_is_one_entry_in_a_checkpoint():
    ledger = ledger_with(None, *[A] * 5000)
    assert ledger.state_dict()["runs"] == {"run-1": [[A.to_dict(), 5000]]}
