"""What holds for the client of every protocol: charged before data, made once, sent again as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import CubicNewton, MeanGradient, Poisson
from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.federated import AsyncClient, AsyncPlan, ClientPrivacy, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import AbstractClient, Message, MessageError
from lightning_dp.federated.synchronous import BVRLSGD, QueryClient
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.schedules import Constant

SIZE, RECORDS, ROUNDS, Z, RATE, DELTA = 4, 30, 6, 2.0, 0.2, 1e-5
MODEL = torch.full((SIZE,), 0.1, dtype=torch.float64)
EVENT = PoissonGaussian(Z, RATE)
ROUTINE = BVRLSGD(0.2, 3, 0.5, noise_multiplier=Z, sample_rate=RATE)


def sgd(records: Any, ledger: ReleaseLedger, *, run: str, seed: int | None, **budget: Any):
    plan = AsyncPlan(ROUNDS, PolynomialSizes(0, RATE * RECORDS), InverseSteps(0.1, 0.01))
    return AsyncClient(records, plan, ClientPrivacy(1.0, Z, **budget, seed=seed), ledger, run=run)


def queries(records: Any, ledger: ReleaseLedger, **settings: Any):
    plan = NoisePlan(Z, Constant(), Poisson(), RATE, MeanGradient(0.7))
    return QueryClient(records, plan, ledger, rounds=ROUNDS, **settings)


def walks(records: Any, ledger: ReleaseLedger, **settings: Any):
    return queries(records, ledger, local_routine=ROUTINE, **settings)


def newton(records: Any, ledger: ReleaseLedger, **settings: Any):
    step = CubicNewton(1.0, 0.0, 1, max_grad_norm=0.5, max_step_size=0.5)
    plan = CubicNewtonPlan(step, clients=1, rounds=ROUNDS)
    own = {"client": 0, "noise_multiplier": Z, "sample_rate": RATE}
    return CubicNewtonClient(records, plan, ledger, **own, **settings)


@dataclass(frozen=True)
class Protocol:
    """How its client is made, and what a server asks it in a round.

    Args:
        client: from records, ledger, run, seed and budget.
        kind: of its requests.
        points: the tensors of a request that are models.
        facts: of a request, besides run and round.
        events: what a round costs one record.
    """

    client: Callable[..., AbstractClient]
    kind: str
    points: tuple[str, ...]
    facts: dict[str, Any]
    events: Sequence[AbstractEvent] = (EVENT,)

    def make(self, records: Any, folder: Path, **changes: Any) -> AbstractClient:
        """A new process of the client whose ledger is in the folder."""
        settings = {"run": "trial", "seed": None, "target_epsilon": math.inf, "target_delta": DELTA}
        return self.client(records, ReleaseLedger(folder, "data"), **{**settings, **changes})

    def request(self, i: int = 0, model: Tensor = MODEL, **changes: Any) -> bytes:
        facts = {"run": "trial", "round": i, **self.facts, **changes}
        return Message(self.kind, facts, dict.fromkeys(self.points, model)).to_bytes()


ASKED = {"noise": "client", "weight0": 1.0, "clip_norm": 0.7, "noise_multiplier": Z}
PROTOCOLS = {
    "sgd": Protocol(sgd, "round", ("model",), {"counter": 0}),
    "queries": Protocol(queries, "query", ("point0",), {"part": 0, **ASKED}),
    "walks": Protocol(walks, "local", ("x", "v"), {"part": 0}, [EVENT] * 2),
    "newton": Protocol(newton, "round", ("model",), {"counter": 0}),
}


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return PROTOCOLS[request.param]


def history(folder: Path) -> list[tuple[AbstractEvent, int]]:
    return ReleaseLedger(folder, "data").history()


def files(folder: Path) -> dict[str, bytes]:
    kept = (".journal", ".release")
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.suffix in kept}


def spent(protocol: Protocol, rounds: int) -> float:
    return PLDAccountant().epsilon([(EVENT, rounds * len(protocol.events))], DELTA)


# -- charged once, made once ---------------------------------------------------------------------


def test_a_round_is_charged_before_a_record_is_touched(protocol, log_cosh, tmp_path):
    charged = [(EVENT, len(protocol.events))]

    class Failing(log_cosh):
        def bounded_sum(self, query, records):
            assert history(tmp_path) == charged
            raise OSError("the disk is gone")

    for _ in range(2):  # and once, however often it fails
        with pytest.raises(OSError, match="the disk is gone"):
            protocol.make(Failing(), tmp_path).answer(protocol.request())
    assert history(tmp_path) == charged


def test_asked_again_the_same_bytes_come_also_from_a_new_process(protocol, log_cosh, tmp_path):
    """With noise from the operating system: a second draw would average the noise out."""
    client, records, replies = protocol.make(log_cosh(), tmp_path), log_cosh(), []
    for i in range(2):
        replies.append(client.answer(protocol.request(i)))
        assert client.answer(protocol.request(i)) == replies[i]
        assert protocol.make(records, tmp_path).answer(protocol.request(i)) == replies[i]
    if protocol.kind == "round":  # the server may have gone back to its last state
        assert protocol.make(records, tmp_path).answer(protocol.request(0)) == replies[0]
    assert records.asked == [] and replies[0] != replies[1]
    assert history(tmp_path) == [(EVENT, 2 * len(protocol.events))]


def test_noise_and_batches_are_a_function_of_the_seed_and_of_nothing_else(
    protocol, log_cosh, tmp_path
):
    def reply(name: str, i: int, seed: int | None) -> bytes:
        return protocol.make(log_cosh(), tmp_path / name, seed=seed).answer(protocol.request(i))

    first = [reply("one", i, 7) for i in range(2)]
    assert [reply("two", i, 7) for i in range(2)] == first
    (a, b), c = first, reply("three", 0, 8)
    unseeded = [reply(name, 0, None) for name in ("four", "five")]
    tensors = [Message.from_bytes(each).tensors for each in (a, b, c, *unseeded)]
    assert len({tuple(each.tolist()) for found in tensors for each in found.values()}) == 5


@pytest.mark.parametrize("seed", [None, 7])
def test_every_release_has_its_own_noise(protocol, log_cosh, tmp_path, seed):
    """Records whose gradient is 0, so that nothing but the noise is sent."""

    class Silent(log_cosh):
        def gradients(self, point, records):
            return torch.zeros(len(records), SIZE, dtype=torch.float64)

    clients = [protocol.make(Silent(), tmp_path / name, seed=seed) for name in ("one", "other")]
    replies = [client.answer(protocol.request(i)) for client in clients for i in range(3)]
    sent = [value for reply in replies for value in Message.from_bytes(reply).tensors.values()]
    assert len({tuple(value.tolist()) for value in sent}) == (6 if seed is None else 3)


def test_rounds_that_are_over_are_not_made_again(protocol, log_cosh, tmp_path):
    client = protocol.make(log_cosh(), tmp_path)
    for i in range(3):
        client.answer(protocol.request(i))
    with pytest.raises(MessageError, match=r"round \d is over|[Rr]ound 0 .*is over"):
        client.answer(protocol.request(0))
    assert history(tmp_path) == [(EVENT, 3 * len(protocol.events))]


# -- what it costs -------------------------------------------------------------------------------


def test_its_facts_are_what_its_ledger_says(protocol, log_cosh, tmp_path):
    client = protocol.make(log_cosh(), tmp_path, seed=1)
    client.answer(protocol.request())
    assert client.epsilon == client.facts["epsilon"] == spent(protocol, 1)
    assert {"unit": "record", "seeded": True, "delta": DELTA}.items() <= client.facts.items()
    assert protocol.make(log_cosh(), tmp_path).facts["seeded"] is False


@pytest.mark.parametrize("name", ["sgd", "queries", "newton"])
def test_sampling_amplifies_nothing_where_the_client_is_the_unit(name, log_cosh, tmp_path):
    """Its presence is not a matter of chance."""
    records, protocol = log_cosh(), PROTOCOLS[name]
    records.unit = "client"
    client = protocol.make(records, tmp_path)
    client.answer(protocol.request())
    assert history(tmp_path) == [(Gaussian(Z), 1)] and client.facts["unit"] == "client"


@pytest.mark.parametrize("name", ["sgd", "queries", "newton"])
def test_a_round_that_the_budget_does_not_allow_is_refused_each_time(name, log_cosh, tmp_path):
    """It charges nothing, and what was sent before comes again as it was."""
    protocol = PROTOCOLS[name]
    target = spent(protocol, 3) * 1.001
    assert spent(protocol, 4) > target

    def ask(i: int) -> bytes:
        return protocol.make(log_cosh(), tmp_path, target_epsilon=target).answer(
            protocol.request(i)
        )

    replies = [ask(i) for i in range(ROUNDS)]
    refused = [Message.from_bytes(reply).kind == "refused" for reply in replies]
    assert refused == [False] * 3 + [True] * 3
    before = files(tmp_path)
    assert [ask(i) for i in (5, 3, 2, 3, 5)] == [replies[i] for i in (5, 3, 2, 3, 5)]
    assert files(tmp_path) == before and len(before) == 2
    assert protocol.make(log_cosh(), tmp_path, target_epsilon=target).epsilon <= target


def test_a_budget_that_affords_no_round_is_not_touched(protocol, log_cosh, tmp_path):
    client = protocol.make(log_cosh(), tmp_path, target_epsilon=1e-3)
    assert Message.from_bytes(client.answer(protocol.request())).kind == "refused"
    assert history(tmp_path) == []


@pytest.mark.parametrize("name", ["sgd", "queries", "newton"])
def test_a_second_run_over_the_same_data_adds_to_the_ledger(name, log_cosh, tmp_path):
    protocol = PROTOCOLS[name]
    target = spent(protocol, 3) * 1.001
    for i in range(2):
        protocol.make(log_cosh(), tmp_path).answer(protocol.request(i))
    second = {"run": "second", "target_epsilon": target}
    client = protocol.make(log_cosh(), tmp_path, **second)
    kinds = [
        Message.from_bytes(client.answer(protocol.request(i, run="second"))).kind for i in (0, 1)
    ]
    assert kinds[0] != "refused" and kinds[1] == "refused"
    assert history(tmp_path) == [(EVENT, 3 * len(protocol.events))]


def test_a_client_has_no_budget_by_default(protocol, log_cosh, tmp_path):
    ledger, settings = ReleaseLedger(tmp_path, "data"), {"run": "trial", "seed": None}
    settings["target_delta"] = DELTA
    with pytest.raises(TypeError, match="target_epsilon"):
        protocol.client(log_cosh(), ledger, **settings)
    for budget in (None, 0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="target_epsilon="):
            protocol.make(log_cosh(), tmp_path, target_epsilon=budget)
    for budget in (math.inf, 3.0):
        protocol.make(log_cosh(), tmp_path, target_epsilon=budget)


# -- what is refused, at no cost -----------------------------------------------------------------


def test_other_runs_and_other_messages_are_refused_at_no_cost(protocol, log_cosh, tmp_path):
    client = protocol.make(log_cosh(), tmp_path)
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
def test_a_round_beyond_the_plan_is_refused(name, log_cosh, tmp_path):
    client = PROTOCOLS[name].make(log_cosh(), tmp_path)
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
    "infinite": lambda x: x / 0,
    "one infinite": lambda x: torch.cat([x[:-1], torch.tensor([math.inf])]),
    "too short": lambda x: x[:-1],
    "too long": lambda x: torch.cat([x, x]),
    "empty": lambda x: x[:0],
    "float64": lambda x: x.double(),
    "float64 that overflows": lambda x: x.double() + 1e300,
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "whole numbers": lambda x: x.long(),
    "a matrix": lambda x: x.reshape(2, -1),
}


@pytest.mark.parametrize(
    ("name", "tensor"), [(name, point) for name, of in PROTOCOLS.items() for point in of.points]
)
@pytest.mark.parametrize("bad", BAD_MODELS)
def test_a_model_that_is_not_the_clients_is_refused_before_a_charge(tmp_path, name, tensor, bad):
    protocol, data = PROTOCOLS[name], TensorDataset(torch.ones(RECORDS, SIZE - 1))
    client = protocol.make(LocalRecords(Regression(), data), tmp_path)
    good = Message.from_bytes(protocol.request(model=MODEL.float()))
    tensors = {**good.tensors, tensor: BAD_MODELS[bad](good.tensors[tensor])}
    with pytest.raises(MessageError):
        client.answer(Message(good.kind, good.facts, tensors).to_bytes())
    assert not files(tmp_path)
    assert Message.from_bytes(client.answer(good.to_bytes())).tensors  # it lives on
