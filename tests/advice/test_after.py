"""The judgement on the releases of a run, and the advice that follows from it."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.advice import OptimizerSetting, after, facts, judged
from lightning_dp.boundary import Query, Release, Term
from lightning_dp.signal import Signal, SignalTracker, Stretch


def test_noise_alone_is_seldom_taken_for_learning(signal_of):
    verdicts = [judged(signal_of([0.0] * 50, size=20, seed=seed)) for seed in range(120)]
    # 1.2 are expected at most; 7 or more have a chance below 1 in 1000. But the largest of many
    # sums is not small: a threshold for a single one would not do.
    assert sum(verdict.learns for verdict in verdicts) <= 6
    assert sum(verdict.largest > 2.0 for verdict in verdicts) > 60
    assert 3.4 < verdicts[0].threshold < 4.0


@pytest.mark.parametrize(
    "strengths",
    [[4.0] * 200, [12.0] * 30 + [0.0] * 170, [0.0] * 170 + [12.0] * 30],
    ids=["always", "early", "late"],
)
def test_a_direction_is_found_whenever_it_was_there(strengths, signal_of):
    # A thousand entries of noise are 32 long, so no single release shows it.
    assert judged(signal_of(strengths)).learns


def test_nothing_is_said_of_few_steps(signal_of):
    assert judged(signal_of([1.0] * 10)) is None
    assert judged(signal_of([1.0] * 11)) is not None
    assert judged(Signal()) is None


def test_a_run_that_learnt_nothing_is_told_what_to_try(setting, signal_of):
    first, *lines = after(setting(), signal_of([0.0] * 100))
    assert "no direction that outlasts their noise" in first and "nothing was learnt" in first
    assert lines[0].startswith("try: batch_size=1024")

    good = setting(
        {"optimizer": OptimizerSetting("Adam", "adam", 0.007)}, batch_size=1024, epochs=8
    )
    assert "larger ε" in after(good, signal_of([0.0] * 100))[1]


def test_steps_that_were_too_short_are_told_so(setting, signal_of):
    good = setting(
        {"optimizer": OptimizerSetting("Adam", "adam", 0.003)}, batch_size=1024, epochs=8
    )
    lines = after(good, signal_of([10.0] * 100))
    assert "still pointed where earlier ones had" in lines[0]
    assert lines[1] == "Try lr=0.009 for Adam (now 0.003), or more epochs."
    assert after(setting({"optimizer": None}), signal_of([10.0] * 100))[1].startswith("try: ")


def test_a_gradient_that_fades_away_is_no_fault(setting, signal_of):
    strengths = [30.0 * 0.9**step for step in range(100)]
    assert after(setting(), signal_of(strengths)) == []


def test_steps_that_jump_across_are_told_so(setting, signal_of):
    signal = signal_of([20.0] * 20 + [(-1) ** (step // 2) * 30.0 for step in range(180)])
    assert judged(signal).jumps
    assert after(setting(), signal)[1] == "Try lr=0.0003 for Adam (now 0.001), or one that decays."


def test_a_clip_norm_that_hardly_any_gradient_has_is_named(setting, signal_of):
    def lines(share, spread):
        stretch = Stretch(1, 1, 1.0, 1.0, counts=1, share=share, share_variance=spread**2)
        return after(setting({"clip_norm": 6.0}), Signal((stretch,), 10))

    assert "Try max_grad_norm=2." in lines(0.01, 0.01)[0]
    assert lines(0.01, 0.1) == [] and lines(0.9, 0.01) == []


def test_facts_hold_public_numbers_releases_and_advice(setting, signal_of):
    found = facts(setting(), signal_of([10.0] * 100))
    assert found["noise in a mean gradient"].startswith("16.4 long")
    assert found["noise over the run"].startswith("4.2 times")
    assert found["length of releases"].count("up to step") == 4
    assert found["a direction that outlasts the noise"].startswith("yes: largest agreement")
    assert "try: batch_size=1024" in found["advice"]
    assert "share of clipped records" not in found
    assert facts(None, None) == {}


def test_facts_tell_the_released_share(setting):
    tracker = SignalTracker()
    count = Release(torch.full((1,), 0.5), 0.02)
    tracker.observe(Query((Term(),), 1.0, 1.0), Release(torch.ones(1), 1.0), 0, count)
    found = facts(setting(), tracker.signal())
    assert found["share of clipped records"].startswith("0.750 ± 0.010")
