"""A damaged journal is refused, and never read as less spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dp.accounting import PoissonGaussian, PoissonRound
from lightning_dp.accounting.journal import Journal, JournalError, read_journal

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
ROUND = PoissonRound((2.0, 3.0), 0.5)


@pytest.fixture
def written(tmp_path: Path, books) -> tuple[Path, bytes, str]:
    """A journal of two runs with changing events: its path, content and ledger."""
    ledger = books.ended(books.ledger_with(tmp_path, A, A, B, ROUND))
    ledger.begin("run-2", tmp_path)
    ledger.charge(A)
    ledger.charge(A)
    ledger.end()
    return books.journal_of(ledger), books.journal_of(ledger).read_bytes(), ledger.id


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
def test_a_journal_with_any_byte_changed_is_refused_or_reads_the_same(written, damage, books):
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
    assert books.steps_in(path) == steps_in_bytes(content) - 1


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
