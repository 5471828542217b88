"""DIFF2-BVR-L-SGD over workers: the paper's algorithm in NumPy, and what each record pays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import Query, Release, Term, add_noise, bounded_sum
from lightning_dp.estimators import Diff2
from lightning_dp.federated.synchronous import BVRLSGD
from lightning_dp.gradients.materialised import MaterialisedGradients
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import Constant
from tests.normal_values import NormalValues

WORKERS, PER_WORKER, SIZE = 3, 8, 4
ROUNDS, INTERVAL, RATE = 7, 3, 0.4
C1, C2, C3 = 1.0, 0.6, 0.5


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WORKERS * PER_WORKER, SIZE, generator=generator, dtype=torch.float64)
    return x, x @ torch.arange(1.0, SIZE + 1, dtype=torch.float64) + 0.3


def gradients(point: Tensor, chosen: Any) -> Tensor:
    """Of log cosh(x·w - y), which is smooth: (n, d)."""
    x, y = (part[chosen] for part in records())
    return torch.tanh(x @ point - y).unsqueeze(1) * x


def answer(query: Query, here: Tensor, chosen: Any) -> Any:
    rows = sum(
        term.weight * gradients(here if term.point is None else term.point, chosen)
        for term in query.terms
    )
    return bounded_sum(MaterialisedGradients([here], [rows], 1.0), query.clip_norm)


def run(routine: BVRLSGD, noise: float, seed: int) -> Tensor:
    """The package's pieces put together: server, then the worker in turn."""
    x = torch.zeros(SIZE, dtype=torch.float64)
    n = WORKERS * PER_WORKER
    ledger = Ledger()
    ledger.begin("run")
    plan = NoisePlan(noise, Constant(), FullBatch(), 1.0, Diff2(INTERVAL, C1, C2, split=2.0))
    source, rng = NoiseSource(seed), np.random.default_rng(seed)
    server = Mechanism(plan, (), ledger, FixedGuard(math.inf), n, source, World())
    for round_number in range(1, ROUNDS + 1):
        query = server.ask([x])
        assert query is not None
        server.answer(answer(query, x, slice(None)))
        state = routine.start(x, server.tell([x]))
        worker = routine.worker_in_turn(round_number, WORKERS)
        while (local := routine.ask(state)) is not None:
            chosen = worker * PER_WORKER + np.flatnonzero(rng.random(PER_WORKER) < RATE)
            total = answer(local, state["x"], chosen)
            release = add_noise(total, local.noise_multiplier, source, World())
            state = routine.tell(state, release.mean(RATE * PER_WORKER))
        x = state["x"]
    return x


def twin(lr: float, local_steps: int, z3: float, noise: float, seed: int) -> Any:
    """Algorithms 1 and 4 written down once more."""
    generator = np.random.Generator(np.random.PCG64DXSM([seed, 0]))
    draw = NormalValues(generator)

    rng = np.random.default_rng(seed)
    n = WORKERS * PER_WORKER
    ratio = math.sqrt((INTERVAL - 1) / (2.0 - 1))

    def clipped(rows: Any, radius: float) -> Any:
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return (rows * np.minimum(1, radius / norms)).sum(0)

    def g(point: Any, chosen: Any = slice(None)) -> Any:
        return gradients(torch.as_tensor(point), chosen).numpy()

    x = before = v = np.zeros(SIZE)
    for r in range(1, ROUNDS + 1):
        if (r - 1) % INTERVAL == 0:
            v = (clipped(g(x), C1) + noise * C1 * draw(SIZE)) / n
        else:
            C = C2 * np.linalg.norm(x - before)
            v = v + (clipped(g(x) - g(before), C) + noise * ratio * C * draw(SIZE)) / n
        before, a, b, u = x, x, x - lr * v, v
        for _ in range(2, local_steps + 1):
            worker = r % WORKERS
            chosen = worker * PER_WORKER + np.flatnonzero(rng.random(PER_WORKER) < RATE)
            C = C3 * np.linalg.norm(b - a)
            total = clipped(g(b, chosen) - g(a, chosen), C) + z3 * C * draw(SIZE)
            u = u + total / (RATE * PER_WORKER)
            a, b = b, b - lr * u
        x = b
    return x


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("local_steps", [1, 2, 5])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_it_is_the_papers_algorithm(local_steps, noise):
    routine = BVRLSGD(0.2, local_steps, C3, noise_multiplier=2 * noise, sample_rate=RATE)
    actual = run(routine, noise, seed=4)
    expected = twin(0.2, local_steps, 2 * noise, noise, seed=4)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-10)
    assert np.linalg.norm(expected) > 0.1


