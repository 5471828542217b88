"""A client's ledger: charged before data, once per release; the same bytes for ever; joint budgets."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.journal import (
    JournalError,
    read_alone,
    read_release_file,
    release_path,
)
from lightning_dp.federated import ledger as federated_ledger
from lightning_dp.federated.ledger import Claims, ReleaseLedger, Spending, _epsilons
from lightning_dp.federated.protocol import MessageError
from lightning_dp.mechanism import BudgetExhausted
from tests.federated.zoo import files, history

EVENTS = [PoissonGaussian(2.0, 0.1 + 0.01 * i) for i in range(10)]


def spending(run="trial", rounds=10, target=math.inf, events=lambda i: [EVENTS[i]], **changes):
    return Spending(run, rounds, events, target, 1e-5, **changes)


def of(folder: Path, name: str = "data") -> ReleaseLedger:
    return ReleaseLedger(folder, name)


def sent_before(folder: Path, plan: Spending, round_: int, part: int) -> bytes | None:
    """The bytes that a release would be sent again as, by the file."""
    path = release_path(of(folder).journal_path, plan.run)
    return read_release_file(path)[1].get((round_, part)) if path.exists() else None


def noise(rng: np.random.Generator) -> bytes:
    """Stands for a noised sum: the batch, and fresh bytes from the operating system."""
    return rng.bytes(4) + os.urandom(8)


def dies(*given: object) -> bytes:
    raise KeyboardInterrupt


def epsilon(events: Sequence, relation="add_remove") -> float:
    return PLDAccountant().epsilon([(event, 1) for event in events], 1e-5, relation)


# -- killed at every point ---------------------------------------------------------------------

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


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
        for plan, round_, part in steps:
            content = of(folder).release(plan, round_, part, mortal(noise))
            mortal(lambda: None)()
            os.write(writer, content)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        sent = stream.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status), [sent[i : i + 12] for i in range(0, len(sent), 12)]


A, B = spending("A"), spending("B", target=3.0)


@forks
@pytest.mark.parametrize(
    ("steps", "charges"),
    [
        ([(A, 0, 0), (A, 1, 0), (A, 1, 1)], {EVENTS[0]: 1, EVENTS[1]: 1}),
        pytest.param(
            [(A, 0, 0), (B, 0, 0), (A, 1, 0), (B, 1, 0)],
            {EVENTS[0]: 2, EVENTS[1]: 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_killed_at_every_point_a_release_is_charged_once_and_sent_as_it_was(
    tmp_path, steps, charges
):
    for calls in itertools.count():
        folder = tmp_path / f"{calls}"
        was_killed, sent = killed_after(calls, folder, steps)
        ledger, count = of(folder), len(sent)
        charged = dict(ledger.history())
        for plan, i, _ in steps[:count]:  # nothing has left without charge
            assert charged[plan.events(i)[0]] >= 1
        assert all(n <= charges[event] for event, n in charged.items())
        before = [sent_before(folder, *step) for step in steps]
        if sent and before[count - 1] != sent[-1]:  # only where a later round has begun
            plan, i, _ = steps[count - 1]
            path = release_path(ledger.journal_path, plan.run)
            assert before[count - 1] is None and read_release_file(path)[0].begun > i
        for number in range(count, len(steps)):  # a new process goes on, and asks again
            content = of(folder).release(*steps[number], noise)
            assert before[number] in (None, content)
            assert of(folder).release(*steps[number], noise) == content
        assert dict(ledger.history()) == charges
        if not was_killed:
            break
    assert calls > 20


def test_a_round_that_had_not_left_is_made_again_on_the_same_batch(tmp_path):
    batches = []

    def fails(rng):
        batches.append(rng.bytes(4))
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            of(tmp_path).release(spending(), 0, 0, fails)
        assert history(tmp_path) == [(EVENTS[0], 1)]
    assert batches[0] == batches[1] == of(tmp_path).release(spending(), 0, 0, noise)[:4]
    assert of(tmp_path).release(spending(), 1, 0, noise)[:4] != batches[0]
    assert history(tmp_path) == [(EVENTS[0], 1), (EVENTS[1], 1)]


# -- order, parts, what is kept ----------------------------------------------------------------


def test_it_is_charged_on_disk_and_locked_when_data_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_dp.federated.ledger._WAIT", 0.1)

    def look(rng):
        assert history(tmp_path) == [(EVENTS[3], 1)]
        with pytest.raises(JournalError, match="in use"):
            of(tmp_path).release(spending(), 4, 0, noise)
        return b"x"

    of(tmp_path).release(spending(), 3, 0, look)
    (cache,) = tmp_path.glob("*.release")
    assert cache.stat().st_mode & 0o077 == 0  # for this user only


def test_a_round_waits_four_times_for_the_disk_and_writes_its_reply_once(tmp_path, monkeypatch):
    """That it has begun, one line; the charge; the reply, and the name of its file."""
    waits, sizes, fsync = [], [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (waits.append(1), fsync(descriptor)))

    def large(rng):
        sizes.append((len(waits), release_of(tmp_path, "trial").stat().st_size))
        return bytes(10_000)

    ledger = of(tmp_path)
    ledger.release(spending(), 0, 0, large)
    for i in range(1, 4):
        del waits[:]
        ledger.release(spending(), i, 0, large)
        assert len(waits) == 4
    assert all(made == 2 and 10_000 < size < 11_000 for made, size in sizes[1:])


def test_what_a_killed_process_left_in_memory_is_on_the_disk_before_the_charge(
    tmp_path, monkeypatch
):
    """Kill it at each wait for the disk: whoever goes on waits again, if the power fails thereafter."""
    on_disk, names, left, fsync = {}, {}, [0], os.fsync
    plan = spending(rounds=2)

    def waits(descriptor):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        fsync(descriptor)
        for path in folder.iterdir():
            place, info = os.fstat(descriptor), path.stat()
            if os.path.samestat(place, folder.stat()):
                names[path.name] = info.st_ino
            elif os.path.samestat(place, info):
                on_disk[info.st_ino] = path.read_bytes()

    def is_durable():
        path = release_of(folder, "trial")
        return on_disk.get(names.get(path.name)) == path.read_bytes()

    def make(rng):
        assert is_durable()
        return rng.bytes(8)

    monkeypatch.setattr(os, "fsync", waits)
    for kill in itertools.count(1):
        folder, done, left[0] = tmp_path / str(kill), [], kill
        try:
            for i in range(2):
                done.append(of(folder).release(plan, i, 0, make))
            break
        except KeyboardInterrupt:
            left[0] = 0
        for i in range(len(done), 2):
            of(folder).release(plan, i, 0, make)
            assert is_durable()
    assert kill > 8


def test_a_line_that_a_crash_cut_does_not_count_and_one_that_was_lost_is_noticed(tmp_path):
    """Cut a round's beginning anywhere: before its charge it begins anew, after it nothing goes on."""
    left = of(tmp_path).release(spending(), 0, 0, noise)
    path, journal = release_of(tmp_path, "trial"), of(tmp_path).journal_path
    whole, before = path.read_bytes(), journal.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        of(tmp_path).release(spending(), 1, 0, dies)
    begun, charged = path.read_bytes(), journal.read_bytes()
    assert begun.startswith(whole) and begun.endswith(b"\n") and charged.startswith(before)
    for end in [*range(len(whole), len(begun), 37), len(begun) - 1, len(begun)]:
        for content in (before, charged):
            path.write_bytes(begun[:end])
            journal.write_bytes(content)
            if content == charged and end < len(begun):
                with pytest.raises(JournalError, match="an old copy"):
                    of(tmp_path).release(spending(), 1, 0, noise)
                continue
            assert of(tmp_path).release(spending(), 0, 0, noise) == left
            sent = of(tmp_path).release(spending(), 1, 0, noise)
            assert of(tmp_path).release(spending(), 1, 0, noise) == sent
            assert history(tmp_path) == [(EVENTS[0], 1), (EVENTS[1], 1)]
            assert read_release_file(path)[1] == {(1, 0): sent}
    other = bytes([whole[-1] ^ 1])  # the reply before it is another
    path.write_bytes(whole[:-1] + other + begun[len(whole) :])
    with pytest.raises(JournalError, match="its checksum is wrong"):
        read_release_file(path)


