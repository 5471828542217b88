"""A journal belongs to one process at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.journal import Journal, JournalError

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
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


def test_two_ledgers_of_one_process_cannot_hold_one_journal(tmp_path, books):
    first = books.ledger_with(tmp_path, A)
    second = books.restored(first.state_dict(), tmp_path)
    with pytest.raises(JournalError, match="in use by another run"):
        second.begin("run-2", tmp_path)
    first.end()
    second.begin("run-2", tmp_path)
    second.end()
