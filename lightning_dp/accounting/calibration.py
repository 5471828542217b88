"""From a budget to the noise: the smallest scale of a shape, the largest number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq

from lightning_dp._refusals import RefusedSetting, warn
from lightning_dp._validate import listed, number, positive, whole
from lightning_dp.accounting.base import (
    LEAST_EPSILON,
    AbstractAccountant,
    Relation,
    check_delta,
    check_relation,
    epsilon_text,
)
from lightning_dp.accounting.events import AbstractEvent, History, sampled_gaussian
from lightning_dp.accounting.external import Declared
from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.accounting.pld import accountant_or_default
from lightning_dp.accounting.steps import (
    CheckedHistory,
    EventPlan,
    Steps,
    check_plan,
    first_events,
    has_pairs,
    merge_arrays,
    pairs_of,
)

_TOLERANCE = 1e-3  # of epsilon, relative
_SAME = 1e-9  # of the logarithm of the scale: a cost that jumps over the target
_ENDLESS = 1e17  # times the scale where a search began: more noise changes nothing
_MOST = 10**18  # steps that are alike
_MOST_STEPS = 10**8  # that are looked at one by one
_AT_ONCE = 10**6  # steps that are cheap enough to be looked at at first


def calibrate(
    shape: Sequence[float] | Callable[[int], float],
    sample_rate: float | Callable[[int], float],
    steps: int,
    epsilon: float,
    delta: float,
    relation: Relation = "add_remove",
    accountant: AbstractAccountant | None = None,
    spent: History = (),
) -> float:
    """Return the smallest scale ``c`` of a noise schedule that keeps to a budget.

    Step ``t`` uses noise multiplier ``c * shape(t)``: the result satisfies
    ``(1 - 1e-3) epsilon <= E(c) <= epsilon``, where ``E(c)`` is the accountant's epsilon at ``delta`` of
    ``spent`` followed by ``PoissonGaussian(c * shape(t), sample_rate)``, t = 0 .. steps - 1
    (``Gaussian`` when ``sample_rate`` is 1). Never above ``epsilon``.

    The guarantee assumes that the shape, the number of steps and the sample rate are fixed before
    data is looked at.

    Args:
        shape: positive numbers, one for each step, or a function of the step.
        sample_rate: ``q`` in (0, 1]: the Poisson rate of every step, or a function of the step.
        steps: number of steps, at least 1.
        epsilon: the budget, > 0, that ``spent`` and the steps may use together.
        delta: in (0, 1).
        relation: ``"add_remove"`` or ``"replace_one"``.
        accountant: :class:`PLDAccountant` by default.
        spent: what ran before, e.g. the ledger of an earlier run.

    Returns:
        The scale ``c``.

    Raises:
        ValueError: if an argument is illegal, ``spent`` alone exceeds the budget, or ``delta`` is so
            large that no noise is needed: a record takes part in any step with less probability.

    Warns:
        PrivacyWarning: if ``delta`` is at least the probability of a record to be in one step.

    Example:
        >>> scale = calibrate([1.0] * 1000, sample_rate=0.01, steps=1000, epsilon=3.0, delta=1e-5)
        >>> round(scale, 3)
        0.814
    """
    shapes = _shape_counts(shape, sample_rate, steps)
    return calibrate_steps(shapes, epsilon, delta, relation, accountant, spent)


def calibrate_steps(
    shapes: Steps,
    epsilon: float,
    delta: float,
    relation: Relation = "add_remove",
    accountant: AbstractAccountant | None = None,
    spent: History = (),
    events: Callable[[float], History] | None = None,
) -> float:
    """Return the scale of steps that were merged; otherwise as :func:`calibrate`.

    Args:
        shapes: the steps at scale 1; :func:`alike` makes those of one kind, however many.
        epsilon, delta, relation, accountant, spent: as there.
        events: from the scale to the events, where the steps are only like them.
    """
    epsilon, delta = _check_budget(epsilon, delta, relation)
    _check_that_delta_is_small(delta, shapes)
    judge = accountant_or_default(accountant)
    before = _checked(spent, judge, epsilon, delta, relation)

    def cost(scale: float) -> float:
        if events is not None:
            return judge.epsilon([*spent, *events(scale)], delta, relation)
        return judge.epsilon(before.followed_by(shapes.scaled(scale)), delta, relation)

    start, slope = _normal_scale(shapes, epsilon, delta, relation)
    scale = _solve(cost, start, epsilon, slope)
    if not scale < math.inf:
        least = epsilon_text(cost(start * _ENDLESS), 6)
        raise RefusedSetting(
            f"no noise keeps the steps within epsilon={epsilon:g} at delta={delta:g}: by the accountant "
            f"{judge.name} they cost at least {least}, however large the noise is. Raise epsilon.",
            topic="budget-exhausted",
        )
    return scale


def _checked(
    spent: History, judge: AbstractAccountant, epsilon: float, delta: float, relation: Relation
) -> CheckedHistory:
    """Return the spent history, merged; refuse it if it leaves nothing of the budget."""
    before = CheckedHistory.of(spent, "spent")
    already = judge.epsilon(spent, delta, relation)
    if not already < epsilon * (1 - _TOLERANCE):
        raise RefusedSetting(
            f"spent already costs epsilon {epsilon_text(already, 6)} of the budget {epsilon:.6g} at "
            f"delta {delta:.3g}: nothing is left for further steps. Raise epsilon.",
            topic="budget-exhausted",
        )
    if not Declared.of(before, relation).left_of(delta) > 0:
        raise RefusedSetting(
            f"spent has releases whose own delta takes all of delta={delta:g}: nothing is left for "
            "further steps. Raise delta.",
            topic="budget-exhausted",
        )
    return before


def _normal_scale(
    shapes: Steps, epsilon: float, delta: float, relation: Relation
) -> tuple[float, float]:
    """Return the scale by the central limit theorem, and the slope of log μ in its logarithm."""
    if np.all(shapes.sample_rates == 1):
        return shapes.mu, -1.0
    mu = math.log(mu_of_budget(epsilon, delta) / check_relation(relation))
    log_rates = 2 * np.log(shapes.sample_rates)

    def excess(log_scale: float) -> float:
        """Return the excess of log μ, ``sum_t q_t^2 (e^(1/z_t^2) - 1) = mu^2``."""
        x = np.exp(-2 * log_scale) / shapes.noise_multipliers**2
        log_terms = log_rates + x + np.log(-np.expm1(-x)) + np.log(shapes.counts)
        return 0.5 * float(np.logaddexp.reduce(log_terms)) - mu

    low = float(np.log(1e-2 / shapes.noise_multipliers.min()))
    high = low + math.log(1e10)
    if not excess(low) > 0 > excess(high):
        return shapes.mu, -1.0
    scale = float(brentq(excess, low, high, xtol=1e-3))
    return math.exp(scale), min((excess(scale + 0.01) - excess(scale)) / 0.01, -1.0)


def _solve(cost: Callable[[float], float], start: float, target: float, slope: float) -> float:
    """Return a scale whose cost, which falls with it, is within the tolerance below the target.

    Infinite, if the cost stays above the target however large the scale is. ``slope``: a guess of that
    of the logarithm of the cost in that of the scale.
    """
    aim, x = math.log(target * (1 - _TOLERANCE / 2)), math.log(start)
    last: tuple[float, float] | None = None
    low, high = -math.inf, math.inf  # of x: the cost is above the target at low, not at high
    for turn in range(200):
        value = cost(math.exp(x))
        if target * (1 - _TOLERANCE) <= value <= target:
            return math.exp(x)
        low, high = (max(low, x), high) if value > target else (low, min(high, x))
        if high - low < _SAME:
            break
        if low > math.log(start * _ENDLESS):
            return math.inf
        guess = math.nan
        if 0 < value < math.inf:
            y = math.log(value)
            if last is not None and last[0] != x:  # the secant
                slope = min((y - last[1]) / (x - last[0]), -0.05)
            last, guess = (x, y), min(max(x + (aim - y) / slope, x - 3.0), x + 3.0)
        if turn % 6 != 5 and low < guess < high:
            x = guess
        elif math.isinf(low) or math.isinf(high):
            x = high - 1.0 if math.isinf(low) else low + 1.0
        else:
            x = (low + high) / 2
    return math.exp(high)


def alike(sample_rate: float, steps: int, shape: float = 1.0) -> Steps:
    """Return steps of one shape and rate, however many.

    Example:
        >>> round(calibrate_steps(alike(0.01, 1000), epsilon=3.0, delta=1e-5), 3)
        0.814
    """
    rate = number("sample_rate", sample_rate)
    sampled_gaussian(1.0, rate)  # raises where it is no rate
    one = np.ones(1)
    return Steps(shape * one, rate * one, whole("steps", steps, 1, _MOST) * one)


def affordable_steps(
    plan: EventPlan,
    limit: int,
    epsilon: float,
    delta: float,
    relation: Relation = "add_remove",
    accountant: AbstractAccountant | None = None,
    spent: History = (),
) -> int:
    """Return the largest number of steps of a plan, up to a limit, that fits into a budget.

    The number depends on the plan only, so stopping there is a stop fixed in advance.

    Args:
        plan: one event for all steps, or a function from the step 0, 1, ... to its event.
        limit: at least 0; may be huge, the search doubles.
        epsilon, delta, relation, accountant, spent: as for :func:`calibrate`.

    Example:
        >>> from lightning_dp.accounting import Gaussian
        >>> affordable_steps(Gaussian(10.0), limit=10**9, epsilon=1.0, delta=1e-5)
        7
    """
    limit = whole("limit", limit, 0)
    epsilon, delta = _check_budget(epsilon, delta, relation)
    check_plan(plan)
    judge, before = accountant_or_default(accountant), CheckedHistory.of(spent, "spent")
    known = np.zeros((2, 0))  # (z, q) of the steps that were asked for

    def cost(n: int) -> float:
        nonlocal known
        if isinstance(plan, AbstractEvent) or not has_pairs(plan, [n], relation):
            return judge.epsilon([*spent, *first_events(plan, n)], delta, relation)
        if n > known.shape[1]:
            more = np.stack(pairs_of(plan, known.shape[1], n))
            known = np.append(known, more, axis=1)
        steps = merge_arrays(known[0, :n], known[1, :n])
        return judge.epsilon(before.followed_by(steps), delta, relation)

    if not cost(0) <= epsilon:
        return 0
    return _last_affordable(cost, limit, epsilon)


def _last_affordable(cost: Callable[[int], float], limit: int, epsilon: float) -> int:
    """Largest n with cost(n) <= epsilon by growing steps, then interpolation with bisection."""
    low, low_cost, high, high_cost = 0, 0.0, min(1, limit), math.inf
    if limit <= _AT_ONCE:  # a plan with an end: all of it fits, mostly
        high = limit
    while high > low:
        high_cost = cost(high)
        if high_cost > epsilon:
            break
        low, low_cost = high, high_cost
        high = min(limit, 4 * high)
    turn = 0
    while high - low > 1:
        turn += 1
        middle = (low + high) // 2
        ratio = high / max(low, 1)  # 1.0 where floats cannot tell the two apart
        if turn % 3 and 0 < low_cost < high_cost < math.inf and ratio > 1:
            # epsilon grows about like a power of n between the two ends.
            power = math.log(high_cost / low_cost) / math.log(ratio)
            middle = int(low * (epsilon / low_cost) ** (1 / power))
            # Once close, ask on both sides of the estimate to close the bracket.
            middle += turn % 2
        middle = min(max(middle, low + 1), high - 1)
        middle_cost = cost(middle)
        if middle_cost <= epsilon:
            low, low_cost = middle, middle_cost
        else:
            high, high_cost = middle, middle_cost
    return low


def _shape_counts(
    shape: Sequence[float] | Callable[[int], float],
    sample_rate: float | Callable[[int], float],
    steps: int,
) -> Steps:
    """Distinct pairs of the shape's value, in the place of z, and the rate, with their counts."""
    steps = whole("steps", steps, 1, _MOST_STEPS)
    if not callable(sample_rate):
        sample_rate = number("sample_rate", sample_rate)
    given = None if callable(shape) else listed("shape", shape, "numbers, one for each step")
    if given is not None and len(given) != steps:
        raise ValueError(
            f"shape has {len(given)} values for {steps} steps; give one positive value for each "
            "step, or a function of the step."
        )
    values = np.array([shape(t) for t in range(steps)] if callable(shape) else given, dtype=float)
    wrong = np.flatnonzero(~((values > 0) & (values < math.inf)))
    if wrong.size:
        raise ValueError(
            f"shape must be finite and positive, got {values[wrong[0]]} at step {wrong[0]}."
        )
    if callable(sample_rate):
        rates = np.array([sample_rate(t) for t in range(steps)], dtype=float)
    else:
        rates = np.full(steps, float(sample_rate))
    for rate in np.unique(rates).tolist():
        sampled_gaussian(1.0, rate)  # raises where it is no rate
    return merge_arrays(values, rates)


