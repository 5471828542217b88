"""Slow, obvious oracles, which share nothing with the package; ledgers with charges in them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import fft
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm

from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.ledger import Ledger

logging.getLogger().setLevel(logging.ERROR)

Step = tuple[float, float]  # (noise multiplier, sample rate)


def _pair(q: float, relation: str, forward: bool) -> tuple[list[Any], list[Any]]:
    """(weight, mean) of the components of the two neighbouring outputs, sensitivity 1."""
    removed = [(1 - q, 0.0), (q, 1.0)]
    other = [(1.0, 0.0)] if relation == "add_remove" else [(1 - q, 0.0), (q, -1.0)]
    return (removed, other) if forward else (other, removed)


def _log_density(x: Any, mixture: list[Any], z: float) -> Any:
    parts = [math.log(w) - 0.5 * ((x - m) / z) ** 2 for w, m in mixture if w > 0]
    return np.logaddexp.reduce(np.stack(parts), axis=0)


def _probability(x: Any, mixture: list[Any], z: float, above: Any) -> Any:
    """P(X > x), or P(X < x)."""
    return sum(w * ndtr(np.where(above, m - x, x - m) / z) for w, m in mixture)


def loss(x: Any, step: Step, relation: str, forward: bool) -> Any:
    p, q = _pair(step[1], relation, forward)
    return _log_density(x, p, step[0]) - _log_density(x, q, step[0])


def one_step(epsilon: Any, step: Step, relation: str, forward: bool) -> Any:
    """The exact delta of one step: the set where p > e^epsilon q is a half line, found by bisection."""
    epsilon = np.asarray(epsilon, dtype=float)
    z = step[0]
    low, high = np.full(epsilon.shape, -60 * z - 60), np.full(epsilon.shape, 60 * z + 60)
    rising = forward  # the loss of the reversed pair falls
    for _ in range(60):
        middle = (low + high) / 2
        right = (loss(middle, step, relation, forward) > epsilon) == rising
        low, high = np.where(right, low, middle), np.where(right, middle, high)
    p, q = _pair(step[1], relation, forward)
    above = np.asarray(rising)
    return _probability(low, p, z, above) - np.exp(epsilon) * _probability(low, q, z, above)


def two_steps(epsilon: float, first: Step, second: Step, relation: str, forward: bool) -> float:
    """delta of two steps: E over the first of delta of the second at epsilon - loss of the first."""
    p, _ = _pair(first[1], relation, forward)
    x = np.linspace(-1 - 12 * first[0], 1 + 12 * first[0], 6001)
    density = np.exp(_log_density(x, p, first[0])) / (first[0] * math.sqrt(2 * math.pi))
    inner = one_step(epsilon - loss(x, first, relation, forward), second, relation, forward)
    return float(np.sum(density * inner) * (x[1] - x[0]))


def exact_delta(epsilon: float, steps: list[Step], relation: str = "add_remove") -> float:
    """delta of one or two steps, the larger of the two directions."""
    if len(steps) == 1:
        return max(float(one_step(epsilon, steps[0], relation, f)) for f in (True, False))
    return max(two_steps(epsilon, steps[0], steps[1], relation, f) for f in (True, False))


def exact_epsilon(delta: float, steps: list[Step], relation: str = "add_remove") -> float:
    if exact_delta(0.0, steps, relation) <= delta:
        return 0.0
    high = 1.0
    while exact_delta(high, steps, relation) > delta:
        high *= 2
    return float(brentq(lambda e: exact_delta(e, steps, relation) - delta, 0.0, high, xtol=1e-13))


def bucket_epsilon(delta: float, steps: list[Step], relation: str, h: float, up: bool) -> float:
    """Losses rounded up (an upper bound) or down (a lower bound) to the grid, convolved directly."""
    return max(_bucket_epsilon(delta, steps, relation, h, up, f) for f in (True, False))


def _bucket_epsilon(
    delta: float, steps: list[Step], relation: str, h: float, up: bool, forward: bool
) -> float:
    known = {step: _bucket_step(step, relation, h, up, forward) for step in set(steps)}
    size = fft.next_fast_len(sum(known[s][0].size for s in steps), real=True)
    product: Any = 1.0
    for step, (pmf, _, _) in known.items():
        product = product * fft.rfft(pmf, size) ** steps.count(step)
    total = fft.irfft(product, size)
    start, infinity = sum(known[s][1] for s in steps), sum(known[s][2] for s in steps)
    x = (start + np.arange(total.size)) * h

    def excess(epsilon: float) -> float:
        above = x > epsilon
        finite = float(np.sum(total[above] * -np.expm1(epsilon - x[above])))
        return finite + (infinity if up else 0.0) - delta

    return float(brentq(excess, 0.0, float(x[-1]), xtol=1e-10)) if excess(0.0) > 0 else 0.0


def _bucket_step(
    step: Step, relation: str, h: float, up: bool, forward: bool
) -> tuple[Any, int, float]:
    z = step[0]
    p, _ = _pair(step[1], relation, forward)
    x = np.linspace(-1 - 9 * z, 1 + 9 * z, 200_001)
    mass = np.diff(_probability(x, p, z, np.asarray(False)))
    ends = loss(x, step, relation, forward) / h
    # The loss is monotone: inside (x_i, x_i+1) it lies between its values at the ends.
    edges = np.maximum(ends[1:], ends[:-1]) if up else np.minimum(ends[1:], ends[:-1])
    index = (np.ceil(edges) if up else np.floor(edges)).astype(int)
    first = int(index.min())
    return np.bincount(index - first, weights=mass), first, 2 * float(norm.sf(9))


def dp_accounting_epsilons(
    deltas: list[float],
    history: list[tuple[Step, int]],
    h: float,
    pessimistic: bool,
    relation: str = "add_remove",
) -> list[float]:
    """Google's PLD of the same history; upper or lower bounds. Its own rounding shows below 1e-10."""
    neighbors = privacy_loss_distribution.NeighborRel
    both = {"add_remove": neighbors.ADD_OR_REMOVE_ONE, "replace_one": neighbors.REPLACE_ONE}
    total = None
    for (z, q), count in history:
        pld = privacy_loss_distribution.from_gaussian_mechanism(
            z,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=h,
            sampling_prob=q,
            use_connect_dots=pessimistic,
            neighboring_relation=both[relation],
        ).self_compose(count)
        total = pld if total is None else total.compose(pld)
    assert total is not None
    return [float(total.get_epsilon_for_delta(delta)) for delta in deltas]


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    functions: list[Callable[..., Any]] = [
        one_step,
        two_steps,
        exact_delta,
        exact_epsilon,
        bucket_epsilon,
        dp_accounting_epsilons,
    ]
    return SimpleNamespace(**{f.__name__: f for f in functions})


class Books:
    """Makes ledgers, and looks into them."""

    @staticmethod
    def ledger_with(directory: Path | None, *events: AbstractEvent, run: str = "run-1") -> Ledger:
        """A ledger whose run is under way, with these charges."""
        ledger = Ledger()
        ledger.begin(run, directory)
        for event in events:
            ledger.charge(event)
        return ledger

    @staticmethod
    def ended(ledger: Ledger) -> Ledger:
        ledger.end()
        return ledger

    @staticmethod
    def restored(state: dict[str, Any], directory: Path) -> Ledger:
        ledger = Ledger()
        ledger.restore(state, directory)
        return ledger

    @staticmethod
    def journal_of(ledger: Ledger) -> Path:
        assert ledger.journal_path is not None
        return ledger.journal_path

    @staticmethod
    def counts(ledger: Ledger) -> dict[AbstractEvent, int]:
        return dict(ledger.history())

    @staticmethod
    def steps_in(path: Path) -> int:
        return read_journal(path)[1].total


@pytest.fixture
def books() -> type[Books]:
    return Books


@pytest.fixture
def plans_accounted_once() -> None:
    """Curves and profiles are computed for each test here, which looks at them."""
