"""Solving for the scale of the noise at which a cost meets its target."""

import math
from collections.abc import Callable

__all__ = ["solve"]


def solve(
    cost: Callable[[float], float],
    start: float,
    target: float,
    tolerance: float,
    slope: float = -1.0,
) -> float:
    """A scale with ``(1 - tolerance) target <= cost(scale) <= target``; cost falls with the scale.

    ``slope`` is a guess of that of the logarithm of the cost in that of the scale.
    """
    aim = math.log(target * (1 - tolerance / 2))
    low, high = 0.0, math.inf  # cost(low) > target >= cost(high)
    x = math.log(start)
    points: list[tuple[float, float]] = []
    low, high = -math.inf, math.inf
    for turn in range(200):
        value = cost(math.exp(x))
        if target * (1 - tolerance) <= value <= target:
            return math.exp(x)
        low, high = (max(low, x), high) if value > target else (low, min(high, x))
        if high - low < 1e-13:
            return math.exp(high)
        if 0 < value < math.inf:
            points = [*points[-1:], (x, math.log(value))]
        guess = math.nan if turn % 6 == 5 else _secant(points, slope, aim)
        x = _inside(guess, low, high)
    return math.exp(high)


def _secant(points: list[tuple[float, float]], slope: float, aim: float) -> float:
    """Where log cost is ``aim`` by the latest two points, or one and a slope; NaN without any."""
    if not points:
        return math.nan
    x, y = points[-1]
    if len(points) == 2 and points[0][0] != x:
        slope = min((y - points[0][1]) / (x - points[0][0]), -0.05)
    return min(max(x + (aim - y) / slope, x - 3.0), x + 3.0)


def _inside(guess: float, low: float, high: float) -> float:
    """The guess if it is inside the bracket, else some number that is."""
    if low < guess < high:
        return guess
    if math.isinf(low):
        return high - 1.0
    if math.isinf(high):
        return low + 1.0
    return (low + high) / 2
