"""The one rounding of ε: never below the value, in print and in 32 bits."""

from __future__ import annotations

import functools
import math
from decimal import ROUND_CEILING, Context

import numpy as np

from lightning_dp._validate import number, whole


def epsilon_text(epsilon: float, digits: int = 4) -> str:
    """Return ε for people: the least number of that many significant digits that is not below it.

    Example:
        >>> epsilon_text(2.99712), epsilon_text(3.0), epsilon_text(0.00123456), epsilon_text(float("inf"))
        ('2.998', '3', '0.001235', 'inf')
    """
    epsilon, digits = number("epsilon", epsilon), whole("digits", digits)
    if not math.isfinite(epsilon):
        return f"{epsilon}"
    # By the shortest text that reads back as this float: 0.1 is 0.1, not 0.1 + 5.6e-18.
    above = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(epsilon))
    return f"{float(above):.{digits}g}"


@functools.lru_cache(maxsize=16)  # asked at every step, of few values
def float32_above(epsilon: float) -> float:
    """Return the least float32 that is not below ε: what loggers that store 32 bits must be given.

    Example:
        >>> float32_above(0.1) >= 0.1, float32_above(0.25)
        (True, 0.25)
    """
    with np.errstate(over="ignore"):  # that is inf
        nearest = np.float32(epsilon)
    if float(nearest) < epsilon:
        nearest = np.nextafter(nearest, np.float32(math.inf))
    return float(nearest)
