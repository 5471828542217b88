"""Synchronous rounds: a client holds its server to the plan, and each step is charged once."""

from __future__ import annotations

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import Constant, CubicNewton, Diff2, FullBatch, MeanGradient, Poisson, Query, Term
from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.estimators import Storm
from lightning_dp.estimators.base import AbstractEstimator, Traits, share_of_noise
from lightning_dp.federated.client import check_fingerprint, fingerprint
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message, MessageError
from lightning_dp.federated.synchronous import BVRLSGD, QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import CyclicPoisson, TruncatedPoisson
from tests.federated.zoo import (
    CLIENTS,
    DIFF2,
    RECORDS,
    ROUTINE,
    SIZE,
    START,
    LogCosh,
    Z,
    diff2,
    files,
    history,
)

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")


def plan_of(estimator: AbstractEstimator, rate: float = 1.0, z: float = Z) -> NoisePlan:
    return NoisePlan(z, Constant(), FullBatch() if rate == 1 else Poisson(), rate, estimator)


def server(plan: NoisePlan, start: Tensor = START, **changes: Any) -> SynchronousServer:
    given = {"rounds": 4, "num_clients": 1, "num_records": RECORDS, "learning_rate": 0.2}
    return SynchronousServer("trial", plan, start, **{**given, "noise": "client", **changes})


def client(folder: Path, plan: NoisePlan, data: Any = None, **changes: Any) -> QueryClient:
    given = {"run": "trial", "rounds": 4, "target_epsilon": math.inf, "target_delta": 1e-5}
    ledger = ReleaseLedger(folder, "data")
    return QueryClient(LogCosh() if data is None else data, plan, ledger, **{**given, **changes})


# -- charges and batches -----------------------------------------------------------------------


def test_poisson_batches_are_of_the_plans_rate(tmp_path):
    plan, data = plan_of(MeanGradient(1.0), 0.3), LogCosh()
    one, machine = client(tmp_path, plan, data, rounds=50), server(plan, rounds=50)
    while not machine.is_done:
        machine.receive(0, one.answer(machine.request(0)))
    sizes = [len(batch) for _, batch in data.asked]
    assert sum(sizes) / 50 == pytest.approx(0.3 * RECORDS, rel=0.2) and len(set(sizes)) > 3
    assert history(tmp_path) == [(PoissonGaussian(Z, 0.3), 50)]


def test_only_a_trusted_server_gets_sums_without_noise_and_no_disk_does(tmp_path):
    plan = plan_of(MeanGradient(1.0))
    request = server(plan, noise="server").request(0)
    with pytest.raises(MessageError, match="trusts_server=True"):
        client(tmp_path, plan).answer(request)
    assert not files(tmp_path)
    reply = client(tmp_path, plan, trusts_server=True).answer(request)
    assert client(tmp_path, plan, trusts_server=True).answer(request) == reply
    payload = Message.from_bytes(reply).tensors["sum"].numpy().tobytes()
    assert payload in reply and all(payload not in content for content in files(tmp_path).values())
    one = server(plan, noise="server", num_clients=2)
    assert one.receive(0, reply) and one.awaited == {1}  # the sum so far is that reply's
    torch.save(one.state_dict(), tmp_path / "server.pt")
    assert payload not in (tmp_path / "server.pt").read_bytes()
    again = server(plan, noise="server", num_clients=2)
    again.load_state_dict(one.state_dict())
    assert again.awaited == {0, 1} and again.request(0) == one.request(1)


@pytest.mark.parametrize("start", [START, START + 1])
def test_two_servers_of_one_name_do_not_both_noise_a_sum(start, tmp_path):
    """One charge is for one noise; a server that goes on from its state is the same one."""
    plan = plan_of(MeanGradient(1.0))
    one, other = server(plan, noise="server"), server(plan, start, noise="server")
    reply = client(tmp_path, plan, trusts_server=True).answer(one.request(0))
    with pytest.raises(MessageError, match=r"without noise.* another server needs another name"):
        client(tmp_path, plan, trusts_server=True).answer(other.request(0))
    again = server(plan, noise="server")
    again.load_state_dict(one.state_dict())
    assert client(tmp_path, plan, trusts_server=True).answer(again.request(0)) == reply
    one.receive(0, reply)
    client(tmp_path, plan, trusts_server=True).answer(one.request(0))
    assert history(tmp_path) == [(Gaussian(Z), 2)]


