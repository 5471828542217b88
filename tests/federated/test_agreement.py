"""A client holds the server to its plan before it charges, and lives on."""

from __future__ import annotations

import math
import random
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import CubicNewton
from lightning_dp.boundary import Query, Term
from lightning_dp.estimators import Diff2, MeanGradient, Storm
from lightning_dp.estimators.base import AbstractEstimator, share_of_noise
from lightning_dp.federated.client import check_fingerprint, fingerprint
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message, MessageError
from lightning_dp.federated.synchronous import BVRLSGD, QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import Constant

SIZE, RECORDS, ROUNDS, Z = 4, 6, 4, 2.0
ROUTINE = BVRLSGD(0.2, 3, 0.5, noise_multiplier=Z, sample_rate=0.5)

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")


class Regression(L.LightningModule):
    """Gradients of very different lengths."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE - 1, 1).to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.softplus(self.layer(x).squeeze(1) * y).mean()


class Remembering(LocalRecords):
    """Writes down the queries that reached the records."""

    def bounded_sum(self, query, records):
        self.asked = [*getattr(self, "asked", []), query]
        return super().bounded_sum(query, records)


def records(dtype: torch.dtype = torch.float32) -> Remembering:
    x = torch.randn(RECORDS, SIZE - 1, generator=torch.Generator().manual_seed(0), dtype=dtype)
    y = torch.tensor([1.0, -1.0] * (RECORDS // 2), dtype=dtype)
    return Remembering(Regression(dtype), TensorDataset(x * 10 ** torch.arange(3), y))


class Custom(AbstractEstimator):
    """One whose queries a client cannot find out for itself."""

    def init(self, params):
        return {}

    def ask(self, state, params, step, noise_multiplier):
        return Query((Term(0.5), Term(0.5, params[0] + 1)), 1.0, noise_multiplier)

    def tell(self, state, params, step, released):
        return released.value, state


NEWTON = CubicNewton(1.0, 0.0, 3, max_grad_norm=0.5, keep=3, max_step_size=0.5)
ESTIMATORS = {
    "mean": MeanGradient(0.7),
    "diff2": Diff2(3, 0.5, 0.6, split=2.0),
    "storm": Storm(0.3, 0.5, 0.6),
    "newton": NEWTON,
    "fresh newton": CubicNewton(1.0, 0.0, 2, keep_fraction=0.5, fresh_batches=True),
    "custom": Custom(),
}


def plan_of(estimator: AbstractEstimator, z: float = Z) -> NoisePlan:
    return NoisePlan(z, Constant(), FullBatch(), 1.0, estimator)


def query_client(folder, plan, data=None, **changes: Any) -> QueryClient:
    settings = {"run": "trial", "rounds": ROUNDS, "target_epsilon": math.inf, "target_delta": 1e-5}
    data = records() if data is None else data
    return QueryClient(data, plan, ReleaseLedger(folder, "data"), **{**settings, **changes})


def requests_of(plan: NoisePlan, folder, **changes: Any) -> list[Message]:
    """What an honest server asks one client in a whole run."""
    start = torch.full((SIZE,), 0.1)
    settings = {"rounds": ROUNDS, "num_clients": 1, "num_records": RECORDS, "learning_rate": 0.2}
    server = SynchronousServer("trial", plan, start, **settings, noise="client", **changes)
    client, found = query_client(folder, plan, **changes), []
    while not server.is_done:
        request = server.request(0)
        found.append(Message.from_bytes(request))
        server.receive(0, client.answer(request))
    return found


def files(folder) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in folder.glob("*") if p.suffix in (".journal", ".release")
    }


def with_tensor(message: Message, name: str, change) -> Message:
    return Message(
        message.kind, message.facts, {**message.tensors, name: change(message.tensors[name])}
    )


def hostile(message: Message, rng: random.Random) -> Message:
    """The same request, changed in one to three places."""
    size = 10.0 ** rng.uniform(-45, 38)
    for _ in range(rng.randint(1, 3)):
        facts, tensors = dict(message.facts), dict(message.tensors)
        kind = rng.choice(["number", "number", "tensor", "drop"] if tensors else ["number"])
        name = rng.choice([*tensors, ""][: len(tensors) or 1])
        numbers = [n for n in facts if n.startswith("weight")] + ["clip_norm", "noise_multiplier"]
        if kind == "number":
            number = rng.choice(numbers)
            new = rng.choice([0.0, -1.0, size, -size, math.nan, math.inf, facts[number] * 1.01])
            facts[number] = rng.choice([new, facts[number] / size if size else 0.0])
        elif kind == "tensor":
            t = tensors[name]
            scaled = [t * size, t / size, t + size, t * math.nan, torch.zeros_like(t)]
            shaped = [t[:-1], t[:0], t.flip(0), torch.cat([t, t]), t.unsqueeze(0)]
            others = [t.double() * 1e200, t.half(), t.long()]
            tensors[name] = rng.choice([*scaled, *shaped, *others])
        else:
            del tensors[name]
        message = Message(message.kind, facts, tensors)
    return message


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_hostile_query_is_refused_at_no_cost_or_has_the_planned_noise(tmp_path, name):
    """The oracle: the longest part of one record that is really added, against the noise."""
    estimator, rng = ESTIMATORS[name], random.Random(name)
    plan = plan_of(estimator)
    honest, answered = requests_of(plan, tmp_path / "honest"), 0
    for trial in range(25):
        folder = tmp_path / f"{trial}"
        number = rng.randrange(len(honest))
        data = records()
        client = query_client(folder, plan, data)
        for message in honest[:number]:
            if message["round"] == honest[number]["round"]:  # earlier parts of the same step
                client.answer(message.to_bytes())
        before, step = files(folder), honest[number]["round"]
        data.asked = []
        try:
            client.answer(hostile(honest[number], rng).to_bytes())
        except MessageError:
            assert files(folder) == before
        else:
            answered += 1
            least = share_of_noise(plan.noise_multiplier(step), estimator.traits.queries_per_step)
            (query,) = data.asked
            parts = [LocalRecords.bounded_sum(data, query, [i]).value for i in range(RECORDS)]
            longest = max(float(part.double().norm()) for part in parts)
            noise = query.noise_multiplier * query.clip_norm
            assert noise >= least * longest * (1 - 1e-5)
        client.answer(honest[number].to_bytes())  # it lives on
    assert answered < 20


def test_tiny_weights_and_clip_norm_do_not_get_the_gradient_without_noise(tmp_path):
    plan = plan_of(MeanGradient(1.0))
    (first, *_) = requests_of(plan, tmp_path / "honest")
    client = query_client(tmp_path / "c", plan)
    for facts in ({"weight0": 1e-30, "clip_norm": 1e-35}, {"clip_norm": 1e-35}, {"weight0": 1e-30}):
        message = Message("query", {**first.facts, **facts}, first.tensors)
        with pytest.raises(MessageError, match=r"weights|clip_norm"):
            client.answer(message.to_bytes())
    assert not files(tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "number", "facts", "match"),
    [
        ("mean", 0, {"clip_norm": 0.70001}, r"clip_norm=0\.70001 at step 0.*0\.7"),
        ("mean", 0, {"weight0": 0.5}, r"weights \[0\.5\] at step 0.*\[1\.0\]"),
        ("mean", 0, {"noise_multiplier": 2.001}, r"noise_multiplier=2\.001 at step 0.*2\.0"),
        ("mean", 0, {"noise_multiplier": 1e300}, "noise_multiplier=1e"),
        ("diff2", 1, {"clip_norm": 0.5}, r"clip_norm=0\.5 at step 1"),
        ("diff2", 1, {"weight1": -0.5}, r"\[1\.0, -0\.5\] at step 1.*\[1\.0, -1\.0\]"),
        ("diff2", 3, {"weight0": -1.0}, "at step 3"),
        ("storm", 1, {"weight1": -1.0}, r"-1\.0\] at step 1"),
        ("newton", 1, {"clip_norm": 0.5}, r"clip_norm=0\.5 at step 0"),
        ("custom", 0, {"clip_norm": 1e-20}, "cannot be clipped"),
        ("custom", 0, {"clip_norm": 1e20}, "cannot be clipped"),
        ("custom", 0, {"weight1": 1e-30}, "weight 1e-30"),
    ],
)
def test_what_differs_from_the_plan_is_named(tmp_path, name, number, facts, match):
    plan = plan_of(ESTIMATORS[name])
    message = requests_of(plan, tmp_path / "honest")[number]
    bad = Message("query", {**message.facts, **facts}, message.tensors)
    with pytest.raises(MessageError, match=match):
        query_client(tmp_path / "c", plan).answer(bad.to_bytes())
    assert not files(tmp_path / "c")


def test_a_plain_gradient_is_not_asked_where_the_plan_has_a_difference(tmp_path):
    plan = plan_of(ESTIMATORS["diff2"])
    first, second, *_ = requests_of(plan, tmp_path / "honest")
    facts = {**first.facts, "round": 1, "noise_multiplier": second["noise_multiplier"]}
    with pytest.raises(MessageError, match="asks nothing about these points"):
        query_client(tmp_path / "c", plan).answer(Message("query", facts, first.tensors).to_bytes())


def test_coordinates_and_directions_are_those_of_the_plan(tmp_path):
    plan = plan_of(NEWTON)
    first, second, *_ = requests_of(plan, tmp_path / "honest")
    client = query_client(tmp_path / "c", plan)
    bad = [
        with_tensor(first, "coordinates", lambda c: torch.tensor([0])),
        with_tensor(first, "coordinates", lambda c: c + 1),
        Message("query", first.facts, {"point0": first.tensors["point0"]}),
        Message("query", first.facts, {**first.tensors, "direction0": torch.ones(SIZE)}),
    ]
    for message in bad:
        with pytest.raises(MessageError, match=r"oordinate|direction0|clip_norm"):
            client.answer(message.to_bytes())
    assert not files(tmp_path / "c")
    client.answer(first.to_bytes())
    with pytest.raises(MessageError, match="direction1 of step 0"):
        client.answer(with_tensor(second, "direction1", lambda v: v + 1e-3).to_bytes())
    client.answer(second.to_bytes())


# -- models ------------------------------------------------------------------------------------


def test_numbers_that_overflow_in_one_parameters_dtype_are_refused(tmp_path):
    """Flat, the model is float32; one of its layers is float16."""
    module = Regression()
    module.layer.bias = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    module.training_step = lambda batch, batch_idx: module.layer.weight.sum()
    local = object.__new__(LocalRecords)
    local.params = tuple(module.parameters())
    local.check_point(torch.ones(SIZE))
    with pytest.raises(ValueError, match="not finite in this client's module"):
        local.check_point(torch.full((SIZE,), 1e5))


@pytest.mark.parametrize("factor", [1e-37, 1e37])
def test_a_local_routine_begins_with_a_step_that_can_be_clipped(tmp_path, factor):
    client = query_client(tmp_path, plan_of(ESTIMATORS["mean"]), local_routine=ROUTINE)
    x = torch.zeros(SIZE)
    message = Message("local", {"run": "trial", "round": 0, "part": 0}, {"x": x, "v": x + 0.1})
    with pytest.raises(MessageError, match="too short or too long"):
        client.answer(with_tensor(message, "v", lambda v: v * factor).to_bytes())
    assert not files(tmp_path)


# -- the rest of the module --------------------------------------------------------------------


class Partly(nn.Module):
    """A frozen random layer, a random buffer and a trained layer."""

    def __init__(self, frozen: int = 0, buffer: int = 0, **changes: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(frozen)
            self.body = nn.Linear(3, 3).requires_grad_(False)
            torch.manual_seed(buffer)
            self.register_buffer("features", torch.randn(3))
        self.first = nn.Linear(3, 1, **changes)
        self.second = nn.Linear(3, 1)


class Reordered(Partly):
    def named_parameters(self, *arguments: Any, **named: Any):
        return reversed([*super().named_parameters(*arguments, **named)])


@pytest.mark.parametrize(
    ("server", "match"),
    [
        (Partly(frozen=1), r"frozen parameters body\.weight, body\.bias are not"),
        (
            Partly().requires_grad_(True),
            "trained parameters are not the server's: 4 tensors, and 6",
        ),
        (Partly(bias=False), "4 tensors, and 3"),
        (Partly().double(), r"first\.weight \(torch\.float32 \[1, 3\]\).*torch\.float64"),
        (Reordered(), r"first\.weight .*where the server has second\.bias"),
        (nn.Sequential(nn.Linear(3, 1)), "4 tensors, and 2"),
    ],
)
def test_another_module_at_the_server_is_refused_by_the_names_of_its_parts(server, match):
    with pytest.raises(MessageError, match=match):
        check_fingerprint(fingerprint(server), fingerprint(Partly()))


def test_equal_modules_agree_whatever_their_trained_numbers_are_and_buffers_are_said(caplog):
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    here = fingerprint(Partly())
    check_fingerprint(fingerprint(Partly()), here)
    assert not caplog.text
    check_fingerprint(fingerprint(Partly(buffer=1)), here)
    assert "buffers features" in caplog.text
    for nonsense in ("", "{}", "[]", "null", '{"trained": 1, "frozen": 2, "buffers": 3}', "\0"):
        with pytest.raises(MessageError, match="cannot be read"):
            check_fingerprint(nonsense, here)
