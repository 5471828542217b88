"""Every charge is counted, on the disk before it returns, and in checkpoints; ledgers only grow."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dp import Diff2, PrivacyConfig
from lightning_dp._world import World
from lightning_dp.accounting import (
    Gaussian,
    PoissonGaussian,
    recover_journal,
    sweep_history,
)
from lightning_dp.accounting.events import CyclicRound, PoissonRound
from lightning_dp.accounting.journal import Charges, JournalError, read_journal
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.callbacks import PrivacyLogger
from lightning_dp.report.files import read_document, write_report
from lightning_dp.report.run_report import report_of_run
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan
from lightning_dp.schedules import Exponential

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
ROUND = PoissonRound((2.0, 3.0), 0.5)

# -- charges -----------------------------------------------------------------------------------

charges = st.lists(st.sampled_from([A, B, ROUND]), max_size=6)


def counted(events: list[Any]) -> list[tuple[Any, int]]:
    found: list[tuple[Any, int]] = []
    for event in events:
        if found and found[-1][0] == event:
            found[-1] = event, found[-1][1] + 1
        else:
            found.append((event, 1))
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(charges, charges, st.booleans())
def test_the_union_of_two_records_of_a_run_is_the_longer_one_if_the_other_begins_it(a, b, begins):
    if begins:
        a = b[: len(a)]
    for ours, theirs in ((a, b), (b, a)):
        known, other = (Charges({"x": counted(each)} if each else {}) for each in (ours, theirs))
        shorter, longer = sorted((ours, theirs), key=len)
        if longer[: len(shorter)] == shorter:
            assert known.is_ahead_of("x", other) == (len(ours) > len(theirs))
            known.merge(other)
            assert known == ({"x": counted(longer)} if longer else {})
            assert known.steps == known.total == known.length("x") == len(longer)
        else:
            for ask in (lambda: known.is_ahead_of("x", other), lambda: known.merge(other)):  # noqa: B023
                with pytest.raises(JournalError, match="Two records of run x contradict"):
                    ask()
            assert known == {"x": counted(ours)}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=5), charges, max_size=3))
def test_charges_survive_a_checkpoint_and_count_every_event(runs):
    appended = Charges()
    for run, events in runs.items():
        for event in events:
            appended.append(run, event)
    assert Charges.from_dict(json.loads(json.dumps(appended.to_dict()))) == appended
    every = [event for events in runs.values() for event in events]
    assert appended.steps == appended.total == len(every)
    assert dict(appended.history()) == {event: every.count(event) for event in every}


def test_charging_needs_a_run(books):
    for ledger in (Ledger(), books.ended(books.ledger_with(None, A))):
        with pytest.raises(RuntimeError, match=r"Ledger\.begin\(\) must come before Ledger.charge"):
            ledger.charge(A)
        with pytest.raises(RuntimeError, match=r"Ledger\.begin\(\) must come before Ledger.void"):
            ledger.void("x")


# -- charging ----------------------------------------------------------------------------------


def test_a_charge_is_on_the_disk_before_it_returns(tmp_path, monkeypatch, books):
    """Written is not enough: the system may lose power."""
    synced: list[int] = []
    ledger = books.ledger_with(tmp_path)
    path, fsync = books.journal_of(ledger), os.fsync

    def recording(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    for number, event in enumerate([A, A, B, ROUND, A], start=1):
        ledger.charge(event)
        found, runs = read_journal(path)
        assert found == ledger.id
        assert runs.length("run-1") == ledger.steps == len(synced) == number
        assert runs["run-1"][-1][0] == event and synced[-1] == path.stat().st_size
    ledger.end()
    assert read_journal(path)[1] == {"run-1": [(A, 2), (B, 1), (ROUND, 1), (A, 1)]}


def test_further_runs_go_on_in_the_same_journal(tmp_path, books):
    """Also those resumed from one state: each appends to what the other wrote in between."""
    first = books.ended(books.ledger_with(tmp_path, A, A))
    state = first.state_dict()
    first.begin("run-2", tmp_path / "elsewhere")
    first.charge(B)
    first.end()
    for run in ("run-3", "run-4"):
        ledger = books.restored(state, tmp_path)
        ledger.begin(run, tmp_path)
        ledger.charge(B)
        ledger.end()
    runs = {"run-1": [(A, 2)], **{f"run-{i}": [(B, 1)] for i in (2, 3, 4)}}
    assert read_journal(books.journal_of(first))[1] == ledger.runs == runs
    assert not (tmp_path / "elsewhere").exists()


def test_journals_that_went_apart_both_count(tmp_path, books):
    """A folder was copied, each copy was charged where the other was not, and they meet again."""
    ledger = Ledger()
    ledger.begin("run-1", tmp_path / "here")
    ledger.note_plan(3.0, 10, is_replanned=False)
    ledger.charge(A)
    state, here = ledger.state_dict(), books.journal_of(ledger)
    ledger.charge(A)
    ledger._journal.close()  # a crash
    there = tmp_path / "there" / here.name
    there.parent.mkdir()
    there.write_bytes(here.read_bytes())
    here.rename(tmp_path / "away")
    other = books.restored(state, there.parent)
    other.begin("run-2", there.parent)
    other.charge(B)
    other.end()
    (tmp_path / "away").rename(here)

    both = books.restored(state, there.parent)

    assert books.counts(both) == {A: 2, B: 1}
    assert both.crashed is None  # another run ended in order
    both.begin("run-3", there.parent)
    both.end()
    assert read_journal(here)[1] == {"run-1": [(A, 2)], "run-2": [(B, 1)]}


def test_ledgers_that_meet_are_united(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A, A)
    older = ledger.state_dict()
    ledger.charge(B)  # after the checkpoint, before the crash
    ledger.end()
    assert books.counts(books.restored(older, tmp_path)) == {A: 2, B: 1}
    ledger.restore(older, tmp_path)  # an older state never shrinks it
    ledger.restore({**older, "journal": None}, tmp_path)
    assert books.counts(ledger) == {A: 2, B: 1}
    mirror = books.ledger_with(None, B, run="another")
    mirror.mirror(ledger.state_dict())
    assert books.counts(mirror) == {A: 2, B: 1} and mirror.id == ledger.id
    with pytest.raises(JournalError, match="Two records of run run-1 contradict each other"):
        books.ledger_with(None, B, B).restore({**older, "journal": None}, tmp_path)


# -- a run that crashed may plan its noise anew --------------------------------------------------------

PLAN = {"target_epsilon": 3.0, "last_step": 10, "is_replanned": False}


def fit(ledger: Ledger, name: str, charges: int = 4, saved: bool = False, **plan: Any) -> None:
    """One run of a ledger, which is left as a crash leaves it."""
    ledger.begin(name, ledger.journal_path.parent if ledger.journal_path else None)
    ledger.note_plan(**{**PLAN, **plan})
    for _ in range(charges):
        ledger.charge(Gaussian(2.0))
    if saved:
        ledger.note_saved()


def crash(ledger: Ledger) -> None:
    ledger._journal.close()
    ledger._journal = None


@pytest.mark.parametrize(
    ("then", "is_crash"),
    [
        (lambda ledger: fit(ledger, "b" * 16), True),
        (lambda ledger: fit(ledger, "b" * 16, charges=0), True),
        (lambda ledger: fit(ledger, "b" * 16, saved=True), False),  # a later checkpoint
        (lambda ledger: fit(ledger, "b" * 16, target_epsilon=4.0), False),
        (lambda ledger: fit(ledger, "b" * 16, last_step=20), False),
        (lambda ledger: (fit(ledger, "b" * 16), ledger.end()), False),  # somebody ended it
        (lambda ledger: None, None),
        (lambda ledger: None, True),
    ],
)
@pytest.mark.parametrize("first", ["crashed", "ended", "saved later", "nothing lost"])
def test_noise_is_planned_anew_only_after_a_crash(tmp_path, first, then, is_crash):
    ledger = Ledger()
    ledger.begin("no steps", tmp_path)
    fit(ledger, "a" * 16)
    ledger.note_saved()
    state = ledger.state_dict()
    if first != "nothing lost":
        ledger.charge(Gaussian(2.0))
    if first == "saved later":
        ledger.note_saved()
    ledger.end() if first == "ended" else crash(ledger)
    if is_crash is None:  # a run whose noise was given, not calibrated
        ledger.begin("b" * 16, tmp_path)
        ledger.charge(Gaussian(2.0))
        crash(ledger)
    else:
        then(ledger)
        if ledger._journal is not None:
            crash(ledger)

    resumed = Ledger()
    resumed.restore(state, tmp_path)

    lost = resumed.steps > 4
    assert resumed.steps == ledger.steps
    expected = bool(is_crash) and first in ("crashed", "nothing lost") and lost
    assert (resumed.crashed is not None) == expected
    assert resumed.crashed is None or resumed.crashed.last_step == 10
    assert not resumed.is_replanned


@pytest.mark.parametrize(
    ("saved", "resumed", "is_crash"), [(1, 1, True), (1, 3, False), (3, 3, True), (0, 0, False)]
)
def test_of_checkpoints_inside_a_block_the_latest_one_is_planned_anew(
    tmp_path, saved, resumed, is_crash
):
    """All know the same charge; it is told how many of its four steps they had not made."""
    ledger = Ledger()
    ledger.begin("no steps", tmp_path)
    fit(ledger, "a" * 16, charges=0)
    ledger.charge(CyclicRound(2.0, 0.4, steps=4))
    ledger.note_saved(ahead=saved)
    state = ledger.state_dict()
    crash(ledger)

    again = Ledger()
    again.restore(state, tmp_path, ahead=resumed)

    assert (again.crashed is not None) == is_crash


def checkpoint_of(state: object, folder: Path) -> Path:
    path = folder / "last.ckpt"
    torch.save({"lightning_dp": {"ledger": state}}, path)
    return path


def test_the_state_survives_a_checkpoint_of_plain_types(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, *[A] * 5000, ROUND, Gaussian(3.0)))
    file = io.BytesIO()
    torch.save(ledger.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state == ledger.state_dict()
    assert state["runs"]["run-1"][0] == [A.to_dict(), 5000]
    assert books.counts(books.restored(state, tmp_path)) == books.counts(ledger)


def test_a_moved_journal_is_found_in_the_ledger_folder_and_a_missing_one_is_an_error(
    tmp_path, books
):
    ledger = books.ended(books.ledger_with(tmp_path / "old", A, A))
    state = ledger.state_dict()
    (tmp_path / "old").rename(tmp_path / "new")
    found = books.restored(state, tmp_path / "new")
    assert found.steps == 2
    assert books.journal_of(found) == tmp_path / "new" / f"{ledger.id}.journal"
    way_out = r"is missing .* lightning_dp\.accounting\.\s?recover_jou"
    with pytest.raises(JournalError, match=way_out):
        books.restored(state, tmp_path)


def test_a_further_run_does_not_begin_a_lost_journal_again(tmp_path, books):
    """Another run of the ledger may have written there what this object never saw."""
    ledger = books.ended(books.ledger_with(tmp_path / "a", Gaussian(2.0)))
    other = books.restored(ledger.state_dict(), tmp_path / "a")
    other.begin("other", tmp_path / "a")
    other.charge(Gaussian(1.0))
    other.end()
    path = books.journal_of(ledger)
    moved = path.rename(tmp_path / path.name)
    with pytest.raises(JournalError, match="is missing"):
        ledger.begin("further", tmp_path / "a")
    assert not path.exists()
    ledger.begin("further", tmp_path)
    assert books.steps_in(moved) == ledger.steps == 2
    ledger.end()


def test_a_journal_that_is_cut_or_damaged_does_not_restore(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A, B))
    path = books.journal_of(ledger)
    content = path.read_bytes()
    for kept in (1, 2, 3):
        path.write_bytes(b"".join(content.splitlines(keepends=True)[:kept]))
        with pytest.raises(JournalError, match="lacks charges of the checkpoint"):
            books.restored(ledger.state_dict(), tmp_path)
    path.write_bytes(content.replace(b"1.0", b"9.0"))
    with pytest.raises(JournalError, match="line 2 fails its checksum"):
        books.restored(ledger.state_dict(), tmp_path)


@pytest.mark.parametrize("unrecorded", [0, 7])
def test_a_recovered_journal_charges_the_bound_on_what_was_lost(tmp_path, unrecorded, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A, B))
    checkpoint = checkpoint_of(ledger.state_dict(), tmp_path)
    for directory in (tmp_path, tmp_path / "new"):
        with pytest.raises(JournalError, match=r"exists\. If it is damaged, move it away first"):
            recover_journal(checkpoint, directory, 0)
    books.journal_of(ledger).unlink()

    path = recover_journal(checkpoint, tmp_path / "new", unrecorded, costliest=B)

    again = books.restored(ledger.state_dict(), tmp_path / "new")
    assert books.journal_of(again) == path
    assert books.counts(again) == {A: 2, B: 1 + unrecorded}
    again.begin("run-2", tmp_path)
    again.charge(A)
    assert books.steps_in(path) == 4 + unrecorded
    again.end()


@pytest.mark.parametrize("content", [b"", b"garbage", [1], {"lightning_dp": 3}, {}, None])
def test_recovering_from_what_is_no_checkpoint_is_refused_and_leaves_no_file(tmp_path, content):
    path = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    cause = r"a\.ckpt (does not exist|cannot be read|is not a checkpoint of a private run)"
    with pytest.raises(ValueError, match=cause):
        recover_journal(path, tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


# -- names and states that somebody edited -----------------------------------------------------

GOOD = "0123456789abcdef"
BAD_IDS: list[Any] = [
    *("../../evil", "/tmp/evil", "..", "", "a" * 10_000, "0123456789ABCDEF", "0123456789abcdef\n"),
    *("０１２３４５６７８９abcdef", "0123456789abcde\0", "*" * 16, None, 17),
    b"0123456789abcdef",
    ["0123456789abcdef"],
]
BAD_JOURNALS: list[Any] = [
    *("../../evil", f"/tmp/{GOOD}.journal/..", "/etc/passwd", "/dev/zero", f"a\0/{GOOD}.journal"),
    *(f"{GOOD[::-1]}.journal", "*.journal", "", 3, [f"{GOOD}.journal"]),
]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(
    "state",
    [
        *({"id": bad} for bad in BAD_IDS),
        *({"journal": bad} for bad in BAD_JOURNALS),
        {"runs": None},
        {"runs": {"r": 3}},
        *({"runs": {"r": [[Gaussian(1.0).to_dict(), count]]}} for count in (-5, 2.5, True)),
        {"runs": {"r": [[{"event": "Gaussian"}, 1]]}},
        *({field: ...} for field in ("id", "journal", "runs")),  # missing
    ],
    ids=lambda state: repr(state)[:40],
)
def test_a_ledger_that_somebody_edited_is_refused_and_makes_no_file(tmp_path, state):
    edited = {"id": GOOD, "journal": f"{GOOD}.journal", "runs": {}, **state}
    edited = {key: value for key, value in edited.items() if value is not ...}
    ledger = Ledger()
    before = ledger.id
    checkpoint = checkpoint_of(edited, tmp_path)
    asks = [
        lambda: ledger.restore(edited, tmp_path / "a" / "b"),
        lambda: ledger.mirror(edited),
        lambda: sweep_history(checkpoint),
        *([lambda: recover_journal(checkpoint, tmp_path / "a", 0)] if "journal" in edited else []),
    ]
    for ask in asks:
        with pytest.raises(JournalError, match="privacy ledger is damaged"):
            ask()
    assert (ledger.id, ledger.steps) == (before, 0)
    assert files(tmp_path) == [checkpoint]


def test_a_field_that_is_not_known_may_change_what_was_spent(tmp_path, books):
    state = books.ended(books.ledger_with(None, A)).state_dict()
    with pytest.raises(JournalError, match="unknown field 'refunds'"):
        books.restored({**state, "refunds": 1}, tmp_path)


def test_a_report_has_the_name_of_a_ledger_and_names_no_other_file(tmp_path):
    nothing = report_of_run(PrivateRun(PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0)))
    for bad in BAD_IDS:
        with pytest.raises(ValueError, match=r"ledger_id=.* is not one of 16 hexadecimal digits"):
            write_report(replace(nothing, ledger_id=bad), tmp_path / "a")
    assert files(tmp_path) == []
    path = tmp_path / "privacy_report-x.json"
    for bad in ("../../evil", "/dev/zero", f"a\0/{GOOD}.journal", "*.journal", ""):
        path.write_text(json.dumps({**nothing.to_dict(), "journal": bad}))
        with pytest.raises(ValueError, match="names a file that is not a journal"):
            read_document(path)


# -- the cost of many distinct events ----------------------------------------------------------


class Counting(Ledger):
    """A ledger that counts how often somebody wants all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def history(self):
        self.looks += 1
        return super().history()

    @property
    def runs(self):
        self.looks += 1
        return super().runs

    def state_dict(self):
        self.looks += 1
        return super().state_dict()


