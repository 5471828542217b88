"""DP-FCRN: the paper's steps, the noise of what leaves a client, and what it books and refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_dp import Constant, Poisson
from lightning_dp.accounting import Gaussian, PoissonGaussian, epsilon
from lightning_dp.boundary import BoundedSum
from lightning_dp.estimators import CubicNewton
from lightning_dp.federated import AsyncServer
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message, MessageError
from lightning_dp.noise_plan import NoisePlan
from tests.federated.zoo import (
    CLIENTS,
    DELTA,
    NEWTON,
    RECORDS,
    SIZE,
    START,
    LogCosh,
    fcrn,
    history,
    play,
    summed,
)

PLAN = CubicNewtonPlan(NEWTON, clients=CLIENTS, rounds=3, step_scale=0.7)


def plan(**changes) -> CubicNewtonPlan:
    own = {k: changes.pop(k) for k in [*changes] if hasattr(PLAN, k)}
    return replace(PLAN, **{"newton": replace(NEWTON, **changes), **own})


def asked(model=START, **changes) -> bytes:
    return Message("round", {"run": "trial", "round": 0, **changes}, {"model": model}).to_bytes()


def client(
    folder, the_plan=PLAN, records=None, noise=0.8, rate=0.5, **changes
) -> CubicNewtonClient:
    make = fcrn(the_plan, noise, rate).client
    budget = {"target_epsilon": math.inf, "target_delta": DELTA, **changes}
    number = budget.pop("number", 0)
    ledger = ReleaseLedger(folder, "data")
    return make(records or LogCosh(seed=0), number, ledger, run="trial", **budget)


class Answers:
    """Records that answer with a function of the query."""

    unit = "record"

    def __init__(self, answer, num_records=RECORDS):
        self.answer, self.num_records = answer, num_records

    def bounded_sum(self, query, records):
        return self.answer(query)


# -- the steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize(
    ("changes", "noise", "rate"),
    [
        ({"max_grad_norm": 1e9, "max_hessian_norm": 1e9}, 0.0, 1.0),  # the paper's own
        ({"keep": None}, 0.8, 0.5),
        ({"fresh_batches": True}, 0.8, 0.5),
        ({"fresh_batches": True}, 0.8, 1.0),
        ({}, 0.8, 1.0),
    ],
)
def test_the_federation_is_its_twin(tmp_path, whole_steps, changes, noise, rate):
    federation = fcrn(plan(**changes, whole_steps=whole_steps), noise, rate)
    end = play(federation.begin(), federation.clients(tmp_path)).point
    torch.testing.assert_close(end, federation.twin(), rtol=0, atol=1e-12)
    assert float((end - START).norm()) > 0.05
    for c in range(CLIENTS):
        assert history(tmp_path, f"client-{c}") == federation.events(c)


def test_one_inner_step_is_fed_sgd(tmp_path):
    newton = CubicNewton(0.001, 0.0, 1, max_grad_norm=1e9, max_step_size=0.3)
    federation = fcrn(CubicNewtonPlan(newton, CLIENTS, 4, step_scale=2.0), 0.0, 1.0)
    x = START
    for _ in range(4):
        x = x - 0.6 * sum(LogCosh(seed=c).rows(x).mean(0) for c in range(CLIENTS)) / CLIENTS
    end = play(federation.begin(), federation.clients(tmp_path)).point
    torch.testing.assert_close(end, x, rtol=0, atol=1e-12)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        u = self.layer(batch[0])[:, 0] - batch[1]
        return (u.abs() + nn.functional.softplus(-2 * u.abs()) - math.log(2)).mean()


def test_an_ordinary_module_and_its_data_make_the_same_updates(tmp_path):
    """Hessian-vector products are the gradient engine's."""
    data = LogCosh(seed=0)
    records = LocalRecords(Module(), TensorDataset(data.x, data.y), chunk_size=7)
    replies = [
        client(tmp_path / name, records=each, seed=5).answer(asked())
        for name, each in (("one", data), ("other", records))
    ]
    one, other = (Message.from_bytes(reply).tensor("update") for reply in replies)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_mean_of_sparse_steps_is_what_the_server_adds():
    """(α/n) Σ_i S_i(u_i), S unbiased: over many rounds' sets, the mean of the whole steps."""
    sparse = plan(keep=2, clients=2)
    steps = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, SIZE)
    total, count, sets = START * 0, 1500, set()
    for t in range(count):
        for c, step in enumerate(steps):
            moved = sparse.move(START * 0, t, sparse.update(step, t, c), c)
            total, sets = total + moved, sets | {(c, tuple(moved.nonzero().flatten().tolist()))}
    torch.testing.assert_close(total / count, 0.7 * steps.mean(0), rtol=0.05, atol=0)
    assert len(sets) == 2 * 6


