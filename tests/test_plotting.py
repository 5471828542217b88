"""Contents of the picture of a schedule."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest

from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.plotting import plot_schedule
from lightning_dp.schedules import Exponential

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
