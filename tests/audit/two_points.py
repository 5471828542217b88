"""A lower bound on ε from fits on two neighbouring data sets; nothing of the package's audit is used.

Sixty private fits on each data set are reduced to one number each: the released weights, along the
direction in which a few other fits with less noise differ on average. A threshold halfway between
those fits' means is fixed before the sixty, so that its errors are independent trials: Clopper and
Pearson bound both rates, and (ε, δ)-privacy of any test means ``1 - δ - misses <= e^ε false alarms``
and the same with the two rates exchanged (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from isolation_zoo.cases import Bad, Records, unchecked_fit
from torch import Tensor

__all__ = ["TwoPoints", "epsilon_bound", "shown", "two_points", "upper_rate"]

DELTA = 1e-5
RECORDS = 128
PILOTS = 4
NOISE = 7.0  # on the sum, for each square root of a step: claims ε = 1.08 by replacement


@dataclass(frozen=True)
class TwoPoints:
    """The outcome: ε as the package claims it, and a bound that holds but for a chance of failure."""

    claimed: float
    bound: float

    def __str__(self) -> str:
        return f"{self.claimed:.2f} -> {self.bound:.2f}"


def upper_rate(errors: int, trials: int, failure: float) -> float:
    """Return Clopper and Pearson's bound: the rate at which so few errors have this probability."""

    def at_most(rate: float) -> float:
        return sum(
            math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(errors + 1)
        )

    if errors >= trials:
        return 1.0
    low, high = errors / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) > failure else (low, middle)
    return high


def epsilon_bound(
    false_alarms: int, misses: int, trials: int, delta: float, failure: float = 0.05
) -> float:
    """Return the ε that both error rates refute together; 0 if they refute none."""
    alarm, miss = (upper_rate(k, trials, failure / 2) for k in (false_alarms, misses))
    ratios = [(1 - delta - miss) / alarm, (1 - delta - alarm) / miss]
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0), 0.0)


def shown(case: Bad, fits: int = 60) -> TwoPoints:
    """Return :func:`two_points`, once more with three times as many fits if it refutes nothing.

    Half of the 5 % is for each try. Errors of one in ten, as ``Correlation`` has, are refuted at once in
    nine of ten tests, and else by the second try.
    """
    found = two_points(case, fits, failure=0.025)
    return found if found.bound > found.claimed else two_points(case, 3 * fits, failure=0.025)


def two_points(case: Bad, fits: int = 60, failure: float = 0.05) -> TwoPoints:
    """Train ``fits`` times on each of two neighbouring data sets, and tell them apart by the weights."""
    noise = NOISE * math.sqrt(case.steps)
    without, with_odd = case.neighbours(RECORDS)
    direction, threshold = _test(
        *(_weights(case, records, noise / 8, PILOTS)[0] for records in (without, with_odd))
    )
    outside, claimed = _weights(case, without, noise, fits)
    inside, _ = _weights(case, with_odd, noise, fits)
    alarms = int((outside @ direction > threshold).sum())
    misses = int((inside @ direction <= threshold).sum())
    return TwoPoints(claimed, epsilon_bound(alarms, misses, fits, DELTA, failure))


def _test(without: Tensor, with_odd: Tensor) -> tuple[Tensor, float]:
    """Return the direction between two means, and its threshold in the middle."""
    direction = with_odd.mean(0) - without.mean(0)
    return direction, float((with_odd.mean(0) + without.mean(0)) @ direction / 2)


def _weights(case: Bad, records: Records, noise: float, fits: int) -> tuple[Tensor, float]:
    """The released weights of each fit as a row, and ε as claimed."""
    rows, claimed = [], 0.0
    for _ in range(fits):
        trainer, privacy = unchecked_fit(case, records, noise)
        parameters = trainer.model.parameters()  # type: ignore[union-attr]
        rows.append(torch.cat([p.detach().flatten().double() for p in parameters]))
        claimed = privacy.epsilon
    return torch.stack(rows), claimed
