"""A federation outlives its clients: whoever is late or wrong is left out, and nobody else notices."""

from __future__ import annotations

import copy
import math
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from lightning_dp.accounting import Gaussian, PLDAccountant
from lightning_dp.federated import AsyncServer
from lightning_dp.federated.cubic_newton import CubicNewtonPlan
from lightning_dp.federated.logbook import _epsilon_of_plan
from lightning_dp.federated.protocol import (
    AbstractServer,
    Attendance,
    Message,
    MessageError,
    Quorum,
    norm_bound,
)
from tests.federated.zoo import (
    ASYNC,
    CLIENTS,
    DELTA,
    FEDERATIONS,
    NEWTON,
    RECORDS,
    ROUNDS,
    Federation,
    LogCosh,
    Z,
    asynchronous,
    diff2,
    fcrn,
    files,
    history,
    play,
)

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")

TWO = Quorum(clients=2)
BOUNDED = {
    "asynchronous, bounded": asynchronous(
        replace(ASYNC, max_grad_norm=1.0, noise_multiplier=Z, keep=3)
    ),
    "DP-FCRN, bounded": fcrn(
        CubicNewtonPlan(
            *(replace(NEWTON, fresh_batches=True), CLIENTS, 4),
            **{"noise_multiplier": 0.8, "min_batch_size": 0.5 * RECORDS, "sample_rate": 0.5},
        )
    ),
}
ALL = {**FEDERATIONS, **BOUNDED}


@pytest.fixture(params=ALL)
def federation(request: pytest.FixtureRequest) -> Federation:
    return ALL[request.param]


# -- away, and back ----------------------------------------------------------------------------


def late_or_away(c: int, i: int) -> bool:
    """Client 0 joins in round 1; client 1 is away in round 2, and client 2 at the end."""
    return (c, i) not in {(0, 0), (1, 2), (2, 3), (2, 5)}


@pytest.mark.few(3)
def test_who_is_away_counts_as_zero_and_is_charged_nothing(federation, tmp_path):
    """The end is the twin's whose loop skips them, also of a server that is restored at any time."""
    holder = [federation.begin(TWO)]

    def restore() -> AbstractServer:
        torch.save(holder[0].state_dict(), tmp_path / "server.pt")
        holder[0] = federation.begin(TWO)
        holder[0].load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
        return holder[0]

    twin = federation.twin(late_or_away)
    end = play(holder[0], federation.clients(tmp_path / "one"), late_or_away)
    torch.testing.assert_close(end.point, twin, rtol=0, atol=1e-12)
    assert float((twin - federation.twin()).norm()) > 1e-4
    for c in range(CLIENTS):
        charged = Counter(dict(history(tmp_path / "one", f"client-{c}")))
        assert charged < Counter(dict(federation.events(c)))
    if isinstance(end, AsyncServer):  # answers of a step that goes on are asked for again
        holder[0] = federation.begin(TWO)
        end = play(holder[0], federation.clients(tmp_path / "two"), late_or_away, restore)
        torch.testing.assert_close(end.point, twin, rtol=0, atol=1e-12)


@pytest.mark.few(3)
def test_a_client_that_died_in_a_round_is_back_in_the_next_and_draws_no_second_noise(
    federation, tmp_path
):
    """It has paid for the round that it died in; its reply comes late, always the same, for nothing."""
    make, died, late = federation.clients(tmp_path), [], []

    class Dying(LogCosh):
        def bounded_sum(self, query, records):
            died.append(server.stage)
            raise KeyboardInterrupt

    server = federation.begin(TWO)
    while not server.is_done:
        stage = server.stage
        for c in sorted(server.awaited):
            if server.stage != stage:
                break
            request = server.request(c)
            if c == 1 and server.round == 2 and not died:
                one = make(c)
                one.records = Dying(seed=c)
                with pytest.raises(KeyboardInterrupt):
                    one.answer(request)
                late.append(request)
                continue
            assert server.receive(c, make(c).answer(request))
        if server.stage in died:
            assert server.leave_out() == {1}
            replies = {make(1).answer(late[0]) for _ in range(3)}
            assert len(replies) == 1 and not server.receive(1, replies.pop())
    torch.testing.assert_close(
        server.point, federation.twin(lambda c, i: (c, i) != (1, 2)), rtol=0, atol=1e-12
    )
    for c in range(CLIENTS):
        charged = Counter(dict(history(tmp_path, f"client-{c}")))
        assert charged == Counter(dict(federation.events(c)))


