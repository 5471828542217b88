"""The exponential decay nearest to a schedule."""

from __future__ import annotations

import numpy as np

from lightning_dp._validate import whole
from lightning_dp.schedules.base import AbstractSchedule
from lightning_dp.schedules.exponential import Exponential

__all__ = ["fit_exponential"]


def fit_exponential(schedule: AbstractSchedule, steps: int) -> Exponential:
    r"""The k of :math:`\sigma_0 e^{-kt}` fitted by least squares to log s(t), t = 0 .. steps - 1.

    As in the experiments of "On Dynamic Noise Influence in Differential Private Learning"
    (Appendix D), which do not say whether σ or log σ is fitted: in the logarithm the fit is linear
    and does not depend on the scale. σ_0 is not returned; the budget sets it.

    Args:
        schedule: what is approximated.
        steps: T >= 1, over which it is.

    Raises:
        ValueError: if ``steps`` is not an integer of at least 1.

    Example:
        >>> from lightning_dp.schedules import DynamicGD
        >>> round(fit_exponential(DynamicGD(kappa=10.0), steps=50).rate, 6)    # -log(0.9) / 4
        0.02634
    """
    steps = whole("steps", steps, of="fit_exponential")
    times = np.arange(steps) - (steps - 1) / 2
    logs = np.log([schedule(step) for step in range(steps)])
    slope = 0.0 if steps == 1 else float(times @ logs / (times @ times))
    return Exponential(rate=-slope)
