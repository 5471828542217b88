"""The cost of a round, and the bound on what one record can do to each of its queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import CubicNewton, FullBatch
from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import BoundedSum, Query, Release, State, add_noise
from lightning_dp.estimators import AbstractEstimator, Traits
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import Poisson
from lightning_dp.schedules import Constant, Exponential
from tests.zoo import private

DELTA = 1e-5


def epsilon(events: Any) -> float:
    return PLDAccountant().epsilon(events, DELTA, "add_remove")


# -- what is charged -----------------------------------------------------------------------------


# privacy.md's reference: z of each query, queries, rate, rounds, the truth, and what independent
# steps would be booked with.
@pytest.mark.parametrize(
    ("z", "tau", "q", "rounds", "true", "wrong"),
    [(1.5, 5, 0.01, 1000, 5.25, 2.17), (3.0, 10, 0.01, 1000, 2.05, 1.33)],
)
def test_a_round_costs_what_it_must(z, tau, q, rounds, true, wrong):
    newton = CubicNewton(0.1, 1.0, tau)
    of_round = PoissonRound((z,) * tau, q).pair[0]
    plan = NoisePlan(of_round, Constant(), Poisson(), q, newton)
    assert epsilon([(plan.event(0), rounds)]) == pytest.approx(true, rel=3e-3)
    assert epsilon([(PoissonGaussian(z, q), rounds * tau)]) == pytest.approx(wrong, rel=1e-2)
    state = newton.init([torch.zeros(3)])
    assert newton.ask(state, [torch.zeros(3)], 0, of_round).noise_multiplier == pytest.approx(z)


def test_the_ledger_of_a_fit_holds_one_event_for_each_round(fit):
    fit(CubicNewton(0.5, 1.0, 5), noise_multiplier=0.8, trainer={"max_epochs": 2})
    history = fit.privacy._run.ledger.history()
    assert [(*event.pair, count) for event, count in history] == [(0.8, 0.25, 8)]
    assert fit.privacy.epsilon == epsilon([(PoissonGaussian(0.8, 0.25), 8)])
    assert fit.model.count_passes() == 8 * 5


def test_the_ledger_of_fresh_batches_holds_one_event_for_each_inner_step(fit):
    estimator = CubicNewton(0.5, 1.0, 4, fresh_batches=True)
    fit(estimator, noise_multiplier=0.8, trainer={"max_epochs": 2})
    history = fit.privacy._run.ledger.history()
    assert [(*event.pair, count) for event, count in history] == [(0.8, 0.25, 8)]


@pytest.mark.parametrize(
    ("fresh", "schedule"),
    [(False, Exponential(rate=0.2)), (True, Constant()), (True, Exponential(rate=0.2))],
)
def test_calibrated_noise_spends_the_budget_and_no_more(fit, fresh, schedule):
    estimator = CubicNewton(0.5, 1.0, 4, fresh_batches=fresh)
    fit(estimator, target_epsilon=2.0, noise_schedule=schedule, trainer={"max_epochs": 1})
    assert 0.998 * 2 < fit.privacy.epsilon <= 2
    assert fit.privacy.steps == 4


# -- answers of the coordinates that are asked for ----------------------------------------------


def mechanism(estimator: AbstractEstimator, z: float) -> Mechanism:
    ledger = Ledger()
    ledger.begin("run")
    plan = NoisePlan(z, Constant(), Poisson(), 0.1, estimator)
    return Mechanism(plan, (), ledger, FixedGuard(math.inf), 10, NoiseSource(0), World())


PARAMS = [torch.zeros(3)]


def test_an_answer_of_another_length_than_the_coordinates_is_refused():
    machine = mechanism(CubicNewton(0.5, 1.0, 1, keep=2), 1.0)
    query = machine.ask(PARAMS)
    with pytest.raises(RuntimeError, match="3 entries, the query asked for 2"):
        machine.answer(BoundedSum(torch.zeros(3), query.clip_norm))


# -- sensitivity ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe(AbstractEstimator):
    """Asks what CubicNewton asks at given v, in one round, and writes down the answers."""

    newton: CubicNewton
    offsets: tuple[Tensor, ...]
    seen: list[Tensor] = field(default_factory=list)

    @property
    def traits(self) -> Traits:
        return Traits(queries_per_step=len(self.offsets), uses_hessian=True)

    def init(self, params: Sequence[Tensor]) -> State:
        return {"asked": 0}

    def ask(self, state: State, params: Sequence[Tensor], step: int, z: float) -> Query:
        at = {"round": 0, "inner": 1, "offset": self.offsets[state["asked"]], "average": None}
        return self.newton.ask(at, params, step, 0.0)

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor | None, State]:
        self.seen.append(released.value)
        asked = state["asked"] + 1
        done = asked == len(self.offsets)
        zeros = torch.zeros(sum(param.numel() for param in params))
        return (zeros if done else None), {"asked": asked}


class Anything(L.LightningModule):
    """Records choose how steep, and how curved either way, their own loss is."""

    def __init__(self, net: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = net().double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, slope, curvature = batch
        out = self.net(x)
        loss = slope * out.sum(1) + curvature * out.square().sum(1)
        return loss.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))


def linear() -> nn.Module:
    return nn.Linear(6, 2)


ADVERSARIES = {
    "ordinary": ([1.0, -2.0, 0.5, 3.0, 0.0, -1.0], 1.0, 0.5),
    "steep": ([1e3, -1e3, 0.0, 1e3, 1.0, 1.0], 1e6, 0.0),
    "curved up": ([1.0, -2.0, 0.5, 3.0, 0.0, -1.0], 0.0, 1e9),
    "curved down": ([1.0, -2.0, 0.5, 3.0, 0.0, -1.0], 1.0, -1e9),
    "overflowing": ([1e200] * 6, 1e200, -1e200),
    "nan": ([math.nan] * 6, 1.0, 1.0),
    "small": ([1e-4] * 6, 1e-3, 1e-3),
}
N = 21


@pytest.mark.parametrize(
    ("keep", "net"),
    [
        pytest.param(None, linear, marks=pytest.mark.slow),
        (3, linear),
        (None, two_layers),
        pytest.param(3, two_layers, marks=pytest.mark.slow),
    ],
)
def test_one_record_moves_each_inner_query_by_at_most_its_bound(make_trainer, keep, net):
    newton = CubicNewton(1.0, 1.0, 2, max_grad_norm=0.7, max_hessian_norm=0.3, keep=keep)
    size = sum(param.numel() for param in net().parameters())
    generator = torch.Generator().manual_seed(5)
    entries = newton.query_size(size)
    offsets = tuple(
        scale * torch.randn(entries, generator=generator, dtype=torch.float64)
        for scale in (0.0, 1e-3, 1.0, 50.0)
    )
    x = torch.randn(N, 6, generator=generator, dtype=torch.float64)
    strength = torch.randn(N, 2, generator=generator, dtype=torch.float64)

    def sums(x: Tensor, strength: Tensor) -> list[Tensor]:
        probe = Probe(newton, offsets)
        privacy = private(noise_multiplier=0.0, sampling=FullBatch(), estimator=probe)
        loader = DataLoader(TensorDataset(x, strength[:, 0], strength[:, 1]), batch_size=8)
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(Anything(net), loader)
        return [value * len(x) for value in probe.seen]

    without = sums(x, strength)
    assert [len(one) for one in without] == [entries] * len(offsets)
    for name, (record, *own) in ADVERSARIES.items():
        more = torch.cat([x, torch.tensor([record], dtype=torch.float64)])
        stronger = torch.cat([strength, torch.tensor([own], dtype=torch.float64)])
        for offset, one, other in zip(offsets, without, sums(more, stronger), strict=True):
            bound = math.sqrt(entries / size) * (0.7 + 0.3 * float(offset.norm()))
            moved = float((other - one).norm())
            assert moved <= bound * (1 + 1e-9), name
            if (name == "steep" and net is linear) or (name == "curved down" and offset.norm() > 0):
                assert moved == pytest.approx(bound, rel=1e-9), f"{name}: the bound is reached"
            if name == "nan":
                assert moved <= 1e-12


def test_the_noise_follows_the_length_of_the_offset():
    """σ_s = z_s Δ_s with the actual ‖v_s‖: measured on many coordinates."""
    size = 40_000
    newton = CubicNewton(1.0, 1.0, 4, 0.5, 2.0, keep_fraction=0.25)
    params = [torch.zeros(size, dtype=torch.float64)]
    offset = torch.full((10_000,), 0.03, dtype=torch.float64)  # of length 3
    state = {"round": 0, "inner": 1, "offset": offset, "average": torch.zeros_like(offset)}
    query = newton.ask(state, params, 0, 1.7)
    assert query.clip_norm == pytest.approx(0.5 * (0.5 + 2.0 * 3))
    assert query.noise_multiplier == pytest.approx(1.7 * 2)
    total = BoundedSum.empty(query, params)
    release = add_noise(total, query.noise_multiplier, NoiseSource(0), World())
    assert release.value.shape == (10_000,)
    assert float(release.value.std()) == pytest.approx(0.5 * 6.5 * 3.4, rel=0.03)