def test_parts_of_a_round_share_a_batch_and_a_charge(tmp_path):
    ledger = of(tmp_path)
    parts = [ledger.release(spending(), 0, part, noise) for part in range(3)]
    assert len({part[:4] for part in parts}) == 1 and len({part[4:] for part in parts}) == 3
    assert ledger.history() == [(EVENTS[0], 1)]
    assert [ledger.release(spending(), 0, part, noise) for part in range(3)] == parts
    for place in ((0, 4), (1, 1)):
        with pytest.raises(MessageError, match="too early"):
            ledger.release(spending(), *place, noise)


def test_several_events_of_a_round_are_charged_together_or_not_at_all(tmp_path):
    twice = spending(events=lambda i: [Gaussian(9.0), Gaussian(9.0), EVENTS[i]] if i else [])
    of(tmp_path).release(twice, 0, 0, noise)
    assert history(tmp_path) == []
    of(tmp_path).release(twice, 1, 0, noise)
    assert history(tmp_path) == [(Gaussian(9.0), 2), (EVENTS[1], 1)]
    pairs = [Gaussian(10.0)] * 2
    plan = spending(events=lambda i: pairs, target=epsilon([*pairs, *pairs, pairs[0]]) * 1.0001)
    assert rounds_made(tmp_path / "pairs", plan) == 2


