"""Promises of every protocol: charged before data, made once, equal to its twin on any network."""

from __future__ import annotations

import math
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp.accounting import Gaussian, PLDAccountant
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.accounting.journal import JournalDiskError
from lightning_dp.boundary import BoundedSum, Query
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message, MessageError
from tests.federated.zoo import (
    CLIENTS,
    DELTA,
    EVENT,
    FEDERATIONS,
    PROTOCOLS,
    RECORDS,
    ROUNDS,
    SIZE,
    START,
    Federation,
    LogCosh,
    Protocol,
    Z,
    files,
    history,
    through_a_bad_network,
)

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")

WHOLE = ["sgd", "queries", "newton"]  # each of their rounds is one event


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return PROTOCOLS[request.param]


@pytest.fixture(params=FEDERATIONS)
def federation(request: pytest.FixtureRequest) -> Federation:
    return FEDERATIONS[request.param]


def spent(protocol: Protocol, rounds: int) -> float:
    return PLDAccountant().epsilon([(EVENT, rounds * protocol.events)], DELTA)


# -- whole runs --------------------------------------------------------------------------------


def check_end(federation: Federation, end: Tensor, folder: Path) -> None:
    torch.testing.assert_close(end, federation.twin(), rtol=0, atol=1e-12)
    assert float((end - START).norm()) > 0.01
    for c in range(CLIENTS):
        charged = Counter(dict(history(folder, f"client-{c}")))
        assert charged == Counter(dict(federation.events(c)))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_bad_network_changes_neither_the_model_nor_the_ledgers(federation, tmp_path, seed):
    server = federation.begin()
    asked = through_a_bad_network(server, federation.clients(tmp_path), seed, faults=0.3)
    assert server.is_done and asked > 12
    check_end(federation, server.point, tmp_path)
    make = federation.clients(tmp_path)
    for c in range(CLIENTS):
        assert make(c).facts["epsilon"] == PLDAccountant().epsilon(
            history(tmp_path, f"client-{c}"), DELTA
        )


@pytest.mark.few(4)
def test_a_server_that_dies_goes_on_from_any_state(federation, tmp_path):
    """Saved and restored between any two calls, it loses and doubles nothing."""
    rng, holder = random.Random(1), [federation.begin()]

    class Restored:
        num_clients = CLIENTS

        def __getattr__(self, name: str) -> Any:
            return getattr(holder[0], name)

    def kill_and_restore() -> None:
        if rng.random() < 0.1:
            torch.save(holder[0].state_dict(), tmp_path / "server.pt")
            holder[0] = federation.begin()
            holder[0].load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))

    make = federation.clients(tmp_path / "ledgers")
    through_a_bad_network(Restored(), make, 5, look=kill_and_restore)
    check_end(federation, holder[0].point, tmp_path / "ledgers")


def test_a_state_of_another_configuration_is_refused_by_name(federation):
    state = federation.begin().state_dict()
    with pytest.raises(ValueError, match=r"run differs.* it was 'trial', now 'other'"):
        federation.server("other", START).load_state_dict(state)


# -- charged once, made once -------------------------------------------------------------------


def test_a_round_is_charged_before_a_record_is_touched(protocol, tmp_path):
    charged = [(EVENT, protocol.events)]

    class Failing(LogCosh):
        def bounded_sum(self, query, records):
            assert history(tmp_path) == charged
            raise OSError("the disk is gone")

    for _ in range(2):  # and once, however often it fails
        with pytest.raises(OSError, match="the disk is gone"):
            protocol.make(Failing(), tmp_path).answer(protocol.request())
    assert history(tmp_path) == charged


def test_a_release_file_that_takes_nothing_is_named_and_nothing_is_charged(
    protocol, tmp_path, monkeypatch
):
    client = protocol.make(LogCosh(), tmp_path)
    client.answer(protocol.request(0))
    before = history(tmp_path)

    def fail(*_):
        raise PermissionError("read-only")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(JournalDiskError, match=r"release file .* cannot be written: read-only"):
            client.answer(protocol.request(1))
    assert history(tmp_path) == before
    assert client.answer(protocol.request(1))


def test_asked_again_the_same_bytes_come_also_from_a_new_process(protocol, tmp_path):
    """With noise from the operating system: a second draw would average the noise out."""
    client, records, replies = protocol.make(LogCosh(), tmp_path), LogCosh(), []
    for i in range(2):
        replies.append(client.answer(protocol.request(i)))
        assert client.answer(protocol.request(i)) == replies[i]
        assert protocol.make(records, tmp_path).answer(protocol.request(i)) == replies[i]
    assert records.asked == [] and replies[0] != replies[1]
    assert history(tmp_path) == [(EVENT, 2 * protocol.events)]


