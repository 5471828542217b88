"""Origin of noise and batches: the operating system, and nothing that a seed can reach."""

from __future__ import annotations

import os
import random
import threading
import warnings
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dp import _noise
from lightning_dp._noise import _BLOCK, _STREAMS, NoiseSource, fill_normal, random_generator
from tests.normal_values import NormalValues

DIMENSION = 20_000
LARGE = 3_000_001  # no whole number of blocks


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


def test_global_seeds_make_neither_noise_nor_batches_predictable():
    for draw in (normal, lambda *_: random_generator(None, 1, 0, 0).standard_normal(100)):
        drawn = []
        for _ in range(2):
            seed_everything_in_sight()
            drawn.append(np.asarray(draw(NoiseSource(), 100)))
        assert not np.isclose(*drawn).any()


def test_drawing_leaves_the_global_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    normal(NoiseSource(), 1000)
    normal(NoiseSource(3), 1000)
    random_generator(None, 1).choice(1000, 10)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


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


def filled(generator: Any, size: int) -> Tensor:
    values = torch.empty(size, dtype=torch.float64)
    fill_normal(generator, values, torch.empty(size // 2, dtype=torch.float64))
    return values


def test_values_follow_the_normal_law_and_pairs_are_independent():
    values = filled(random_generator(4), 400_000).numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kstest(values[np.abs(values) < 0.01], "uniform", (-0.01, 0.02)).pvalue > 1e-3
    beyond = [(np.abs(values) > t).mean() / (2 * stats.norm.sf(t)) for t in (2, 3, 3.7)]
    assert beyond == pytest.approx([1, 1, 1], abs=0.35)
    first, second = np.split(values, 2)  # a value and the one with the same length
    angles = np.arctan2(second, first)
    assert stats.kstest(angles, "uniform", (-np.pi, 2 * np.pi)).pvalue > 1e-3
    assert stats.kstest(first**2 + second**2, "expon", (0, 2)).pvalue > 1e-3
    assert abs(np.corrcoef(first**2, second**2)[0, 1]) < 0.01


def test_the_least_and_the_largest_uniform_numbers_give_finite_values():
    class Ends:
        def random(self, out: np.ndarray) -> None:
            out[:] = np.resize([0.0, 1 - 2.0**-53], len(out))

    values = filled(Ends(), 8)
    assert values.isfinite().all()
    assert float(values.abs().max()) == pytest.approx((2 * 53 * np.log(2)) ** 0.5)


@pytest.mark.parametrize("size", [1, 6, 7, 1001, 8192, 8193, 20_001])
def test_values_are_those_of_the_method_and_none_is_used_twice(size):
    expected, source = NormalValues(random_generator(3, 0, 0, 0)), NoiseSource(3)
    for each in (size, size, 5, size, size):
        torch.testing.assert_close(normal(source, each), torch.from_numpy(expected(each)))


def test_the_noise_of_a_float32_vector_is_that_of_a_float64_one_rounded():
    for size in (9, 100_000):
        vector = torch.zeros(size)
        NoiseSource(3).add_normal(vector, 1.0)
        assert torch.equal(vector, normal(NoiseSource(3), size).float())


def begun(source: NoiseSource, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """So many values that were drawn in the background."""
    values = torch.empty(size, dtype=dtype)
    source.begin_normal(values, 1.0)()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1001, 100_000, LARGE])
def test_noise_drawn_in_the_background_is_what_would_have_been_drawn(size, dtype):
    """Also after some that nobody used: nothing is drawn twice."""
    behind, now = NoiseSource(seed=3), NoiseSource(seed=3)
    for _ in range(2):
        values = torch.zeros(size, dtype=dtype)
        now.add_normal(values, 1.0)
        assert torch.equal(begun(behind, size, dtype), values)
    unused = torch.zeros(size, dtype=dtype)
    behind.begin_normal(unused, 1.0)
    assert not torch.isclose(begun(behind, size, dtype), unused, rtol=1e-9, atol=0).all()
    behind.begin_normal(unused, 1.0)
    behind.close()
    assert torch.isfinite(begun(behind, size, dtype)).all()


def test_noise_that_no_thread_has_begun_is_drawn_by_who_waits_for_it():
    source, values = NoiseSource(seed=3), torch.zeros(100_000, dtype=torch.float64)
    may_end = threading.Event()

    def other_work() -> None:
        may_end.wait(60)

    for _ in range(_STREAMS):  # for every thread
        source._on_worker(other_work)
    source.begin_normal(values, 1.0)()
    may_end.set()
    source.close()
    assert torch.equal(values, normal(NoiseSource(seed=3), 100_000))


@pytest.mark.parametrize("size", [1, 7, DIMENSION, 1 << 15, (1 << 15) + 1, LARGE])
def test_each_entry_has_noise_of_its_own_in_every_size(size):
    source = NoiseSource()
    values = begun(source, size)
    assert (values != 0).all()
    assert len(values.unique()) == size
    assert float(values.mean()) == pytest.approx(0, abs=5 / size**0.5)
    if size > 1000:
        assert float(values.var()) == pytest.approx(1, abs=5 * (2 / size) ** 0.5)


def test_the_two_generators_are_not_alike():
    """Each draws its half."""
    blocks = normal(NoiseSource(seed=5), 10 * _BLOCK).view(-1, _BLOCK)
    among = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert float(among.abs().max()) < 5 / _BLOCK**0.5


@pytest.mark.parametrize("size", [100_000, LARGE])
def test_noise_of_long_vectors_is_scaled_in_all_its_parts(size):
    """Noise that the worker draws, and the training's thread."""
    source, vector = NoiseSource(1), torch.full((size,), 5.0)
    source.add_normal(vector, 0.25)
    noise = normal(NoiseSource(1), size)
    torch.testing.assert_close(vector, (5 + 0.25 * noise).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [100, 100_000, LARGE])
def test_noise_that_is_begun_is_written_over_whatever_the_memory_held(size):
    source, vector = NoiseSource(1), torch.full((size,), torch.nan)
    source.begin_normal(vector, 0.25)()
    noise = normal(NoiseSource(1), size)
    torch.testing.assert_close(vector, (0.25 * noise).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [5, 100_000])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_forked_process_draws_other_noise(size, is_begun):
    """Clients of a federation are made like this, before the processes in which they answer."""
    source, mine = NoiseSource(), torch.zeros(size)
    finish = source.begin_normal(mine, 1.0) if is_begun else partial(source.add_normal, mine, 1.0)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)  # the team of OpenMP's threads is the parent's
            finish()
            os.write(write, mine[-5:].numpy().tobytes())
            os._exit(0)
    finish()
    theirs = np.frombuffer(os.read(read, 20), np.float32)
    assert os.waitpid(child, 0)[1] == 0
    assert not (mine[-5:].numpy() == theirs).any()


def test_what_an_interrupted_draw_left_is_not_released(monkeypatch):
    source, size = NoiseSource(), _BLOCK // 2
    source.add_normal(torch.zeros(size - 2), 1.0)
    source.add_normal(torch.zeros(2), 1.0)

    def interrupted(generator, values, room):
        values.zero_()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_noise, "fill_normal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.add_normal(torch.zeros(_BLOCK), 1.0)
    noise = torch.zeros(100)
    source.add_normal(noise, 1.0)
    assert (noise != 0).all()