@pytest.mark.few(3)
def test_below_the_quorum_a_round_waits_and_nothing_is_lost(federation, tmp_path):
    server, make = federation.begin(TWO), federation.clients(tmp_path)
    assert server.receive(0, make(0).answer(server.request(0)))
    for _ in range(2):
        assert server.leave_out() == set()
    assert (server.round, server.awaited, server.is_done) == (0, {1, 2}, False)
    restored = federation.begin(TWO)
    restored.load_state_dict(server.state_dict())
    end = play(restored, make)
    torch.testing.assert_close(end.point, federation.twin(), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="clients=4 must be a whole number from 1 to 3"):
        federation.begin(Quorum(clients=4))
    with pytest.raises(ValueError, match="quorum differs"):
        federation.begin(Quorum(clients=3)).load_state_dict(server.state_dict())


@pytest.mark.few(3)
def test_without_budget_clients_leave_as_long_as_there_is_a_quorum(federation, tmp_path):
    server, make = federation.begin(TWO), federation.clients(tmp_path)
    poor = federation.clients(tmp_path, target_epsilon=1e-6)
    end = play(server, lambda c: poor(c) if c == 1 else make(c))
    assert end.reason.endswith("rounds were made") and history(tmp_path, "client-1") == []
    torch.testing.assert_close(end.point, federation.twin(lambda c, i: c != 1), rtol=0, atol=1e-12)
    end = play(federation.begin(Quorum(clients=3)), federation.clients(tmp_path / "2", run="trial"))
    assert end.reason.endswith("rounds were made")
    broke = federation.clients(tmp_path / "3", target_epsilon=1e-6)
    end = federation.begin(Quorum(clients=3))
    end.receive(2, broke(2).answer(end.request(2)))
    assert end.reason == "2 of the clients have budget left, and a round needs 3"


def test_others_are_ahead_when_a_round_goes_on_without_a_client(tmp_path):
    """Lag 2: who is left out of round 0 is a round behind still, and may answer round 1."""
    federation = asynchronous(replace(ASYNC, lag=2))
    server, make = federation.begin(TWO), federation.clients(tmp_path)
    for c in (0, 1, 0, 1):
        assert server.receive(c, make(c).answer(server.request(c)))
    assert (server.applied, server.request(0)) == ([2, 2, 0], None)
    assert server.leave_out() == {2} and (server.round, server.applied) == (1, [2, 2, 1])
    assert server.leave_out() == {2} and (server.round, server.applied) == (2, [2, 2, 2])
    assert server.leave_out() == set()
    restored = federation.begin(TWO)
    restored.load_state_dict(server.state_dict())
    end = play(restored, make)
    assert (end.applied, end.reason) == ([ROUNDS] * CLIENTS, "all 6 rounds were made")
    assert sum(n for _, n in history(tmp_path, "client-2")) == ROUNDS - 2


# -- messages that anybody may have changed ----------------------------------------------------


