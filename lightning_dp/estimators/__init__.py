"""Estimators: the questions asked of the data, and the gradients made from the answers.

Each name is imported when it is first asked for: a training needs one estimator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp._lazy import names_from

__all__ = [
    "AbstractEstimator",
    "CubicNewton",
    "Diff2",
    "MeanGradient",
    "Storm",
    "Traits",
    "share_of_noise",
]

if TYPE_CHECKING:
    from lightning_dp.estimators.base import AbstractEstimator, MeanGradient, Traits, share_of_noise
    from lightning_dp.estimators.cubic_newton import CubicNewton
    from lightning_dp.estimators.diff2 import Diff2
    from lightning_dp.estimators.storm import Storm
else:
    __getattr__ = names_from(__name__, "base", "diff2", "storm", "cubic_newton")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
