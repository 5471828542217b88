"""What leaves a client of DP-FCRN, what it books for it, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lightning_dp.accounting import Gaussian, PoissonGaussian, epsilon
from lightning_dp.boundary import BoundedSum, bounded_sum
from lightning_dp.estimators import CubicNewton
from lightning_dp.federated import AsyncServer
from lightning_dp.federated.cubic_newton import CubicNewtonClient
from lightning_dp.federated.protocol import Message, MessageError
from lightning_dp.gradients.materialised import MaterialisedGradients

RECORDS, SIZE = 12, 5


class Answers:
    """Records that answer with a function of the query."""

    num_records, unit = RECORDS, "record"

    def __init__(self, answer, num_records=RECORDS):
        self.answer, self.num_records = answer, num_records

    def bounded_sum(self, query, records):
        return self.answer(query)


def zeros(size):
    return lambda query: BoundedSum(
        torch.zeros(query.size(size), dtype=torch.float64), query.clip_norm
    )


def asked(model, **changes):
    facts = {"run": "trial", "round": 0, "counter": 0, **changes}
    return Message("round", facts, {"model": model}).to_bytes()


@pytest.mark.parametrize("whole_steps", [False, True])
def test_one_record_moves_no_answer_by_more_than_the_noise_is_made_for(federation, whole_steps):
    """Random and adversarial gradients and Hessians: aligned, huge, indefinite, not finite."""
    generator = torch.Generator().manual_seed(0)
    g = 3 * torch.randn(RECORDS, SIZE, generator=generator, dtype=torch.float64)
    h = torch.randn(RECORDS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    h = h + h.transpose(1, 2)
    h[0], h[1], g[2, 0], h[3] = 1e6 * torch.eye(SIZE), -1e3, math.nan, math.inf
    kept, ratios = SIZE if whole_steps else 3, []

    def summed(query, rows):
        rows = rows if query.coordinates is None else rows[:, query.coordinates]
        return bounded_sum(MaterialisedGradients([rows[0] * 0], [rows], 1.0), query.clip_norm)

    def answer(query):
        rows, length = g.clone(), 0.0
        for term in query.terms[1:]:
            rows = rows + (h @ term.direction)
            length = float(term.direction.norm())
        delta = math.sqrt(kept / SIZE) * (0.5 + 0.3 * length)
        assert query.clip_norm == pytest.approx(delta, rel=1e-12)
        assert query.noise_multiplier == pytest.approx(0.8 * 2)  # z √τ
        total = summed(query, rows)
        for left_out in range(RECORDS):
            others = [j for j in range(RECORDS) if j != left_out]
            ratios.append(float((total.value - summed(query, rows[others]).value).norm()) / delta)
        return total

    run = federation.but(sample_rate=1.0, whole_steps=whole_steps)
    run.client(0, Answers(answer)).answer(run.server().request(0))
    assert len(ratios) == 4 * RECORDS
    assert 0.999 < max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize("keep", [500, 4000])
def test_the_noise_in_a_message_has_the_size_it_was_booked_with(federation, keep):
    """Records whose gradient is 0: -(d/k) η z Δ / N is all that is sent, with Δ = √(k/d) C."""
    newton = CubicNewton(1.0, 0.0, 1, max_grad_norm=0.5, keep=keep, max_step_size=0.2)
    run = federation.but(newton=newton, clients=1, rounds=1)
    run = replace(run, noise_multiplier=6.0, sample_rate=1.0)
    client = run.client(0, Answers(zeros(4000), 10))
    reply = client.answer(asked(torch.zeros(4000, dtype=torch.float64)))
    sent, ratio = Message.from_bytes(reply).tensor("update", keep), 4000 / keep
    expected = ratio * 0.2 * 6.0 * 0.5 / math.sqrt(ratio) / 10
    assert float(sent.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * keep))
    assert float(sent.mean()) == pytest.approx(0, abs=4 * expected / math.sqrt(keep))


@pytest.mark.parametrize(
    ("change", "events"),
    [
        ({}, [PoissonGaussian(0.8, 0.5)]),
        ({"sample_rate": 1.0}, [Gaussian(0.8)]),
        ({"fresh_batches": True}, [PoissonGaussian(0.8, 0.5)] * 4),
        ({"sample_rate": 1.0, "fresh_batches": True}, [Gaussian(0.8)] * 4),
        ({"whole_steps": True}, [PoissonGaussian(0.8, 0.5)]),
    ],
)
def test_what_a_client_books(federation, change, events):
    run = federation.but(**change)
    run.in_turn()
    assert run.plan.events(0.8, run.sample_rate) == events
    for number in range(3):
        assert run.ledger(number).history() == [(events[0], 3 * len(events))]
        spent = epsilon([(events[0], 3 * len(events))], 1e-5)
        assert run.client(number).facts["epsilon"] == pytest.approx(spent)


def test_a_round_is_amplified_once(federation):
    """z_s = 1.5, τ = 5, q = .01, T = 1000: 5.25, not the 2.17 of 5000 steps on fresh batches."""
    plan = federation.but(newton=CubicNewton(1.0, 0.0, inner_steps=5)).plan
    (event,) = plan.events(1.5 / math.sqrt(5), 0.01)
    assert epsilon([(event, 1000)], 1e-5) == pytest.approx(5.25, abs=0.01)
    fresh = federation.but(newton=replace(plan.newton, fresh_batches=True)).plan
    events = [(event, 1000) for event in fresh.events(1.5, 0.01)]
    assert epsilon(events, 1e-5) == pytest.approx(2.17, abs=0.01)


def test_a_batch_is_drawn_once_for_a_round_or_for_each_inner_step(federation):
    for fresh in (False, True):
        run = federation.but(fresh_batches=fresh, folder=federation.folder / f"{fresh}", seed=None)
        client = run.client(0)
        client.answer(asked(run.start))
        batches = {tuple(batch) for batch in client.records.asked}
        assert len(client.records.asked) == 4
        assert len(batches) == 1 if not fresh else len(batches) > 1


def test_a_round_that_diverged_draws_no_second_noise(federation):
    """The same error each time: what it depends on is noised, and is charged once."""
    asks = []

    def huge(query):
        asks.append(query)
        return BoundedSum(torch.full((3,), 1e308, dtype=torch.float64), query.clip_norm)

    run = federation.but(max_step_size=None, box=None, strong_convexity=1e-9, seed=None)
    counts = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"inner step \d of 4 is no longer finite"):
            run.client(0, Answers(huge)).answer(asked(run.start))
        counts.append(len(asks))
    assert counts[0] == counts[1] >= 1
    assert run.ledger(0).history() == [(PoissonGaussian(0.8, 0.5), 1)]


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clients": 0}, "clients=0 must be a whole number of at least 1"),
        ({"clients": 2.5}, r"clients=2\.5 must be"),
        ({"rounds": True}, "rounds=True must be"),
        ({"step_scale": 0.0}, r"step_scale=0\.0 must be"),
        ({"step_scale": math.inf}, "step_scale=inf must be"),
        ({"step_scale": math.nan}, "step_scale=nan must be"),
    ],
)
def test_a_plan_refuses_bad_arguments(federation, change, match):
    with pytest.raises(ValueError, match=match):
        federation.but(**change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"noise_multiplier": -0.1}, r"noise_multiplier=-0\.1 must be"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan must be"),
        ({"sample_rate": 0.0}, r"sample_rate=0\.0 must be in \(0, 1\]"),
        ({"sample_rate": math.nan}, "sample_rate=nan must be"),
        ({"privacy": {"target_epsilon": 0.0}}, r"target_epsilon=0\.0 must be"),
        ({"privacy": {"target_delta": 1.0}}, "delta"),
    ],
)
def test_a_client_refuses_bad_arguments(federation, change, match):
    with pytest.raises(ValueError, match=match):
        replace(federation, **change).client(0)


@pytest.mark.parametrize("number", [3, -1])
def test_a_client_that_is_none_is_refused(federation, number):
    with pytest.raises(ValueError, match=rf"client={number} must be a whole number from 0 to 2"):
        federation.client(number, Answers(zeros(SIZE)))


def test_a_client_without_records_is_refused(federation):
    with pytest.raises(ValueError, match="num_records=0 must be at least 1"):
        federation.client(0, Answers(zeros(SIZE), 0))


@pytest.mark.parametrize(
    ("start", "clients", "match"),
    [
        (torch.zeros(2), 3, "keep=3 coordinates of 2"),
        (torch.zeros(2, 3), 3, "start must be a vector of finite numbers"),
        (torch.tensor([0.0, math.nan, 0.0]), 3, "start must be a vector of finite numbers"),
        (torch.zeros(5), 4, "num_clients=4, but the plan has clients=3"),
    ],
)
def test_a_server_refuses_what_the_plan_is_not_for(federation, start, clients, match):
    with pytest.raises(ValueError, match=match):
        AsyncServer("trial", federation.plan, start, clients)


@pytest.mark.parametrize(
    ("values", "change", "match"),
    [
        (torch.zeros(4), {}, "not a vector of 3 numbers"),
        (torch.zeros(3), {"round": 1}, "round 1, which it was not asked for"),
        (torch.full((3,), math.nan), {}, "Client 0 sent values that are not finite"),
    ],
)
def test_a_server_refuses_what_it_did_not_ask_for(federation, values, change, match):
    server = federation.server()
    facts = {"round": 0, "counter": 0, **change}
    with pytest.raises(MessageError, match=match):
        server.receive(0, Message("update", facts, {"update": values}).to_bytes())
    assert server.applied == [0, 0, 0] and torch.equal(server.point, federation.start)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (asked(torch.zeros(2)), "keep=3 coordinates of 2"),
        (asked(torch.zeros(5).half()), "float16"),
        (asked(torch.zeros(5) / 0), "not finite"),
        (
            Message("round", {"run": "trial", "round": 0, "counter": 0}).to_bytes(),
            "no tensor 'model'",
        ),
    ],
)
def test_a_client_refuses_such_requests_and_pays_nothing(federation, request_, match):
    client: CubicNewtonClient = federation.client(0)
    with pytest.raises(MessageError, match=match):
        client.answer(request_)
    assert federation.ledger(0).history() == []
