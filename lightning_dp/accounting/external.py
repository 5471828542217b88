"""Guarantees of other releases about the same records: declared, not measured, and composed soundly."""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from lightning_dp._validate import between, normalise, not_negative, one_of
from lightning_dp.accounting.abstract_event import AbstractEvent, Relation

__all__ = ["NOTHING", "ZCDP", "AbstractExternal", "ApproximateDP", "Declared"]

_LONGEST = 300  # letters of the user's words


@dataclass(frozen=True)
class AbstractExternal(AbstractEvent):
    """A release that was made elsewhere, known by the guarantee that somebody states for it.

    What is declared is taken at its word, and reports say so.
    """

    @property
    @abstractmethod
    def declared(self) -> str:
        """The user's words as one line, of the release, its guarantee and the relation."""

    @property
    def key(self) -> str:
        """Its name among the runs of a ledger, by which it counts once wherever it is declared."""
        text = json.dumps(self.to_dict(), sort_keys=True).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    @abstractmethod
    def costs(self, relation: Relation) -> tuple[float, float, float]:
        """Return ``(epsilon, delta, rho)`` under a relation: it is both (ε, δ)-DP next to ρ-zCDP.

        Raises ValueError if the guarantee says nothing about that relation.
        """

    @property
    def is_gaussian(self) -> bool:
        """False."""
        return False

    @property
    def is_step(self) -> bool:
        """False, since nothing was trained with it."""
        return False

    @property
    def pair(self) -> tuple[float, float]:
        """Raises ValueError, since no single Gaussian costs the same."""
        raise ValueError(
            f"{self} is no Gaussian release, so this guard or accountant cannot count it: use "
            "PLDAccountant() or StreamingRDPAccountant()."
        )


@dataclass(frozen=True)
class ApproximateDP(AbstractExternal):
    """A release that is (ε, δ)-differentially private, by whatever mechanism.

    Promised by whoever declares it: for all neighbouring data sets x, x' under ``relation``, in both
    orders, and every set S of outputs, ``P(M(x) in S) <= e^epsilon P(M(x') in S) + delta``; also if
    what was asked depended on earlier releases. :class:`PLDAccountant` composes it by its exact
    dominating pair (:class:`Declared`).

    A guarantee under "add_remove" counts under "replace_one" as that of two changes,
    ``(2 epsilon, (1 + e^epsilon) delta)``. One under "replace_one" is refused under "add_remove": it
    may have told everybody the number of records.

    Args:
        epsilon: ε >= 0. 0 with δ > 0 is legal.
        delta: δ in [0, 1); 0 for pure differential privacy.
        relation: the neighbouring relation of the guarantee, "add_remove" or "replace_one".
        what: your words for the release, one line. A release is known by them: two that differ
            must not have the same words, and one that several trainings declare counts once.

    Raises:
        ValueError: naming the argument.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian, epsilon
        >>> table = ApproximateDP(0.5, 1e-7, relation="add_remove", what="table of ages, 2026-03-01")
        >>> run = (PoissonGaussian(1.0, sample_rate=0.01), 1000)
        >>> round(epsilon([run], delta=1e-5), 2), round(epsilon([run, (table, 1)], delta=1e-5), 2)
        (1.83, 2.27)
    """

    epsilon: float
    delta: float
    relation: Relation
    what: str

    def __post_init__(self) -> None:
        normalise(self, not_negative, "epsilon")
        normalise(self, between("[0, 1)"), "delta")
        normalise(self, _RELATION, "relation")
        normalise(self, _words, "what")

    @property
    def declared(self) -> str:
        """The user's words as one line."""
        return f"{self.what}: ({self.epsilon:g}, {self.delta:g})-DP ({self.relation})"

    def costs(self, relation: Relation) -> tuple[float, float, float]:
        """Return ``(epsilon, delta, 0)``, of two changes for replace-one from add/remove."""
        if self.relation == _checked(self, relation):
            return self.epsilon, self.delta, 0.0
        # P(x) <= e^ε (e^ε P(x'') + δ) + δ, x' between x and x''.
        growth = math.exp(self.epsilon) if self.epsilon < 700 else math.inf
        return 2 * self.epsilon, (1 + growth) * self.delta if self.delta else 0.0, 0.0


@dataclass(frozen=True)
class ZCDP(AbstractExternal):
    """A release that is ρ-zero-concentrated differentially private, as a census has it.

    Promised by whoever declares it: the Rényi divergence of every order a > 1 between the outputs
    for neighbouring data sets, in both orders, is at most ``rho * a`` (Bun and Steinke, arXiv
    1605.02065v1, Definition 1.1). ρ of several releases add up. Rényi accounting takes it as it is;
    :class:`PLDAccountant` by the largest privacy profile that it leaves possible.

    A guarantee under "add_remove" counts under "replace_one" as that of two changes, ``4 rho``
    (Proposition 1.9 there). One under "replace_one" is refused under "add_remove".

    Args:
        rho: ρ >= 0.
        relation: the neighbouring relation of the guarantee, "add_remove" or "replace_one".
        what: your words for the release, one line. A release is known by them: two that differ
            must not have the same words, and one that several trainings declare counts once.

    Raises:
        ValueError: naming the argument.

    Example:
        >>> from lightning_dp.accounting import StreamingRDPAccountant
        >>> tables = ZCDP(0.1, relation="replace_one", what="tables of the census")
        >>> round(StreamingRDPAccountant().epsilon([(tables, 1)], 1e-5, "replace_one"), 2)
        1.92
    """

    rho: float
    relation: Relation
    what: str

    def __post_init__(self) -> None:
        normalise(self, not_negative, "rho")
        normalise(self, _RELATION, "relation")
        normalise(self, _words, "what")

    @property
    def declared(self) -> str:
        """The user's words as one line."""
        return f"{self.what}: {self.rho:g}-zCDP ({self.relation})"

    def costs(self, relation: Relation) -> tuple[float, float, float]:
        """Return ``(0, 0, rho)``, of two changes for replace-one from add/remove."""
        return 0.0, 0.0, self.rho if self.relation == _checked(self, relation) else 4 * self.rho


