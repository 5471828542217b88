"""Several federations over one data set with one budget: all go on until it is spent."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
from pathlib import Path

import pytest

from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.base import Relation
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.mechanism import BudgetExhausted

ROUNDS = 30
KINDS = {
    "alike": lambda run, i: PoissonGaussian(2.0, 0.2),
    "full batches": lambda run, i: Gaussian(4.0 + 0.3 * i + (run == "B")),
    "growing batches": lambda run, i: PoissonGaussian(2.0, 0.05 + 0.01 * i + 0.02 * (run == "B")),
}


def plans(kind: str, target: float, relation: Relation = "add_remove") -> dict[str, Spending]:
    def of(run: str) -> Spending:
        return Spending(run, ROUNDS, lambda i: [KINDS[kind](run, i)], target, 1e-5, relation)

    return {run: of(run) for run in "ABC"}


def noise(rng) -> bytes:
    return rng.bytes(4) + os.urandom(8)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def together(folder: Path, of: dict[str, Spending], order) -> dict[str, int]:
    """Runs ask in an order until each was refused three times; how many rounds each made."""
    done, refusals = dict.fromkeys(of, 0), dict.fromkeys(of, 0)
    sent = {}
    for run in order:
        if refusals[run] == 3:
            continue
        ledger, i = ReleaseLedger(folder, "data"), done[run]
        before = files(folder) if folder.exists() else {}
        try:
            sent[run, i] = ledger.release(of[run], i, 0, noise)
        except BudgetExhausted as error:
            assert f"Round {i} of run '{run}' does not fit" in str(error)
            refusals[run] += 1
            assert i == 0 or files(folder) == before
        else:
            done[run] += 1
        if done[run]:  # asked again, refused or not, the same bytes
            latest = done[run] - 1
            assert ledger.release(of[run], latest, 0, noise) == sent[run, latest]
        if all(count == 3 for count in refusals.values()):
            return done
    raise AssertionError("they never ended")


@pytest.mark.parametrize(
    ("kind", "relation"),
    [
        *((kind, "add_remove") for kind in KINDS),
        ("alike", "replace_one"),
        ("full batches", "replace_one"),
    ],
)
def test_two_runs_take_turns_until_the_joint_budget_is_spent(tmp_path, kind, relation):
    of = plans(kind, 2.5 if relation == "add_remove" else 5.0, relation)
    done = together(tmp_path, {run: of[run] for run in "AB"}, itertools.cycle("AB"))
    spent = ReleaseLedger(tmp_path, "data").epsilon(1e-5, relation)
    assert abs(done["A"] - done["B"]) <= 2 and done["A"] >= 3
    assert 0.8 * of["A"].target_epsilon < spent <= of["A"].target_epsilon
    if kind != "growing batches":  # not one more would have fitted
        events = [(e, n) for e, n in ReleaseLedger(tmp_path, "data").history()]
        for run in "AB":
            more = [*events, (KINDS[kind](run, done[run]), 1)]
            assert PLDAccountant().epsilon(more, 1e-5, relation) > of["A"].target_epsilon


@pytest.mark.parametrize("seed", range(3))
def test_runs_that_ask_in_any_order_never_exceed_the_budget(tmp_path, seed):
    rng = random.Random(seed)
    kind = rng.choice([*KINDS])
    of = plans(kind, rng.uniform(0.8, 3.0))
    together(tmp_path, of, iter(lambda: rng.choice("AAB" if rng.random() < 0.5 else "ABC"), None))
    spent = ReleaseLedger(tmp_path, "data").epsilon(1e-5)
    assert 0.75 * of["A"].target_epsilon < spent <= of["A"].target_epsilon


def test_a_run_that_begins_where_nothing_is_left_does_not_stop_the_other(tmp_path):
    of = plans("alike", 1.5)
    ledger = ReleaseLedger(tmp_path, "data")
    left = ledger.rounds_left(of["A"])
    assert 3 < left < ROUNDS
    for i in range(left - 1):
        ledger.release(of["A"], i, 0, noise)
    assert ledger.rounds_left(of["B"]) == 1
    ledger.release(of["A"], left - 1, 0, noise)
    for run, i in (("B", 0), ("A", left), ("B", 0)):
        with pytest.raises(BudgetExhausted, match=f"run '{run}'"):
            ledger.release(of[run], i, 0, noise)


def test_each_run_keeps_to_its_own_budget_of_what_both_spent(tmp_path):
    small, large = plans("alike", 1.0)["A"], plans("alike", 2.0)["B"]
    done = together(tmp_path, {"A": small, "B": large}, itertools.cycle("AB"))
    event = KINDS["alike"]("A", 0)
    most = {
        e: max(n for n in range(99) if PLDAccountant().epsilon([(event, n)], 1e-5) <= e)
        for e in (1.0, 2.0)
    }
    assert done["A"] == math.ceil(most[1.0] / 2) and sum(done.values()) == most[2.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_killed_at_every_point_two_runs_on_one_budget_go_on(tmp_path):
    of = plans("growing batches", 2.0)
    steps = [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    for calls in itertools.count():
        folder = tmp_path / f"{calls}"
        if (child := os.fork()) == 0:
            left = itertools.count(calls, -1)

            def mortal(function, left=left):
                def wrapper(*arguments, **named):
                    if next(left) == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*arguments, **named)

                return wrapper

            for name in ("fsync", "replace", "open"):
                setattr(os, name, mortal(getattr(os, name)))  # this process is about to end
            ledger = ReleaseLedger(folder, "data")
            for run, i in steps:
                ledger.release(of[run], i, 0, mortal(noise))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ledger = ReleaseLedger(folder, "data")
        for run, i in steps:
            if i == 0 and ledger.find(of[run], 1, 0) is not None:
                continue
            sent = ledger.release(of[run], i, 0, noise)
            assert ReleaseLedger(folder, "data").release(of[run], i, 0, noise) == sent
        assert dict(ledger.history()) == {KINDS["growing batches"](run, i): 1 for run, i in steps}
        if not os.WIFSIGNALED(status):
            break
    assert calls > 20


def test_two_federations_of_one_client_both_go_on(log_cosh, tmp_path):
    """Whole protocols, in turn; each ends in words when the budget is spent."""
    plan = AsyncPlan(40, PolynomialSizes(0, 6), InverseSteps(0.05, 0.01))
    privacy = ClientPrivacy(1.0, 2.0, target_epsilon=2.0, target_delta=1e-5)
    data = log_cosh(30)
    servers = {run: AsyncServer(run, plan, data.x[0] * 0, 1) for run in ("one", "two")}
    for _ in range(100):
        for run, server in servers.items():
            ledger = ReleaseLedger(tmp_path, "data")
            client = AsyncClient(data, plan, privacy, ledger, run=run)  # a new process each time
            server.forget(0)
            if (request := server.request(0)) is not None:
                server.receive(0, client.answer(request))
    for server in servers.values():
        assert server.is_done and server.applied[0] > 3
        assert server.reason == "no client has budget left"
    assert client.epsilon <= 2.0
