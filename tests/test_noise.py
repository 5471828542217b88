"""Where noise and batches come from: the operating system, and nothing that a seed can reach."""

from __future__ import annotations

import random

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource, random_generator

DIMENSION = 20_000
CPU = torch.device("cpu")


def test_two_draws_of_one_source_are_independent():
    source = NoiseSource(0)
    first, second = source.normal(DIMENSION, CPU), source.normal(DIMENSION, CPU)
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
        drawn.append(NoiseSource().normal(100, CPU))
    assert not torch.isclose(drawn[0], drawn[1]).any()


def test_global_seeds_do_not_make_batches_predictable():
    drawn = []
    for _ in range(2):
        seed_everything_in_sight()
        drawn.append(random_generator(None, 1, 0, 0).standard_normal(100))
    assert not np.isclose(drawn[0], drawn[1]).any()


def test_drawing_leaves_the_global_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    NoiseSource().normal(1000, CPU)
    NoiseSource(3).normal(1000, CPU)
    random_generator(None, 1).choice(1000, 10)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_a_seed_makes_noise_repeatable_and_seeds_differ():
    def draw(seed: int) -> Tensor:
        return NoiseSource(seed).normal(100, CPU)

    assert torch.equal(draw(5), draw(5))
    assert not torch.isclose(draw(5), draw(6)).any()


def test_the_streams_of_one_seed_differ():
    """Noise, and the batches of each rank and pass."""
    streams = [(0,), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 2, 0)]
    first = [random_generator(7, *stream).standard_normal() for stream in streams]
    assert len(set(first)) == len(streams)


def test_the_noise_has_all_the_bits_of_a_double():
    """32-bit values would repeat among a million draws, and be exact multiples of a step."""
    values = NoiseSource().normal(1_000_000, CPU)
    assert values.dtype == torch.float64
    assert len(values.unique()) == 1_000_000


def test_noise_drawn_ahead_is_what_would_have_been_drawn():
    """Also of a size that then was not asked for: nothing is used twice."""
    size, cpu = 100_000, torch.device("cpu")
    ahead, now = NoiseSource(seed=3), NoiseSource(seed=3)
    for _ in range(3):
        ahead.prepare(size, cpu)
        ahead.prepare(size, cpu)  # one is enough
        assert torch.equal(ahead.normal(size, cpu), now.normal(size, cpu))
    ahead.prepare(size, cpu)
    first = now.normal(size, cpu)
    assert torch.equal(ahead.normal(7, cpu), now.normal(7, cpu))
    assert not torch.equal(ahead.normal(size, cpu), first)