def test_noise_and_batches_are_a_function_of_the_seed_and_of_nothing_else(protocol, tmp_path):
    def reply(name: str, i: int, seed: int | None) -> bytes:
        return protocol.make(LogCosh(), tmp_path / name, seed=seed).answer(protocol.request(i))

    first = [reply("one", i, 7) for i in range(2)]
    assert [reply("two", i, 7) for i in range(2)] == first
    (a, b), c = first, reply("three", 0, 8)
    unseeded = [reply(name, 0, None) for name in ("four", "five")]
    tensors = [Message.from_bytes(each).tensors for each in (a, b, c, *unseeded)]
    assert len({tuple(each.tolist()) for found in tensors for each in found.values()}) == 5


class Silent(LogCosh):
    def rows(self, point, direction=None, records=None):
        return torch.zeros(len(records), SIZE, dtype=torch.float64)


@pytest.mark.parametrize("seed", [None, 7])
def test_every_release_has_its_own_noise(protocol, tmp_path, seed):
    """Records whose gradient is 0, so that nothing but the noise is sent."""

    clients = [protocol.make(Silent(), tmp_path / name, seed=seed) for name in ("one", "other")]
    replies = [client.answer(protocol.request(i)) for client in clients for i in range(3)]
    sent = [value for reply in replies for value in Message.from_bytes(reply).tensors.values()]
    assert len({tuple(value.tolist()) for value in sent}) == (6 if seed is None else 3)


def test_rounds_that_are_over_are_not_made_again(protocol, tmp_path):
    client = protocol.make(LogCosh(), tmp_path)
    for i in range(3):
        client.answer(protocol.request(i))
    with pytest.raises(MessageError, match=r"[Rr]ound \d .*is over|round \d is over"):
        client.answer(protocol.request(0))
    assert history(tmp_path) == [(EVENT, 3 * protocol.events)]


def test_its_facts_are_those_of_its_ledger(protocol, tmp_path):
    client = protocol.make(LogCosh(), tmp_path, seed=1)
    client.answer(protocol.request())
    assert client.epsilon == client.facts["epsilon"] == spent(protocol, 1)
    assert {"unit": "record", "seeded": True, "delta": DELTA}.items() <= client.facts.items()
    assert protocol.make(LogCosh(), tmp_path).facts["seeded"] is False


# -- what it costs -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_sampling_amplifies_nothing_where_the_client_is_the_unit(name, tmp_path):
    """Its presence is not a matter of chance."""
    records, protocol = LogCosh(), PROTOCOLS[name]
    records.unit = "client"
    client = protocol.make(records, tmp_path)
    client.answer(protocol.request())
    assert history(tmp_path) == [(Gaussian(Z), 1)] and client.facts["unit"] == "client"


@pytest.mark.parametrize("name", WHOLE)
def test_what_leaves_a_whole_client_is_not_scaled_by_its_number_of_records(name, tmp_path):
    """Noise over N would tell N, and so whether a client is as large as another one."""
    sent = []
    for num_records in (RECORDS, 100 * RECORDS):
        records = Silent(num_records)
        records.unit = "client"
        client = PROTOCOLS[name].make(records, tmp_path / f"{num_records}", seed=7)
        sent.append(client.answer(PROTOCOLS[name].request()))
    assert sent[0] == sent[1]


class Fails(LogCosh):
    """Records whose gradients fail where a loss is large, as a training_step may."""

    limit, error = -math.inf, OverflowError("a value of a record")

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        if float(query.terms[0].point[0]) > self.limit:
            raise self.error
        return super().bounded_sum(query, records)


@pytest.mark.parametrize("error", [Fails.error, VoidedRunError("a chunk without a gradient")])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_server_learns_from_no_second_model_whether_a_round_fails(name, error, tmp_path):
    """Else it would find any limit of the records by bisection, for one charge."""
    protocol, records = PROTOCOLS[name], Fails()
    records.error = error
    with pytest.raises(type(error)):
        protocol.make(records, tmp_path).answer(protocol.request())
    charged = files(tmp_path)
    records.limit = math.inf
    with pytest.raises(MessageError, match="no other request"):
        protocol.make(records, tmp_path).answer(protocol.request(model=START * 1.01))
    assert files(tmp_path) == charged
    client = protocol.make(records, tmp_path)
    reply = client.answer(protocol.request())  # mended, the same is answered
    assert protocol.make(records, tmp_path).answer(protocol.request()) == reply
    client.answer(protocol.request(1, model=START * 1.01))


@pytest.mark.parametrize(("first", "then"), [("client", "record"), ("record", "client")])
@pytest.mark.parametrize("run", ["trial", "another"])
def test_a_ledger_is_about_one_unit(first, then, run, tmp_path):
    """One record moves a clipped sum of all records by 2 C, and a client moves many clipped ones."""
    for unit, name in ((first, "trial"), (then, run), (first, "another")):
        records, protocol = LogCosh(), PROTOCOLS["queries"]
        records.unit = unit
        client = protocol.make(records, tmp_path, run=name)
        if unit == first:
            client.answer(protocol.request(run=name))
        else:
            with pytest.raises(ValueError, match=f"unit='{then}'.*unit='{first}'"):
                client.answer(protocol.request(run=name))
    assert sum(n for _, n in history(tmp_path)) == 2


