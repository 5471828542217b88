"""The signal beneath the noise: its law under noise alone, its oracle, its power, its memory."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from lightning_dp.boundary import Query, Release, Term
from lightning_dp.plan.signal import Signal, SignalTracker, Stretch

GRADIENT = Query((Term(),), 1.0, 1.0)


def tracked(releases, stds):
    tracker = SignalTracker()
    for step, (value, std) in enumerate(zip(releases, stds, strict=True)):
        tracker.observe(GRADIENT, Release(value, std), step)
    return tracker


def agreements_of_noise(seed, runs=120, steps=20, size=5, factor=1.0):
    """a_t of runs that release noise alone, whose strength follows what was released before."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(runs):
        releases, stds = [], []
        for _ in range(steps):
            std = 0.1 if releases and releases[-1][0] > 0 else 3.0
            releases.append(factor * std * torch.randn(size, generator=generator))
            stds.append(std)
        found += [s.agreement for s in tracked(releases, stds).signal().stretches if s.agreements]
    assert len(found) == runs * (steps - 1)
    return found


def test_under_noise_alone_agreements_are_standard_normal_also_where_noise_follows_releases():
    found = agreements_of_noise(0)

    assert scipy.stats.kstest(found, scipy.stats.norm.cdf).pvalue > 0.01
    successive = torch.tensor(found).view(-1, 19)
    correlation = torch.corrcoef(torch.stack([successive[:, 1:], successive[:, :-1]]).flatten(1))
    assert abs(float(correlation[0, 1])) < 0.07


@pytest.mark.parametrize("size", [20, 64])
def test_the_law_is_the_same_where_some_entries_are_followed(size, monkeypatch):
    """Of a large model: 7 of 20 entries in one case, an eighth of 64 in the other."""
    monkeypatch.setattr("lightning_dp.plan.signal._ENTRIES", 7)
    tracker = tracked([torch.randn(size)], [1.0])
    assert len(tracker._average) == {20: 7, 64: 8}[size]
    assert tracker.signal().whole.noise == size  # lengths are of all entries

    assert scipy.stats.kstest(agreements_of_noise(3, size=size), "norm").pvalue > 0.01
    for factor in (0.85, 1.18):
        assert (
            scipy.stats.kstest(agreements_of_noise(3, size=size, factor=factor), "norm").pvalue
            < 0.01
        )
    constant = [torch.full((size,), 0.5) + torch.randn(size) for _ in range(100)]
    assert tracked(constant, [1.0] * 100).signal().whole.z_score > 3


def test_numbers_equal_a_slow_loop():
    generator = torch.Generator().manual_seed(1)
    releases = [torch.randn(30, generator=generator) + 0.3 for _ in range(50)]
    stds = [1.0 + 0.1 * (step % 3) for step in range(50)]

    stretches = tracked(releases, stds).signal().stretches

    for step, stretch in enumerate(stretches):
        value = releases[step].double()
        assert stretch.last_step == step + 1
        assert stretch.squared == pytest.approx(float(value @ value), rel=1e-5)
        assert stretch.noise == pytest.approx(30 * stds[step] ** 2)
        if not step:
            assert stretch.agreements == 0
            continue
        # The weights of a moving average with steps 4 / (s + 4): products of what is left of each.
        average = torch.zeros(30, dtype=torch.float64)
        for earlier in range(step):
            left = math.prod(later / (later + 4) for later in range(earlier + 1, step))
            average += 4 / (earlier + 4) * left * releases[earlier].double()
        expected = float(value @ average) / (stds[step] * float(average.norm()))
        assert stretch.agreement == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_gradient_shows_though_noise_is_thirty_times_as_long_at_every_step():
    generator = torch.Generator().manual_seed(2)
    size, steps = 40_000, 150
    gradient = torch.randn(size, generator=generator)
    gradient *= 200 / 30 / gradient.norm()

    def releases(weight):
        return [weight * gradient + torch.randn(size, generator=generator) for _ in range(steps)]

    with_it = tracked(releases(1.0), [1.0] * steps).signal().whole
    without = tracked(releases(0.0), [1.0] * steps).signal().whole
    assert with_it.released_norm < 1.01 * with_it.noise_norm  # one step shows nothing
    assert with_it.z_score > 8
    assert abs(without.z_score) < 4
    assert with_it.signal_ratio == pytest.approx(1 / 30, rel=0.5)


def test_the_length_of_the_gradient_has_no_bias():
    generator = torch.Generator().manual_seed(4)
    gradient = torch.full((1000,), 0.4)
    releases = [gradient + 2 * torch.randn(1000, generator=generator) for _ in range(200)]
    whole = tracked(releases, [2.0] * 200).signal().whole
    assert whole.signal_norm == pytest.approx(float(gradient.norm()), rel=0.1)
    assert whole.noise_norm == pytest.approx(2 * math.sqrt(1000))


@pytest.mark.parametrize(
    "query",
    [
        Query((Term(), Term(-1.0, torch.zeros(3))), 1.0, 1.0),
        Query((Term(direction=torch.ones(3)),), 1.0, 1.0),
        Query((Term(),), 1.0, 1.0, torch.tensor([0, 2, 4])),
    ],
    ids=["difference", "product", "coordinates"],
)
def test_only_gradients_of_all_parameters_count(query):
    tracker = SignalTracker()
    tracker.observe(query, Release(torch.ones(3), 1.0), 0)
    assert tracker.signal() == Signal()


def test_a_release_that_is_not_finite_ends_what_can_be_said_but_nothing_else():
    releases = [torch.ones(3), torch.full((3,), math.inf), torch.ones(3)]
    whole = tracked(releases, [1.0] * 3).signal().whole
    assert whole.steps == 2 and math.isfinite(whole.squared) and whole.agreements == 0


def test_a_resumed_tracker_goes_on_from_its_sums():
    generator = torch.Generator().manual_seed(6)
    releases = [torch.randn(50, generator=generator) + 1 for _ in range(90)]
    first = tracked(releases[:80], [1.0] * 80)
    resumed = SignalTracker()
    resumed.load_state_dict(first.state_dict())
    assert resumed.signal() == first.signal()

    for step in range(80, 90):
        resumed.observe(GRADIENT, Release(releases[step], 1.0), step)

    whole = resumed.signal().whole
    assert whole.steps == 90 and whole.last_step == 90
    assert whole.agreements == 88  # each of both parts has a first release
    assert whole.squared == pytest.approx(tracked(releases, [1.0] * 90).signal().whole.squared)
    assert whole.agreement > first.signal().whole.agreement + 10


def test_shares_of_clipped_records_are_averaged_with_their_noise():
    tracker = SignalTracker()
    for step, mean in enumerate([0.5, 0.1]):
        count = Release(torch.tensor([mean]), 0.08)
        tracker.observe(GRADIENT, Release(torch.ones(3), 1.0), step, count)
    share, noise = tracker.signal().whole.share_clipped
    assert share == pytest.approx((0.75 + 0.55) / 2)
    assert noise == pytest.approx(0.04 / math.sqrt(2))
    assert Stretch().share_clipped is None