def test_what_a_record_pays():
    """7 rounds of 3 workers: rounds 3 and 6 are worker 0's, 1, 4 and 7 worker 1's."""
    routine = BVRLSGD(0.2, 5, C3, noise_multiplier=3.0, sample_rate=RATE)
    diff2 = Diff2(INTERVAL, split=2.0)
    server = [(Gaussian(2.0), 3), (Gaussian(2.0 * diff2.relative_noise(1)), 4)]
    for worker, turns in enumerate([2, 3, 2]):
        history = routine.history(diff2, 2.0, ROUNDS, worker, WORKERS)
        assert history == [*server, (PoissonGaussian(3.0, RATE), 4 * turns)]
    assert BVRLSGD(0.2, 1, C3, 3.0, RATE).history(diff2, 2.0, ROUNDS, 0, WORKERS) == server


def test_where_nothing_moves_nothing_is_asked():
    routine = BVRLSGD(0.2, 5, C3, noise_multiplier=3.0, sample_rate=RATE)
    assert routine.ask(routine.start(torch.ones(2), torch.zeros(2))) is None


def test_the_bound_is_the_distance_times_c3():
    routine = BVRLSGD(0.5, 5, diff_norm=3.0, noise_multiplier=2.0, sample_rate=RATE)
    state = routine.start(torch.ones(2), torch.tensor([6.0, 8.0]))
    query = routine.ask(state)
    expected = (Term(1.0, state["x"]), Term(-1.0, state["before"]))
    assert query is not None and (query.clip_norm, query.noise_multiplier) == (15.0, 2.0)
    assert [term.weight for term in query.terms] == [term.weight for term in expected]
    assert all(a.point is b.point for a, b in zip(query.terms, expected, strict=True))


def test_the_state_is_of_plain_types(tmp_path):
    routine = BVRLSGD(0.5, 5, diff_norm=3.0, noise_multiplier=2.0, sample_rate=RATE)
    state = routine.tell(
        routine.start(torch.ones(2), torch.ones(2)), Release(torch.ones(2), noise_std=1.0)
    )
    torch.save(state, tmp_path / "state.pt")
    assert repr(torch.load(tmp_path / "state.pt", weights_only=True)) == repr(state)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"learning_rate": 0.0}, r"learning_rate=0\.0 must be"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be"),
        ({"local_steps": 0}, "local_steps=0 must be"),
        ({"local_steps": 1.5}, r"local_steps=1\.5 must be"),
        ({"diff_norm": math.inf}, "diff_norm=inf must be"),
        ({"noise_multiplier": -1.0}, r"noise_multiplier=-1\.0 must be"),
        ({"sample_rate": 1.5}, r"sample_rate=1\.5 must be in \(0, 1\]"),
        ({"sample_rate": math.nan}, "sample_rate=nan must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    good = {
        "learning_rate": 0.1,
        "local_steps": 3,
        "diff_norm": 1.0,
        "noise_multiplier": 1.0,
        "sample_rate": 0.1,
    }
    with pytest.raises(ValueError, match=match):
        BVRLSGD(**{**good, **arguments})


def test_a_worker_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"worker=3 must be a whole number from 0 to 2"):
        BVRLSGD(0.2, 1, C3, 3.0, RATE).history(Diff2(3), 2.0, 7, 3, 3)