def _check_that_delta_is_small(delta: float, steps: Steps) -> None:
    """Warn where delta permits to publish a record that is drawn, and refuse where that is all."""
    rates = steps.sample_rates
    with np.errstate(divide="ignore"):
        part = -math.expm1(float(np.sum(steps.counts * np.log1p(-rates))))  # in a step or more
    if not delta < part:
        raise RefusedSetting(
            f"delta={delta:g} is not below {part:.3g}, the probability that a record takes part in "
            "any of the steps. At such a delta, publishing the records of every batch would count "
            "as private, and there is no smallest noise. Choose a delta well below 1 / (number of "
            "records).",
            topic="delta-too-large",
        )
    if not delta < rates.min():
        warn(
            f"delta={delta:g} is not below the sample rate {rates.min():.3g}: this budget would "
            "permit to publish every record of a batch as it is. Choose a delta well below 1 / "
            "(number of records).",
            topic="delta-too-large",
        )


def _check_budget(epsilon: float, delta: float, relation: Relation) -> tuple[float, float]:
    """Return a legal budget, or raise."""
    epsilon = positive("epsilon", epsilon)
    if not epsilon >= LEAST_EPSILON:
        raise ValueError(
            f"epsilon={epsilon} is below {LEAST_EPSILON:g}, the smallest supported budget. "
            "Raise epsilon."
        )
    check_relation(relation)
    return epsilon, check_delta(delta)