def test_the_cures_of_runs_that_took_turns_work(tmp_path):
    alike = [PoissonGaussian(z, 0.1) for z in (1.0, 1.5)]
    target = epsilon(alike * 20) * 1.001
    one, other = (
        spending(run, 20, target, lambda i, event=event: [event])
        for run, event in zip(("one", "other"), alike, strict=True)
    )
    made = 0
    with pytest.raises(
        BudgetExhausted, match=r"of run 'one' .* turns .* another name with"
    ) as error:
        for made in range(20):
            of(tmp_path).release(one, made, 0, noise)
            of(tmp_path).release(other, made, 0, noise)
    assert 2 < made < 20 and "larger target_epsilon, or with fewer rounds" in str(error.value)
    for run, rounds, budget in (("larger", 20, 1.5 * target), ("fewer", 20 - made, target)):
        plan = replace(one, run=run, rounds=rounds, target_epsilon=budget)
        assert of(tmp_path).release(plan, 0, 0, noise)


def rounds_made(folder: Path, plan: Spending) -> int:
    """Ask for rounds until the budget is spent, and twice more: nothing is charged then."""
    made = 0
    while made < plan.rounds:
        before = files(folder)
        try:
            of(folder).release(plan, made, 0, noise)
        except BudgetExhausted as error:
            assert f"Round {made} of run '{plan.run}' does not fit" in str(error)
            assert made == 0 or files(folder) == before
            break
        made += 1
    assert of(folder).epsilon(1e-5) <= plan.target_epsilon
    return made


def test_an_unnoised_sum_is_not_on_disk_and_is_made_again(tmp_path):
    def secret(rng):
        return b"un-noised" + rng.bytes(4)

    first = of(tmp_path).release(spending(), 0, 0, secret, keep=False)
    assert of(tmp_path).release(spending(), 0, 0, secret, keep=False) == first
    assert history(tmp_path) == [(EVENTS[0], 1)]
    assert not any(b"un-noised" in content for content in files(tmp_path).values())


def test_epsilon_holds_few_histories_in_memory():
    """One is as long as the run's rounds, and each round of each client makes another."""
    assert _epsilons.cache_info().maxsize == 8


