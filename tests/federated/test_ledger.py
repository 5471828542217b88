"""A client's ledger: charged before data, once per release; the same bytes for ever."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.journal import JournalError
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.federated.protocol import MessageError
from lightning_dp.mechanism import BudgetExhausted

EVENTS = [PoissonGaussian(2.0, 0.1 + 0.01 * i) for i in range(10)]


def spending(run="trial", rounds=10, target=float("inf"), events=lambda i: [EVENTS[i]], **changes):
    return Spending(run, rounds, events, target, 1e-5, **changes)


def noise(rng: np.random.Generator) -> bytes:
    """Stands for a noised sum: the batch, and fresh bytes from the operating system."""
    return rng.bytes(4) + os.urandom(8)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


# -- killed at every point -------------------------------------------------------------------


def killed_after(calls: int, folder: Path, steps) -> tuple[bool, list[bytes]]:
    """Run ``steps`` in a process that gets SIGKILL at its n-th look at the disk, or in ``make``.

    Returns whether it was killed, and what it had sent by then.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        left = itertools.count(calls, -1)

        def mortal(function):
            def wrapper(*arguments, **named):
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return wrapper

        for name in ("fsync", "replace", "open"):
            setattr(os, name, mortal(getattr(os, name)))  # this process is about to end
        make = mortal(noise)
        ledger = ReleaseLedger(folder, "data")
        for round_, part in steps:
            content = ledger.release(spending(), round_, part, make)
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(writer, bytes([round_, part]) + content)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        sent = stream.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status), [sent[i : i + 14] for i in range(0, len(sent), 14)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_point_a_release_is_charged_once_and_sent_as_it_was(tmp_path):
    steps = [(0, 0), (1, 0), (1, 1)]
    for calls in itertools.count():
        folder = tmp_path / f"{calls}"
        was_killed, sent = killed_after(calls, folder, steps)
        ledger = ReleaseLedger(folder, "data")
        charged = dict(ledger.history())
        assert set(charged.values()) <= {1}
        for each in sent:  # nothing has left without charge
            assert charged[EVENTS[each[0]]] == 1
        if sent:  # the latest that left comes again, byte by byte
            last = sent[-1]
            place = (last[0], last[1])
            found = ledger.find(spending(), *place)
            assert found in (last[2:], None)
            if found is None:  # only where a later release was already made
                assert len(sent) < len(steps)
                assert ledger.find(spending(), *steps[len(sent)]) is not None
        before = [ledger.find(spending(), *place) for place in steps]
        for number in range(len(sent), len(steps)):  # a new process goes on, and asks again
            content = ledger.release(spending(), *steps[number], noise)
            assert before[number] in (None, content)
            assert ledger.release(spending(), *steps[number], noise) == content
        assert ledger.history() == [(EVENTS[i], 1) for i in range(2)]
        if not was_killed:
            break
    assert calls > 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_round_that_had_not_left_is_made_again_on_the_same_batch(tmp_path):
    batches = []

    def dies(rng):
        batches.append(rng.bytes(4))
        raise KeyboardInterrupt

    ledger = ReleaseLedger(tmp_path, "data")
    with pytest.raises(KeyboardInterrupt):
        ledger.release(spending(), 0, 0, dies)
    assert ledger.history() == [(EVENTS[0], 1)]
    with pytest.raises(KeyboardInterrupt):
        ReleaseLedger(tmp_path, "data").release(spending(), 0, 0, dies)
    assert batches[0] == batches[1]
    assert ledger.release(spending(), 0, 0, noise)[:4] == batches[0]
    assert ledger.release(spending(), 1, 0, noise)[:4] != batches[0]
    assert ledger.history() == [(EVENTS[0], 1), (EVENTS[1], 1)]


# -- order, parts, what is kept --------------------------------------------------------------


def test_it_is_charged_on_disk_when_data_is_touched(tmp_path):
    def look(rng):
        assert ReleaseLedger(tmp_path, "data").history() == [(EVENTS[3], 1)]
        return b"x"

    ReleaseLedger(tmp_path, "data").release(spending(), 3, 0, look)


def test_parts_of_a_round_share_a_batch_and_a_charge(tmp_path):
    ledger = ReleaseLedger(tmp_path, "data")
    parts = [ledger.release(spending(), 0, part, noise) for part in range(3)]
    assert len({part[:4] for part in parts}) == 1
    assert len({part[4:] for part in parts}) == 3
    assert ledger.history() == [(EVENTS[0], 1)]
    assert [ledger.release(spending(), 0, part, noise) for part in range(3)] == parts
    with pytest.raises(MessageError, match="too early"):
        ledger.release(spending(), 0, 4, noise)
    with pytest.raises(MessageError, match="too early"):
        ledger.release(spending(), 1, 1, noise)


def test_several_events_of_a_round_are_charged_together(tmp_path):
    twice = spending(events=lambda i: [Gaussian(9.0), Gaussian(9.0), EVENTS[i]] if i else [])
    ledger = ReleaseLedger(tmp_path, "data")
    ledger.release(twice, 0, 0, noise)
    assert ledger.history() == []
    ledger.release(twice, 1, 0, noise)
    assert ledger.history() == [(Gaussian(9.0), 2), (EVENTS[1], 1)]


def test_what_must_not_be_on_disk_is_made_again(tmp_path):
    ledger = ReleaseLedger(tmp_path, "data")

    def secret(rng):
        return b"un-noised" + rng.bytes(4)

    first = ledger.release(spending(), 0, 0, secret, keep=False)
    assert ledger.release(spending(), 0, 0, secret, keep=False) == first
    assert ledger.history() == [(EVENTS[0], 1)]
    assert not any(b"un-noised" in content for content in files(tmp_path).values())


def test_old_rounds_are_refused_and_some_are_retained(tmp_path):
    ledger, kept = ReleaseLedger(tmp_path, "data"), spending(retain=3)
    sent = [ledger.release(kept, i, 0, noise) for i in range(5)]
    assert [ledger.release(kept, i, 0, noise) for i in (2, 3, 4)] == sent[2:]
    with pytest.raises(MessageError, match="round 1 is over"):
        ledger.release(kept, 1, 0, noise)
    assert ledger.release(kept, 8, 0, noise)  # rounds may be left out
    assert sum(n for _, n in ledger.history()) == 6


# -- the budget ------------------------------------------------------------------------------


@pytest.mark.parametrize("fitting", [0, 1, 4, 10])
def test_the_round_that_would_exceed_the_budget_is_refused(tmp_path, fitting):
    exact = PLDAccountant().epsilon([(e, 1) for e in EVENTS[:fitting]], 1e-5)
    plan = spending(target=exact * 1.0001 + 1e-9)
    ledger = ReleaseLedger(tmp_path, "data")
    for i in range(fitting):
        ledger.release(plan, i, 0, noise)
    before = files(tmp_path)
    for i in range(fitting, 10):
        with pytest.raises(BudgetExhausted, match=f"Round {i} of run 'trial' does not fit"):
            ledger.release(plan, i, 0, noise)
    assert fitting == 0 or files(tmp_path) == before
    assert ledger.epsilon(1e-5) <= plan.target_epsilon
    assert ledger.rounds_left(plan) == 0 or fitting == 10


def test_what_other_runs_spent_counts(tmp_path):
    ledger, half = ReleaseLedger(tmp_path, "data"), [(e, 1) for e in EVENTS[:5]]
    for i in range(5):
        ledger.release(spending("first"), i, 0, noise)
    spent = PLDAccountant().epsilon(half, 1e-5)
    with pytest.raises(BudgetExhausted):
        ledger.release(spending("second", target=spent * 1.01), 0, 0, noise)
    both = PLDAccountant().epsilon([(EVENTS[0], 2), *half[1:]], 1e-5)
    third = spending("third", target=both * 1.001)
    ledger.release(third, 0, 0, noise)
    with pytest.raises(BudgetExhausted):
        ledger.release(third, 1, 0, noise)
    assert ledger.epsilon(1e-5) == pytest.approx(both, rel=1e-3)


def test_a_plan_that_fits_alone_but_not_beside_what_was_spent_is_cut_short(tmp_path):
    ledger = ReleaseLedger(tmp_path, "data")
    for i in range(5):
        ledger.release(spending("first"), i, 0, noise)
    target = PLDAccountant().epsilon([(e, 1) for e in EVENTS[:9]], 1e-5) * 1.001
    short = spending("second", rounds=5, target=target, events=lambda i: [EVENTS[5 + i]])
    assert PLDAccountant().epsilon([(e, 1) for e in EVENTS[5:]], 1e-5) < target
    assert ledger.rounds_left(short) == 4
    for i in range(4):
        ledger.release(short, i, 0, noise)
    with pytest.raises(BudgetExhausted):
        ledger.release(short, 4, 0, noise)
    assert ledger.epsilon(1e-5) <= target


def test_several_events_of_a_round_fit_together_or_not_at_all(tmp_path):
    pairs = spending(
        events=lambda i: [Gaussian(10.0)] * 2,
        target=PLDAccountant().epsilon([(Gaussian(10.0), 5)], 1e-5) * 1.0001,
    )
    ledger = ReleaseLedger(tmp_path, "data")
    assert ledger.rounds_left(pairs) == 2


# -- identity, damage ------------------------------------------------------------------------


def test_two_data_sets_never_share_a_ledger(tmp_path):
    names = ["a", "A", "a/b", "a%2Fb", "a b", "../a", "ä", "a" * 300, "a" * 299 + "b"]
    for number, name in enumerate(names):
        ledger = ReleaseLedger(tmp_path, name)
        for i in range(number + 1):
            ledger.release(spending(), i, 0, noise)
    for number, name in enumerate(names):
        history = ReleaseLedger(tmp_path, name).history()
        assert history == [(e, 1) for e in EVENTS[: number + 1]]
    folded = [p.name.lower() for p in tmp_path.iterdir()]
    assert len(set(folded)) == len(folded) and all(p.parent == tmp_path for p in tmp_path.iterdir())


def test_a_renamed_journal_is_not_another_data_sets(tmp_path):
    mine, yours = ReleaseLedger(tmp_path, "mine"), ReleaseLedger(tmp_path, "yours")
    mine.release(spending(), 0, 0, noise)
    shutil.copy(mine.journal_path, yours.journal_path)
    with pytest.raises(JournalError, match="mine"):
        yours.history()
    with pytest.raises(JournalError, match="mine"):
        yours.release(spending(), 0, 0, noise)


def test_a_lost_or_old_or_damaged_cache_is_no_second_noise_draw(tmp_path):
    ledger = ReleaseLedger(tmp_path, "data")
    ledger.release(spending(), 0, 0, noise)
    (cache,) = tmp_path.glob("*.release")
    old = cache.read_bytes()
    ledger.release(spending(), 1, 0, noise)
    new = cache.read_bytes()
    for content, match in (
        (None, "is missing"),
        (old, "an old copy"),
        (new[:-1], "its checksum is wrong"),
        (new.replace(b'"parts": 1', b'"parts": 0'), "its checksum is wrong"),
        (b"", "its checksum is wrong"),
    ):
        cache.unlink() if content is None else cache.write_bytes(content)
        with pytest.raises(JournalError, match=match):
            ledger.release(spending(), 1, 0, noise)
    cache.write_bytes(new)
    assert ledger.release(spending(), 1, 0, noise) in new


def test_another_process_is_kept_out(tmp_path):
    def second(rng):
        with pytest.raises(JournalError, match="in use"):
            ReleaseLedger(tmp_path, "data").release(spending(), 1, 0, noise)
        return b"x"

    ReleaseLedger(tmp_path, "data").release(spending(), 0, 0, second)
    assert sum(n for _, n in ReleaseLedger(tmp_path, "data").history()) == 1


def test_another_plan_under_the_same_name_is_refused(tmp_path):
    ledger = ReleaseLedger(tmp_path, "data")
    ledger.release(spending(), 0, 0, noise)
    for other in (spending(rounds=9), spending(target=3.0), spending(events=lambda i: [EVENTS[0]])):
        with pytest.raises(ValueError, match="run='trial' was begun with another plan"):
            ledger.release(other, 1, 0, noise)


def test_files_are_for_this_user_only(tmp_path):
    ReleaseLedger(tmp_path, "data").release(spending(), 0, 0, noise)
    (cache,) = tmp_path.glob("*.release")
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: ReleaseLedger(path, ""), "dataset_id=''"),
        (lambda path: ReleaseLedger(path, "a" * 1001), "dataset_id='aaa.*1 to 1000 letters"),
        (lambda path: ReleaseLedger(path, 7), "dataset_id='7'"),
        (lambda path: ReleaseLedger("s3://bucket", "a"), "directory='s3"),
        (lambda path: spending(""), "run=''"),
        (lambda path: spending("\udcff"), "run="),
        (lambda path: spending("a" * 1001), "run='aaa"),
        (lambda path: spending(rounds=0), "rounds=0"),
        (lambda path: spending(target=float("nan")), "target_epsilon=nan"),
        (lambda path: spending(relation="near"), "relation must be"),
        (lambda path: spending(retain=0), "retain=0"),
        (lambda path: Spending("r", 1, lambda i: [], 1.0, 0.0), "delta"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, make, match):
    with pytest.raises(ValueError, match=match):
        make(tmp_path)