@pytest.mark.parametrize("name", WHOLE)
def test_a_round_that_the_budget_does_not_allow_is_refused_each_time(name, tmp_path):
    """It charges nothing, and what was sent before comes again as it was."""
    protocol = PROTOCOLS[name]
    target = spent(protocol, 3) * 1.001
    assert spent(protocol, 4) > target

    def ask(i: int) -> bytes:
        client = protocol.make(LogCosh(), tmp_path, target_epsilon=target)
        return client.answer(protocol.request(i))

    replies = [ask(i) for i in range(ROUNDS)]
    refused = [Message.from_bytes(reply).kind == "refused" for reply in replies]
    assert refused == [False] * 3 + [True] * 3
    before = files(tmp_path)
    assert [ask(i) for i in (5, 3, 2, 3, 5)] == [replies[i] for i in (5, 3, 2, 3, 5)]
    assert files(tmp_path) == before and len(before) == 2
    assert protocol.make(LogCosh(), tmp_path, target_epsilon=target).epsilon <= target


def test_a_budget_that_affords_no_round_is_not_touched(protocol, tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    client = protocol.make(LogCosh(), tmp_path, target_epsilon=1e-3)
    assert Message.from_bytes(client.answer(protocol.request())).kind == "refused"
    assert re.search(
        r"client leaves: Round \d of .* does not fit.* another name with a larger", caplog.text
    )
    assert history(tmp_path) == []


@pytest.mark.parametrize("name", WHOLE)
def test_a_second_run_over_the_same_data_adds_to_the_ledger(name, tmp_path):
    protocol = PROTOCOLS[name]
    for i in range(2):
        protocol.make(LogCosh(), tmp_path).answer(protocol.request(i))
    second = {"run": "second", "target_epsilon": spent(protocol, 3) * 1.001}
    client = protocol.make(LogCosh(), tmp_path, **second)
    replies = [client.answer(protocol.request(i, run="second")) for i in (0, 1)]
    refused = [Message.from_bytes(reply).kind == "refused" for reply in replies]
    assert refused == [False, True]
    assert history(tmp_path) == [(EVENT, 3)]


def test_a_client_has_no_budget_by_default(protocol, tmp_path):
    settings = {"run": "trial", "seed": None, "target_delta": DELTA}
    with pytest.raises(TypeError, match="target_epsilon"):
        protocol.client(LogCosh(), ReleaseLedger(tmp_path, "data"), **settings)
    with pytest.raises(TypeError, match="ledger=None must be a ReleaseLedger"):
        protocol.client(LogCosh(), None, **settings, target_epsilon=1.0)


# -- refused, at no cost -----------------------------------------------------------------------


def test_other_runs_and_other_messages_are_refused_at_no_cost(protocol, tmp_path):
    client = protocol.make(LogCosh(), tmp_path)
    for request, match in (
        (b"", "no message"),
        (protocol.request(run="other"), "rounds of run 'trial'"),
        (Message("nonsense", {"run": "trial"}).to_bytes(), "rounds of run 'trial'"),
        (protocol.request(-1), "round=-1"),
        (Message(protocol.kind, {"run": "trial"}).to_bytes(), "has no 'round'"),
    ):
        with pytest.raises(MessageError, match=match):
            client.answer(request)
    assert not files(tmp_path)


@pytest.mark.parametrize("name", ["sgd", "newton"])
def test_a_round_beyond_the_plan_is_refused(name, tmp_path):
    client = PROTOCOLS[name].make(LogCosh(), tmp_path)
    with pytest.raises(MessageError, match="Round 6 of 6 was asked for"):
        client.answer(PROTOCOLS[name].request(ROUNDS))
    assert not files(tmp_path)


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE - 1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.softplus(self.layer(batch[0])).mean()


BAD_MODELS = {
    "NaN": lambda x: x * math.nan,
    "infinite": lambda x: torch.cat([x[:-1], torch.tensor([math.inf])]),
    "too short": lambda x: x[:-1],
    "too long": lambda x: torch.cat([x, x]),
    "empty": lambda x: x[:0],
    "float64": lambda x: x.double(),
    "float64 that overflows": lambda x: x.double() + 1e300,
    "bfloat16": lambda x: x.bfloat16(),
    "whole numbers": lambda x: x.long(),
}


def test_a_model_that_is_not_the_clients_is_refused_before_a_charge(protocol, tmp_path):
    data = TensorDataset(torch.ones(RECORDS, SIZE - 1))
    client = protocol.make(LocalRecords(Regression(), data), tmp_path)
    good = Message.from_bytes(protocol.request(model=START.float()))
    for tensor in protocol.points:
        for bad in BAD_MODELS.values():
            tensors = {**good.tensors, tensor: bad(good.tensors[tensor])}
            with pytest.raises(MessageError):
                client.answer(Message(good.kind, good.facts, tensors).to_bytes())
    assert not files(tmp_path)
    assert Message.from_bytes(client.answer(good.to_bytes())).tensors  # it lives on