@pytest.mark.parametrize("sampling", [TruncatedPoisson(9, num_records=9), CyclicPoisson(2)])
def test_batches_that_are_not_drawn_each_by_itself_are_refused_at_no_cost(sampling, tmp_path):
    plan = NoisePlan(Z, Constant(), sampling, 0.2, MeanGradient(1.0))
    for make in (server, lambda plan: client(tmp_path, plan)):
        with pytest.raises(ValueError, match=r"Use Poisson\(\) or FullBatch\(\)"):
            make(plan)
    assert not files(tmp_path)


class Three(AbstractEstimator):
    """Asks three times on one batch, each time about x minus what it was told."""

    traits = Traits(queries_per_step=3)

    def init(self, params):
        return {"part": 0, "moved": torch.zeros_like(params[0])}

    def ask(self, state, params, step, noise_multiplier):
        z = share_of_noise(noise_multiplier, 3) * (1 + 1e-14)
        return Query((Term(1.0, params[0] - state["moved"]),), 1.0, z)

    def tell(self, state, params, step, released):
        if state["part"] == 2:
            return released.value, self.init(params)
        return None, {"part": state["part"] + 1, "moved": state["moved"] + released.value}


@pytest.mark.parametrize("at", range(3))
def test_an_error_between_the_queries_of_a_step_costs_no_second_charge(tmp_path, at):
    """One batch and one charge for all queries; what was sent before comes again as it was."""

    class Failing(LogCosh):
        calls = 0

        def bounded_sum(self, query, records):
            self.calls += 1
            if self.calls == at + 1:
                raise OSError("record-17.png cannot be read")
            return super().bounded_sum(query, records)

    plan, data, sent, failures = plan_of(Three(), 0.3), Failing(), [], 0
    machine = server(plan, rounds=1)
    while not machine.is_done:
        request = machine.request(0)
        one = client(tmp_path, plan, data, rounds=1)
        try:
            reply = one.answer(request)
        except OSError:
            failures += 1
            assert all(one.answer(old) == same for old, same in sent)
            continue
        sent.append((request, reply))
        machine.receive(0, reply)
    assert failures == 1 and len(sent) == 3
    assert history(tmp_path) == [(PoissonGaussian(Z, 0.3), 1)]
    assert len({tuple(batch) for _, batch in data.asked}) == 1
    together = PoissonRound((data.asked[0][0].noise_multiplier,) * 3, 1.0).pair[0]
    assert together >= Z
    with pytest.raises(ValueError, match="noise='client'"):
        server(plan, noise="server")


def test_who_missed_the_first_query_of_a_step_is_not_asked_the_others(tmp_path):
    """It could not answer them on the batch of the first; it is asked again in the next step."""
    plan, asked = plan_of(Three(), 0.3), set()
    given = {"rounds": 2, "num_clients": 3, "num_records": 3 * RECORDS}
    machine, clients = server(plan, **given), [client(tmp_path / f"{c}", plan) for c in range(3)]
    while not machine.is_done:
        stage = machine.stage
        for c in sorted(machine.awaited - ({2} if stage == (0, 0, False) else set())):
            asked.add((c, *stage[:2]))
            assert machine.receive(c, clients[c].answer(machine.request(c)))
        if machine.stage == stage:
            assert machine.leave_out() == {2}
            restored = server(plan, **given)
            restored.load_state_dict(machine.state_dict())
            assert restored.awaited == machine.awaited == {0, 1}
    everything = {(c, step, part) for c in range(3) for step in range(2) for part in range(3)}
    assert everything - asked == {(2, 0, part) for part in range(3)}
    assert [sum(n for _, n in history(tmp_path / f"{c}")) for c in range(3)] == [2, 2, 1]


