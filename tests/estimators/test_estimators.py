"""Estimators: one contract for all, and the closed form of each."""

from __future__ import annotations

import copy
import dataclasses
import io
import math

import pytest
import torch

from lightning_dp import estimators
from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.estimators import AbstractEstimator, CubicNewton, Diff2, MeanGradient, Storm
from lightning_dp.estimators.base import Driver

# One line for each estimator.
CASES: dict[str, AbstractEstimator] = {
    "mean_gradient": MeanGradient(),
    "mean_gradient_clipped": MeanGradient(max_grad_norm=0.3),
    "diff2": Diff2(restart_every=3, max_grad_norm=0.3, diff_norm=2.0),
    "diff2_optimal": Diff2(restart_every=4, split="optimal", step_length=0.1, restart_rate=2.0),
    "storm": Storm(momentum=0.2, max_grad_norm=0.3, diff_norm=2.0),
    "cubic_newton": CubicNewton(2.0, 1.0, inner_steps=3, box=0.5, fresh_batches=True),
    "cubic_newton_of_one_step": CubicNewton(2.0, 0.0, inner_steps=1, max_grad_norm=0.3),
}
NOT_ESTIMATORS = {"AbstractEstimator", "Traits", "share_of_noise"}
PARAMS = [torch.linspace(-1, 1, 4).view(2, 2), torch.ones(2)]


@pytest.fixture(params=CASES)
def estimator(request: pytest.FixtureRequest) -> AbstractEstimator:
    return CASES[request.param]


def run(estimator: AbstractEstimator, steps: int) -> tuple[list[Query], list[torch.Tensor], State]:
    generator = torch.Generator().manual_seed(0)
    params, state, queries, estimates = PARAMS, estimator.init(PARAMS), [], []
    for step in range(steps):
        query = estimator.ask(state, params, step, 1.5)
        assert query is not None
        queries.append(query)
        released = Release(torch.randn(6, generator=generator), noise_std=0.01)
        estimate, state = estimator.tell(state, params, step, released)
        estimates.append(estimate)
        params = [param + 0.1 for param in params]  # the optimizer's step
    return queries, estimates, state


class TestContract:
    """The promises of every estimator."""

    def test_it_asks_for_at_least_the_planned_noise(self, estimator):
        queries, _, _ = run(estimator, 5)
        assert all(query.noise_multiplier >= 1.5 for query in queries)

    def test_its_clip_norm_is_finite_when_there_is_noise(self, estimator):
        queries, _, _ = run(estimator, 5)
        assert all(0 < query.clip_norm < math.inf for query in queries)

    def test_its_estimate_is_as_long_as_the_parameters(self, estimator):
        _, estimates, _ = run(estimator, 5)
        assert all(estimate.shape == (6,) for estimate in estimates)

    def test_it_is_a_pure_function_of_its_arguments(self, estimator):
        first, second = run(estimator, 5), run(estimator, 5)
        assert [q.clip_norm for q in first[0]] == [q.clip_norm for q in second[0]]
        assert torch.equal(torch.stack(first[1]), torch.stack(second[1]))

    def test_it_changes_none_of_its_arguments(self, estimator):
        _, _, state = run(estimator, 3)
        before = copy.deepcopy((state, PARAMS))
        released = Release(torch.ones(6), noise_std=0.01)
        estimator.ask(state, PARAMS, 4, 1.0)
        estimator.tell(state, PARAMS, 4, released)
        assert repr((state, PARAMS)) == repr(before)
        assert torch.equal(released.value, torch.ones(6))

    def test_its_state_goes_into_a_checkpoint(self, estimator):
        _, _, state = run(estimator, 3)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert repr(torch.load(file, weights_only=True)) == repr(state)

    def test_it_is_frozen_configuration(self, estimator):
        for name in [f.name for f in dataclasses.fields(estimator)]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(estimator, name, 0)

    def test_its_repr_is_the_call_that_made_it(self, estimator):
        assert eval(repr(estimator), vars(estimators)) == estimator


def test_every_estimator_is_tested():
    public = {
        getattr(estimators, name) for name in estimators.__all__ if name not in NOT_ESTIMATORS
    }
    assert public == {type(estimator) for estimator in CASES.values()}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_other_estimators_take_any_optimizer(optimizer):
    for estimator in (MeanGradient(), Diff2(3), Storm(0.5)):
        estimator.check(optimizer([torch.zeros(2, requires_grad=True)]))
        assert estimator.traits.queries_per_step == 1 and not estimator.traits.uses_hessian


def test_the_query_that_all_processes_agree_on_is_the_one_asked():
    driver = Driver.begin(MeanGradient(), PARAMS)
    halved = driver.ask(PARAMS, 1.0, lambda query: dataclasses.replace(query, clip_norm=0.5))
    assert halved.clip_norm == 0.5


def test_mean_gradient_asks_for_the_gradient_where_the_model_is():
    query = MeanGradient(0.3).ask({}, PARAMS, step=7, noise_multiplier=1.5)
    assert query == Query((Term(weight=1.0, point=None),), clip_norm=0.3, noise_multiplier=1.5)


def test_the_estimate_of_mean_gradient_is_the_release():
    released = Release(torch.arange(6.0), noise_std=1.0)
    estimate, state = MeanGradient().tell({}, PARAMS, 0, released)
    assert torch.equal(estimate, released.value)
    assert state == {}


def test_mean_gradient_without_a_bound_is_for_training_without_noise():
    unbounded = MeanGradient(math.inf)
    assert unbounded.ask({}, PARAMS, 0, 0.0).clip_norm == math.inf
    with pytest.raises(ValueError, match="infinite clip norm bounds nothing"):
        unbounded.ask({}, PARAMS, 0, 1.0)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan])
def test_a_clip_norm_that_is_not_positive_is_refused(norm):
    with pytest.raises(ValueError, match=f"max_grad_norm={norm} must be greater than 0"):
        MeanGradient(norm)