def spoilt(content: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A message, changed in one way or another."""
    message, way = Message.from_bytes(content), rng.randrange(10)
    facts, tensors = dict(message.facts), dict(message.tensors)
    if way == 0:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if way == 1:
        return content[: rng.randrange(len(content))] + rng.randbytes(rng.randrange(9))
    if way == 2 and others:
        return rng.choice(others)
    if way == 3:
        return rng.randbytes(rng.randrange(200))
    if way == 4:
        facts[rng.choice([*facts, "more"])] = rng.choice([-1, 0, 1, 5, 2**62, True, "x", math.nan])
    elif way == 5:
        kind = rng.choice(["update", "answer", "walked", "refuse", "round", "query", ""])
        return Message(kind, facts, tensors).to_bytes()
    elif tensors:
        name = rng.choice(sorted(tensors))
        t = tensors[name]
        values = [t * math.nan, t * math.inf, t * 1e6, t * 1e300, t[1:], t[:0], torch.cat([t, t])]
        values += [t.long(), t.bfloat16(), t.float(), -t, t + 1e9]
        tensors[rng.choice([name, name, name, "other"])] = rng.choice(values)
    return Message(message.kind, facts, tensors).to_bytes()


def state(server: AbstractServer) -> str:
    return repr((server.state_dict(), [server.request(c) for c in range(CLIENTS)]))


def hostile_run(federation: Federation, seed: int, tries: int = 4) -> tuple[int, int]:
    """Messages to and from client 1 are spoilt; the others end as if it were away where that failed.

    Returns how many were spoilt, and how many were refused.
    """
    rng, count, refused, server = random.Random(seed), 0, 0, federation.begin(TWO)
    accepted: dict[Any, bytes] = {}
    old: list[bytes] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, other = Path(temporary, "a"), Path(temporary, "b")
        make = federation.clients(folder)
        while not server.is_done:
            stage = server.stage
            for c in sorted(server.awaited - {1}):
                reply = make(c).answer(server.request(c))
                assert server.receive(c, reply)
                old.append(reply)
                if server.stage != stage:
                    break
            before, good = state(server), b""
            for _ in range(tries):
                if 1 not in server.awaited or server.stage != stage:
                    break
                request, is_asked, count = server.request(1), rng.random() < 0.3, count + 1
                charged = files(folder) if is_asked or not good else {}
                try:
                    asked = spoilt(request, rng, []) if is_asked else request
                    reply = good = good if good and not is_asked else make(1).answer(asked)
                except MessageError as error:
                    assert files(folder) == charged and len(str(error)) < 700
                    refused += 1
                    continue
                sent = reply if is_asked else spoilt(reply, rng, old)
                # Mostly a copy gets it, so that what can be taken does not end the stage.
                at = server if tries < 10 or rng.random() < 0.05 else copy.deepcopy(server)
                try:
                    if not at.receive(1, sent):
                        assert state(at) == before
                    elif at is server:
                        accepted[stage] = sent
                    assert bool(torch.isfinite(at.point).all())
                except MessageError as error:
                    refused += 1
                    assert state(at) == before and len(str(error)) < 500
                    numbers = [n for t in Message.from_bytes(reply).tensors.values() for n in t]
                    texts = [f"{float(n):.4g}" for n in numbers if abs(n) > 1e-3]
                    assert not any(text in str(error) for text in texts if len(text) > 4)
                old.append(reply)
            if 1 in server.awaited and server.stage == stage:
                assert server.leave_out() == {1}
        assert bool(torch.isfinite(server.point).all())
        for c in (0, 2):
            charged = Counter(dict(history(folder, f"client-{c}")))
            assert charged == Counter(dict(federation.events(c)))
        again, make = federation.begin(TWO), federation.clients(other)
        while not again.is_done:
            stage = again.stage
            for c in sorted(again.awaited - {1}):
                assert again.receive(c, make(c).answer(again.request(c)))
                if again.stage != stage:
                    break
            if 1 in again.awaited and again.stage == stage:
                if stage in accepted:
                    assert again.receive(1, accepted[stage])
                else:
                    assert again.leave_out() == {1}
    torch.testing.assert_close(server.point, again.point, rtol=0, atol=1e-12)
    assert (server.round, server.reason) == (again.round, again.reason)
    return count, refused


@pytest.mark.few(3)
def test_spoilt_messages_kill_nothing_and_the_others_end_as_if_that_client_were_away(federation):
    assert hostile_run(federation, seed=0)[1] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_ten_thousand_spoilt_messages(name):
    count, seed = 0, 100
    while count < 10_000:
        count, seed = count + hostile_run(ALL[name], seed, tries=200)[0], seed + 1


# -- waiting -----------------------------------------------------------------------------------


def test_waiting_is_over_for_who_failed_is_silent_or_late():
    attendance = Attendance(Quorum(wait=100.0, tries=2), began=0.0)
    assert not attendance.is_over({1, 2}, 99.9) and attendance.is_over({1, 2}, 100.0)
    attendance.fail(1)
    assert not attendance.is_over({1}, 1.0)
    attendance.fail(1)
    assert attendance.is_over({1}, 1.0) and not attendance.is_over({1, 2}, 1.0)
    attendance.begin(200.0, left_out={1, 2})  # nobody waits for them until they are heard of
    assert attendance.is_over({1, 2}, 201.0) and not attendance.is_over({0, 1}, 201.0)
    attendance.hear(2)
    assert not attendance.is_over({1, 2}, 201.0) and attendance.is_over({1}, 201.0)


# -- bounds ------------------------------------------------------------------------------------


def test_a_bound_fails_with_less_than_the_probability_that_it_claims():
    """Exact tails: of the size of a Poisson batch, and of the norm of the noise."""
    for draws in (1, 100):
        for batch in (1e-6, 0.01, 0.3, 1.0, 7.0, 100.0, 1e4):
            largest = norm_bound(1.0, 0.0, batch, 1, draws=draws) / 1.001
            for n in (math.ceil(batch), 10 * math.ceil(batch) + 50, 10**7):
                above = stats.binom.sf(math.floor(largest), n, min(1.0, batch / n))
                assert above < 0.5e-9 / draws
        for size in (1, 3, 100, 10**6):
            largest = (norm_bound(1.0, 5.0, 1.0, size, 0.0, draws)) / 1.001 / 5.0
            assert stats.chi.sf(largest, size) < 0.5e-9 / draws
    assert norm_bound(2.0, 0.0, 5.0, 3, num_records=4) == pytest.approx(8.0, rel=2e-3)
    assert norm_bound(math.inf, 0.0, 5.0, 3) == math.inf


@pytest.mark.parametrize(
    "federation",
    [*BOUNDED.values(), diff2("client"), diff2("server"), FEDERATIONS["BVR-L-SGD, noisy clients"]],
)
def test_honest_updates_are_below_the_bound_and_a_million_is_above(federation, tmp_path):
    """Whoever tells it, a refusal has no number of the update in it."""
    server, make = federation.begin(TWO), federation.clients(tmp_path)
    while not server.is_done:
        for c in sorted(server.awaited):
            stage, good = server.stage, Message.from_bytes(make(c).answer(server.request(c)))
            (name,) = good.tensors
            long = {name: good.tensors[name] + 1e6}
            with pytest.raises(MessageError, match=r"longer than|farther away"):
                server.receive(c, Message(good.kind, good.facts, long).to_bytes())
            assert server.receive(c, good.to_bytes())
            if server.stage != stage:
                break
    torch.testing.assert_close(server.point, federation.twin(), rtol=0, atol=1e-12)


def test_a_client_whose_settings_exceed_the_plan_is_refused_before_a_round(tmp_path):
    for changes, match in (
        ({"max_grad_norm": 0.5}, r"max_grad_norm=1\.0 exceeds"),
        ({"noise_multiplier": 1.5}, r"noise_multiplier=2\.0 exceeds"),
    ):
        with pytest.raises(ValueError, match=match):
            asynchronous(replace(ASYNC, **changes)).clients(tmp_path)(0)
    for changes, match in (
        ({"noise_multiplier": 0.8, "min_batch_size": RECORDS}, "min_batch_size"),
        ({"sample_rate": 0.4}, r"sample_rate=0\.5 exceeds the sample_rate=0\.4"),
    ):
        with pytest.raises(ValueError, match=match):
            fcrn(CubicNewtonPlan(NEWTON, CLIENTS, 4, **changes)).clients(tmp_path)(0)


def test_what_the_plan_says_of_epsilon_is_what_honest_clients_pay(tmp_path):
    known = "DIFF2, noisy clients", "BVR-L-SGD, noisy clients"
    for federation in (*BOUNDED.values(), *(FEDERATIONS[name] for name in known)):
        end = play(federation.begin(TWO), federation.clients(tmp_path / f"{id(federation)}"))
        assert end.round == getattr(end.plan, "rounds", ROUNDS)
        for c in range(CLIENTS):
            assert Counter(dict(end.spent(RECORDS, c))) == Counter(dict(federation.events(c)))
        if federation is BOUNDED["DP-FCRN, bounded"]:  # of a whole client nothing is amplified
            facts = {"client": 0, "unit": "client", "delta": DELTA, "relation": "add_remove"}
            expected = PLDAccountant().epsilon([(Gaussian(0.8), 4 * 4)], DELTA)
            assert _epsilon_of_plan(end, facts) == {"epsilon_of_plan": expected}
    assert FEDERATIONS["asynchronous"].begin().spent(RECORDS, 0) == []
    started = play(
        FEDERATIONS["asynchronous"].begin(TWO), FEDERATIONS["asynchronous"].clients(tmp_path)
    )
    assert started.spent(RECORDS, 0) is None
