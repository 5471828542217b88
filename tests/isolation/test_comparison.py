"""The movement of the clipped sum of the kept samples, in C, against a slow computation."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dp.clipping import Automatic, Flat, ParameterGroups
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.parameter_sum import MaterialisedGradients
from lightning_dp.isolation.comparison import (
    TOLERANCE,
    Entries,
    movement,
    movement_if_ordered,
    resolution,
    take_sample,
)

N, D = 8, 400
SIZES = [300, 100]


def gradients(seed=0, n=N, d=D):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def sample(grads, rows=tuple(range(N)), clip_norm=5.0, sizes=SIZES, clipping=Flat()):  # noqa: B008
    params = [torch.zeros(size) for size in sizes]
    given = MaterialisedGradients(params, list(grads.clone().split(sizes, dim=1)), 1.0)
    return take_sample(given, list(rows), clip_norm, Entries.drawn(params, 3), clipping)


def clipped(grads, clip_norm):
    """Return each gradient in units of C, scaled to length 1 at most, one after the other."""
    return torch.stack([g.double() / max(clip_norm, float(g.double().norm())) for g in grads])


def moved(before, after, n, k):
    """Return the formula's two estimates by loops."""
    total = sum(a - b for a, b in zip(before, after, strict=True)).norm() * n / k
    apart = math.sqrt(
        n / k * sum(float((a - b).norm()) ** 2 for a, b in zip(before, after, strict=True))
    )
    return float(total), apart


@pytest.mark.parametrize("clip_norm", [0.5, 20.0, 100.0])
@pytest.mark.parametrize("rows", [range(8), [1, 4], [7]])
def test_the_sum_moves_as_in_a_slow_computation(rows, clip_norm):
    before, after = gradients(0), gradients(0)
    after[4:] += 0.5
    rows, k, n = list(rows), len(rows), 64

    found = movement(sample(before, rows, clip_norm), sample(after, rows, clip_norm), n, k)

    total, apart = moved(clipped(before[rows], clip_norm), clipped(after[rows], clip_norm), n, k)
    assert float(found) >= 0.99 * total
    assert float(found) <= 1.01 * total + 3 * apart  # some entries stand for all of them


@pytest.mark.parametrize(
    ("rule", "by_hand"),
    [
        (Automatic(3.0), lambda g: g / (g.norm() + 3.0)),
        (
            ParameterGroups((0, 1), (0.6, 0.8)),
            lambda g: torch.cat(
                [
                    part / max(5.0 * share, float(part.norm())) * share
                    for part, share in zip(g.split(SIZES), (0.6, 0.8), strict=True)
                ]
            ),
        ),
    ],
    ids=["automatic", "groups"],
)
def test_the_sum_of_another_rule_moves_as_in_a_slow_computation(rule, by_hand):
    before, after = gradients(0).double(), gradients(0).double()
    after[4:] += 0.5
    found = movement(sample(before, clipping=rule), sample(after, clipping=rule), 64, N)
    each = [torch.stack([by_hand(g) for g in some]) for some in (before, after)]
    total, apart = moved(*each, 64, N)
    assert 0.99 * total <= float(found) <= 1.01 * total + 3 * apart
    # A common factor, which scaling to one norm hides from the sum.
    scaled = movement(sample(before, clipping=rule), sample(2 * before, clipping=rule), 64, N)
    assert float(scaled) > 0.5 * 64


@pytest.mark.parametrize("clip_norm", [2.0, 50.0])
def test_a_common_factor_shows_though_all_are_clipped(clip_norm):
    """Gradients are some 20 long: clipping at 2 hides the factor, and 50 does not."""
    before, k, n = gradients(), N, 64
    norms = before.double().norm(dim=1)

    found = movement(
        sample(before, clip_norm=clip_norm), sample(1.1 * before, clip_norm=clip_norm), n, k
    )

    longer = sum(0.1 * float(norm) / max(clip_norm, float(norm)) for norm in norms) * n / k
    assert float(found) == pytest.approx(longer, rel=1e-4)


def test_entries_estimate_what_cancels_in_the_sum():
    before, after = gradients(), gradients()
    after[0] += 1.0
    after[1] -= 1.0  # the sum stays

    found = [
        float(movement(sample(before, clip_norm=1e3), sample(after, clip_norm=1e3), N, N))
        for _ in range(3)
    ]

    expected = math.sqrt(2 * D) / 1e3
    assert found[0] == found[1] == found[2]  # the same entries each time
    assert 0.5 * expected < found[0] < 2 * expected