def test_a_claim_is_about_exactly_what_was_charged(tmp_path, monkeypatch):
    """Also where another run over the data takes turns, and where rounds are left out."""
    events = lambda i: [PoissonGaussian(4.0, 0.1 + 0.001 * i)] * 3  # noqa: E731
    looks, own = [], spending(rounds=80, events=events)
    curve = federated_ledger.epsilon_curve
    counting = lambda *given, **named: looks.append(len(given[1])) or curve(*given, **named)  # noqa: E731
    monkeypatch.setattr(federated_ledger, "epsilon_curve", counting)
    ledger, other = of(tmp_path), spending("other", rounds=80, events=lambda i: [Gaussian(3.0)])
    claims, before = Claims(ledger, own), 0.0
    for i in [*range(40), *range(45, 60)]:
        of(tmp_path).release(own, i, 0, noise)
        if i in (20, 22, 50):
            of(tmp_path).release(other, i, 0, noise)
        claim = claims.epsilon()
        assert claim == claims.epsilon() and before < claim
        assert claim == pytest.approx(of(tmp_path).epsilon(1e-5), rel=1e-3)
        before = claim
    assert 4 <= len(looks) <= 15
    assert max(looks) == 15  # of rounds, not of events: a walk alone may have thousands
    for name in ("epsilon", "curve"):
        monkeypatch.setattr(PLDAccountant, name, dies)
    of(tmp_path).release(other, 60, 0, noise)
    for _ in range(2):  # what could not be found is not claimed as what was found before
        with pytest.raises(KeyboardInterrupt):
            claims.epsilon()
    monkeypatch.undo()
    broken = Claims(ledger, spending("noiseless", events=lambda i: [Gaussian(0.0)]))
    of(tmp_path).release(broken._spending, 0, 0, noise)
    assert broken.epsilon() == claims.epsilon() == math.inf


def test_old_rounds_are_refused_and_some_are_retained(tmp_path):
    ledger, kept = of(tmp_path), spending(retain=3)
    sent = [ledger.release(kept, i, 0, noise) for i in range(5)]
    assert [ledger.release(kept, i, 0, noise) for i in (2, 3, 4)] == sent[2:]
    with pytest.raises(MessageError, match="round 1 is over"):
        ledger.release(kept, 1, 0, noise)
    assert ledger.release(kept, 8, 0, noise)  # rounds may be left out
    assert sum(n for _, n in ledger.history()) == 6


# -- one budget, one run or several ------------------------------------------------------------


@pytest.mark.parametrize("fitting", [0, 1, 4, 10])
def test_the_round_that_would_exceed_the_budget_is_refused(tmp_path, fitting):
    plan = spending(target=epsilon(EVENTS[:fitting]) * 1.0001 + 1e-9)
    assert rounds_made(tmp_path, plan) == fitting


def test_the_charges_of_other_runs_count(tmp_path):
    assert rounds_made(tmp_path, spending("first", 5)) == 5
    spent = epsilon(EVENTS[:5])
    assert rounds_made(tmp_path, spending("second", target=spent * 1.01)) == 0
    both = epsilon([EVENTS[0], *EVENTS[:5]])
    assert rounds_made(tmp_path, spending("third", target=both * 1.001)) == 1
    assert of(tmp_path).epsilon(1e-5) == pytest.approx(both, rel=1e-3)
    # A plan that fits alone, but not on top of what was spent, is cut short.
    more = [*EVENTS[:5], EVENTS[0]]
    target = epsilon([*more, *EVENTS[5:9]]) * 1.001
    short = spending("fourth", 5, target, events=lambda i: [EVENTS[5 + i]])
    assert epsilon(EVENTS[5:]) < target and rounds_made(tmp_path, short) == 4


KINDS = {
    "alike": lambda run, i: PoissonGaussian(2.0, 0.2),
    "full batches": lambda run, i: Gaussian(4.0 + 0.3 * i + (run == "B")),
    "growing batches": lambda run, i: PoissonGaussian(2.0, 0.05 + 0.01 * i + 0.02 * (run == "B")),
}


