"""A report as data, read field by field, and as a picture."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from lightning_dp.accounting import Gaussian, PoissonGaussian, epsilon
from lightning_dp.accounting.charges import Charges
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report.files import read_report
from lightning_dp.schedules import Exponential

matplotlib.use("Agg")

DELTA = 1e-5


@pytest.fixture(autouse=True)
def closed():
    from matplotlib import pyplot

    yield
    pyplot.close("all")


@pytest.fixture
def report(fit):
    """Of 12 steps with falling noise."""
    privacy = DifferentialPrivacy(
        target_epsilon=8.0,
        noise_multiplier=3.0,
        noise_schedule=Exponential(0.1),
        target_delta=DELTA,
        isolation_probe=False,
    )
    return fit(privacy=privacy).privacy.report()


def line(ax, label):
    (found,) = [line for line in ax.get_lines() if line.get_label() == label]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def test_infinite_epsilon_is_legal_json(fit):
    privacy = DifferentialPrivacy(noise_multiplier=0.0, target_delta=1e-5, isolation_probe=False)
    fitted = fit(privacy=privacy)

    (path,) = fitted.reports

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    assert content["epsilon"] == "inf" and content["private"] is False
    assert read_report(path) == privacy.report()
    assert "NOT PRIVATE (no noise)" in path.with_suffix(".md").read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": "two"}, "epsilon='two' must be a real number"),
        ({"delta": "nan"}, "delta='nan' must be a real number"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"seeded": 0}, "seeded=0 must be True or False"),
        ({"versions": {"torch": 2}}, r"versions\['torch'\]=2 must be a text"),
        ({"events": []}, r"events=\[\] must be a dictionary"),
        ({"format": "other"}, "not a privacy report of this version"),
        ({"more": 1}, r"unknown fields: \['more'\]"),
        ({"relation": "x"}, "relation must be"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_its_field(fit, edit_json, change, message):
    (path,) = fit().reports
    edit_json(path, lambda content: content.update(change))

    with pytest.raises(ValueError, match=message):
        read_report(path)


def test_a_field_that_is_absent_has_its_default_if_it_has_one(fit, edit_json):
    fitted = fit()
    (path,) = fitted.reports
    edit_json(path, lambda content: [content.pop(name) for name in ("stop_reason", "versions")])

    assert read_report(path) == replace(fitted.privacy.report(), stop_reason=None, versions={})
    edit_json(path, lambda content: content.pop("seeded"))
    with pytest.raises(ValueError, match=r"lacks fields: \['seeded'\]"):
        read_report(path)


def test_it_shows_epsilon_of_the_charges_in_their_order_against_the_budget(report):
    ax = report.plot()

    steps, values = line(ax, r"$\epsilon_t$")
    events = [event for run in report.events.values() for event, _ in run]
    assert (steps[0], values[0], steps[-1]) == (0, 0.0, 12)
    for t in (1, 4, 12):
        expected = epsilon(events[:t], DELTA)
        assert values[list(steps).index(t)] == pytest.approx(expected, rel=5e-4)
    _, budget = line(ax, r"budget: $\epsilon$ = 8")
    assert set(budget) == {8.0} and ax.get_ylim()[1] > 8


def test_it_shows_the_noise_of_every_step(report):
    ax = report.plot()

    steps, sigmas = line(ax.figure.axes[-1], r"$\sigma_t$")
    np.testing.assert_array_equal(steps, range(1, 13))
    np.testing.assert_allclose(sigmas, [3.0 * Exponential(0.1)(t) for t in range(12)])


def test_metrics_get_a_panel_of_their_own(report):
    ax = report.plot(metrics={"accuracy": [(6, 0.5), (12, 0.75)]})

    steps, values = line(ax.figure.axes[0], "accuracy")
    assert (steps.tolist(), values.tolist()) == ([6, 12], [0.5, 0.75])
    assert len(ax.figure.axes) == 3


def test_given_axes_hold_epsilon_and_noise(report):
    from matplotlib import pyplot

    ax = pyplot.subplots()[1]

    assert report.plot(ax) is ax
    line(ax, r"$\epsilon_t$")
    line(ax.figure.axes[-1], r"$\sigma_t$")
    assert ax.get_xlabel() == "noised steps"
    with pytest.raises(ValueError, match="leave out ax"):
        report.plot(ax, metrics={"accuracy": [(1, 0.5)]})


def test_two_runs_of_one_ledger_follow_each_other(report):
    a, b = PoissonGaussian(2.0, 0.1), PoissonGaussian(1.0, 0.1)
    two = replace(report, steps=30, events=Charges({"x": [(a, 10), (b, 5)], "y": [(a, 15)]}))

    steps, values = line(two.plot(), r"$\epsilon_t$")

    assert steps[-1] == 30
    assert values[-1] == pytest.approx(epsilon([(a, 25), (b, 5)], DELTA), rel=5e-4)
    at = list(steps).index(15)
    assert values[at] == pytest.approx(epsilon([(a, 10), (b, 5)], DELTA), rel=5e-4)


def test_a_claim_of_the_whole_budget_is_level_from_the_first_step(report):
    ax = replace(report, claims_budget=True, epsilon=8.0).plot()

    assert [values.tolist() for values in line(ax, r"$\epsilon_t$")] == [[0, 1, 12], [0, 8, 8]]


def test_a_run_without_noise_says_so(report):
    ax = replace(report, private=False, events=Charges({"x": [(Gaussian(0.0), 12)]})).plot()

    assert ax.get_title() == "NOT PRIVATE (no noise)"
    assert r"$\epsilon = \infty$" in [text.get_text() for text in ax.texts]


def test_a_report_without_steps_is_refused():
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=DELTA)

    with pytest.raises(ValueError, match="steps=0: nothing was charged"):
        privacy.report().plot()


def test_without_matplotlib_the_error_says_what_to_install(report, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'lightning-dp\[examples\]'"):
        report.plot()
