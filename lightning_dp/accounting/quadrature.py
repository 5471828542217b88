"""Many steps as few that together cost the same, nearly: for estimates, never for claims."""

import numpy as np
from scipy.linalg import eigh_tridiagonal

from lightning_dp.accounting.base import FloatArray, Steps

__all__ = ["few_alike"]

_NODES = 12
_ALL_NODES = 24  # of all rates together
_MOST_RATES = 4
_TINY = 1e-12


def few_alike(steps: Steps) -> Steps:
    """Return few steps with the sum of every smooth function of the noise; all, of many rates.

    The nodes of Gauss' quadrature for the distribution of log z, for each sample rate: all that is
    composed are sums over steps. Counts are not whole numbers.

    Example:
        >>> z = np.linspace(1.0, 2.0, 10_000)
        >>> few = few_alike(Steps(z, np.full(10_000, 0.01), np.ones(10_000)))
        >>> len(few.counts), bool(np.isclose(few.counts @ few.noise_multipliers**-2, sum(z**-2)))
        (12, True)
    """
    rates = np.unique(steps.sample_rates)
    if steps.counts.size <= _NODES or rates.size > _MOST_RATES:
        return steps
    most = min(_NODES, _ALL_NODES // rates.size)
    z, q, counts = [], [], []
    for rate in rates:
        here = steps.at(np.flatnonzero(steps.sample_rates == rate))
        nodes, weights = _gauss(np.log(here.noise_multipliers), here.counts, most)
        z.append(np.exp(nodes))
        q.append(np.full(nodes.size, rate))
        counts.append(weights)
    return Steps(np.concatenate(z), np.concatenate(q), np.concatenate(counts))


def _gauss(x: FloatArray, weights: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights of the quadrature with that many nodes or fewer, by Lanczos' recurrence."""
    if x.size <= most:
        return x, weights
    total, middle = float(weights.sum()), float(x.min() + x.max()) / 2
    reach = max(float(x.max()) - middle, _TINY)
    place = (x - middle) / reach
    vectors = [np.sqrt(weights / total)]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(most):
        new = place * vectors[-1]
        diagonal.append(float(new @ vectors[-1]))
        for _ in range(2):  # once more, for rounding
            for vector in vectors:
                new = new - (new @ vector) * vector
        beside.append(float(np.linalg.norm(new)))
        if beside[-1] < _TINY:
            break
        vectors.append(new / beside[-1])
    nodes, basis = eigh_tridiagonal(np.array(diagonal), np.array(beside[: len(diagonal) - 1]))
    return middle + reach * nodes, total * basis[0] ** 2