_RELATION = one_of(get_args(Relation))


def _words(name: str, value: object, *, of: str | None = None) -> str:
    """Return one line of a user's own words, which a report will print."""
    is_line = isinstance(value, str) and 0 < len(value.strip()) <= _LONGEST
    if not (is_line and isinstance(value, str) and value.isprintable()):
        raise ValueError(
            f"{name}={value!r} must be one line of 1 to {_LONGEST} letters that says which release "
            "it is."
        )
    return value.strip()


def _checked(event: ApproximateDP | ZCDP, relation: Relation) -> Relation:
    """Return the relation that ε is asked for, or refuse a guarantee that does not speak of it."""
    if event.relation == "replace_one" and relation == "add_remove":
        raise ValueError(
            f"{event} is a guarantee for the exchange of a record, and says nothing about adding or "
            "removing one (it may have told everybody the number of records). State it under "
            "add_remove, or ask for ε under relation='replace_one'."
        )
    return relation


@dataclass(frozen=True)
class Declared:
    """Declared guarantees together, under one relation.

    An (ε, δ)-DP release is no worse than one that, with probability δ, tells all, and else answers a
    yes-no question truly with probability ``e^ε / (1 + e^ε)`` (Kairouz, Oh and Viswanath, "The
    Composition Theorem for Differential Privacy", arXiv 1311.0776). So all of them together
    tell all with probability ``lost = 1 - prod_i (1 - δ_i)``, and else are pure:
    ``delta(e) = lost + (1 - lost) delta_pure(e)``, exactly.

    Args:
        pure: ε of each distinct question, and how often it is asked.
        log_intact: ``sum_i log(1 - δ_i)``.
        rho: of all zCDP releases.

    Example:
        >>> two = ApproximateDP(0.5, 1e-6, "add_remove", "two tables")
        >>> Declared.of([(two, 2)], "add_remove").lost
        1.999999e-06
    """

    pure: tuple[tuple[float, int], ...] = ()
    log_intact: float = 0.0
    rho: float = 0.0

    @classmethod
    def of(cls, history: Iterable[tuple[AbstractExternal, int]], relation: Relation) -> Declared:
        """Add up guarantees.

        Raises:
            ValueError: if one of them says nothing about the relation.
        """
        pure: dict[float, int] = {}
        logs, rhos = [], []
        for event, count in history:
            epsilon, delta, rho = event.costs(relation)
            if epsilon > 0:
                pure[epsilon] = pure.get(epsilon, 0) + count
            logs.append(count * math.log1p(-delta) if delta < 1 else -math.inf)
            rhos.append(count * rho)
        return cls(tuple(sorted(pure.items())), math.fsum(logs), math.fsum(rhos))

    @property
    def is_empty(self) -> bool:
        """True if nothing of it costs anything."""
        return self == NOTHING

    @property
    def lost(self) -> float:
        """The probability that a release tells all."""
        return -math.expm1(self.log_intact)

    @property
    def without_delta(self) -> Declared:
        """The part of them that is pure or zCDP."""
        return replace(self, log_intact=0.0)

    @property
    def simple_epsilon(self) -> float:
        """ε at δ = ``lost``, the sum of all ε; infinite if anything is zCDP."""
        return math.fsum(n * epsilon for epsilon, n in self.pure) if self.rho == 0 else math.inf

    def left_of(self, delta: float) -> float:
        """Return δ for all that is pure, so that the whole has ``delta``; not above 0 if none is left."""
        if self.log_intact == 0.0:
            return delta
        if self.log_intact == -math.inf:
            return 0.0
        # Rounded down: the difference of two numbers that may be nearly the same.
        return (delta * (1 - 1e-14) - self.lost * (1 + 1e-14)) / math.exp(self.log_intact)

    def with_all(self, delta: float) -> float:
        """Return δ of the whole, if that of all else, pure, is ``delta``."""
        if self.log_intact == 0.0:
            return delta
        return min(1.0, (self.lost + math.exp(self.log_intact) * delta) * (1 + 1e-14))

    def divergence(self, orders: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the Rényi divergence of all that is pure or zCDP, at each order above 1."""
        total = self.rho * orders
        for epsilon, count in self.pure:
            total = total + count * _of_a_question(epsilon, orders)
        return np.asarray(total)


NOTHING = Declared()


def _of_a_question(epsilon: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """``log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1)``, ``p = e^ε / (1 + e^ε)``.

    That of randomized response, which every ε-DP release is a post-processing of.
    """
    x = (orders - 1) * epsilon
    log_p = -math.log1p(math.exp(-epsilon))
    large = np.logaddexp(x + log_p, -x + log_p - epsilon)
    # log(cosh x + (2 p - 1) sinh x), without cancellation for small x.
    y = np.minimum(x, 1.0)
    small = np.log1p(2 * np.sinh(y / 2) ** 2 + (2 * expit(epsilon) - 1) * np.sinh(y))
    return np.asarray(np.where(x < 1, small, large) / (orders - 1))