def steps_of_a_run(steps: int, folder: Path, **options) -> tuple[list[float], list[int]]:
    """Processor time, and looks at the whole ledger, of each step of a run without a Trainer."""
    run = PrivateRun(PrivacyConfig(target_delta=1e-5, **options))
    ledger = run.ledger = Counting()
    run.use_batches(BatchPlan(1000, 0.01, 1, 100))
    run.start(steps, World(), folder)
    trainer = SimpleNamespace(
        log_every_n_steps=50, callback_metrics={}, progress_bar_metrics={}, loggers=[]
    )
    logger = PrivacyLogger()
    logger.on_privacy_start(trainer, run, folder)
    params, seconds, looks = [torch.zeros(2)], [], []
    for step in range(steps):
        start, before = time.thread_time(), ledger.looks
        assert not run.exhausted
        assert run.rate(step) == 0.01
        assert run.mechanism is not None
        run.mechanism.ask(params)
        run.mechanism.tell(params)
        assert not run.is_over_early or step == steps - 1
        logger.on_privacy_step(trainer, run)
        seconds.append(time.thread_time() - start)
        looks.append(ledger.looks - before)
    run.stop()
    assert len(ledger.history()) >= steps // 7  # Diff2 asks nothing where the model stands still
    return seconds, looks


@pytest.mark.parametrize(
    "options",
    [{}, {"target_epsilon": 8.0}, {"estimator": Diff2(restart_every=7)}],
    ids=["no budget", "budget", "diff2"],
)
def test_a_step_does_not_look_at_the_whole_ledger(tmp_path, options):
    options = {"noise_multiplier": 5.0, "noise_schedule": Exponential(rate=1e-5), **options}
    _, looks = steps_of_a_run(500, tmp_path, **options)
    assert sum(looks) <= 12  # for the stretches of the curve of epsilon, which grow
    assert sum(looks[300:]) <= 1
