"""Where noise and batches come from: the operating system, and nothing that a seed can reach."""

from __future__ import annotations

import random

import lightning as L
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dp._noise import _AHEAD, _BLOCK, NoiseSource, normal_values, random_generator

DIMENSION = 20_000
CPU = torch.device("cpu")
LARGE = 3_000_001  # more than is drawn ahead, and no whole number of blocks


def normal(source: NoiseSource, size: int) -> Tensor:
    """So many of its values."""
    values = torch.zeros(size, dtype=torch.float64)
    source.add_normal(values, 1.0)
    return values


def test_two_draws_of_one_source_are_independent():
    source = NoiseSource(0)
    first, second = normal(source, DIMENSION), normal(source, DIMENSION)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.03


def seed_everything_in_sight() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    L.seed_everything(1, workers=True, verbose=False)


def test_global_seeds_do_not_make_noise_predictable():
    drawn = []
    for _ in range(2):
        seed_everything_in_sight()
        drawn.append(normal(NoiseSource(), 100))
    assert not torch.isclose(drawn[0], drawn[1]).any()


def test_global_seeds_do_not_make_batches_predictable():
    drawn = []
    for _ in range(2):
        seed_everything_in_sight()
        drawn.append(random_generator(None, 1, 0, 0).standard_normal(100))
    assert not np.isclose(drawn[0], drawn[1]).any()


def test_drawing_leaves_the_global_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    normal(NoiseSource(), 1000)
    normal(NoiseSource(3), 1000)
    random_generator(None, 1).choice(1000, 10)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_a_seed_makes_noise_repeatable_and_seeds_differ():
    def draw(seed: int) -> Tensor:
        return normal(NoiseSource(seed), 100)

    assert torch.equal(draw(5), draw(5))
    assert not torch.isclose(draw(5), draw(6)).any()


def test_the_streams_of_one_seed_differ():
    """Noise, and the batches of each rank and pass."""
    streams = [(0,), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 2, 0)]
    first = [random_generator(7, *stream).standard_normal() for stream in streams]
    assert len(set(first)) == len(streams)


def test_the_noise_has_all_the_bits_of_a_double():
    """32-bit values would repeat among a million draws, and be exact multiples of a step."""
    values = normal(NoiseSource(), 1_000_000)
    assert values.dtype == torch.float64
    assert len(values.unique()) == 1_000_000


@pytest.mark.parametrize("size", [400_000, 399_999])
def test_values_follow_the_normal_law_and_pairs_are_independent(size):
    values = normal_values(random_generator(4), size).numpy()
    assert len(values) == size
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kstest(values[np.abs(values) < 0.01], "uniform", (-0.01, 0.02)).pvalue > 1e-3
    beyond = [(np.abs(values) > t).mean() / (2 * stats.norm.sf(t)) for t in (2, 3, 3.7)]
    assert beyond == pytest.approx([1, 1, 1], abs=0.35)
    half = (size + 1) // 2  # a value and the one with the same length
    first, second = values[: size - half], values[half:]
    angles = np.arctan2(second, first)
    assert stats.kstest(angles, "uniform", (-np.pi, 2 * np.pi)).pvalue > 1e-3
    assert stats.kstest(first**2 + second**2, "expon", (0, 2)).pvalue > 1e-3
    assert abs(np.corrcoef(first**2, second**2)[0, 1]) < 0.01


def test_the_least_and_the_largest_uniform_numbers_give_finite_values():
    class Ends:
        def random(self, size: int) -> np.ndarray:
            return np.resize([0.0, 1 - 2.0**-53], size)

    values = normal_values(Ends(), 8)
    assert values.isfinite().all()
    assert float(values.abs().max()) == pytest.approx((2 * 53 * np.log(2)) ** 0.5)


def streams(source: NoiseSource) -> list[list[Tensor]]:
    """What each generator has drawn ahead."""
    for each in source._ahead:
        each.result()
    return [stream._ahead for stream in source._streams]


@pytest.mark.parametrize("size", [100_000, LARGE])
def test_noise_drawn_ahead_is_what_would_have_been_drawn(size):
    """Also for a vector of another size than it was drawn for: nothing is used twice."""
    ahead, now = NoiseSource(seed=3), NoiseSource(seed=3)
    for _ in range(2):
        ahead.prepare(size, CPU)
        ahead.prepare(size, CPU)  # one is enough
        assert torch.equal(normal(ahead, size), normal(now, size))
    assert torch.equal(normal(ahead, size), normal(now, size))  # not what was used before
    ahead.prepare(size, CPU)
    unused = [block for stream in streams(ahead) for block in stream]
    assert sum(map(len, unused)) == min(size, _AHEAD)
    assert not torch.isin(normal(ahead, size - 1), torch.cat(unused)).any()
    ahead.prepare(size, CPU)
    ahead.close()
    assert torch.isfinite(normal(ahead, size)).all()


@pytest.mark.parametrize("size", [1, 7, DIMENSION, 1 << 15, (1 << 15) + 1, LARGE])
def test_each_entry_has_noise_of_its_own_in_every_size(size):
    source = NoiseSource()
    source.prepare(size, CPU)
    values = normal(source, size)
    assert (values != 0).all()
    assert len(values.unique()) == size
    assert float(values.mean()) == pytest.approx(0, abs=5 / size**0.5)
    if size > 1000:
        assert float(values.var()) == pytest.approx(1, abs=5 * (2 / size) ** 0.5)


def test_the_two_generators_are_not_alike():
    """Blocks are drawn by two of them in turn."""
    blocks = normal(NoiseSource(seed=5), 10 * _BLOCK).view(-1, _BLOCK)
    among = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert float(among.abs().max()) < 5 / _BLOCK**0.5


def test_the_same_noise_is_drawn_whatever_threads_do():
    draws = [normal(NoiseSource(seed=2), 300_000) for _ in range(3)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def test_noise_is_scaled_and_added():
    vector = torch.full((DIMENSION,), 5.0)
    NoiseSource(1).add_normal(vector, 0.25)
    noise = normal(NoiseSource(1), DIMENSION)
    torch.testing.assert_close(vector, (5 + 0.25 * noise).float(), rtol=1e-6, atol=0)
