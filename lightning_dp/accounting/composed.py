"""The composed loss, and what is read from it: epsilon at a delta, delta at an epsilon."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.tilting import log_largest_weight


@dataclass(frozen=True)
class Composed:
    """The composed loss around the point of interest, tilted by ``tilt``.

    ``error`` bounds what is missing from, or wrong in, the sum of ``tilted``.
    """

    start: int
    h: float
    tilted: FloatArray
    tilt: float
    log_norm: float
    infinity: float
    error: float

    def epsilon(self, delta: float) -> float:
        """The least epsilon inside the window whose delta, errors included, is at most ``delta``."""
        room = delta * (1 - 1e-9) - self.infinity
        if not room > 0:
            return math.inf
        x = (self.start + np.arange(self.tilted.size, dtype=float)) * self.h
        center = float(x[int(np.argmax(np.cumsum(self.tilted) >= 0.5 * self.tilted.sum()))])
        above, weighted, error = self._suffix_sums(x, center)
        target = room * math.exp(min(self.tilt * center - self.log_norm, 700.0))
        values = above - np.exp(np.minimum(x - center, 300.0)) * weighted + error
        met = np.flatnonzero(values <= target)
        if met.size == 0:
            return math.inf
        k = int(met[0])
        if k == 0:
            return max(float(x[0]), 0.0)
        # Inside (x[k-1], x[k]] the sums do not change: above - e^(e - center) weighted = target.
        left = above[k - 1] - (target - error[k - 1])
        if not (weighted[k - 1] > 0 and left > 0):
            return max(float(x[k]), 0.0)
        root = center + math.log(left / weighted[k - 1])
        return max(min(max(root, float(x[k - 1])), float(x[k])), 0.0)

    def delta(self, epsilon: float) -> float:
        """delta at ``epsilon``, errors included."""
        if epsilon < self.start * self.h:
            return 1.0
        x = (self.start + np.arange(self.tilted.size)) * self.h
        beyond = x > epsilon
        y = x[beyond] - epsilon
        total = float(self.tilted[beyond] @ (np.exp(-self.tilt * y) * -np.expm1(-y)))
        total += self.error * math.exp(float(log_largest_weight(self.tilt)))
        exponent = self.log_norm - self.tilt * epsilon
        finite = math.exp(exponent + math.log(total)) if total > 0 and exponent < 700 else 0.0
        return min(1.0, finite * (1 + 1e-9) + self.infinity) if exponent < 700 else 1.0

    def has_small_error(self, epsilon: float, delta: float) -> bool:
        """Whether the errors that are added to delta are at most a thousandth of it."""
        if not math.isfinite(epsilon):
            return False
        exponent = self.log_norm - self.tilt * epsilon + float(log_largest_weight(self.tilt))
        return self.error * math.exp(min(exponent, 700.0)) <= 1e-3 * delta

    def _suffix_sums(self, x: FloatArray, center: float) -> tuple[FloatArray, ...]:
        """Sums over the losses above each grid point, both times ``e^(tilt center)``."""
        exponent = -self.tilt * (x - center)
        weights = self.tilted * np.exp(np.minimum(exponent, 600.0))
        above = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
        shrunk = weights * np.exp(-np.maximum(x - center, -100.0))
        weighted = np.append(np.cumsum(shrunk[::-1])[::-1][1:], 0.0)
        largest = math.exp(float(log_largest_weight(self.tilt)))
        error = self.error * largest * np.exp(np.minimum(exponent, 600.0))
        error[exponent > 600.0] = np.inf
        error[x - center < -100.0] = np.inf
        return above, weighted, error
