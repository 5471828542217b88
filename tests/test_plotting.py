"""What is in the picture of a schedule."""

from __future__ import annotations

import builtins
import math

import matplotlib
import numpy as np
import pytest

from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.plotting import plot_schedule
from lightning_dp.schedules import Cosine, Exponential

matplotlib.use("Agg")


@pytest.fixture
def figure():
    from matplotlib import pyplot

    yield pyplot.figure()
    pyplot.close("all")


def test_it_shows_sigma_of_every_step_and_epsilon_up_to_the_last(figure):
    schedule, steps = Exponential(0.02), 50
    ax = plot_schedule(
        schedule,
        steps,
        scale=3.0,
        sample_rate=0.1,
        delta=1e-5,
        relation="replace_one",
        ax=figure.subplots(),
    )
    (sigmas,) = ax.get_lines()
    np.testing.assert_array_equal(sigmas.get_xdata(), range(1, steps + 1))
    np.testing.assert_allclose(sigmas.get_ydata(), [3.0 * schedule(t) for t in range(steps)])
    spent = figure.axes[-1]
    (epsilons,) = spent.get_lines()
    x, y = epsilons.get_xdata(), epsilons.get_ydata()
    assert (x[0], y[0], x[-1]) == (0, 0.0, steps)
    assert np.all(np.diff(y) > 0)
    for index in (5, -1):
        history = [(PoissonGaussian(3.0 * schedule(t), 0.1), 1) for t in range(int(x[index]))]
        assert y[index] == pytest.approx(epsilon(history, 1e-5, "replace_one"))
    assert ax.get_xlabel() == "step"
    assert "delta" in spent.get_ylabel()
    assert ax.get_ylim()[0] == 0 == spent.get_ylim()[0]


def test_full_batches_are_drawn_by_the_exact_formula(figure):
    ax = plot_schedule(
        Cosine(10, 0.5), 10, scale=4.0, sample_rate=1.0, delta=1e-6, ax=figure.subplots()
    )
    mu = math.sqrt(sum((4.0 * Cosine(10, 0.5)(t)) ** -2 for t in range(10)))
    last = ax.figure.axes[-1].get_lines()[0].get_ydata()[-1]
    assert last == pytest.approx(gdp_epsilon(mu, 1e-6), rel=1e-6)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'lightning-dp\[examples\]'"):
        plot_schedule(Exponential(0.1), 5, scale=1.0, sample_rate=0.1, delta=1e-5)


@pytest.mark.parametrize(
    ("argument", "value"), [("steps", 0), ("steps", math.nan), ("scale", 0.0), ("scale", math.nan)]
)
def test_a_bad_argument_is_refused_by_name_and_value(argument, value):
    arguments = {"steps": 5, "scale": 1.0, "sample_rate": 0.1, "delta": 1e-5, argument: value}
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        plot_schedule(Exponential(0.1), arguments.pop("steps"), **arguments)
