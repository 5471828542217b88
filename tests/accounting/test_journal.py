"""A journal is whole or refused: after crashes, damage, a full disk, other processes and hands."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.events import PoissonRound, Voided
from lightning_dp.accounting.journal import (
    Journal,
    JournalDiskError,
    JournalError,
    checked_line,
    read_journal,
    read_text,
    read_written,
)

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
    return read_text(Path("j.journal"), bytes(content)).runs.total


def whole_records(content: bytes) -> int:
    """Charges of which every byte is there, their newline apart: the slow way to count them."""
    return sum(
        len(line) > 9 and f" {zlib.crc32(line[:-9]):08x}".encode() == line[-9:]
        for line in content.split(b"\n")[1:]
        if not line.startswith(b"[null")
    )


# -- crashes and damage ------------------------------------------------------------------------

events = st.one_of(
    st.builds(PoissonGaussian, st.floats(0, 1e9), st.floats(1e-9, 1)),
    st.builds(
        PoissonRound, st.lists(st.floats(0, 1e9), min_size=1, max_size=4).map(tuple), st.just(0.5)
    ),
    st.builds(Voided, st.text(max_size=20)),
)
names = st.one_of(st.just('fédération "1", [west]#0'), st.text(max_size=12))
runs = st.dictionaries(names, st.lists(events, min_size=1, max_size=4), min_size=1, max_size=3)


def text_of(runs: dict[str, list[Any]], weights: list[str]) -> bytes:
    """A journal, line by line, in which an event equal to the one before is null."""
    lines = [["lightning-dp-journal-2", "0" * 16]]
    for run, charges in runs.items():
        for number, event in enumerate(charges):
            is_same = number > 0 and charges[number - 1] == event
            lines.append([run, number, None if is_same else event.to_dict()])
    lines += [[None, "weights", weights], [None, "data", [22_000, 'visits "A], of 2024']]]
    return b"".join(map(checked_line, lines))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(runs, st.lists(st.sampled_from(["00ff", "11ee"]), max_size=2), st.data())
def test_a_crash_loses_the_line_that_was_being_written_and_nothing_else(runs, weights, data):
    content = text_of(runs, weights)
    header = content.index(b"\n") + 1
    assert steps_in_text(content) == sum(map(len, runs.values())) == whole_records(content)
    for cut in {header, *data.draw(st.lists(st.integers(header, len(content)), max_size=60))}:
        assert steps_in_text(content[:cut]) == whole_records(content[:cut])
    with pytest.raises(JournalError, match="empty or not a journal"):
        read_text(Path("j.journal"), content[: data.draw(st.integers(0, header - 1))])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(runs, st.data())
def test_what_is_known_of_a_journal_is_read_once_and_believed_of_no_other_file(runs, data):
    path, content = Path("j.journal"), text_of(runs, ["00ff"])
    whole, header = read_text(path, content), content.index(b"\n") + 1
    for cut in data.draw(st.lists(st.integers(header, len(content)), min_size=1, max_size=20)):
        known = read_text(path, content[:cut])
        more = read_text(path, content, known)
        assert more == whole and more.runs.history() == whole.runs.history()
        assert all(
            more.runs.of_federation(name) == whole.runs.of_federation(name)
            for name in ('fédération "1", [west]', "run")
        )
        assert known == read_text(path, content[:cut])  # nothing was added to it
        changed = bytearray(content)
        changed[data.draw(st.integers(0, len(known.text) - 1))] ^= 4
        with pytest.raises(JournalError):
            read_text(path, bytes(changed), known)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(runs, st.data())
def test_no_damage_makes_a_journal_say_less_without_an_error(runs, data):
    """Bytes changed, also two at once; zeros, which file systems leave of blocks not written."""
    content = text_of(runs, ["00ff"])
    truth = sum(map(len, runs.values()))
    newlines = [i for i, byte in enumerate(content) if byte == ord("\n")]
    places = st.one_of(st.integers(0, len(content) - 2), st.sampled_from(newlines))
    changed = bytearray(content)
    for place in data.draw(st.lists(places, min_size=1, max_size=3, unique=True)):
        changed[place] ^= data.draw(st.integers(1, 255))
    start = data.draw(st.integers(0, len(content) - 1))
    zeros = content[:start] + bytes(data.draw(st.integers(1, 5))) + content[start + 5 :]
    for damaged in (changed, zeros, content[:start] + bytes(len(content) - start)):
        with suppress(JournalError):
            assert steps_in_text(damaged) >= truth


@settings(max_examples=75, deadline=None, derandomize=True)
@given(runs, st.data())
def test_a_change_in_an_unfinished_line_loses_no_whole_one(runs, data):
    content = text_of(runs, ["00ff"])
    content = content[: -data.draw(st.integers(2, 20))]
    changed = bytearray(content)
    start = content.rindex(b"\n") + 1
    if start < len(content):
        changed[data.draw(st.integers(start, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(JournalError):
        assert steps_in_text(changed) == steps_in_text(content)


def test_a_byte_for_the_last_newline_is_refused(written):
    path, content, _ = written
    for byte in {*range(256)} - {ord("\n")}:
        path.write_bytes(content[:-1] + bytes([byte]))
        with pytest.raises(JournalError, match="what follows line 6 is not the beginning of one"):
            read_journal(path)


def test_charging_goes_on_after_a_cut_at_any_byte_of_the_last_line(written):
    path, content, ledger_id = written
    last = content[:-1].rindex(b"\n") + 1
    for cut in range(last, len(content)):
        path.write_bytes(content[:cut])
        journal = Journal(path, ledger_id)
        journal.append("run-3", 0, B)
        journal.close()
        is_whole = cut == len(content) - 1  # without its newline
        assert read_journal(path)[1]["run-2"] == [(A, 2 if is_whole else 1)]
        assert read_journal(path)[1]["run-3"] == [(B, 1)]


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
        *(
            lambda text, i=i: b"".join(
                line for k, line in enumerate(text.splitlines(keepends=True)) if k != i
            )
            for i in (0, 1, 2, 3, 5)  # except the last of a run: only a checkpoint can tell
        ),
    ],
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


def test_a_data_set_is_described_once(tmp_path):
    path = tmp_path / "a.journal"
    for _ in range(2):
        journal = Journal(path, "a")
        journal.note("data", 22_000, 'visits "A], of 2024')
        journal.close()
    assert path.read_bytes().count(b"visits") == 1
    assert read_written(path).data == {(22_000, 'visits "A], of 2024')}


def test_a_journal_of_the_first_version_is_read_and_goes_on(tmp_path, books):
    path = tmp_path / "old.journal"
    path.write_bytes(
        checked('["lightning-dp-journal-1","old"]')
        + checked('["r",0,{"event":"Gaussian","noise_multiplier":2.0}]')
        + checked('["r",1,null]')
    )
    journal = Journal(path, "old")
    journal.append("r2", 0, A)
    journal.note("weights", "aa")
    journal.close()
    assert books.steps_in(path) == 3
    assert path.read_bytes().startswith(checked('["lightning-dp-journal-1","old"]'))


def test_what_is_no_journal_of_the_ledger_is_refused(written, tmp_path):
    for content in (b"", b"\n", b"hello\n", b'["other",1] 00000000\n'):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(JournalError, match="journal"):
            read_journal(tmp_path / "file")
    with pytest.raises(JournalError, match="does not exist"):
        read_journal(tmp_path / "nowhere")
    path, _, ledger_id = written
    with pytest.raises(JournalError, match=f"belongs to ledger {ledger_id}, not to other"):
        Journal(path, "other")


# -- the disk ----------------------------------------------------------------------------------

ERRORS = pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@ERRORS
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_folder_that_takes_no_journal_is_named_and_nothing_is_left(
    tmp_path, books, monkeypatch, number, call
):
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(number))
        with pytest.raises(JournalDiskError, match=rf"{os.strerror(number)}.*ledger_dir") as caught:
            books.ledger_with(tmp_path / "privacy")
    assert isinstance(caught.value, JournalError)
    assert isinstance(caught.value.__cause__, OSError)
    assert not [path for path in tmp_path.rglob("*journal*") if path.suffix != ".lock"]
    books.ended(books.ledger_with(tmp_path / "privacy", A))  # the lock is free, too


@ERRORS
def test_a_charge_that_does_not_reach_the_disk_is_neither_booked_nor_repeated(
    tmp_path, books, monkeypatch, number
):
    ledger = books.ledger_with(tmp_path, A)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing(number))
        with pytest.raises(JournalDiskError, match=rf"{os.strerror(number)}.*ledger_dir"):
            ledger.charge(B)
    with pytest.raises(JournalError, match="could not be written before; begin a new fit"):
        ledger.charge(B)
    assert ledger.steps == 1
    ledger.end()

    ledger.begin("run-2", tmp_path)
    ledger.charge(B)
    ledger.end()
    # The charge that raised may be there, too: ahead by one, never behind.
    assert books.steps_in(books.journal_of(ledger)) == ledger.steps == 3


def test_part_of_a_line_is_taken_back(tmp_path, books):
    """A disk with seven bytes left, as the kernel knows it."""
    resource = pytest.importorskip("resource")
    ledger = books.ledger_with(tmp_path, A)
    path = books.journal_of(ledger)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, hard))
    try:
        with pytest.raises(JournalDiskError, match=r"File too large.*ledger_dir"):
            ledger.charge(B)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and ledger.steps == 1
    ledger.end()


def test_a_file_or_a_folder_in_the_wrong_place_is_named(tmp_path, books):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "privacy"):
        with pytest.raises(JournalDiskError, match=r"file.*ledger_dir"):
            books.ledger_with(folder)
    (tmp_path / "a.journal").mkdir()
    with pytest.raises(JournalDiskError, match=r"a\.journal cannot be read"):
        read_journal(tmp_path / "a.journal")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_journal_and_lock_are_readable_by_their_owner_alone(tmp_path, books, umask):
    before = os.umask(umask)
    try:
        ledger = books.ended(books.ledger_with(tmp_path / "privacy", A))
    finally:
        os.umask(before)
    path = books.journal_of(ledger)
    assert mode(path) == mode(Path(f"{path}.lock")) == 0o600
    assert mode(path.parent) == 0o700
    path.parent.chmod(0o750)  # modes that somebody set are left
    path.chmod(0o640)
    ledger.begin("run-2", tmp_path)
    ledger.charge(A)
    ledger.end()
    assert (mode(path), mode(path.parent)) == (0o640, 0o750)


# -- other processes ---------------------------------------------------------------------------

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
    command, pipe = [sys.executable, "-c", HOLDER, str(path)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX forks")
def test_a_forked_child_writes_nothing(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    child = os.fork()
    if child == 0:
        try:
            ledger.charge(B)
        except JournalError as error:
            os._exit(0 if "from which this one was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    ledger.end()
    assert books.steps_in(books.journal_of(ledger)) == 1


def test_two_ledgers_of_one_process_cannot_hold_one_journal(tmp_path, books):
    first = books.ledger_with(tmp_path, A)
    second = books.restored(first.state_dict(), tmp_path)
    with pytest.raises(JournalError, match="in use by another run"):
        second.begin("run-2", tmp_path)
    first.end()
    second.begin("run-2", tmp_path)
    second.end()


# -- hands -------------------------------------------------------------------------------------


def replaced_by_a_copy(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


TOUCHES: dict[str, Callable[[Path], object]] = {
    "unlinked": Path.unlink,
    "renamed": lambda path: path.rename(path.with_suffix(".old")),
    "folder renamed": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    "folder removed": lambda path: shutil.rmtree(path.parent),
    "replaced by a copy": replaced_by_a_copy,
    "replaced by a folder": replaced_by_a_folder,
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "appended to": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_a_journal_touched_during_a_run_takes_no_further_charge(tmp_path, books, touch):
    ledger = books.ledger_with(tmp_path / "privacy", A, A)
    path = books.journal_of(ledger)
    touch(path)
    for _ in range(2):  # also when it is tried again
        with pytest.raises(
            JournalError, match=rf"{path.name} .*while this run charges it.*ledger_dir"
        ):
            ledger.charge(B)
    assert ledger.steps == 2
    ledger.end()


def test_a_journal_that_is_put_back_or_backed_up_goes_on(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    path = books.journal_of(ledger)
    path.rename(tmp_path / "away")
    with pytest.raises(JournalError, match="is gone"):
        ledger.charge(B)
    (tmp_path / "away").rename(path)
    ledger.charge(B)
    os.link(path, tmp_path / "backup")
    shutil.copy2(path, tmp_path / "copy")
    os.utime(path)
    ledger.charge(B)
    ledger.end()
    assert books.steps_in(path) == ledger.steps == 3


def test_a_second_process_that_enters_without_the_lock_file_is_noticed(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    path = books.journal_of(ledger)
    Path(f"{path}.lock").unlink()
    second = Journal(path, ledger.id)
    second.append("intruder", 0, B)
    with pytest.raises(JournalError, match="written to by another process"):
        ledger.charge(A)
    second.close()
    ledger.end()
    assert read_journal(path)[1] == {"run-1": [(A, 1)], "intruder": [(B, 1)]}


def test_a_ledger_whose_journal_vanished_goes_on_when_it_is_back(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A, B)
    path = books.journal_of(ledger)
    away = path.rename(tmp_path / "away")
    with pytest.raises(JournalError, match="is gone"):
        ledger.charge(B)
    with pytest.raises(JournalError, match="is missing"):
        ledger.begin("run-2", tmp_path)
    away.rename(path)
    ledger.begin("run-2", tmp_path)
    ledger.charge(A)
    ledger.end()
    assert books.steps_in(path) == 3
