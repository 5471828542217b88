"""The driver of an estimator: where it is, and what it does not let pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from lightning_dp.boundary import Query, Release, Term
from lightning_dp.estimators import AbstractEstimator, MeanGradient, Traits
from lightning_dp.estimators.base import Driver

PARAMS = [torch.zeros(2)]
RELEASED = Release(torch.tensor([1.0, 2.0]), 1.0)


@dataclass(frozen=True)
class Rounds(AbstractEstimator):
    """Asks several queries a step, and then stops asking after ``asks`` of them."""

    queries: int = 2
    asks: int = 9
    says: int = 2

    @property
    def traits(self) -> Traits:
        return Traits(queries_per_step=self.says)

    def init(self, params):
        return {"told": 0}

    def ask(self, state, params, step, noise_multiplier):
        return Query((Term(),), 1.0, noise_multiplier) if state["told"] < self.asks else None

    def tell(self, state, params, step, released):
        told = state["told"] + 1
        return (released.value, {"told": 0}) if told == self.queries else (None, {"told": told})


def test_a_step_ends_with_its_estimate_and_a_part_with_its_answer():
    driver = Driver.begin(Rounds(), PARAMS)
    places = []
    for _ in range(4):
        assert driver.ask(PARAMS, 1.5).noise_multiplier == 1.5
        estimate, driver = driver.tell(PARAMS, RELEASED)
        places.append((driver.step, driver.part, estimate is None))
    assert places == [(0, 1, True), (1, 0, False), (1, 1, True), (2, 0, False)]


def test_a_step_that_breaks_off_is_begun_again_from_where_it_began():
    driver = Driver.begin(Rounds(), PARAMS)
    driver.tell(PARAMS, RELEASED)
    assert (driver.step, driver.part, driver.state) == (0, 0, {"told": 0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        driver.step = 1


def test_more_queries_than_the_traits_say_are_refused():
    driver = Driver.begin(Rounds(queries=3), PARAMS)
    for _ in range(2):
        driver.ask(PARAMS, 1.0)
        _, driver = driver.tell(PARAMS, RELEASED)
    with pytest.raises(
        RuntimeError, match=r"no estimate after 2 queries at step 0.*queries_per_step=2"
    ):
        driver.ask(PARAMS, 1.0)


def test_a_step_that_has_begun_asks_or_estimates():
    driver = Driver.begin(Rounds(asks=1), PARAMS)
    driver.ask(PARAMS, 1.0)
    _, driver = driver.tell(PARAMS, RELEASED)
    with pytest.raises(RuntimeError, match="asks nothing at step 0, and has no estimate"):
        driver.ask(PARAMS, 1.0)


def test_the_query_that_all_processes_agree_on_is_the_one_asked():
    def agree(query: Query | None) -> Query | None:
        assert query is not None
        return dataclasses.replace(query, clip_norm=0.5)

    assert Driver.begin(MeanGradient(), PARAMS).ask(PARAMS, 1.0, agree).clip_norm == 0.5
