"""A journal that somebody touches while a run charges it is noticed before the next charge."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.journal import Journal, JournalError, read_journal

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)


def replaced_by_a_copy(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def appended_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


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
    "emptied": emptied,
    "cut": cut,
    "appended to": appended_to,
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


def test_a_journal_that_is_put_back_goes_on(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    path = books.journal_of(ledger)
    path.rename(tmp_path / "away")
    with pytest.raises(JournalError, match="is gone"):
        ledger.charge(B)
    (tmp_path / "away").rename(path)
    ledger.charge(B)
    ledger.end()
    assert books.steps_in(path) == ledger.steps == 2


def test_a_backup_of_a_journal_by_a_hard_link_or_a_read_changes_nothing(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    path = books.journal_of(ledger)
    os.link(path, tmp_path / "backup")
    shutil.copy2(path, tmp_path / "copy")
    os.utime(path)
    ledger.charge(B)
    ledger.end()
    assert books.steps_in(path) == 2


def test_a_second_process_that_enters_without_the_lock_file_is_noticed(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A)
    path = books.journal_of(ledger)
    Path(f"{path}.lock").unlink()
    second = Journal(path, ledger.id)
    second.append("intruder", 0, B)

    with pytest.raises(JournalError, match="written to by somebody else"):
        ledger.charge(A)

    second.close()
    ledger.end()
    assert read_journal(path)[1] == {"run-1": [(A, 1)], "intruder": [(B, 1)]}


def test_a_ledger_whose_journal_vanished_writes_all_it_knows_into_the_next_one(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A, B)
    books.journal_of(ledger).unlink()
    with pytest.raises(JournalError, match="is gone"):
        ledger.charge(B)
    ledger.begin("run-2", tmp_path)
    ledger.charge(A)
    ledger.end()
    assert books.steps_in(books.journal_of(ledger)) == 3