# -- noise and charges -------------------------------------------------------------------------


@pytest.mark.parametrize("whole_steps", [False, True])
def test_one_record_moves_no_answer_by_more_than_the_noise_is_made_for(tmp_path, whole_steps):
    """Random and adversarial gradients and Hessians: aligned, huge, indefinite, not finite."""
    generator, count = torch.Generator().manual_seed(0), 12
    g = 3 * torch.randn(count, SIZE, generator=generator, dtype=torch.float64)
    h = torch.randn(count, SIZE, SIZE, generator=generator, dtype=torch.float64)
    h = h + h.transpose(1, 2)
    h[0], h[1], g[2, 0], h[3] = 1e6 * torch.eye(SIZE), -1e3, math.nan, math.inf
    kept, ratios = SIZE if whole_steps else 3, []

    def answer(query):
        rows, length = g.clone(), 0.0
        for term in query.terms[1:]:
            rows = rows + (h @ term.direction)
            length = float(term.direction.norm())
        delta = math.sqrt(kept / SIZE) * (0.5 + 0.3 * length)
        assert query.clip_norm == pytest.approx(delta, rel=1e-12)
        assert query.noise_multiplier == pytest.approx(0.8 * 2)  # z √τ
        total = summed(rows, query)
        for left_out in range(count):
            others = rows[torch.arange(count) != left_out]
            ratios.append(float((total.value - summed(others, query).value).norm()) / delta)
        return total

    one = client(tmp_path, plan(whole_steps=whole_steps), Answers(answer), rate=1.0)
    one.answer(asked())
    assert len(ratios) == 4 * count
    assert 0.999 < max(ratios) <= 1 + 1e-9


def test_a_round_is_amplified_once():
    """z_s = 1.5, τ = 5, q = .01, T = 1000: 5.25, not the 2.17 of 5000 steps on fresh batches."""
    newton = CubicNewton(1.0, 0.0, inner_steps=5)
    (event,) = plan(newton=newton).events(1.5 / math.sqrt(5), 0.01)
    assert epsilon([(event, 1000)], 1e-5) == pytest.approx(5.25, abs=0.01)
    fresh = plan(newton=replace(newton, fresh_batches=True)).events(1.5, 0.01)
    assert epsilon([(event, 1000) for event in fresh], 1e-5) == pytest.approx(2.17, abs=0.01)
    assert PLAN.events(0.8) == [Gaussian(0.8)]


@pytest.mark.parametrize("fresh", [False, True])
def test_epsilon_by_the_plan_is_that_of_a_training_in_one_process(fresh):
    z, q = 3.0, 0.05
    agreed = plan(fresh_batches=fresh, noise_multiplier=z, sample_rate=q)
    server = AsyncServer("trial", replace(agreed, clients=1), START, 1)
    for t in range(PLAN.rounds):
        zeros = Message("update", {"round": t}, {"update": START[:3] * 0})
        assert server.receive(0, zeros.to_bytes())
    alone = NoisePlan(z, Constant(), Poisson(), q, agreed.newton)
    steps = PLAN.rounds * (NEWTON.inner_steps if fresh else 1)  # there a fresh batch is a step
    expected = epsilon([alone.event(t) for t in range(steps)], DELTA)
    found = epsilon(server.spent(RECORDS, 0), DELTA)
    assert found == pytest.approx(expected, rel=1e-3) and 0.1 < found < 10
    for unknown in ({"sample_rate": None}, {"noise_multiplier": None}):
        assert replace(agreed, **unknown).cost(0, RECORDS) is None


def test_a_round_that_diverged_moves_nothing_and_draws_no_second_noise(tmp_path, caplog):
    """Zeros each time: what they depend on is noised, and is charged once."""
    counts = []

    def huge(query):
        counts[-1] += 1
        return BoundedSum(torch.full((3,), 1e308, dtype=torch.float64), query.clip_norm)

    steep = plan(max_step_size=None, box=None, strong_convexity=1e-9)
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    for _ in range(2):
        counts.append(0)
        reply = Message.from_bytes(client(tmp_path, steep, Answers(huge)).answer(asked()))
        assert torch.equal(reply.tensor("update"), torch.zeros(3, dtype=torch.float64))
    assert "sends zeros for round 0" in caplog.text and "no longer finite" in caplog.text
    assert counts[0] >= 1 and counts[1] == 0
    assert history(tmp_path) == [(PoissonGaussian(0.8, 0.5), 1)]


# -- bad input ---------------------------------------------------------------------------------


def test_a_model_of_half_precision_is_refused_at_no_cost(tmp_path):
    with pytest.raises(MessageError, match="DP-FCRN needs float32 or float64"):
        client(tmp_path, records=Answers(None)).answer(asked(torch.zeros(5).half()))
    assert history(tmp_path) == []