def test_where_nothing_moves_nothing_is_asked_of_a_worker():
    assert ROUTINE.ask(ROUTINE.start(START, START * 0)) is None


def test_a_worker_goes_on_alone_in_its_turn_from_a_step_that_can_be_clipped(tmp_path):
    plan = plan_of(DIFF2)

    def walk(c: int, v: Tensor) -> Message:
        one = client(
            *(tmp_path / f"{c}", plan), local_routine=ROUTINE, client=c, num_clients=CLIENTS
        )
        facts = {"run": "trial", "round": 0, "part": 0}
        return Message.from_bytes(
            one.answer(Message("local", facts, {"x": START * 0, "v": v}).to_bytes())
        )

    for c, v, match in (
        (0, START + 1, "not this client's turn"),
        (1, START * 1e-37, "too short or too long"),
        (1, START * 1e37, "too short or too long"),
        (1, START * 1e160, "too short or too long"),
        (1, START[:-1], r"v: \(3,\) of"),
        (1, START.float(), "v: .*float32"),
    ):
        with pytest.raises(MessageError, match=match):
            walk(c, v)
    assert not files(tmp_path / "0") and not files(tmp_path / "1")
    assert walk(1, START + 1).kind == "walked"


# -- replies in the wrong place ----------------------------------------------------------------


def message(kind: str, tensor: str = "", value: Tensor = START) -> bytes:
    tensors = {tensor: value} if tensor else {}
    return Message(kind, {"round": 0, "part": 0}, tensors).to_bytes()


def test_who_has_answered_a_step_does_not_leave_it():
    machine = diff2("client").begin()
    assert machine.receive(0, message("answer", "sum")) is True
    assert machine.receive(0, message("answer", "sum")) is False
    with pytest.raises(MessageError, match="was not asked of it"):
        machine.receive(0, message("refused"))
    with pytest.raises(MessageError, match="sent 'walked', which was not asked"):
        machine.receive(1, message("walked", "x"))
    assert not machine.is_done


def test_only_the_worker_in_turn_goes_on_alone():
    machine = diff2("client", routine=BVRLSGD(0.2, 3, 0.5, 3.0, 0.4)).begin()
    for c in range(CLIENTS):
        machine.receive(c, message("answer", "sum"))
    assert [machine.request(c) is None for c in range(CLIENTS)] == [True, False, True]
    for c, reply in (
        (0, message("walked", "x")),
        (2, message("walked", "x")),
        (0, message("refused")),
    ):
        with pytest.raises(MessageError, match="was not asked of it"):
            machine.receive(c, reply)
    assert machine.receive(1, message("answer", "sum")) is False  # as if it came twice
    with pytest.raises(MessageError, match="farther away than the plan's local routine"):
        machine.receive(1, message("walked", "x", START + 7))
    near = machine.point + 1e-3
    assert machine.receive(1, message("walked", "x", near)) is True
    assert torch.equal(machine.point, near)


def test_a_run_that_diverges_ends_at_its_last_finite_model():
    """The answer is finite, and the step is not."""
    machine = server(plan_of(MeanGradient(1e18), z=0.0), START.float(), learning_rate=1e38)
    machine.receive(0, message("answer", "sum", torch.full((SIZE,), 1e18)))
    assert machine.is_done and "no longer finite" in machine.reason
    assert torch.equal(machine.point, START.float())


# -- queries that are not the plan's -----------------------------------------------------------