def plans(kind: str, target: float, relation="add_remove") -> dict[str, Spending]:
    def plan(run: str) -> Spending:
        return Spending(run, 30, lambda i: [KINDS[kind](run, i)], target, 1e-5, relation)

    return {run: plan(run) for run in "ABC"}


def together(folder: Path, runs: dict[str, Spending], order: Iterator[str]) -> dict[str, int]:
    """Runs ask in an order until each was refused three times; how many rounds each made."""
    done, refusals = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0)
    sent = {}
    for run in order:
        if refusals[run] == 3:
            continue
        ledger, i, before = of(folder), done[run], files(folder)
        try:
            sent[run, i] = ledger.release(runs[run], i, 0, noise)
        except BudgetExhausted as error:
            assert f"Round {i} of run '{run}' does not fit" in str(error)
            refusals[run] += 1
            assert i == 0 or files(folder) == before
        else:
            done[run] += 1
        if done[run]:  # asked again, refused or not, the same bytes
            latest = done[run] - 1
            assert ledger.release(runs[run], latest, 0, noise) == sent[run, latest]
        if all(count == 3 for count in refusals.values()):
            return done
    raise AssertionError("they never ended")


@pytest.mark.parametrize(
    ("kind", "relation"),
    [*((kind, "add_remove") for kind in KINDS), ("full batches", "replace_one")],
)
def test_two_runs_take_turns_until_the_joint_budget_is_spent(tmp_path, kind, relation):
    target = 2.0 if relation == "add_remove" else 4.0
    runs = plans(kind, target, relation)
    done = together(tmp_path, {run: runs[run] for run in "AB"}, itertools.cycle("AB"))
    assert abs(done["A"] - done["B"]) <= 2 and done["A"] >= 2
    assert 0.8 * target < of(tmp_path).epsilon(1e-5, relation) <= target
    if kind != "growing batches":  # not one more would have fitted
        for run in "AB":
            more = [*history(tmp_path), (KINDS[kind](run, done[run]), 1)]
            assert PLDAccountant().epsilon(more, 1e-5, relation) > target


@pytest.mark.parametrize("seed", range(2))
def test_runs_that_ask_in_any_order_never_exceed_the_budget(tmp_path, seed):
    rng = random.Random(seed)
    target = rng.uniform(0.8, 2.0)
    runs = plans(rng.choice([*KINDS]), target)
    order = iter(lambda: rng.choice("AAB" if rng.random() < 0.5 else "ABC"), None)
    together(tmp_path, runs, order)
    assert 0.75 * target < of(tmp_path).epsilon(1e-5) <= target


def test_each_run_keeps_to_its_own_budget_of_what_both_spent(tmp_path):
    small, large = plans("alike", 1.0)["A"], plans("alike", 1.6)["B"]
    done = together(tmp_path, {"A": small, "B": large}, itertools.cycle("AB"))
    event = KINDS["alike"]("A", 0)
    most = {e: max(n for n in range(60) if epsilon([event] * n) <= e) for e in (1.0, 1.6)}
    assert done["A"] == math.ceil(most[1.0] / 2) and sum(done.values()) == most[1.6]


def test_two_data_sets_never_share_a_ledger(tmp_path):
    names = ["a", "A", "a/b", "a%2Fb", "a b", "../a", "ä", "a" * 300, "a" * 299 + "b"]
    for number, name in enumerate(names):
        for i in range(number + 1):
            of(tmp_path, name).release(spending(), i, 0, noise)
    for number, name in enumerate(names):
        assert history(tmp_path, name) == [(e, 1) for e in EVENTS[: number + 1]]
    folded = [p.name.lower() for p in tmp_path.iterdir()]
    assert len(set(folded)) == len(folded) and all(p.parent == tmp_path for p in tmp_path.iterdir())


# -- identity ----------------------------------------------------------------------------------


def test_another_plan_under_the_same_name_is_refused(tmp_path):
    of(tmp_path).release(spending(), 0, 0, noise)
    for other in (spending(rounds=9), spending(target=3.0), spending(events=lambda i: [EVENTS[0]])):
        with pytest.raises(ValueError, match="run='trial' was begun with another plan"):
            of(tmp_path).release(other, 1, 0, noise)