def test_a_tenth_of_c_is_a_tenth_of_c_whatever_the_number_of_samples():
    for n in (8, 64, 512):
        before = 0.01 * gradients(n=n)
        after = before.clone()
        after[:, 0] += 0.1 / n  # of each sample, with C = 1
        whole = [sample(each, range(n), 1.0) for each in (before, after)]
        quarter = [sample(each, range(0, n, 4), 1.0) for each in (before, after)]
        assert float(movement(*whole, n, n)) == pytest.approx(0.1, rel=1e-3)
        assert float(movement(*quarter, n, n // 4)) == pytest.approx(0.1, rel=1e-3)
        assert resolution(torch.finfo(torch.float32).eps, n, n // 4) < TOLERANCE


def test_the_unit_is_c():
    before, after = 1e-3 * gradients(), 1e-3 * gradients(1)
    found = [
        float(movement(sample(before, clip_norm=c), sample(after, clip_norm=c), N, N))
        for c in (1.0, 10.0, math.inf)
    ]
    assert found[0] == pytest.approx(10 * found[1], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e6])
def test_rounding_is_no_movement(size):
    before = gradients() * size
    after = before * (1 + 1e-6 * gradients(1).sign())
    assert float(movement(sample(before), sample(after), 512, N)) < TOLERANCE


def test_other_samples_are_not_looked_at():
    before, after = gradients(), gradients()
    after[4:] = gradients(1)[4:]
    assert float(movement(sample(before, range(4)), sample(after, range(4)), N, 4)) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_gradients_that_are_not_finite_count_as_none(value):
    before, nothing = gradients(), gradients()
    before[2, 5], nothing[2] = value, 0.0
    assert float(movement(sample(before), sample(before), N, N)) == 0
    assert float(movement(sample(before), sample(nothing), N, N)) < 1e-6  # sums of another order
    assert float(movement(sample(before), sample(gradients()), N, N)) > TOLERANCE


def test_the_sketch_of_a_long_sum_keeps_its_length():
    length = (1 << 16) * 5 + 1234
    for seed in range(3):
        grads = gradients(seed, 2, length)
        whole = clipped(grads, 1.0).sum(0)
        found = sample(grads, (0, 1), 1.0, [length]).total
        assert len(found) == 1 << 16
        assert float(found.norm()) == pytest.approx(float(whole.norm()), rel=0.02)


def test_the_sketch_is_linear_and_the_same_each_time():
    length = (1 << 16) + 77
    before = gradients(0, 2, length)
    after = before.clone()
    after[:, 1000] += 300.0
    pair = [sample(each, (0, 1), 1e4, [length]) for each in (before, after)]
    assert float((pair[0].total - pair[1].total).norm()) == pytest.approx(0.06, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_another_order_have_not_moved_and_others_have(dtype):
    n, rows, eps = 256, range(0, 256, 4), torch.finfo(dtype).eps
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    noise = 2 * eps * gradients(1, n)  # of each coordinate, as rounding is

    def found(after):
        whole, few = sample(gradients(0, n)[order], range(n)), sample(after[rows], range(len(rows)))
        return movement_if_ordered(whole, few, n, len(rows), eps)

    limit = max(TOLERANCE, resolution(eps, n, len(rows)))
    assert found(gradients(0, n) * (1 + noise)) <= limit
    # Each by 2 % only, but all the same way: a coupling, also in half precision.
    assert not found(gradients(0, n) + 0.02) <= limit
    assert not found(gradients(0, n) * 1.05) <= limit
    assert found(gradients(1, n)) == math.inf


def test_long_gradients_are_told_apart_by_their_entries():
    """Rounding of norms in half precision is larger than what is left of gradients that were clipped."""
    n, eps = 64, torch.finfo(torch.bfloat16).eps
    long = gradients(0, n)
    long *= torch.linspace(60, 100, n)[:, None] / long.norm(dim=1, keepdim=True)
    rounded = long * (1 + eps * torch.randn(n, 1, generator=torch.Generator().manual_seed(1)))
    whole, few = sample(long, range(n), 0.1), sample(rounded[::2], range(n // 2), 0.1)
    assert movement_if_ordered(whole, few, n, n // 2, eps) < TOLERANCE


def test_engines_without_single_gradients_are_compared_by_the_sum():
    """Engines that keep norms alone give no entries."""

    class NormsAlone(AbstractPerSampleGradients):
        count, combine = N, None

        def norms(self):
            return grads.norm(dim=1)

        def weighted_sum(self, weights):
            return (weights[:, None] * grads).sum(0)

    grads = gradients()
    found = take_sample(NormsAlone(), [0, 3], 5.0, Entries.drawn([torch.zeros(D)], 3), Flat())
    assert found.entries is None
    torch.testing.assert_close(
        found.total, clipped(grads[[0, 3]], 5.0).sum(0), rtol=1e-5, atol=1e-6
    )
    assert float(movement(found, found, 8, 2)) == 0


def test_the_resolution_grows_with_the_batch_and_is_coarse_in_half_precision():
    single, half = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    assert resolution(single, 512, 128) < TOLERANCE < resolution(half, 512, 128)
    assert resolution(single, 64, 16) == resolution(single, 128, 64)
    assert resolution(single, 128, 16) == 2 * resolution(single, 64, 16)
