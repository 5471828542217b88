"""The reading of ε by hypothesis tests: how well anybody can tell whether a record was used."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_dp._validate import between
from lightning_dp.accounting.base import (
    AbstractAccountant,
    Relation,
    check_delta,
    check_relation,
)
from lightning_dp.accounting.events import History
from lightning_dp.accounting.pld import PLDAccountant, chosen

_PARTS = 10  # of ε, between which the privacy profile is asked for
_RTOL = 5e-3  # rates are shown in percent, and every report has them: a quarter of the time


@dataclass(frozen=True)
class TradeOff:
    r"""Bounds on every test of whether one record was used.

    A test looks at all that was released and says "used" or "not used". Its false positive rate α
    is the probability of "used" where the record was not; its true positive rate, where it was. For
    each pair :math:`(\epsilon, \delta)` that holds, every test has

    .. math:: \mathrm{TPR} \le \min\bigl(e^{\epsilon} α + \delta,\;
        1 - e^{-\epsilon} (1 - \delta - α)\bigr).

    Promised: the methods return upper bounds, for every test, if every pair holds in both directions
    (as the accountants of this package say for add/remove; replacing is symmetric).

    Source: Kairouz, Oh and Viswanath, arXiv 1311.0776v4, Theorem 2.1; Dong, Roth and Su, arXiv
    1905.02383v3, Proposition 2.5.

    Args:
        pairs: ``(epsilon, delta)`` that hold for the releases, at least one.

    Raises:
        ValueError: without a pair, or if an ε is negative or NaN, or a δ is not in [0, 1].

    Example:
        >>> one = TradeOff(((1.0, 1e-5),))
        >>> round(one.true_positive_rate(0.01), 4), round(one.advantage, 4)
        (0.0272, 0.4621)
    """

    pairs: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ValueError("pairs=(): at least one (epsilon, delta) must be given.")
        for epsilon, delta in self.pairs:
            between("[0, inf]")("epsilon", epsilon)
            between("[0, 1]")("delta", delta)

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return the most that any test with this false positive rate finds, in [0, 1].

        Args:
            false_positive_rate: α in [0, 1].

        Raises:
            ValueError: if it is not.
        """
        rate = between("[0, 1]")("false_positive_rate", false_positive_rate)
        bounds = [1.0]
        for epsilon, delta in self.pairs:
            # e^epsilon may be too large for a float: 1 is a bound then, too.
            if rate == 0 or epsilon < 700:
                bounds.append((math.exp(epsilon) * rate if rate else 0.0) + delta)
            bounds.append(1 - math.exp(-epsilon) * (1 - delta - rate))
        return min(bounds)

    @property
    def advantage(self) -> float:
        r"""The most by which any test's true positive rate is above its false positive rate.

        The two bounds of a pair meet where their difference is
        :math:`(e^{\epsilon} - 1 + 2 \delta) / (e^{\epsilon} + 1)`. A guess whether a record was used,
        where a fair coin decided it, is right with probability (1 + advantage) / 2 at most.
        """
        # tanh(epsilon / 2) = (e^epsilon - 1) / (e^epsilon + 1), which does not overflow.
        return min(
            min(1.0, math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, 700.0))))
            for epsilon, delta in self.pairs
        )


def trade_off(
    history: History,
    delta: float,
    relation: Relation = "add_remove",
    accountant: AbstractAccountant | None = None,
) -> TradeOff:
    """Return the bounds on tests that the events allow, by eleven points of their privacy profile.

    The points are at ε = 0 (whose δ is the total variation distance, the largest advantage of
    all) and on to the ε that belongs to ``delta``.

    Args:
        history: pairs of an event and its count.
        delta: in (0, 1), of the largest ε that is asked for.
        relation: ``"add_remove"`` or ``"replace_one"``.
        accountant: gives δ at each ε; :class:`PLDAccountant` by default.

    Raises:
        ValueError: if an argument is illegal.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> bounds = trade_off([(PoissonGaussian(1.0, 0.01), 1000)], delta=1e-5)
        >>> round(bounds.true_positive_rate(0.01), 2), round(bounds.advantage, 2)
        (0.03, 0.16)
    """
    check_delta(delta)
    check_relation(relation)
    judge = chosen(accountant)
    return up_to((judge.epsilon(history, delta, relation), delta), history, relation, judge)


def up_to(
    pair: tuple[float, float], history: History, relation: Relation, judge: AbstractAccountant
) -> TradeOff:
    """Return the bounds by a pair (ε, δ) that is known to hold, and by the profile below it."""
    largest = pair[0]
    if not math.isfinite(largest):
        return TradeOff(((math.inf, 1.0),))
    if isinstance(judge, PLDAccountant):  # also on a coarser grid, δ is never below the truth
        judge = replace(judge, rtol=max(judge.rtol, _RTOL))
    epsilons = [largest * part / _PARTS for part in range(_PARTS)]
    found = {epsilon: judge.delta(history, epsilon, relation) for epsilon in epsilons}
    return TradeOff((*found.items(), pair))