# -- files of different moments ----------------------------------------------------------------


def pairs(run="A") -> Spending:
    return spending(run, 6, events=lambda i: [Gaussian(5.0 + i)] * 2)


def journal_of(folder: Path) -> Path:
    return of(folder).journal_path


def release_of(folder: Path, run: str = "A") -> Path:
    (path,) = folder.glob(f"*.{run}-*.release")
    return path


def refused(folder: Path, run: str = "A", round_: int = 5) -> str:
    """A release of a run is refused, and changes nothing; the message."""
    before = files(folder)
    with pytest.raises(JournalError) as caught:
        of(folder).release(pairs(run), round_, 0, noise)
    assert files(folder) == before
    return str(caught.value)


def fails() -> None:
    raise KeyError("before anything is charged")


@pytest.fixture
def states(tmp_path) -> list[Path]:
    """The folder after 0, 1, ..., 4 rounds of run A."""
    live, copies = tmp_path / "live", []
    for i in range(5):
        if i:
            of(live).release(pairs(), i - 1, 0, noise)
        else:
            with pytest.raises(KeyError):
                of(live).release(pairs(), 0, 0, noise, try_first=fails)
            assert of(live).history() == []
        copies.append(shutil.copytree(live, tmp_path / f"after {i}"))
    return copies


def test_a_journal_and_a_release_file_of_different_moments_are_refused(states, tmp_path):
    for journal, release in itertools.permutations(range(5), 2):
        mixed = shutil.copytree(states[release], tmp_path / f"mixed {journal} {release}")
        shutil.copy(journal_of(states[journal]), journal_of(mixed))
        message = refused(mixed)
        assert str(journal_of(mixed)) in message and str(release_of(mixed)) in message
        assert "Put the right" in message
        if journal < release:  # ε would fall
            for ask in (
                lambda m=mixed: of(m).epsilon(1e-5),
                lambda m=mixed: read_alone(journal_of(m)),
            ):
                with pytest.raises(JournalError, match="journal was lost, cut, or replaced"):
                    ask()
    shutil.copy(journal_of(states[release]), journal_of(mixed))  # the cure
    assert of(mixed).release(pairs(), 5, 0, noise)


def test_a_ledger_that_goes_on_notices_an_old_journal_and_a_changed_one(tmp_path):
    ledger, old = of(tmp_path), b""
    for i in range(3):
        old = ledger.journal_path.read_bytes() if i else b""
        ledger.release(spending(), i, 0, noise)
    new = ledger.journal_path.read_bytes()
    changed = new.replace(b"0.1,", b"0.2,") if b"0.1," in new else new.replace(b"0.1}", b"0.2}")
    for content, match in ((old, "lost, cut, or replaced"), (changed, "fails its checksum")):
        assert content != new
        ledger.journal_path.write_bytes(content)
        for ask in (ledger.history, lambda: ledger.release(spending(), 3, 0, noise)):
            with pytest.raises(JournalError, match=match):
                ask()
    ledger.journal_path.write_bytes(new)
    ledger.charges().append("trial#9", EVENTS[9])  # of the caller: the ledger's own stays as it is
    ledger.release(spending(), 3, 0, noise)
    assert ledger.history() == [(event, 1) for event in EVENTS[:4]]


def test_a_lost_journal_is_not_begun_again(states):
    folder = states[3]
    spent, journal = of(folder).epsilon(1e-5), journal_of(folder)
    kept = journal.read_bytes()
    journal.unlink()
    assert "journal was lost" in refused(folder) and not journal.exists()
    with pytest.raises(JournalError, match="journal was lost"):
        of(folder).epsilon(1e-5)
    journal.write_bytes(kept)
    assert of(folder).epsilon(1e-5) == spent


