"""Advice before the first step."""

from __future__ import annotations

import math
import re

import pytest

from lightning_dp.advice import OptimizerSetting, before
from lightning_dp.advice.before import changes, suggested_rate


def test_the_numbers_of_a_run_are_named(setting):
    text = "\n".join(before(setting()))
    assert "22,000 records, 128 in a batch on average (q = 0.00582), 344 steps (2 epochs)" in text
    assert "noise multiplier z = 0.634, clip norm C = 1." in text
    assert f"z·C·√d/B = {0.63448 * math.sqrt(11e6) / 128:.3g} long (d = 11,000,000 weights)" in text
    assert "That is no fault" in text
    assert "the noise is 4.2 times that of full batches" in text
    assert "With batches of 512" in text and "with 8 epochs" in text
    assert len(before(setting())) <= 10


def test_noise_shorter_than_the_bound_needs_no_excuse(setting):
    assert "no fault" not in "\n".join(before(setting({"size": 100})))


def test_what_to_try_is_one_line_that_can_be_followed(setting):
    line, *reasons = changes(setting())
    found = re.fullmatch(
        r"try: batch_size=(\d+) \(or batch_size × accumulate_grad_batches\), max_epochs=(\d+), "
        r"learning rate ([\d.e-]+)",
        line,
    )
    assert found.groups() == ("1024", "8", "0.007")
    assert "176 steps" in reasons[0] and "1.4 times" in reasons[0]
    assert "(now 0.001)" in reasons[1]


def test_followed_advice_leads_to_silence(setting):
    followed = setting(
        {"optimizer": OptimizerSetting("Adam", "adam", 0.007)}, batch_size=1024, epochs=8
    )
    assert changes(followed) == []


def test_a_rate_that_is_near_enough_is_kept(setting):
    line = changes(setting({"optimizer": OptimizerSetting("AdamW", "adam", 0.005)}))[0]
    assert line.endswith("max_epochs=8, learning rate 0.005")


def test_too_large_a_rate_is_named_too(setting):
    line = changes(
        setting({"optimizer": OptimizerSetting("Adam", "adam", 0.3)}, batch_size=1024, epochs=8)
    )[0]
    assert line.startswith("try: batch_size=1024") and line.endswith("learning rate 0.007")


def test_the_rate_of_sgd_follows_noise_and_momentum(setting):
    def rate(momentum, **changed):
        optimizer = OptimizerSetting("SGD", "sgd", 0.1, momentum)
        return suggested_rate(setting({"optimizer": optimizer, **changed}))

    given = setting()
    noise = given.noise_multiplier / given.batch_size
    assert rate(0.0) == pytest.approx(0.09 / (noise * math.sqrt(344)))
    assert rate(0.9) == pytest.approx(rate(0.0) / 10)
    assert rate(0.0, clip_norm=0.5) == pytest.approx(2 * rate(0.0))
    assert rate(0.0, size=100) is None  # hardly any noise: it sets no scale


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": None},
        {"optimizer": OptimizerSetting("Lion", None, 1e-4)},
        {"weight_size": None},
        {"noise_multiplier": 0.0},
        {"steps": math.inf},
        {"is_constant": False},
        {"clip_norm": math.inf},
        {"optimizer": OptimizerSetting("SGD", "sgd", 0.1, 1.5)},
    ],
    ids=[
        "several",
        "unknown",
        "vectors",
        "no noise",
        "no end",
        "other steps",
        "no clip norm",
        "momentum",
    ],
)
def test_where_the_principle_is_silent_no_rate_is_named(changed, setting):
    assert suggested_rate(setting(changed)) is None


def test_a_delta_that_is_too_large_is_said(setting):
    assert any("not below 1/N" in line for line in before(setting({"target_delta": 1e-4})))
    assert not any("1/N" in line for line in before(setting()))


@pytest.mark.parametrize(
    ("steps", "words"),
    [(1, "One step spends the whole budget"), (37, "ends after 37 of 344 steps")],
)
def test_a_budget_that_ends_early_is_said(steps, words, setting):
    assert any(words in line for line in before(setting({"steps": steps})))


def test_without_noise_or_an_end_there_are_numbers_only(setting):
    assert len(before(setting({"noise_multiplier": 0.0}))) == 1
    text = "\n".join(before(setting({"steps": math.inf, "planned_steps": math.inf})))
    assert "an unknown number of steps (no last one)" in text and "try" not in text


@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 0.4, 0.999])
@pytest.mark.parametrize("noise_multiplier", [1e-9, 1e9])
def test_no_legal_setting_ends_in_an_error(epsilon, delta, noise_multiplier, setting):
    changed = {
        "target_epsilon": epsilon,
        "target_delta": delta,
        "noise_multiplier": noise_multiplier,
    }
    for optimizer in ("adam", "sgd"):
        kind = OptimizerSetting(optimizer, optimizer, 0.1)
        assert before(setting({**changed, "optimizer": kind}))
