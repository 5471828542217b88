"""The reporting accountant: numerical privacy loss distributions with an automatic grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_dp._validate import between, instance, listed, normalise, not_negative, whole
from lightning_dp.accounting.base import (
    AbstractAccountant,
    Relation,
    check_delta,
    check_relation,
)
from lightning_dp.accounting.events import AbstractEvent, History, check_history, sampled_gaussian
from lightning_dp.accounting.external import Declared
from lightning_dp.accounting.gdp import HUGE, LittleNoise, gdp_delta, gdp_epsilon, mu_of
from lightning_dp.accounting.rdp import RenyiCurve
from lightning_dp.accounting.steps import (
    CheckedHistory,
    EventPlan,
    FloatArray,
    Steps,
    check_plan,
    has_pairs,
)

# The numerical parts are loaded by the first ε that needs them: a callback is made, and a model is
# refused, without.
if TYPE_CHECKING:
    from lightning_dp.accounting._grid import GridSearch, Target

_NEXT_TO_NOTHING = 1e-6  # a μ that needs no amplification, at which a grid would be fine beyond use
_ANY_DELTA = 1e-5  # to see how large the losses are
_MOST_STEPS = 2**63 - 1
_PARTS = 10  # of ε, between which the privacy profile is asked for
_TRADE_OFF_RTOL = (
    5e-3  # rates are shown in percent, and every report has them: a quarter of the time
)


@dataclass(frozen=True)
class PLDAccountant(AbstractAccountant):
    """Numerical accounting of any sequence of (subsampled) Gaussian releases: tight, never below.

    The privacy loss of every distinct ``(z, q)`` is put on a grid pessimistically, the steps are
    composed by fast Fourier transform, for adding and for removing a record (the larger counts);
    full-batch steps alone use the exact mu-GDP formula. Declared (ε, δ) guarantees are composed by
    their exact dominating pair, zCDP by the largest profile that it leaves possible. What is promised:

    - the result is an upper bound: tails, the window and floating-point errors are added to delta;
    - it is at most about ``rtol`` (relative) above the exact composition, for up to 32 distinct
      steps; for more, interpolation in ``(z, q)`` adds up to about ``spacing^2``, and memory bounds
      may coarsen the grid or the interpolation, always upwards;
    - an epsilon above about 10,000 is a quick bound, where no grid of such losses would fit, and a
      delta below about 1e-30 may be far above the truth.

    Assumes Poisson sampling, independent for every event, and noise multipliers that were fixed in
    advance, or for full batches a budget on ``sum z_t^-2`` fixed in advance.

    Args:
        rtol: relative accuracy of epsilon with respect to the grid, in (0, 0.1].
        spacing: relative distance of the noise multipliers between which is interpolated, in (0, 1].

    Sources: Connect-the-Dots discretisation, arXiv 2207.04380v1; see the modules ``_pmf``, ``_grid``,
    ``_grouping`` and ``_composition`` for the statements used.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> history = [(PoissonGaussian(1.2, 0.01), 300), (PoissonGaussian(0.9, 0.01), 700)]
        >>> round(PLDAccountant().epsilon(history, delta=1e-5), 2)
        2.09
        >>> round(PLDAccountant().epsilon(history, delta=1e-5, relation="replace_one"), 2)
        3.07
    """

    shares_curve: ClassVar[bool] = True

    rtol: float = 2.5e-4
    spacing: float = 0.04

    def __post_init__(self) -> None:
        normalise(self, between("(0, 0.1]"), "rtol")
        normalise(self, between("(0, 1]"), "spacing")

    name = "PLD"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        from lightning_dp.accounting._grid import Target

        checked = CheckedHistory.of(history)
        steps, declared = checked.steps, Declared.of(checked, relation)
        check_relation(relation)
        left = declared.left_of(check_delta(delta))
        if declared.is_empty:
            if steps.counts.size == 0:
                return 0.0
            # No amplification: an upper bound for any sample rate, exact for full batches.
            bound = gdp_epsilon(mu_of(steps, relation), delta)
            if bound == 0.0 or math.isinf(bound) or not _needs_amplification(steps, relation):
                return bound
            if bound > HUGE or LittleNoise.of(steps, relation).count:
                bound = min(bound, _quick_epsilon(steps, delta, relation))
            if bound > HUGE or bound == 0.0:
                return bound
        else:
            bound = RenyiCurve(steps, relation, declared).epsilon(delta)
            if steps.counts.size == 0 and declared.lost <= delta * (1 + 1e-14):
                bound = min(bound, declared.simple_epsilon)  # δ may be just what they state
            if not (left > 0 and 0 < bound <= HUGE):
                return bound
        search = self._search(declared, relation, Target(log_delta=math.log(left)))
        return min(bound, search.worst_direction(steps))

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        return self.profile(history, (epsilon,), relation)[0]

    def profile(
        self, history: History, epsilons: Sequence[float], relation: Relation = "add_remove"
    ) -> list[float]:
        """Return delta at each epsilon: upper bounds, accurate at the least and the largest.

        Between them they are read from the grids of these two, the smaller bound of each.

        Example:
            >>> from lightning_dp.accounting import PoissonGaussian
            >>> history = [(PoissonGaussian(1.0, 0.01), 1000)]
            >>> [round(delta, 6) for delta in PLDAccountant().profile(history, (0.0, 0.5, 1.0, 2.0))]
            [0.161018, 0.030569, 0.002613, 3e-06]
        """
        if not (asked := [not_negative("epsilon", epsilon) for epsilon in epsilons]):
            raise ValueError("epsilons is empty; give at least one.")
        check_relation(relation)
        checked = CheckedHistory.of(history)
        steps, declared = checked.steps, Declared.of(checked, relation)
        if not declared.is_empty:
            declared_curve = RenyiCurve(steps, relation, declared)
            least = declared.simple_epsilon if steps.counts.size == 0 else math.inf
            alone = [declared.lost if least <= epsilon else 1.0 for epsilon in asked]
            bounds = [min(declared_curve.delta(e), d) for e, d in zip(asked, alone, strict=True)]
            lossless = replace(declared, log_intact=0.0)
            if self._needs_no_grid(steps, lossless, _ANY_DELTA, relation):
                return bounds
            pure = self._profile(steps, declared, asked, relation)
            return [min(b, declared.with_all(d)) for b, d in zip(bounds, pure, strict=True)]
        if steps.counts.size == 0:
            return [0.0 for _ in asked]
        mu = mu_of(steps, relation)
        without = [gdp_delta(mu, epsilon) for epsilon in asked]
        if steps.has_noiseless or not _needs_amplification(steps, relation):
            return without
        if self._needs_no_grid(steps, declared, _ANY_DELTA, relation):
            few = LittleNoise.of(steps, relation)  # Rényi's integrals would be long
            curve = few if few.count else RenyiCurve(steps, relation)
            quick = [curve.delta(epsilon) for epsilon in asked]
        else:
            quick = self._profile(steps, declared, asked, relation)
        return [min(each) for each in zip(without, quick, strict=True)]

    def _profile(
        self, steps: Steps, declared: Declared, epsilons: Sequence[float], relation: Relation
    ) -> list[float]:
        from lightning_dp.accounting._grid import Target

        targets = [Target(epsilon=epsilon) for epsilon in {min(epsilons), max(epsilons)}]
        searches = [self._search(declared, relation, target) for target in targets]
        bounds = [search.profile(steps, epsilons) for search in searches]
        return [min(each) for each in zip(*bounds, strict=True)]

    def curve(
        self,
        plan: EventPlan,
        lengths: NDArray[np.int64],
        delta: float,
        relation: Relation = "add_remove",
        spent: History = (),
    ) -> FloatArray:
        from lightning_dp.accounting._grid import CurveSearch, Run, Target

        if not has_pairs(plan, lengths, relation):
            return super().curve(plan, lengths, delta, relation, spent)
        declared = Declared.of(spent, relation)
        run = Run.of(plan, lengths, [each for each in spent if each[0].is_pair])
        left, steps = declared.left_of(delta), run.steps()
        is_little = mu_of(steps, relation) < _NEXT_TO_NOTHING
        if is_little or not left > 0 or self._needs_no_grid(steps, declared, delta, relation):
            return super().curve(plan, lengths, delta, relation, spent)
        search = self._search(declared, relation, Target(log_delta=math.log(left)))
        values = CurveSearch(search, left).values(run)
        if declared.is_empty:
            return values
        return np.maximum(values, self.epsilon(spent, delta, relation))  # also of no step

    def _search(self, declared: Declared, relation: Relation, target: Target) -> GridSearch:
        """Return the search for a grid, with declared guarantees next to all steps."""
        from lightning_dp.accounting._grid import GridSearch

        return GridSearch(self.rtol, self.spacing, declared.nodes, relation, target)

    def _needs_no_grid(
        self, steps: Steps, declared: Declared, delta: float, relation: Relation
    ) -> bool:
        """True if epsilon at a delta is so large that a quick bound will do, or is seen to be 0."""
        if steps.has_noiseless or (declared.is_empty and steps.counts.size == 0):
            return True
        if not declared.is_empty:
            return not RenyiCurve(steps, relation, declared).epsilon(delta) <= HUGE
        if gdp_epsilon(mu_of(steps, relation), delta) <= HUGE:
            return False  # as nearly always, and quickly seen
        return not 0.0 < _quick_epsilon(steps, delta, relation) <= HUGE


def _needs_amplification(steps: Steps, relation: Relation) -> bool:
    """True if the formula for full batches is neither exact nor as good as 0."""
    is_full = bool(np.all(steps.sample_rates == 1.0))
    return not is_full and mu_of(steps, relation) >= _NEXT_TO_NOTHING


def _quick_epsilon(steps: Steps, delta: float, relation: Relation) -> float:
    """Return a bound of epsilon that needs no grid, for large losses."""
    few = LittleNoise.of(steps, relation)
    if few.count:  # Rényi's integrals would be long
        return few.epsilon(delta)
    return RenyiCurve(steps, relation).epsilon(delta)


Events = AbstractEvent | Sequence[AbstractEvent | tuple[AbstractEvent, int]]


def epsilon(events: Events, delta: float, relation: Relation = "add_remove") -> float:
    """Return the epsilon of a sequence of events, by :class:`PLDAccountant`.

    Args:
        events: an event, or a sequence of events and ``(event, count)`` pairs.
        delta: in (0, 1).
        relation: ``"add_remove"`` or ``"replace_one"``.

    Returns:
        epsilon >= 0, never below the truth; ``inf`` when a step has no noise.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> round(epsilon([(PoissonGaussian(1.0, 0.01), 1000)], delta=1e-5), 2)
        1.83
    """
    return PLDAccountant().epsilon(_history(events), delta, relation)


def delta(events: Events, epsilon: float, relation: Relation = "add_remove") -> float:
    """Return the delta of a sequence of events at ``epsilon``, by :class:`PLDAccountant`.

    Args:
        events: an event, or a sequence of events and ``(event, count)`` pairs.
        epsilon: at least 0.
        relation: ``"add_remove"`` or ``"replace_one"``.

    Returns:
        delta in [0, 1], never below the truth; 1 when a step has no noise.

    Example:
        >>> from lightning_dp.accounting import Gaussian
        >>> round(delta(Gaussian(1.0), epsilon=1.0), 6)
        0.126937
    """
    return PLDAccountant().delta(_history(events), epsilon, relation)


def epsilon_curve(
    plan: EventPlan,
    at_steps: ArrayLike,
    delta: float,
    relation: Relation = "add_remove",
    accountant: AbstractAccountant | None = None,
    spent: History = (),
) -> FloatArray:
    """Return epsilon of what was spent and the first n steps of a plan, for each n; it does not fall.

    Args:
        plan: one event for all steps, or a function from the step 0, 1, ... to its event.
        at_steps: numbers n of steps, each at least 0, in any order.
        delta, relation, spent: as for :func:`epsilon`.
        accountant: :class:`PLDAccountant` by default, for which lengths share their work.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> epsilon_curve(PoissonGaussian(1.0, 0.01), [0, 100, 1000], delta=1e-5).round(2)
        array([0.  , 0.72, 1.83])
    """
    check_delta(delta)
    check_relation(relation)
    lengths = _check_lengths(at_steps)
    judge, spent = accountant_or_default(accountant), check_history(spent, "spent")
    check_plan(plan)
    distinct, places = np.unique(lengths, return_inverse=True)
    values = judge.curve(plan, distinct, delta, relation, spent)
    return np.asarray(np.maximum.accumulate(values)[places].reshape(lengths.shape))


def _check_lengths(at_steps: ArrayLike) -> NDArray[np.int64]:
    """Return legal numbers of steps, or raise."""
    try:
        lengths = np.asarray(at_steps)
    except (TypeError, ValueError, RuntimeError):  # a list of lists, a tensor of another device
        lengths = np.array(math.nan)
    if lengths.size == 0:
        return lengths.astype(np.int64)
    is_whole = np.issubdtype(lengths.dtype, np.integer)
    if not (is_whole and np.all(lengths >= 0) and lengths.max() <= _MOST_STEPS):
        raise ValueError(f"at_steps={at_steps!r} must be integers from 0 to 2^63 - 1.")
    return lengths.astype(np.int64)


def _history(events: Events) -> History:
    """Return events and pairs as pairs."""
    if isinstance(events, AbstractEvent):
        return [(events, 1)]
    given = listed("events", events, "events, and of pairs (event, count)")
    pairs = [(each, 1) if isinstance(each, AbstractEvent) else each for each in given]
    return check_history(pairs, "events")


def accountant_or_default(accountant: AbstractAccountant | None) -> AbstractAccountant:
    """Return the accountant that was given, or the default."""
    if accountant is None:
        return PLDAccountant()
    return instance("accountant", accountant, AbstractAccountant)  # type: ignore[type-abstract]


@dataclass(frozen=True)
class EnvelopeAccountant(AbstractAccountant):
    """:class:`PLDAccountant` for a limited number of steps, none costlier than a declared one.

    More noise than declared is a post-processing, and the cost grows with the rate and the number of
    steps, so whatever is inside the envelope costs no more than all of it, next to anything else. For
    what is not inside, ε is infinite: a budget affords no such step.

    Args:
        noise_multiplier: the least noise of a step, above 0.
        sample_rate: the largest rate, in (0, 1].
        steps: the largest number of steps.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> declared = EnvelopeAccountant(noise_multiplier=1.0, sample_rate=0.01, steps=100)
        >>> histories = [[(PoissonGaussian(1.0, q), n)] for q, n in ((0.01, 100), (0.01, 101), (0.02, 9))]
        >>> [round(declared.epsilon(each, 1e-5), 2) for each in histories]
        [0.72, inf, inf]
    """

    is_its_own_guard: ClassVar[bool] = True

    noise_multiplier: float = 1.0
    sample_rate: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        normalise(self, between("(0, inf)"), "noise_multiplier")
        normalise(self, between("(0, 1]"), "sample_rate")
        normalise(self, whole, "steps")

    name = "PLD inside a declared envelope"

    def history(self) -> History:
        """Return the costliest history that is inside."""
        return [(sampled_gaussian(self.noise_multiplier, self.sample_rate), self.steps)]

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        if not self._holds(history):
            return math.inf
        return PLDAccountant().epsilon(history, delta, relation)

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        if not self._holds(history):
            return 1.0
        return PLDAccountant().delta(history, epsilon, relation)

    def _holds(self, history: History) -> bool:
        checked = CheckedHistory.of(history)
        steps = checked.steps
        return (
            not checked.others
            and steps.total <= self.steps
            and bool(np.all(steps.noise_multipliers >= self.noise_multiplier))
            and bool(np.all(steps.sample_rates <= self.sample_rate))
        )


# -- hypothesis tests --------------------------------------------------------------------------


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

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> bounds = trade_off([(PoissonGaussian(1.0, 0.01), 1000)], delta=1e-5)
        >>> round(bounds.true_positive_rate(0.01), 2), round(bounds.advantage, 2)
        (0.03, 0.16)
    """
    check_delta(delta)
    check_relation(relation)
    judge = accountant_or_default(accountant)
    return trade_off_up_to(
        (judge.epsilon(history, delta, relation), delta), history, relation, judge
    )


def trade_off_up_to(
    pair: tuple[float, float], history: History, relation: Relation, judge: AbstractAccountant
) -> TradeOff:
    """Return the bounds by a pair (ε, δ) that is known to hold, and by the profile below it."""
    largest = pair[0]
    if not math.isfinite(largest):
        return TradeOff(((math.inf, 1.0),))
    epsilons = list(dict.fromkeys(largest * part / _PARTS for part in range(_PARTS)))
    if isinstance(judge, PLDAccountant):  # also on a coarser grid, δ is never below the truth
        coarse = replace(judge, rtol=max(judge.rtol, _TRADE_OFF_RTOL))
        deltas = coarse.profile(history, epsilons, relation)
    else:
        deltas = [judge.delta(history, epsilon, relation) for epsilon in epsilons]
    return TradeOff((*zip(epsilons, deltas, strict=True), pair))
