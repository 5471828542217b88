"""Clients that protect users: who is drawn, one clip a user, what is charged, and what comes again."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant as Oracle
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_dp import Constant, FullBatch, MeanGradient, Poisson, Query, Term, UserLevel
from lightning_dp.accounting import PoissonGaussian
from lightning_dp.boundary import BoundedSum
from lightning_dp.federated.client import draw
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message
from lightning_dp.federated.synchronous import QueryClient, SynchronousServer
from lightning_dp.functional import flatten, unflatten
from lightning_dp.noise_plan import NoisePlan
from tests.federated.zoo import PROTOCOLS, RECORDS, LogCosh, Z, history, summed

C, DELTA = 0.6, 1e-5
USERS = [3, 0, 0, 1, 2, 2, 2, 2, 0, 3, 2, 4]  # 5 users of one to five rows
LOSSES = [1, 0.2, 0.2, 5, 0.3, 0.3, 0.3, 0.3, 0.2, 1, 0.3, 0.05]  # some gradients are short
ENGINES = ["auto", "layers", "records", "ghost", "one_by_one"]


@pytest.fixture
def module(classifier: Any, mlp: Any) -> Any:
    return classifier(mlp())


def data(users: list[int] = USERS, scale: list[float] = LOSSES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(users), 6, generator=generator) * torch.tensor(scale).unsqueeze(1)
    return TensorDataset(x, torch.arange(len(users)) % 3)


def local(module: Any, dataset: Any = None, users: Any = USERS, most_rows: int = 9, **options: Any):
    unit = UserLevel(users, most_rows=most_rows)
    return LocalRecords(module, dataset or data(), unit=unit, **options)


def loop(module: Any, dataset: Any, users: Any, query: Query, rows: Any = None) -> Tensor:
    """Each user by itself: the mean over the rows at each point, combined, clipped, added up."""
    params = list(module.net.parameters())
    total = torch.zeros_like(flatten(params))
    for user in {*users}:
        own = [row for row in rows or range(len(users)) if users[row] == user]
        part = torch.zeros_like(total)
        for term in query.terms:
            for row in own:
                at = unflatten(flatten(params) if term.point is None else term.point, params)
                names = dict(zip(dict(module.net.named_parameters()), at, strict=True))
                asked = {name: each.clone().requires_grad_() for name, each in names.items()}
                x, y = (each.unsqueeze(0) for each in dataset[row])
                out = torch.func.functional_call(module.net, asked, (x,))
                loss = nn.functional.cross_entropy(out, y) * term.weight / len(own)
                part += flatten(torch.autograd.grad(loss, list(asked.values())))
        total += part * min(1.0, query.clip_norm / max(float(part.norm()), 1e-12))
    return total


# -- one clip a user ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunk_size", [2, 64])
def test_the_sum_is_that_of_a_loop_over_users(module, engine, chunk_size):
    """Also of differences between two points; rows may be asked for in any order."""
    here = flatten(list(module.net.parameters()))
    for terms in ((Term(),), (Term(1.0, here + 0.3), Term(-1.0, here - 0.2))):
        query, found = Query(terms, C, 1.0), local(module, engine=engine, chunk_size=chunk_size)
        expected = loop(module, data(), USERS, query)
        for rows in (range(12), [11, 0, 4, 2, 10, 9, 1, 3, 5, 6, 7, 8]):
            answer = found.bounded_sum(query, rows)
            torch.testing.assert_close(answer.value, expected, rtol=1e-4, atol=1e-5)
        assert answer.clip_norm == C
    of_each = [
        float(loop(module, data(), USERS, Query((Term(),), 1e9, 1.0), rows).norm())
        for rows in ([r for r in range(12) if USERS[r] == user] for user in range(5))
    ]
    assert min(of_each) < C < max(of_each)  # the bound reaches some, and not others


@pytest.mark.parametrize("engine", ["auto", "one_by_one"])
def test_a_user_less_moves_the_sum_by_at_most_c(module, engine):
    """By brute force over who is removed; rows clipped one by one would move it by up to 5 C."""
    query, loud = Query((Term(),), C, 1.0), data(scale=[30.0] * 12)
    whole = local(module, loud, engine=engine)
    everybody, moved = whole.bounded_sum(query, range(12)).value, []
    for user in range(5):
        rows = [row for row in range(12) if USERS[row] != user]
        without = local(module, Subset(loud, rows), [USERS[row] for row in rows], engine=engine)
        assert without.num_records == 4
        there = whole.bounded_sum(query, rows).value
        torch.testing.assert_close(without.bounded_sum(query, range(len(rows))).value, there)
        moved.append(float((everybody - there).norm()))
    assert max(moved) <= C * (1 + 1e-5) and max(moved) == pytest.approx(C, rel=1e-4)


def test_a_user_with_a_row_that_is_not_finite_counts_as_zero(module):
    dataset, query = data(), Query((Term(),), C, 1.0)
    dataset.tensors[0][4] = math.nan  # of user 2
    rest = [row for row in range(12) if USERS[row] != 2]
    found = local(module, dataset).bounded_sum(query, range(12)).value
    torch.testing.assert_close(found, loop(module, dataset, USERS, query, rest))


# -- who is drawn ------------------------------------------------------------------------------


def test_users_are_drawn_each_at_q_with_at_most_k_rows(module):
    users = [0] * 40 + [1 + row // 4 for row in range(40)]
    records = local(module, data(users, [1.0] * 80), users, most_rows=3)
    assert records.num_records == 11
    rng, met, rows_of_0 = np.random.default_rng(0), Counter[int](), Counter[int]()
    for _ in range(2000):
        rows = draw(records, 0.3, rng)
        assert len({*rows}) == len(rows)
        of_users = Counter(users[row] for row in rows)
        assert all(count == 3 for count in of_users.values())
        met.update(of_users.keys())
        rows_of_0.update(row for row in rows if row < 40)
    assert all(abs(met[user] - 600) < 5 * math.sqrt(420) for user in range(11))
    assert len(rows_of_0) == 40 and max(rows_of_0.values()) < 45 + 5 * math.sqrt(45)
    assert draw(records, 0.0, rng) == []
    assert len(draw(records, 1.0, rng, FullBatch())) == 33


class Owned(LogCosh):
    """The records of the zoo, three of each user; two of them are read."""

    unit = "user"

    def __init__(self, num_records: int = RECORDS, seed: int = 0) -> None:
        super().__init__(num_records, seed)
        self.users = UserLevel([row % 10 for row in range(RECORDS)], most_rows=2).rows_of(self.y)

    @property
    def num_records(self) -> int:
        return len(self.users)

    def bounded_sum(self, query: Query, records: Any) -> BoundedSum:
        self.asked.append((query, list(records)))
        parts = [torch.zeros(0, len(query.terms[0].point)).double()]
        for own in self.users.split(records):
            of_rows = [t.weight * self.rows(t.point, t.direction, own).mean(0) for t in query.terms]
            parts.append(sum(of_rows).unsqueeze(0))
        return summed(torch.cat(parts), query)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_samples_and_charges_users(name, tmp_path):
    protocol, records = PROTOCOLS[name], Owned()
    client = protocol.make(records, tmp_path)
    for i in range(3):
        assert Message.from_bytes(client.answer(protocol.request(i))).kind != "refused"
    for _, rows in records.asked:
        assert {*Counter(row % 10 for row in rows).values()} <= {2}
    rate = 0.6 if name == "sgd" else 0.2  # its plan has batches of 6, and there are 10 users
    assert history(tmp_path) == [(PoissonGaussian(Z, rate), 3 * protocol.events)]
    assert client.facts["unit"] == "user"


# -- a federation ------------------------------------------------------------------------------

ROUNDS, RATE = 5, 0.5
PLAN = NoisePlan(1.0, Constant(), Poisson(), RATE, MeanGradient(C))


def client(records: Any, folder: Path, **settings: Any) -> QueryClient:
    given = {"run": "trial", "rounds": ROUNDS, "target_epsilon": math.inf, "target_delta": DELTA}
    return QueryClient(records, PLAN, ReleaseLedger(folder, "data"), **{**given, **settings})


def server(module: Any, noise: Any = "client", run: str = "trial") -> SynchronousServer:
    start = flatten(list(module.parameters())).detach()
    return SynchronousServer(run, PLAN, start, ROUNDS, 1, 5, 0.1, noise)


def test_epsilon_is_that_of_users(module, tmp_path):
    machine, one = server(module), client(local(module, most_rows=2), tmp_path)
    while not machine.is_done:
        machine.receive(0, one.answer(machine.request(0)))
    assert machine.round == ROUNDS
    event = PoissonSampledDpEvent(RATE, GaussianDpEvent(1.0))
    oracle = Oracle(value_discretization_interval=5e-4).compose(SelfComposedDpEvent(event, ROUNDS))
    assert one.epsilon == pytest.approx(oracle.get_epsilon(DELTA), rel=2e-3)
    assert one.facts["unit"] == "user" and history(tmp_path) == [(PLAN.event(0), ROUNDS)]


class Watched(TensorDataset):
    """Looks into the journal at each read, and may stop the process."""

    folder, stops = Path(), False

    def __getitem__(self, row: int) -> Any:
        self.read.append(row)
        assert history(self.folder)
        if self.stops and len(self.read) > 3:
            raise KeyboardInterrupt
        return super().__getitem__(row)


@pytest.mark.parametrize("noise", ["client", "server"])
def test_a_killed_round_is_charged_before_data_and_made_again_from_the_same_rows(
    module, noise, tmp_path
):
    users = [row // 8 for row in range(320)]
    dataset = Watched(*data(users, [1.0] * 320).tensors)
    dataset.folder, dataset.stops, dataset.read = tmp_path, True, []
    machine = server(module, noise)

    def again() -> QueryClient:  # a new process
        records = local(module, dataset, users, most_rows=2, try_first=False)
        return client(records, tmp_path, trusts_server=noise == "server")

    with pytest.raises(KeyboardInterrupt):
        again().answer(machine.request(0))
    assert history(tmp_path) == [(PLAN.event(0), 1)]
    began, dataset.read, dataset.stops = dataset.read, [], False
    reply = again().answer(machine.request(0))
    assert dataset.read[: len(began)] == began and len(dataset.read) > len(began)
    assert {*Counter(users[row] for row in dataset.read).values()} == {2}
    read, dataset.read = dataset.read, []
    assert again().answer(machine.request(0)) == reply
    assert dataset.read == (read if noise == "server" else [])  # what has no noise is on no disk
    assert history(tmp_path) == [(PLAN.event(0), 1)]


# -- refused -----------------------------------------------------------------------------------


def test_what_cannot_protect_users_is_refused(module, tmp_path):
    with pytest.raises(ValueError, match=r"unit='people' must be one of .*, or a UserLevel"):
        LocalRecords(module, data(), unit="people")
    with pytest.raises(ValueError, match="engine='hooks' has gradients of rows"):
        local(module, engine="hooks")
    with pytest.raises(ValueError, match="has 11 ids, and the training set has 12 rows"):
        local(module, users=USERS[1:])
    with pytest.raises(ValueError, match="a row has no id"):
        local(module, users=[None, *USERS[1:]])
    client(local(module), tmp_path).answer(server(module).request(0))
    other = client(LocalRecords(module, data()), tmp_path, run="another")
    request = server(module, run="another").request(0)
    with pytest.raises(ValueError, match=r"unit='record': run 'trial' over .* has unit='user'"):
        other.answer(request)


def test_rows_of_one_user_may_meet_alone_and_those_of_two_may_not(classifier, mlp, tmp_path):
    class Spread(classifier):
        """A row alone has no gradient."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found = self(batch[0])
            return (found - found.mean(0)).square().sum(1).mean()

    module = Spread(mlp())
    request = server(module).request(0)
    coupled = client(local(module, engine="layers"), tmp_path)
    with pytest.raises((MisconfigurationException, ValueError), match="record"):
        coupled.answer(request)
    assert history(tmp_path) == []
    alone = client(local(module, engine="one_by_one"), tmp_path)
    assert Message.from_bytes(alone.answer(request)).kind == "answer"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_collate_fn_that_sorts_rows_would_give_them_to_other_users(classifier, sign, tmp_path):
    def by_length(rows: list[Any]) -> Any:
        x, y = zip(*sorted(rows, key=lambda row: sign * len(row[0])), strict=True)
        return nn.utils.rnn.pad_sequence([*x], batch_first=True), torch.stack([*y])

    class Summed(classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum(1)

    module = Summed(nn.Linear(6, 3, bias=False))
    rows = [(torch.randn(2 + row % 5, 6), torch.tensor(row % 3)) for row in range(12)]
    loader = DataLoader(rows, 4, collate_fn=by_length)
    with pytest.raises(MisconfigurationException, match="couples the records"):
        client(local(module, loader), tmp_path).answer(server(module).request(0))
    assert history(tmp_path) == []
    one = client(local(module, loader, engine="one_by_one"), tmp_path)
    assert Message.from_bytes(one.answer(server(module).request(0))).kind == "answer"


def test_the_loader_of_a_training_gives_the_ids_by_name(module):
    dataset = data()
    dataset.patients = USERS
    records = LocalRecords(module, DataLoader(dataset, 2), unit=UserLevel("patients", most_rows=1))
    assert (records.num_records, records.unit) == (5, "user")
    assert not records.bounded_sum(Query((Term(),), C, 1.0), []).value.any()
