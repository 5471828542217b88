"""Noise that remembers: its matrix, what it draws one step at a time, and what it costs."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from lightning_dp import BandedNoise, IndependentNoise, LambdaCGD, Workload
from lightning_dp._noise import CorrelatedSource, NoiseSource
from lightning_dp._refusals import RefusedRun
from lightning_dp._world import World
from lightning_dp.boundary import BoundedSum, Query, Term, add_noise, begin_with_noise

GIVEN = BandedNoise(4, coefficients=(1.0, 0.7, 0.4, 0.1))
UNEVEN = BandedNoise(4, coefficients=(1.0, -0.2, 0.9, 0.3))
NOISES = [IndependentNoise(), GIVEN, UNEVEN, LambdaCGD(0.8), BandedNoise(6).for_steps(40)]


def matrix(noise, steps):
    """C of a block, from its inverse."""
    return np.linalg.inv(toeplitz(noise.inverse(steps), np.zeros(steps)))


def source(noise, seed=0, rank=0):
    return CorrelatedSource(noise.correlate, noise.column_norm, seed, rank)


def drawn(of, steps, size=5, std=1.0):
    vectors = torch.zeros(steps, size, dtype=torch.float64)
    for t in range(steps):
        of.add_normal(vectors[t], std) if t % 2 else of.begin_normal(vectors[t], std)()
    return vectors


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_what_is_drawn_step_by_step_is_the_dense_product(noise):
    fresh = drawn(NoiseSource(0), 30, std=0.7).numpy()
    found = drawn(source(noise), 30, std=0.7).numpy()
    dense = noise.column_norm * np.linalg.solve(matrix(noise, 30), fresh)
    assert np.abs(found - dense).max() < 1e-6
    # And C undoes it: nothing but fresh noise is on C x.
    assert np.abs(matrix(noise, 30) @ found - noise.column_norm * fresh).max() < 1e-6


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_columns_are_lower_triangular_with_ones_and_have_the_stated_norm(noise):
    c = matrix(noise, 60)
    assert np.allclose(np.triu(c, 1), 0)
    assert np.allclose(np.diag(c), 1)
    assert np.linalg.norm(c[:, 0]) == pytest.approx(noise.column_norm, rel=1e-4)
    if math.isfinite(noise.bands):
        assert np.allclose(np.tril(c, -noise.bands), 0, atol=1e-9)


def patterns(steps, separation):
    for count in range(1, steps // separation + 2):
        for chosen in itertools.combinations(range(steps), count):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield list(chosen)


@pytest.mark.parametrize("separation", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "noise", [IndependentNoise(), GIVEN, LambdaCGD(0.8), LambdaCGD(0.3)], ids=repr
)
def test_the_cost_is_the_largest_of_all_ways_to_take_part(noise, separation):
    """Also of any part of a block, whatever the signs of what a record adds."""
    passes = 12 // separation
    for count in range(1, passes + 1):
        c = np.abs(matrix(noise, count * separation))
        most = max(np.linalg.norm(c[:, each].sum(1)) for each in patterns(len(c), separation))
        total = sum(noise.cost(use, separation) for use in range(count))
        assert math.sqrt(total) * noise.column_norm == pytest.approx(most, rel=1e-9)


@pytest.mark.parametrize("separation", [1, 2, 3, 5])
def test_the_cost_of_coefficients_that_do_not_fall_is_a_bound(separation):
    for count in range(1, 10 // separation + 1):
        c = np.abs(matrix(UNEVEN, count * separation))
        most = max(np.linalg.norm(c[:, each].sum(1)) for each in patterns(len(c), separation))
        total = sum(UNEVEN.cost(use, separation) for use in range(count))
        assert math.sqrt(total) * UNEVEN.column_norm >= most * (1 - 1e-12)


def test_uses_that_are_bands_apart_share_no_row_and_cost_the_same():
    assert [GIVEN.cost(use, 4) for use in range(3)] == pytest.approx([1, 1, 1])
    assert GIVEN.cost(1, 3) > GIVEN.cost(0, 3)
    assert LambdaCGD(0.9).cost(10**9, 10) == pytest.approx((1 - 0.81**10) / (1 - 0.9**10) ** 2)


@pytest.mark.parametrize("workload", [Workload(), Workload(0.9), Workload(0.5, final_rate=0.1)])
def test_optimised_coefficients_beat_the_square_root_and_independent_noise(workload):
    steps, bands = 60, 6

    def error(noise):
        c = matrix(noise, steps)
        dense = np.linalg.norm(workload.matrix(steps) @ np.linalg.inv(c)) / math.sqrt(steps)
        if workload.final_rate == 1:
            assert noise.error(steps, workload) == pytest.approx(noise.column_norm * dense)
        return noise.column_norm * dense

    k = np.arange(1, bands)
    root = BandedNoise(bands, coefficients=(1.0, *np.cumprod((2 * k - 1) / (2 * k)).tolist()))
    found = BandedNoise(bands, workload).for_steps(steps)
    assert error(found) < 0.999 * error(root) < 0.8 * error(IndependentNoise())
    c = np.array(found.coefficients)
    assert (np.diff(c) <= 0).all() and (c >= 0).all()  # so that its cost is exact
    assert found == BandedNoise(bands, workload).for_steps(steps)
    assert found.for_steps(7) is found


def test_one_band_is_independent_noise():
    noise = BandedNoise(1).for_steps(100)
    assert (noise.column_norm, noise.cost(3, 2), noise.inverse(3).tolist()) == (1, 1, [1, 0, 0])


def test_coefficients_must_be_known_before_noise_is_drawn():
    with pytest.raises(RefusedRun, match="once the number of steps is known"):
        _ = BandedNoise(4).column_norm


# -- the source ----------------------------------------------------------------------------------


def released(of, noise_multiplier, *, begins, size=70_000):
    params = [torch.zeros(size)]
    query = Query((Term(),), 0.5, noise_multiplier)
    total = (
        begin_with_noise(query, params, of, World())()
        if begins
        else BoundedSum.empty(query, params)
    )
    return add_noise(total, noise_multiplier, of, World()).value


def test_a_sum_that_begins_with_its_noise_has_the_same(monkeypatch):
    """In the background too, for vectors that are worth a thread."""
    now, behind = (source(GIVEN, seed=3) for _ in range(2))
    for _ in range(6):
        first, second = released(now, 2.0, begins=False), released(behind, 2.0, begins=True)
        assert (first - second).abs().max() < 1e-5
    assert float(second.std()) > 2.0 * 0.5 * GIVEN.column_norm


def test_the_ranks_draw_their_shares_apart_and_each_cancels():
    size, norm, steps = 11, GIVEN.column_norm, 8
    sources = [source(GIVEN, seed=1, rank=rank) for rank in range(2)]
    whole = np.zeros((steps, size))
    for t in range(steps):
        for rank, each in enumerate(sources):
            vector = torch.zeros(size, dtype=torch.float64)
            share = World(rank, 2).share(size)
            each.add_normal(vector[share], 1.0)
            whole[t] += vector.numpy()
    fresh = matrix(GIVEN, steps) @ whole / norm
    assert np.abs(fresh[0] - whole[0] / norm).max() < 1e-12
    assert 0.7 < fresh.std() < 1.3
    assert [[len(past) for past in each._past] for each in sources] == [[5] * 3, [6] * 3]


def test_noise_of_another_scale_is_refused_in_a_block():
    of = source(GIVEN)
    of.add_normal(torch.zeros(3), 1.0)
    with pytest.raises(
        RefusedRun, match=r"standard deviation 2\.0, and that of the steps before 1\.0"
    ):
        of.add_normal(torch.zeros(3), 2.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])
def test_copies_have_no_memory_and_neither_has_a_pickle(copied):
    of = source(GIVEN, seed=None)
    values = drawn(of, 3, size=1000)
    other = copied(of)
    assert other._past == [] and other._std is None
    assert values[-1].numpy().tobytes() not in pickle.dumps(of)
    assert not torch.equal(drawn(other, 1, 1000), values[:1])


def test_a_forked_process_does_not_go_on_with_the_past():
    of = source(GIVEN)
    of.add_normal(torch.zeros(3), 1.0)
    finish = of.begin_normal(torch.zeros(3), 1.0)
    of._process = os.getpid() + 1
    for draw in (finish, lambda: of.add_normal(torch.zeros(3), 1.0)):
        with pytest.raises(RefusedRun, match="forked from one whose noise remembers"):
            draw()


def test_the_memory_ends_with_the_block():
    of = source(GIVEN)
    drawn(of, 3)
    of.close()
    assert of._past == []


@pytest.mark.parametrize("noise", [GIVEN, LambdaCGD(0.8)], ids=repr)
def test_the_noise_of_a_late_step_has_the_stated_size(noise):
    values = drawn(source(noise), 40, size=40_000)
    assert float(values[-1].std()) == pytest.approx(noise.growth, rel=0.02)
    assert noise.growth > 1