class Regression(L.LightningModule):
    """Gradients of very different norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE - 1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.softplus(self.layer(x).squeeze(1) * y).mean()


class Remembering(LocalRecords):
    """Writes down the queries that reached the records."""

    def bounded_sum(self, query, records):
        self.asked = [*getattr(self, "asked", []), query]
        return super().bounded_sum(query, records)


COUNT = 6


def records() -> Remembering:
    x = torch.randn(COUNT, SIZE - 1, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([1.0, -1.0] * (COUNT // 2))
    return Remembering(Regression(), TensorDataset(x * 10 ** torch.arange(3), y))


class Custom(AbstractEstimator):
    """One whose queries a client cannot find out for itself."""

    def init(self, params):
        return {}

    def ask(self, state, params, step, noise_multiplier):
        return Query((Term(0.5), Term(0.5, params[0] + 1)), 1.0, noise_multiplier)

    def tell(self, state, params, step, released):
        return released.value, state


ESTIMATORS = {
    "mean": MeanGradient(0.7),
    "diff2": Diff2(3, 0.5, 0.6, split=2.0),
    "storm": Storm(0.3, 0.5, 0.6),
    "newton": CubicNewton(1.0, 0.0, 3, max_grad_norm=0.5, keep=3, max_step_size=0.5),
    "fresh newton": CubicNewton(1.0, 0.0, 2, keep_fraction=0.5, fresh_batches=True),
    "custom": Custom(),
}


@cache
def requests_of(name: str) -> list[Message]:
    """The requests of an honest server to one client in a whole run."""
    plan, found = plan_of(ESTIMATORS[name]), []
    machine = server(plan, torch.full((SIZE,), 0.1), num_records=COUNT)
    with tempfile.TemporaryDirectory() as folder:
        one = client(Path(folder), plan, records())
        while not machine.is_done:
            request = machine.request(0)
            found.append(Message.from_bytes(request))
            machine.receive(0, one.answer(request))
    return found


@st.composite
def spoilt(draw: st.DrawFn, good: Message) -> Message:
    """The same request, changed in one to three places."""
    facts, tensors = dict(good.facts), dict(good.tensors)
    numbers = [n for n in facts if n.startswith("weight")] + ["clip_norm", "noise_multiplier"]
    for _ in range(draw(st.integers(1, 3))):
        size = 10.0 ** draw(st.floats(-45, 38))
        if draw(st.booleans()) or not tensors:
            name = draw(st.sampled_from(numbers))
            values = [0.0, -1.0, size, -size, math.nan, math.inf, facts[name] * 1.01]
            facts[name] = draw(st.sampled_from([*values, facts[name] / size]))
            continue
        name = draw(st.sampled_from(sorted(tensors)))
        t = tensors.pop(name)
        values = [t * size, t / size, t + size, t * math.nan, t * 0, t[:-1], t[:0], t.flip(0)]
        values += [torch.cat([t, t]), t.double() * 1e200, t.half(), t.long()]
        number = draw(st.integers(0, len(values)))
        if number < len(values):  # else it is left out
            tensors[name] = values[number]
    return Message(good.kind, facts, tensors)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_hostile_query_is_refused_at_no_cost_or_has_the_planned_noise(data):
    """The oracle: the largest part of one record that is really added, against the noise."""
    name = data.draw(st.sampled_from(sorted(ESTIMATORS)))
    plan, honest = plan_of(ESTIMATORS[name]), requests_of(name)
    good = data.draw(st.sampled_from(honest))
    bad = data.draw(spoilt(good))
    with tempfile.TemporaryDirectory() as temporary:
        folder, local = Path(temporary), records()
        one = client(folder, plan, local)
        for earlier in honest[: honest.index(good)]:
            if earlier["round"] == good["round"]:  # earlier parts of the same step
                one.answer(earlier.to_bytes())
        before, local.asked = files(folder), []
        try:
            one.answer(bad.to_bytes())
        except MessageError:
            assert files(folder) == before
        else:
            z, parts = plan.noise_multiplier(good["round"]), []
            least = share_of_noise(z, plan.estimator.traits.queries_per_step)
            (query,) = local.asked
            for i in range(COUNT):
                parts.append(float(LocalRecords.bounded_sum(local, query, [i]).value.norm()))
            noise = query.noise_multiplier * query.clip_norm
            assert noise >= least * max(parts) * (1 - 1e-5)
        one.answer(good.to_bytes())  # it lives on


ONE = torch.ones(SIZE)


@pytest.mark.parametrize(
    ("name", "number", "facts", "tensors", "match"),
    [
        ("mean", 0, {"clip_norm": 0.70001}, {}, r"clip_norm=0\.70001 at step 0.*0\.7"),
        ("mean", 0, {"weight0": 0.5}, {}, "weight0 of step 0"),
        ("mean", 0, {"noise_multiplier": 2.001}, {}, r"noise_multiplier=2\.001 at step 0.*2\.0"),
        ("mean", 0, {"noise_multiplier": 1.99}, {}, r"noise_multiplier=1\.99 at step 0, below"),
        ("mean", 0, {"noise_multiplier": math.nan}, {}, "cannot be asked"),
        ("mean", 0, {"clip_norm": math.inf}, {}, "cannot be asked"),
        ("mean", 0, {"weight0": 1e-30, "clip_norm": 1e-35}, {}, "clip_norm"),
        ("mean", 0, {"noise": "nobody"}, {}, "noise='nobody'"),
        ("mean", 0, {"part": 1}, {}, "Part 1 of step 0"),
        ("mean", 0, {"run": "other"}, {}, "run 'trial'"),
        ("diff2", 1, {"weight1": -0.5}, {}, "weight1 of step 1"),
        ("diff2", 1, {}, {"point0": ONE, "point1": ONE}, "asks nothing about these points"),
        ("storm", 1, {"weight1": -1.0}, {}, "weight1 of step 1"),
        ("newton", 0, {}, {"coordinates": torch.tensor([0])}, "oordinates"),
        ("newton", 0, {}, {"coordinates": torch.tensor([9])}, "Coordinate 9 of 4"),
        ("newton", 0, {}, {"direction0": ONE}, "direction0"),
        ("newton", 1, {"clip_norm": 0.5}, {}, r"clip_norm=0\.5 at step 0"),
        ("newton", 1, {}, {"direction1": ONE}, "direction1 of step 0"),
        ("custom", 0, {"clip_norm": 1e-20}, {}, "cannot be clipped"),
        ("custom", 0, {"weight1": 1e-30}, {}, "weight 1e-30"),
    ],
)
def test_what_differs_from_the_plan_is_named(tmp_path, name, number, facts, tensors, match):
    plan, good = plan_of(ESTIMATORS[name]), requests_of(name)[number]
    bad = Message("query", {**good.facts, **facts}, {**good.tensors, **tensors})
    with pytest.raises(MessageError, match=match):
        client(tmp_path, plan, records()).answer(bad.to_bytes())
    assert not files(tmp_path)


# -- the server's module -----------------------------------------------------------------------


class Partly(nn.Module):
    """A frozen layer, a trained one, a buffer."""

    def __init__(self, seed: int = 0, buffer: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Linear(3, 3).requires_grad_(False)
        for param in self.body.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("features", torch.full((2,), buffer))


class Reordered(Partly):
    def __init__(self) -> None:
        super().__init__()
        self.first = self._modules.pop("first")


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Partly(seed=1), r"frozen parameters body\.weight, body\.bias are not"),
        (Partly().double(), r"first\.weight \(torch\.float32 \[1, 3\]\).*torch\.float64"),
        (Reordered(), r"first\.weight .*where the server has second\.weight"),
        (nn.Sequential(nn.Linear(3, 1)), r"second\.weight .*where the server has nothing"),
    ],
)
def test_another_module_at_the_server_is_refused_by_the_names_of_its_parts(module, match):
    with pytest.raises(MessageError, match=match):
        check_fingerprint(fingerprint(module), fingerprint(Partly()))


def test_equal_modules_agree_and_buffers_that_differ_are_logged(caplog):
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    here = fingerprint(Partly())
    check_fingerprint(fingerprint(Partly()), here)
    assert not caplog.text
    check_fingerprint(fingerprint(Partly(buffer=1)), here)
    assert "buffers features" in caplog.text
    for nonsense in ("", "{}", "[]", "null", '{"trained": 1, "frozen": 2, "buffers": 3}', "\0"):
        with pytest.raises(MessageError, match="cannot be read"):
            check_fingerprint(nonsense, here)
