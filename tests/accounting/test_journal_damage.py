"""A damaged journal is refused, and never read as less spent."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting._journal_text import read_text
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.accounting.journal import Journal, JournalError, read_journal, read_written

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


def steps_in_text(content: bytes) -> int:
    runs = read_text(Path("j.journal"), bytes(content)).runs
    return sum(count for charges in runs.values() for _, count in charges)


def whole_records(content: bytes) -> int:
    """Charges of which every byte is there, their newline apart: the slow way to count them."""
    return sum(
        len(line) > 9 and f" {zlib.crc32(line[:-9]):08x}".encode() == line[-9:]
        for line in content.split(b"\n")[1:]
    )


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
            whole_records(content[:cut])
        )


def test_charging_goes_on_after_a_cut_at_any_byte_of_the_last_line(written):
    path, content, ledger_id = written
    last = content[:-1].rindex(b"\n") + 1
    for cut in range(last, len(content)):
        path.write_bytes(content[:cut])
        journal = Journal(path, ledger_id)
        journal.append("run-3", 0, B)
        journal.close()
        is_whole = cut == len(content) - 1  # but for its newline
        assert read_journal(path)[1]["run-2"] == [(A, 2 if is_whole else 1)]
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


def test_a_journal_whose_last_newline_is_another_byte_is_refused(written):
    path, content, _ = written
    for byte in {*range(256)} - {ord("\n")}:
        path.write_bytes(content[:-1] + bytes([byte]))
        with pytest.raises(JournalError, match="what follows line 6 is not the beginning of one"):
            read_journal(path)


def test_no_flip_and_no_zeros_make_a_journal_say_less_without_an_error(written, books):
    """Zeros are what a file system leaves of blocks that it had promised and not written."""
    path, content, _ = written
    truth = books.steps_in(path)
    newlines = [i for i, byte in enumerate(content) if byte == ord("\n")]
    damaged = [content[:i] + bytes(len(content) - i) for i in range(len(content))]
    damaged += [content[:i] + bytes(3) + content[i + 3 :] for i in range(len(content) - 3)]
    for last in newlines[-3:]:  # two at once: one of them hides whole records
        for i in range(last - 60, last):
            changed = bytearray(content)
            changed[last] ^= 1
            changed[i] ^= 1
            damaged.append(bytes(changed))
    for changed in damaged:
        with suppress(JournalError):
            assert steps_in_text(changed) >= truth


def test_a_flip_in_an_unfinished_line_loses_no_whole_one(written, books):
    path, content, _ = written
    cut = content[:-7]
    path.write_bytes(cut)
    truth = books.steps_in(path)
    for position in range(content[:-1].rindex(b"\n") + 1, len(cut)):
        for damage in (1, 8, 0x20, 0xFF):
            changed = bytearray(cut)
            changed[position] ^= damage
            with suppress(JournalError):
                assert steps_in_text(changed) == truth


@pytest.mark.parametrize(
    "event",
    [
        PoissonGaussian(1.2345678901234567e-05, 0.1 + 0.2),
        PoissonRound((1 / 3, 2e22, 5.0), 1e-7),
    ],
    ids=lambda event: type(event).__name__,
)
def test_any_beginning_of_any_record_is_one_that_a_crash_may_leave(tmp_path, event):
    path = tmp_path / "j.journal"
    journal = Journal(path, "ledger")
    journal.append('fédération "1", [west]#0', 0, A)
    start = path.stat().st_size
    journal.append('fédération "1", [west]#0', 1, event)
    journal.note_weights(["00ff", "11ee"])
    journal.note_data(22_000, 'visits "A], of 2024')
    journal.note_data(22_000, 'visits "A], of 2024')
    journal.close()
    content = path.read_bytes()
    assert content.count(b"data") == 1
    assert read_written(path).data == {(22_000, 'visits "A], of 2024')}
    for cut in range(start, len(content)):
        beginning = content[:cut]
        assert steps_in_text(beginning) == whole_records(beginning.split(b"[null")[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.decode().encode("utf-16"),
        lambda text: text.replace(b"\n", b"\n\0"),
        lambda text: text + b"\n",
        lambda text: text + b"  ",
        lambda text: text + text,
        lambda text: b"".join(reversed(text.splitlines(keepends=True))),
        lambda text: text + text.splitlines(keepends=True)[-1],
    ],
    ids=["CRLF", "BOM", "UTF-16", "NULs", "blank line", "blanks", "doubled", "reversed", "twice"],
)
def test_a_journal_that_an_editor_or_a_copy_changed_is_refused(written, change):
    path, content, ledger_id = written
    path.write_bytes(change(content))
    with pytest.raises(JournalError, match=r"damaged|not a (privacy )?journal"):
        read_journal(path)
    with pytest.raises(JournalError):
        Journal(path, ledger_id)
    assert path.read_bytes() == change(content)


def checked(text: str) -> bytes:
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()


@pytest.mark.parametrize(
    "text",
    [
        '["run-9",0,{"event":"Gaussian","noise_multiplier":-1.0}]',
        '["run-9",0,{"event":"Gaussian","noise_multiplier":NaN}]',
        '["run-9",0,{"event":"Unheard","z":1.0}]',
        '["run-9",0,[]]',
        '["run-9",true,{"event":"Gaussian","noise_multiplier":1.0}]',
        '["run-9",0]',
        '[["run-9"],0,null]',
        '[null,"something new",1]',
        '[null,"weights",3]',
        '[null,"weights",[3]]',
        '[null,"data",[3]]',
        '[null,"data",[true,null]]',
        '[null,"data",[3,4]]',
        "{}",
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_record_that_checks_but_cannot_be_read_is_damage(written, text):
    path, content, _ = written
    path.write_bytes(content + checked(text))
    with pytest.raises(JournalError, match=r"(damaged|of another version).* line 8"):
        read_journal(path)


def test_a_journal_of_the_first_version_is_read_and_goes_on(tmp_path, books):
    path = tmp_path / "old.journal"
    path.write_bytes(
        checked('["lightning-dp-journal-1","old"]')
        + checked('["r",0,{"event":"Gaussian","noise_multiplier":2.0}]')
        + checked('["r",1,null]')
    )
    journal = Journal(path, "old")
    journal.append("r2", 0, A)
    journal.note_weights(["aa"])
    journal.close()
    assert books.steps_in(path) == 3
    assert path.read_bytes().startswith(checked('["lightning-dp-journal-1","old"]'))


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
