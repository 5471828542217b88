"""A sum that begins with its noise, which is drawn while the gradients are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.boundary import BoundedSum, Query, Term, add_noise, begin_with_noise
from lightning_dp.mechanism import _EARLY_VALUES, Mechanism

SIZE = 100_001
PARAMS = (torch.zeros(SIZE - 1), torch.zeros(1))
QUERY = Query((Term(),), clip_norm=0.5, noise_multiplier=3.0)


def noise(source: NoiseSource, size: int, std: float) -> Tensor:
    values = torch.zeros(size)
    source.add_normal(values, std)
    return values


class Threads(NoiseSource):
    """Counts the vectors that threads were given."""

    begun = 0

    def begin_normal(self, vector: Tensor, std: float) -> Callable[[], None]:
        self.begun += 1
        return super().begin_normal(vector, std)


def estimate(mechanism: Mechanism, parts: list[Tensor], *, is_begun: bool, adds: bool) -> Tensor:
    """Of one step, whose chunks have these sums; added to the sum so far, or made by themselves."""
    query = mechanism.ask(PARAMS)
    assert query is not None
    for part in parts:
        if is_begun:
            mechanism.begin_noise(PARAMS)  # once a step, whatever chunks there are
        so_far = mechanism.so_far
        if so_far is not None and adds:
            so_far.value.add_(part)
            mechanism.answer(so_far)
        else:
            mechanism.answer(BoundedSum(part.clone(), query.sensitivity))
    return mechanism.tell(PARAMS)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_begun_sum_is_released_with_the_same_noise_once(count, adds, trial):
    parts = [torch.randn(SIZE) for _ in range(count)]
    begun, plain = Threads(seed=4), Threads(seed=4)
    for _ in range(2):
        first = estimate(trial.make(noise=begun), parts, is_begun=True, adds=adds)
        late = trial.make(noise=plain, spares_memory=True)
        second = estimate(late, parts, is_begun=False, adds=adds)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
    assert begun.begun == 2 and plain.begun == 0
    expected = sum(parts) + noise(NoiseSource(seed=4), SIZE, 1.0)
    fresh = estimate(trial.make(noise=NoiseSource(4)), parts, is_begun=True, adds=adds)
    torch.testing.assert_close(fresh * trial.batch_size, expected, rtol=0, atol=1e-5)


def test_noise_of_small_models_begins_with_the_step(trial):
    """Next to a gradient of the last step, for which a small model has room."""
    large = (torch.zeros(_EARLY_VALUES + 1),)
    for params, spares_memory, begun in ((PARAMS, False, 1), (PARAMS, True, 0), (large, False, 0)):
        source = Threads(seed=4)
        trial.make(noise=source, spares_memory=spares_memory).ask(params)
        assert source.begun == begun


@pytest.mark.parametrize("spares_memory", [False, True])
def test_a_step_without_any_answer_releases_the_noise_that_was_drawn(spares_memory, trial):
    mechanism = trial.make(noise=NoiseSource(seed=2), spares_memory=spares_memory)
    mechanism.ask(PARAMS)
    mechanism.begin_noise(PARAMS)  # which has begun, or not
    released = mechanism.tell(PARAMS) * trial.batch_size
    torch.testing.assert_close(released, noise(NoiseSource(seed=2), SIZE, 1.0))


def test_a_step_that_is_begun_again_has_other_noise(trial):
    mechanism = trial.make(noise=NoiseSource(seed=2))
    for _ in range(2):
        mechanism.ask(PARAMS)
        mechanism.begin_noise(PARAMS)
    source = NoiseSource(seed=2)
    dropped, kept = noise(source, SIZE, 1.0), noise(source, SIZE, 1.0)
    released = mechanism.tell(PARAMS) * trial.batch_size
    torch.testing.assert_close(released, kept)
    assert not torch.isclose(released, dropped).all()


def test_small_sums_and_steps_without_noise_begin_empty(trial):
    for size, noise_multiplier in ((100, 1.0), (SIZE, 0.0)):
        source, params = Threads(seed=2), (torch.zeros(size),)
        mechanism = trial.make(noise=source, noise_multiplier=noise_multiplier)
        mechanism.ask(params)
        mechanism.begin_noise(params)
        assert mechanism.so_far is None and source.begun == 0


def test_each_rank_begins_with_the_noise_of_its_share():
    shares = [World(rank, 3).share(SIZE) for rank in range(3)]
    for rank, share in enumerate(shares):
        begun = begin_with_noise(QUERY, PARAMS, NoiseSource(7, rank), World(rank, 3))()
        own = torch.zeros(SIZE, dtype=torch.bool)
        own[share] = True
        assert torch.equal(begun.value != 0, own)
        expected = noise(NoiseSource(7, rank), int(own.sum()), 1.5)
        torch.testing.assert_close(begun.value[share], expected)
        assert (begun.clip_norm, begun.noise_std) == (0.5, 1.5)


def test_the_noise_of_a_count_begins_with_it():
    query = replace(QUERY, count_weight=0.75)  # C' = 0.5 · 1.25
    begun = begin_with_noise(query, PARAMS, NoiseSource(1), World())()
    torch.testing.assert_close(begun.value, noise(NoiseSource(1), SIZE + 1, 3 * 0.625))
    released = add_noise(begun, 3.0, NoiseSource(1), World())
    assert released.value is begun.value and released.noise_std == pytest.approx(3 * 0.625)


@pytest.mark.parametrize("noise_multiplier", [1.5, 6.0, 0.0])
def test_a_sum_that_began_with_other_noise_is_not_released(noise_multiplier):
    begun = begin_with_noise(QUERY, PARAMS, NoiseSource(), World())()
    with pytest.raises(ValueError, match=r"began with noise of standard deviation 1\.5"):
        add_noise(begun, noise_multiplier, NoiseSource(), World())
