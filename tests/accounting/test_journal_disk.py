"""What the disk does not take is not charged, and the message names ledger_dir."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.journal import JournalDiskError, JournalError, read_journal

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT]


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
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
    ledger = books.ledger_with(tmp_path / "privacy", A)  # the lock is free, too
    ledger.end()


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
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
    assert path.read_bytes() == before
    ledger.end()


def test_a_file_where_the_folder_should_be_is_named(tmp_path, books):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "privacy"):
        with pytest.raises(JournalDiskError, match=r"file.*ledger_dir"):
            books.ledger_with(folder)


def test_a_folder_in_the_place_of_a_journal_is_named(tmp_path):
    (tmp_path / "a.journal").mkdir()
    with pytest.raises(JournalDiskError, match=r"a\.journal cannot be read"):
        read_journal(tmp_path / "a.journal")


# -- who may read them ---------------------------------------------------------------------

posix = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_journal_and_lock_are_readable_by_their_owner_alone(tmp_path, books, umask):
    before = os.umask(umask)
    try:
        ledger = books.ended(books.ledger_with(tmp_path / "privacy", A))
    finally:
        os.umask(before)
    path = books.journal_of(ledger)
    assert mode(path) == mode(Path(f"{path}.lock")) == 0o600
    assert mode(path.parent) == 0o700


@posix
def test_modes_that_somebody_set_are_left(tmp_path, books):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    ledger = books.ended(books.ledger_with(tmp_path / "shared", A))
    path = books.journal_of(ledger)
    path.chmod(0o640)
    ledger.begin("run-2", tmp_path)
    ledger.charge(A)
    ledger.end()
    assert (mode(path), mode(path.parent)) == (0o640, 0o750)
