"""Several queries on one batch: charged as one, and never with less noise than was planned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import BoundedSum, Query, Release, State, Term
from lightning_dp.estimators import AbstractEstimator, Traits, share_of_noise
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import Poisson
from lightning_dp.schedules import Constant


@dataclass(frozen=True)
class Round(AbstractEstimator):
    """Asks queries with these multipliers on one batch."""

    multipliers: tuple[float, ...]
    says: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(queries_per_step=self.says or len(self.multipliers))

    def init(self, params: Sequence[Tensor]) -> State:
        return {"asked": 0}

    def ask(self, state: State, params: Sequence[Tensor], step: int, z: float) -> Query:
        return Query((Term(),), 1.0, self.multipliers[state["asked"]])

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor | None, State]:
        asked = state["asked"] + 1
        done = asked == len(self.multipliers)
        return (released.value if done else None), {"asked": 0 if done else asked}


def mechanism(estimator: AbstractEstimator, z: float) -> Mechanism:
    ledger = Ledger()
    ledger.begin("run")
    plan = NoisePlan(z, Constant(), Poisson(), 0.1, estimator)
    return Mechanism(plan, (), ledger, FixedGuard(math.inf), 10, NoiseSource(0), World())


PARAMS = [torch.zeros(3)]


def one_round(machine: Mechanism) -> list[bool]:
    """Make a round; one True for each further query that was answered."""
    answered: list[bool] = []

    def answer() -> None:
        machine.answer(BoundedSum(torch.zeros(3), 1.0))
        answered.append(True)

    machine.ask(PARAMS)
    machine.tell(PARAMS, answer)
    return answered


@pytest.mark.parametrize("z", [0.37, 1.0, 1.1, 3.3])
def test_equal_shares_of_the_noise_are_never_below_the_plan_by_rounding(z):
    for queries in (*range(1, 40), 100, 1000, 12345):
        shares = (share_of_noise(z, queries),) * queries
        together = PoissonRound(shares, 1.0).pair[0]
        assert z <= together <= z * (1 + 1e-12)
        one_round(mechanism(Round(shares[:50]), z))


def test_unequal_shares_are_composed():
    one_round(mechanism(Round((2.0, 3.0, 6.0)), 1 / math.sqrt(1 / 4 + 1 / 9 + 1 / 36) - 1e-12))


@pytest.mark.parametrize("multipliers", [(1.0, 1.0), (1.5, 1.5, 1.7), (1.5, 0.5), (1.5, 1.5, 0.0)])
def test_booking_a_round_as_one_of_its_queries_is_refused_before_the_data_are_touched(multipliers):
    machine = mechanism(Round(multipliers), 1.0)
    machine.ask(PARAMS)
    answers: list[None] = []
    with pytest.raises(RuntimeError, match=r"queries on one batch.*the plan is an envelope"):
        machine.tell(PARAMS, lambda: answers.append(None))
    assert len(answers) < len(multipliers) - 1 and machine.step == 0
    assert not machine.is_begun and machine.query is None
    assert machine.ledger.steps == 1  # what was asked is charged


def test_an_estimator_may_not_ask_more_often_than_it_says():
    machine = mechanism(Round((9.0, 9.0, 9.0), says=2), 1.0)
    machine.ask(PARAMS)
    with pytest.raises(RuntimeError, match="queries_per_step=2"):
        machine.tell(PARAMS, lambda: None)


@dataclass(frozen=True)
class LateRound(Round):
    """Asks nothing at first, and then a query after all."""

    def ask(self, state: State, params: Sequence[Tensor], step: int, z: float) -> Query | None:
        return super().ask(state, params, step, z) if state["asked"] else None


def test_a_step_that_asked_nothing_and_was_not_charged_asks_nothing_later():
    machine = mechanism(LateRound((9.0, 9.0, 9.0)), 1.0)
    assert machine.ask(PARAMS) is None
    answers: list[None] = []
    with pytest.raises(RuntimeError, match="asked nothing at step 0, which was not charged"):
        machine.tell(PARAMS, lambda: answers.append(None))
    assert not answers and machine.query is None
    assert machine.ledger.steps == 0


def test_further_queries_need_somebody_who_answers():
    machine = mechanism(Round((2.0, 2.0)), 1.0)
    machine.ask(PARAMS)
    with pytest.raises(RuntimeError, match="Nobody answers"):
        machine.tell(PARAMS)


def test_a_round_that_breaks_off_is_charged_and_begun_again():
    machine = mechanism(Round((2.0, 2.0)), 1.0)
    machine.ask(PARAMS)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.tell(PARAMS, fail)
    assert machine.state_dict()["estimator"] == {"asked": 0}
    assert one_round(machine) == [True]
    assert (machine.step, machine.ledger.steps) == (1, 2)
