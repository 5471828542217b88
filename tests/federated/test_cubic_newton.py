"""DP-FCRN: the federation against NumPy, lost and repeated messages, what leaves a client and costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_dp import CubicNewton
from lightning_dp.accounting import Gaussian, PoissonGaussian, epsilon
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.clipping import bounded_sum
from lightning_dp.federated import CubicNewtonClient, FederatedCubicNewton
from lightning_dp.gradients.materialised import MaterialisedGradients
from lightning_dp.mechanism import BudgetExhausted
from lightning_dp.query import BoundedSum, Query
from lightning_dp.sparsify import SparseVector, random_k, shared_mask

CLIENTS, RECORDS, SIZE = 3, 12, 5
START = torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float64)
NEWTON = CubicNewton(
    strong_convexity=0.1,
    hessian_lipschitz=0.7,
    inner_steps=4,
    max_grad_norm=0.5,
    max_hessian_norm=0.3,
    keep=3,
    mask_seed=17,
    box=1.5,
    weight_decay=0.02,
    max_step_size=1.5,
)
RUN = FederatedCubicNewton(
    NEWTON, clients=CLIENTS, rounds=3, noise_multiplier=0.8, sample_rate=0.5, step_scale=0.7
)


def records(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(RECORDS, SIZE, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).double()


def loss(point: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(x @ point, y)


def rows_of(query: Query, x: Tensor, y: Tensor) -> Tensor:
    """What is asked of each record, by automatic differentiation: (records, d)."""
    gradient = torch.func.grad(loss)

    def of_record(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(SIZE, dtype=torch.float64)
        for term in query.terms:
            assert term.point is not None

            def there(point: Tensor) -> Tensor:
                return gradient(point, x, y)

            if term.direction is None:
                total = total + term.weight * there(term.point)
            else:
                total = (
                    total
                    + term.weight * (torch.func.jvp(there, (term.point,), (term.direction,))[1])
                )
        return total

    return torch.func.vmap(of_record)(x, y)


def summed(query: Query, rows: Tensor) -> BoundedSum:
    kept = rows if query.coordinates is None else rows[:, query.coordinates]
    return bounded_sum(MaterialisedGradients([kept[:0].sum(0)], [kept], 1.0), query.clip_norm)


def answers(client: int) -> Callable[[Query, Sequence[int]], BoundedSum]:
    x, y = records(client)

    def answer(query: Query, chosen: Sequence[int]) -> BoundedSum:
        places = torch.as_tensor(np.asarray(chosen))
        if not len(places):
            size = SIZE if query.coordinates is None else len(query.coordinates)
            return BoundedSum(torch.zeros(size, dtype=torch.float64), query.clip_norm)
        return summed(query, rows_of(query, x[places], y[places]))

    return answer


def new_ledger() -> Ledger:
    ledger = Ledger()
    ledger.begin("run")
    return ledger


def client_of(
    run: FederatedCubicNewton, number: int, seed: int | None = 5, ledger: Ledger | None = None
) -> CubicNewtonClient:
    return run.client(number, answers(number), RECORDS, ledger or new_ledger(), seed)


def in_turn(run: FederatedCubicNewton, seed: int | None = 5) -> Tensor:
    server = run.server(START)
    clients = [client_of(run, number, seed) for number in range(run.clients)]
    while not server.is_done:
        for number, client in enumerate(clients):
            request = server.request(number)
            assert request is not None
            assert server.receive(number, client.answer(request))
    return server.point


# -- the federation in NumPy -----------------------------------------------------------------------


def twin(run: FederatedCubicNewton, seed: int) -> Any:
    """Algorithms 1 and 2 and the rules for noise, with dense Hessians."""
    x = START.numpy().copy()
    for t in range(run.rounds):
        uploads = []
        for i in range(run.clients):
            mask = shared_mask(run.newton.mask_seed + i, t, SIZE, run.newton.kept(SIZE)).numpy()
            c = np.arange(SIZE) if run.whole_steps else mask
            moved = np.zeros(SIZE)
            moved[c] = local_round(run, i, t, x, c, seed)
            sent = np.zeros(SIZE)
            sent[mask] = run.step_scale * SIZE / len(mask) * moved[mask]
            uploads.append(sent)
        x = x + np.mean(uploads, axis=0)
    return x


def local_round(run: FederatedCubicNewton, i: int, t: int, x: Any, c: Any, seed: int) -> Any:
    n, q = run.newton, run.sample_rate
    tau = n.inner_steps
    noise = np.random.Generator(np.random.PCG64DXSM([seed + (i << 64) + (t << 128), 0]))
    sample = np.random.Generator(np.random.PCG64DXSM([seed, 1, i, t]))
    a, y = (part.numpy() for part in records(i))
    p = 1 / (1 + np.exp(-a @ x))
    g = ((p - y)[:, None] * a)[:, c]
    h = ((p * (1 - p))[:, None, None] * a[:, :, None] * a[:, None, :])[:, c][:, :, c]
    v, average = np.zeros(len(c)), np.zeros(len(c))
    for s in range(tau):
        if s == 0 or n.fresh_batches:
            size = RECORDS if q == 1 else sample.binomial(RECORDS, q)
            batch = np.arange(RECORDS)
            if q < 1:
                batch = sample.choice(RECORDS, size=size, replace=False, shuffle=False)
        length = np.linalg.norm(v)
        bound = math.sqrt(len(c) / SIZE) * (n.max_grad_norm + n.max_hessian_norm * length)
        u = (g + h @ v)[batch]
        u = u * np.minimum(1, bound / np.linalg.norm(u, axis=1, keepdims=True))
        total = u.sum(0)
        if run.noise_multiplier:
            z = run.noise_multiplier * (1 if n.fresh_batches else math.sqrt(tau))
            total = total + z * bound * noise.standard_normal(len(c))
        slope = total / (q * RECORDS) + n.weight_decay * (x[c] + v)
        slope = slope + n.hessian_lipschitz / 2 * length * v
        step = min(2 / (n.strong_convexity * (s + 2)), n.max_step_size or math.inf)
        v = np.clip(x[c] + v - step * slope, -(n.box or math.inf), n.box or math.inf) - x[c]
        average = average + 2 * (s + 1) / (tau * (tau + 1)) * v
    return average


@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize("keep", [3, None])
def test_without_noise_and_clipping_it_is_the_papers_federation(keep, whole_steps):
    newton = replace(NEWTON, keep=keep, max_grad_norm=1e9, max_hessian_norm=1e9)
    run = replace(
        RUN, newton=newton, noise_multiplier=0.0, sample_rate=1.0, whole_steps=whole_steps
    )
    actual = in_turn(run)
    np.testing.assert_allclose(actual.numpy(), twin(run, seed=5), rtol=1e-10)
    assert float((actual - START).norm()) > 0.1


@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize("fresh_batches", [False, True])
@pytest.mark.parametrize("sample_rate", [0.5, 1.0])
def test_noise_clipping_and_samples_are_those_of_the_rules(sample_rate, fresh_batches, whole_steps):
    newton = replace(NEWTON, fresh_batches=fresh_batches)
    run = replace(RUN, newton=newton, sample_rate=sample_rate, whole_steps=whole_steps)
    np.testing.assert_allclose(in_turn(run).numpy(), twin(run, seed=5), rtol=1e-9)


def test_one_inner_step_is_fed_sgd():
    newton = CubicNewton(0.001, 5.0, 1, max_grad_norm=1e9, max_step_size=0.3)
    run = FederatedCubicNewton(newton, CLIENTS, 4, noise_multiplier=0.0, step_scale=2.0)
    x = START.numpy().copy()
    for _ in range(4):
        slopes = []
        for client in range(CLIENTS):
            a, y = (part.numpy() for part in records(client))
            slopes.append(((1 / (1 + np.exp(-a @ x)) - y)[:, None] * a).mean(0))
        x = x - 0.6 * np.mean(slopes, axis=0)
    np.testing.assert_allclose(in_turn(run).numpy(), x, rtol=1e-10)


def test_clients_have_sets_noise_and_samples_of_their_own():
    server = RUN.server(START)
    replies = [
        SparseVector.from_bytes(client_of(RUN, number).answer(server.request(number) or b""))
        for number in range(CLIENTS)
    ]
    assert len({tuple(reply.coordinates().tolist()) for reply in replies}) > 1
    request = server.request(0) or b""
    first, second = (client_of(RUN, 0, seed=None).answer(request) for _ in range(2))
    assert first != second


# -- messages that come late, twice, or not at all -------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(CLIENTS))))
def test_order_and_repetition_change_no_bit(order):
    server = RUN.server(START)
    clients = [client_of(RUN, number) for number in range(CLIENTS)]
    late: list[tuple[int, bytes]] = []
    while not server.is_done:
        before = server.point
        for number in order:
            request = server.request(number)
            reply = clients[number].answer(request or b"")
            assert clients[number].answer(request or b"") == reply
            assert torch.equal(server.point, before)
            assert server.receive(number, reply)
            assert not server.receive(number, reply)
            assert not any(server.receive(*old) for old in late)
            late.append((number, reply))
        assert not torch.equal(server.point, before)
    assert torch.equal(server.point, in_turn(RUN))
    assert server.request(0) is None and not server.receive(*late[-1])
    assert server.received_bytes == RUN.rounds * CLIENTS * (40 + 8 * 3)


def test_a_client_is_asked_until_it_was_heard_of():
    server = RUN.server(START)
    first = server.request(1)
    assert first is not None and server.request(1) == first == server.request(0)
    server.receive(1, client_of(RUN, 1).answer(first))
    assert server.request(1) is None and server.request(0) == first


def test_a_request_that_comes_again_costs_nothing():
    ledger = new_ledger()
    client, server = client_of(RUN, 0, seed=None, ledger=ledger), RUN.server(START)
    replies = {client.answer(server.request(0) or b"") for _ in range(3)}
    assert len(replies) == 1 and ledger.steps == 1


def test_server_and_clients_go_on_from_every_state(tmp_path):
    expected = in_turn(RUN)
    ledgers = [new_ledger() for _ in range(CLIENTS)]
    server = RUN.server(START)
    clients = [client_of(RUN, i, ledger=ledgers[i]) for i in range(CLIENTS)]
    while not server.is_done:
        for number in range(CLIENTS):
            request = server.request(number)
            reply = clients[number].answer(request or b"")
            torch.save([c.state_dict() for c in clients], tmp_path / "clients.pt")
            clients = [client_of(RUN, i, ledger=ledgers[i]) for i in range(CLIENTS)]
            for client, state in zip(
                clients, torch.load(tmp_path / "clients.pt", weights_only=True), strict=True
            ):
                client.load_state_dict(state)
            assert clients[number].answer(request or b"") == reply
            server.receive(number, reply)
            torch.save(server.state_dict(), tmp_path / "server.pt")
            received, server = server.received_bytes, RUN.server(torch.zeros_like(START))
            server.load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
            assert server.received_bytes == received
    assert torch.equal(server.point, expected)
    assert [ledger.steps for ledger in ledgers] == [RUN.rounds] * CLIENTS


def test_a_client_that_forgot_pays_again_and_never_exceeds_its_rounds():
    ledger = new_ledger()
    request = RUN.server(START).request(0) or b""
    replies = {client_of(RUN, 0, None, ledger).answer(request) for _ in range(RUN.rounds)}
    assert len(replies) == RUN.rounds and ledger.steps == RUN.rounds
    with pytest.raises(BudgetExhausted):
        client_of(RUN, 0, None, ledger).answer(request)
    assert ledger.steps == RUN.rounds


def test_it_is_charged_before_a_record_is_touched():
    ledger = new_ledger()

    def fails(query: Query, chosen: Sequence[int]) -> BoundedSum:
        assert ledger.steps == 1
        raise OSError("the disk is gone")

    client = RUN.client(0, fails, RECORDS, ledger)
    with pytest.raises(OSError, match="the disk is gone"):
        client.answer(RUN.server(START).request(0) or b"")
    assert ledger.history() == [(RUN.event(), 1)]


# -- what leaves a client, and what it costs -------------------------------------------------------


@pytest.mark.parametrize("whole_steps", [False, True])
def test_one_record_moves_no_answer_by_more_than_the_noise_is_made_for(whole_steps):
    """Random and adversarial gradients and Hessians: aligned, huge, indefinite, not finite."""
    generator = torch.Generator().manual_seed(0)
    g = 3 * torch.randn(RECORDS, SIZE, generator=generator, dtype=torch.float64)
    h = torch.randn(RECORDS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    h = h + h.transpose(1, 2)
    h[0], h[1], g[2, 0], h[3] = 1e6 * torch.eye(SIZE), -1e3, math.nan, math.inf
    kept = SIZE if whole_steps else 3
    ratios = []

    def answer(query: Query, chosen: Sequence[int]) -> BoundedSum:
        rows, length = g.clone(), 0.0
        for term in query.terms[1:]:
            rows = rows + (h @ term.direction)
            length = float(term.direction.norm())
        delta = math.sqrt(kept / SIZE) * (NEWTON.max_grad_norm + NEWTON.max_hessian_norm * length)
        assert query.clip_norm == pytest.approx(delta, rel=1e-12)
        assert query.noise_multiplier == pytest.approx(0.8 * 2)  # z √τ
        total = summed(query, rows)
        for left_out in range(RECORDS):
            others = [j for j in range(RECORDS) if j != left_out]
            moved = (total.value - summed(query, rows[others]).value).norm()
            ratios.append(float(moved) / delta)
        return total

    run = replace(RUN, sample_rate=1.0, whole_steps=whole_steps)
    client, server = run.client(0, answer, RECORDS, new_ledger(), seed=1), run.server(START)
    client.answer(server.request(0) or b"")
    assert len(ratios) == 4 * RECORDS
    assert 0.999 < max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize("keep", [500, 4000])
def test_the_noise_in_a_message_has_the_size_it_was_booked_with(keep):
    """Records whose gradient is 0: -α (d/k) η z Δ / N is all that is sent, with Δ = √(k/d) C."""
    newton = CubicNewton(1.0, 0.0, 1, max_grad_norm=0.5, keep=keep, max_step_size=0.2)
    run = FederatedCubicNewton(newton, 1, 1, noise_multiplier=6.0, step_scale=1.5)

    def answer(query: Query, chosen: Sequence[int]) -> BoundedSum:
        return BoundedSum(torch.zeros(query.size(4000), dtype=torch.float64), query.clip_norm)

    start = torch.zeros(4000, dtype=torch.float64)
    client, server = run.client(0, answer, 10, new_ledger(), seed=2), run.server(start)
    sent = SparseVector.from_bytes(client.answer(server.request(0) or b"")).values
    ratio = 4000 / keep
    expected = 1.5 * ratio * 0.2 * 6.0 * 0.5 / math.sqrt(ratio) / 10
    assert float(sent.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * keep))
    assert float(sent.mean()) == pytest.approx(0, abs=4 * expected / math.sqrt(keep))


def test_the_uplink_is_k_values_and_a_header():
    def answer(query: Query, chosen: Sequence[int]) -> BoundedSum:
        return BoundedSum(torch.zeros(query.size(100_000)), query.clip_norm)

    sizes = []
    for keep in (10_000, 100_000):
        newton = CubicNewton(1.0, 0.0, 2, keep=keep)
        run = FederatedCubicNewton(newton, 1, 1, noise_multiplier=1.0)
        server = run.server(torch.zeros(100_000))
        reply = run.client(0, answer, 10, new_ledger()).answer(server.request(0) or b"")
        assert server.receive(0, reply)
        sizes.append(server.received_bytes)
    assert sizes == [40_040, 400_040]


@pytest.mark.parametrize(
    ("change", "fresh_batches", "event", "count"),
    [
        ({}, False, PoissonGaussian(0.8, 0.5), 3),
        ({"sample_rate": 1.0}, False, Gaussian(0.8), 3),
        ({}, True, PoissonGaussian(0.8, 0.5), 12),
        ({"sample_rate": 1.0}, True, Gaussian(0.8), 12),
        ({"whole_steps": True}, False, PoissonGaussian(0.8, 0.5), 3),
    ],
)
def test_what_a_client_books(change, fresh_batches, event, count):
    run = replace(RUN, newton=replace(NEWTON, fresh_batches=fresh_batches), **change)
    ledgers = [new_ledger() for _ in range(CLIENTS)]
    clients = [client_of(run, i, None, ledgers[i]) for i in range(CLIENTS)]
    server = run.server(START)
    while not server.is_done:
        for number, client in enumerate(clients):
            server.receive(number, client.answer(server.request(number) or b""))
    for ledger, client in zip(ledgers, clients, strict=True):
        assert ledger.history() == list(run.history()) == [(event, count)]
        assert client.epsilon(1e-5) == pytest.approx(epsilon([(event, count)], 1e-5))


def test_a_round_is_amplified_once():
    """z_s = 1.5, τ = 5, q = .01, T = 1000: 5.25, not the 2.17 of 5000 steps on fresh batches."""
    newton = CubicNewton(1.0, 0.0, inner_steps=5)
    run = FederatedCubicNewton(newton, 40, 1000, 1.5 / math.sqrt(5), sample_rate=0.01)
    assert epsilon(list(run.history()), 1e-5) == pytest.approx(5.25, abs=0.01)
    fresh = replace(newton, fresh_batches=True)
    run = FederatedCubicNewton(fresh, 40, 1000, 1.5, sample_rate=0.01)
    assert epsilon(list(run.history()), 1e-5) == pytest.approx(2.17, abs=0.01)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clients": 0}, "clients=0 must be a whole number of at least 1"),
        ({"clients": 2.0}, r"clients=2\.0 must be"),
        ({"rounds": True}, "rounds=True must be"),
        ({"noise_multiplier": -0.1}, r"noise_multiplier=-0\.1 must be"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan must be"),
        ({"sample_rate": 0.0}, r"sample_rate=0\.0 must be in \(0, 1\]"),
        ({"sample_rate": math.nan}, "sample_rate=nan must be"),
        ({"step_scale": 0.0}, r"step_scale=0\.0 must be"),
        ({"step_scale": math.inf}, "step_scale=inf must be"),
    ],
)
def test_bad_arguments_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        replace(RUN, **change)


@pytest.mark.parametrize(
    ("point", "match"),
    [
        (torch.zeros(2), "keep=3 coordinates of 2"),
        (torch.zeros(2, 3), r"values of shape \(2, 3\)"),
        (torch.tensor([0.0, math.nan, 0.0]), "must be finite"),
    ],
)
def test_a_server_refuses_bad_parameters(point, match):
    with pytest.raises(ValueError, match=match):
        RUN.server(point)


def message(**change: Any) -> bytes:
    of = {"u": START, "keep": 3, "seed": 17, "round_": 0, **change}
    return random_k(**of).to_bytes()


@pytest.mark.parametrize(
    ("client", "reply", "match"),
    [
        (0, b"hello", "holds no sparse vector"),
        (0, message(keep=4), "Client 0 sent 4 of 5 coordinates"),
        (0, message(u=torch.zeros(6)), "3 of 6 coordinates"),
        (0, message(seed=18), "of seed 18 in round 0"),
        (1, message(), "asked for were 3 of 5 of seed 18"),
        (0, message(round_=1), "in round 1; asked for were"),
        (0, message(u=START / 0), "not finite"),
        (3, message(), r"client=3 must be one of 0, \.\.\., 2"),
        (-1, message(), "client=-1 must be"),
    ],
)
def test_a_server_refuses_what_it_did_not_ask_for(client, reply, match):
    server = RUN.server(START)
    with pytest.raises(ValueError, match=match):
        server.receive(client, reply)
    assert server.received_bytes == 0 and server.request(0) is not None
    assert server.receive(0, message())


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (b"", "holds no sparse vector"),
        (message(), "3 of 5 parameters; need all"),
        (message(keep=5, round_=3), "Round 3 is none of 3 rounds"),
        (message(keep=5, round_=0), "Round 0 is over"),
    ],
)
def test_a_client_refuses_such_requests_and_pays_nothing(request_, match):
    ledger = new_ledger()
    client = client_of(RUN, 0, ledger=ledger)
    client.answer(message(keep=5, round_=1))
    with pytest.raises(ValueError, match=match):
        client.answer(request_)
    assert ledger.steps == 1


def test_a_client_without_records_is_refused():
    with pytest.raises(ValueError, match="num_records=0 must be at least 1"):
        RUN.client(0, answers(0), 0, new_ledger())


def test_a_state_of_another_model_is_refused():
    state = RUN.server(torch.zeros(7)).state_dict()
    with pytest.raises(ValueError, match="The state has 7 parameters, this run 5"):
        RUN.server(START).load_state_dict(state)
