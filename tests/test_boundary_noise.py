"""The noise of a release: its scale and its place."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.boundary import BoundedSum, add_noise

DIMENSION = 20_000
MULTIPLIER, CLIP_NORM = 1.7, 0.4
CPU = torch.device("cpu")


def noise_of(seed: int | None = 0) -> Tensor:
    total = BoundedSum(torch.zeros(DIMENSION), CLIP_NORM)
    return add_noise(total, MULTIPLIER, NoiseSource(seed), World()).value


def p_value(noise: Tensor, standard_deviation: float) -> float:
    normal = scipy.stats.norm(scale=standard_deviation)
    return float(scipy.stats.kstest(noise.numpy(), normal.cdf).pvalue)


def test_noise_is_normal_with_standard_deviation_multiplier_times_clip_norm():
    assert p_value(noise_of(), MULTIPLIER * CLIP_NORM) > 0.01


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2, 0.5, 2.0, 0.95, 1.05])
def test_noise_of_another_scale_would_be_noticed(factor):
    assert p_value(noise_of(), MULTIPLIER * CLIP_NORM * factor) < 1e-3


def test_the_release_says_how_much_noise_it_has():
    release = add_noise(BoundedSum(torch.zeros(3), 0.4), 1.7, NoiseSource(), World())
    assert release.noise_std == pytest.approx(0.68, rel=1e-12)


def test_every_coordinate_gets_noise_of_its_own():
    noise = noise_of()
    assert (noise != 0).all()
    assert len(noise.unique()) > 0.99 * DIMENSION
    assert abs(float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1])) < 0.03


def test_noise_is_added_to_the_sum():
    total = torch.linspace(-1, 1, DIMENSION)

    release = add_noise(BoundedSum(total.clone(), CLIP_NORM), MULTIPLIER, NoiseSource(0), World())

    assert p_value(release.value - total, MULTIPLIER * CLIP_NORM) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_release_is_in_the_memory_of_the_sum_which_is_gone(dtype):
    total = BoundedSum(torch.ones(5, dtype=dtype), 1.0)
    memory = total.value.data_ptr()

    release = add_noise(total, 1.0, NoiseSource(), World())

    assert release.value.dtype == dtype
    assert release.value.data_ptr() == release.mean(7.0).value.data_ptr() == memory
    assert (total.value != 1).all()


@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
def test_without_noise_the_sum_is_released_exactly(clip_norm):
    total = torch.randn(50)
    release = add_noise(BoundedSum(total, clip_norm), 0.0, NoiseSource(), World())
    assert torch.equal(release.value, total)
    assert release.noise_std == 0


def test_a_sum_without_a_bound_is_not_noised():
    with pytest.raises(ValueError, match=r"not bounded \(clip norm inf\)"):
        add_noise(BoundedSum(torch.zeros(2), math.inf), 1.0, NoiseSource(), World())


@pytest.mark.parametrize("multiplier", [-0.1, math.nan, math.inf])
def test_a_noise_multiplier_that_means_nothing_is_refused(multiplier):
    with pytest.raises(
        ValueError, match=f"noise_multiplier={multiplier} must be finite and at least 0"
    ):
        add_noise(BoundedSum(torch.zeros(2), 1.0), multiplier, NoiseSource(), World())


# -- several processes ---------------------------------------------------------------------------


def release_on_ranks(totals: list[Tensor], multiplier: float) -> tuple[list[Tensor], Tensor]:
    """Summands of the all-reduce, and the release: the ranks one after the other."""
    handed: list[Tensor] = []

    def all_reduce(vector: Tensor) -> Tensor:
        handed.append(vector)
        return torch.stack(handed).sum(0)

    for rank, total in reversed(list(enumerate(totals))):
        world = World(rank=rank, size=len(totals), all_reduce=all_reduce)
        own = BoundedSum(total.clone(), CLIP_NORM)
        release = add_noise(own, multiplier, NoiseSource(rank), world)
    return handed[::-1], release.value


def test_each_rank_noises_its_share_alone_and_before_the_sums_are_added_up():
    totals = [torch.randn(DIMENSION) for _ in range(3)]

    handed, released = release_on_ranks(totals, MULTIPLIER)

    shares = [World(rank, 3).share(DIMENSION) for rank in range(3)]
    assert [each.stop - each.start for each in shares] == [6666, 6667, 6667]
    for vector, total, share in zip(handed, totals, shares, strict=True):
        own = torch.zeros(DIMENSION, dtype=torch.bool)
        own[share] = True
        assert torch.equal(vector != total, own)
    # Twice the noise in one entry, or none, would not be the same at all of them.
    assert p_value(released - sum(totals), MULTIPLIER * CLIP_NORM) > 0.01


def test_ranks_of_one_seed_draw_other_values():
    vectors = [torch.zeros(40_000) for _ in range(2)]
    for rank, vector in enumerate(vectors):
        NoiseSource(5, rank).add_normal(vector, 1.0)
    assert abs(float(torch.corrcoef(torch.stack(vectors))[0, 1])) < 0.03


@pytest.mark.parametrize(("size", "ranks"), [(0, 2), (1, 4), (8, 3), (101, 7), (6, 6)])
def test_every_entry_is_in_the_share_of_one_rank(size, ranks):
    shares = [World(rank, ranks).share(size) for rank in range(ranks)]
    assert [i for share in shares for i in range(size)[share]] == list(range(size))


def test_without_noise_the_ranks_release_the_sum_of_their_sums():
    totals = [torch.ones(4), torch.arange(4.0)]
    assert torch.equal(release_on_ranks(totals, 0.0)[1], torch.arange(4.0) + 1)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, size):
    with pytest.raises(ValueError, match=f"rank={rank}, size={size}"):
        World(rank=rank, size=size)


def test_noise_is_drawn_in_double_precision_and_added_in_that_of_the_sum():
    size = 200_001
    total = BoundedSum(torch.randn(size, generator=torch.Generator().manual_seed(0)), 0.5)
    before = total.value.clone()
    noise = torch.zeros(size, dtype=torch.float64)
    NoiseSource(seed=1).add_normal(noise, 1.0)
    release = add_noise(total, 3.0, NoiseSource(seed=1), World())
    assert torch.equal(release.value, before.add(noise.float(), alpha=1.5))