def test_a_journal_that_lacks_another_runs_charges_is_refused(tmp_path):
    """The run that asks is whole; what the other one spent is forgotten."""
    for i in range(2):
        of(tmp_path).release(pairs("A"), i, 0, noise)
    old = journal_of(tmp_path).read_bytes()
    of(tmp_path).release(pairs("B"), 0, 0, noise)
    journal_of(tmp_path).write_bytes(old)
    message = refused(tmp_path, "A")
    assert str(release_of(tmp_path, "B")) in message and "run 'B'" in message
    refused(tmp_path, "B")
    refused(tmp_path, "C", 0)
    with pytest.raises(JournalError, match="run 'B'"):
        history(tmp_path)


def test_a_release_file_that_is_lost_old_damaged_or_anothers_is_no_second_noise(tmp_path):
    ledger, other = of(tmp_path), of(tmp_path, "other")
    ledger.release(pairs(), 0, 0, noise)
    cache = release_of(tmp_path)
    old = cache.read_bytes()
    ledger.release(pairs(), 1, 0, noise)
    new = cache.read_bytes()
    ledger.release(pairs("B"), 0, 0, noise)
    another_run = release_of(tmp_path, "B").read_bytes()
    other.release(pairs(), 0, 0, noise)
    (theirs,) = tmp_path.glob("other*.release")
    for content, match in (
        (None, "is missing"),
        (old, "an old copy"),
        (another_run, "Put the right one back|another run"),
        (theirs.read_bytes(), "data set 'other'"),
        (new[:-1], "its checksum is wrong"),
        (new.replace(b'"parts": 1', b'"parts": 0'), "its checksum is wrong"),
        (b"", "its checksum is wrong"),
    ):
        cache.unlink() if content is None else cache.write_bytes(content)
        with pytest.raises(JournalError, match=match):
            ledger.release(pairs(), 1, 0, noise)
    cache.write_bytes(new)
    assert ledger.release(pairs(), 1, 0, noise) in new
    cache.unlink()  # the file of a run that is over may go
    assert ledger.release(pairs("B"), 1, 0, noise)
    shutil.copy(ledger.journal_path, other.journal_path)
    with pytest.raises(JournalError, match="data"):
        other.history()


def test_a_charge_that_did_not_leave_is_all_that_a_journal_may_be_ahead(tmp_path):
    of(tmp_path).release(pairs(), 0, 0, noise)
    with pytest.raises(KeyboardInterrupt):
        of(tmp_path).release(pairs(), 1, 0, dies)
    crashed = release_of(tmp_path).read_bytes()
    assert sum(n for _, n in history(tmp_path)) == 4
    left = of(tmp_path).release(pairs(), 1, 0, noise)
    assert of(tmp_path).release(pairs(), 1, 0, noise) == left
    of(tmp_path).release(pairs(), 2, 0, noise)
    release_of(tmp_path).write_bytes(crashed)  # two rounds behind
    assert "old copy" in refused(tmp_path)


def test_fields_of_a_release_file_that_are_absent_have_defaults_and_unknown_ones_are_named(
    tmp_path,
):
    def rewrite(change: Callable[[dict], object]) -> None:
        path = release_of(tmp_path)
        line, _, rest = path.read_bytes().partition(b"\n")
        header = json.loads(line.rpartition(b" ")[0])
        change(header[1])
        text = json.dumps(header).encode()
        path.write_bytes(text + f" {zlib.crc32(text):08x}\n".encode() + rest)

    left = of(tmp_path).release(pairs(), 0, 0, noise)
    rewrite(lambda fields: (fields.pop("dataset"), fields.pop("charged")))  # an older version
    assert of(tmp_path).release(pairs(), 0, 0, noise) == left
    of(tmp_path).release(pairs(), 1, 0, noise)
    assert sum(n for _, n in history(tmp_path)) == 4
    rewrite(lambda fields: fields.update(amplified=True))  # it may mean that more was spent
    assert "unknown fields: ['amplified']" in refused(tmp_path)
    with pytest.raises(JournalError, match="amplified"):
        of(tmp_path).epsilon(1e-5)
