"""A client's journal and its release files know the same, or nothing goes on."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.journal import JournalError
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.report.files import read_charges

ROUNDS = 6


def spending(run="A") -> Spending:
    return Spending(run, ROUNDS, lambda i: [Gaussian(5.0 + i)] * 2, float("inf"), 1e-5)


def noise(rng) -> bytes:
    return rng.bytes(4) + os.urandom(8)


def ledger_of(folder: Path) -> ReleaseLedger:
    return ReleaseLedger(folder, "data")


def journal_of(folder: Path) -> Path:
    return ledger_of(folder).journal_path


def release_of(folder: Path, run: str = "A") -> Path:
    (path,) = folder.glob(f"*.{run}-*.release")
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def refused(folder: Path, run: str = "A", round_: int = ROUNDS - 1) -> str:
    """Every way to the ledger of a run is refused, and changes nothing; the message."""
    before, messages = content(folder), set()
    ledger, plan = ledger_of(folder), spending(run)
    for ask in (
        lambda: ledger.release(plan, round_, 0, noise),
        lambda: ledger.find(plan, round_, 0),
        lambda: ledger.latest(plan),
        lambda: ledger.rounds_left(plan),
    ):
        with pytest.raises(JournalError) as caught:
            ask()
        messages.add(str(caught.value))
    assert content(folder) == before
    (message,) = messages
    return message


def states(folder: Path) -> list[Path]:
    """The folder after 0, 1, ..., 4 rounds of run A."""
    live, copies = folder / "live", []
    for i in range(5):
        if i:
            ledger_of(live).release(spending(), i - 1, 0, noise)
        else:
            ledger_of(live).rounds_left(spending())  # the run has begun, and charged nothing
        copies.append(shutil.copytree(live, folder / f"after {i}"))
    return copies


@pytest.mark.parametrize(("journal", "release"), [*itertools.permutations(range(5), 2)])
def test_a_journal_and_a_release_file_of_different_moments_are_refused(tmp_path, journal, release):
    copies = states(tmp_path)
    mixed = shutil.copytree(copies[release], tmp_path / "mixed")
    shutil.copy(journal_of(copies[journal]), journal_of(mixed))
    message = refused(mixed)
    assert str(journal_of(mixed)) in message and str(release_of(mixed)) in message
    assert "Put the right" in message
    if journal < release:  # ε would fall
        with pytest.raises(JournalError, match="journal was lost, cut, or replaced"):
            ledger_of(mixed).epsilon(1e-5)
        with pytest.raises(JournalError, match="journal was lost, cut, or replaced"):
            read_charges(journal_of(mixed))
    shutil.copy(journal_of(copies[release]), journal_of(mixed))  # the cure
    assert ledger_of(mixed).release(spending(), 5, 0, noise)


def test_a_lost_journal_is_not_begun_anew(tmp_path):
    folder = states(tmp_path)[3]
    epsilon, journal = ledger_of(folder).epsilon(1e-5), journal_of(folder)
    kept = journal.read_bytes()
    journal.unlink()
    assert "journal was lost" in refused(folder) and not journal.exists()
    with pytest.raises(JournalError, match="journal was lost"):
        ledger_of(folder).epsilon(1e-5)
    journal.write_bytes(kept)
    assert ledger_of(folder).epsilon(1e-5) == epsilon


def test_a_journal_that_lacks_another_runs_charges_is_refused(tmp_path):
    """The run that asks is whole; what the other one spent is forgotten."""
    ledger = ledger_of(tmp_path)
    for i in range(2):
        ledger.release(spending("A"), i, 0, noise)
    old = journal_of(tmp_path).read_bytes()
    ledger.release(spending("B"), 0, 0, noise)
    journal_of(tmp_path).write_bytes(old)
    message = refused(tmp_path, "A")
    assert str(release_of(tmp_path, "B")) in message and "run 'B'" in message
    refused(tmp_path, "B")
    refused(tmp_path, "C", 0)
    with pytest.raises(JournalError, match="run 'B'"):
        ledger.history()


def test_the_release_file_of_a_run_that_is_over_may_go(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.release(spending("A"), 0, 0, noise)
    ledger.release(spending("B"), 0, 0, noise)
    release_of(tmp_path, "A").unlink()
    ledger.release(spending("B"), 1, 0, noise)
    assert "is missing" in refused(tmp_path, "A", 1)
    assert len(ledger.history()) == 2


@pytest.mark.parametrize("how", ["another run's", "another data set's"])
def test_a_release_file_under_another_name_is_refused(tmp_path, how):
    ledger = ledger_of(tmp_path)
    ledger.release(spending("A"), 0, 0, noise)
    other = ledger if how == "another run's" else ReleaseLedger(tmp_path, "other")
    run = "B" if how == "another run's" else "A"
    other.release(spending(run), 0, 0, noise)
    paths = sorted(tmp_path.glob("*.release"))
    assert len(paths) == 2
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    assert "Put" in refused(tmp_path, "A") if paths[0].name.startswith("data") else True
    paths[1].write_bytes(first)
    paths[0].write_bytes(second)
    refused(tmp_path, "A")


def test_a_round_that_was_charged_and_did_not_leave_is_all_that_a_journal_may_be_ahead(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.release(spending(), 0, 0, noise)

    def dies(rng):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.release(spending(), 1, 0, dies)
    crashed = content(tmp_path)
    assert sum(n for _, n in ledger.history()) == 4
    left = ledger.release(spending(), 1, 0, noise)
    assert ledger_of(tmp_path).release(spending(), 1, 0, noise) == left
    ledger.release(spending(), 2, 0, noise)
    release_of(tmp_path).write_bytes(crashed[release_of(tmp_path).name])  # two rounds behind
    assert "old copy" in refused(tmp_path)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the fields of a release file as another version would have written them."""
    line, _, rest = path.read_bytes().partition(b"\n")
    header = json.loads(line.rpartition(b" ")[0])
    change(header[1])
    text = json.dumps(header).encode()
    path.write_bytes(text + f" {zlib.crc32(text):08x}\n".encode() + rest)


def test_a_field_that_is_absent_has_its_default(tmp_path):
    """Older versions did not write how much was charged."""
    ledger = ledger_of(tmp_path)
    left = ledger.release(spending(), 0, 0, noise)
    rewrite_header(
        release_of(tmp_path), lambda fields: (fields.pop("dataset"), fields.pop("charged"))
    )
    assert ledger.release(spending(), 0, 0, noise) == left
    ledger.release(spending(), 1, 0, noise)
    assert sum(n for _, n in ledger.history()) == 4


def test_a_field_that_is_unknown_is_refused_by_name(tmp_path):
    """It may say that more was spent."""
    ledger_of(tmp_path).release(spending(), 0, 0, noise)
    rewrite_header(release_of(tmp_path), lambda fields: fields.update(amplified=True))
    assert "unknown fields: ['amplified']" in refused(tmp_path)
    with pytest.raises(JournalError, match="amplified"):
        ledger_of(tmp_path).epsilon(1e-5)
