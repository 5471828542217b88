"""Privacy events: one frozen, checked record for each kind of noisy release, and histories of them."""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from decimal import ROUND_CEILING, Context
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from scipy.special import betainc

from lightning_dp._refusals import Refusal, RefusedSetting
from lightning_dp._validate import (
    Check,
    between,
    explained,
    listed,
    normalise,
    not_negative,
    number,
    one_of,
    whole,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Relation: TypeAlias = Literal["add_remove", "replace_one", "zero_out"]
"""Neighbouring data sets: one record more or less, exchanged, or without effect at the place it has."""

_NOISE = explained(
    not_negative, "It is the noise standard deviation over the sensitivity (0 means no privacy)."
)
_RATE = explained(
    between("(0, 1]"),
    "It is the probability that a record takes part: the expected batch size over the records.",
)
_LONGEST = 300  # letters of the user's words
_LITTLE_NOISE = 0.05  # a multiplier; below, no secret of who takes part protects


@dataclass(frozen=True)
class AbstractEvent(ABC):
    """One noisy release, described by public numbers only.

    Every event whose ``is_gaussian`` is true is, for accounting, one Gaussian release on one Poisson
    sample: each record takes part independently with probability ``sample_rate``, the sum over the
    participating records has sensitivity ``C`` to adding or removing one record, and noise
    ``N(0, (noise_multiplier * C)^2 I)`` is added to it. It costs no more than that, and less where
    ``is_pair`` is false. How a sequence of events is analysed is the business of an accountant.

    A field has one meaning and one check in all events: constructors raise ValueError, naming the
    argument, if it is out of range or NaN.
    """

    is_gaussian: ClassVar[bool] = True
    """True if there is a :attr:`pair`."""

    is_step: ClassVar[bool] = True
    """True if it is charged for steps of a training."""

    no_bound: ClassVar[Mapping[str, str]] = {}
    """The reason why there is no bound, for each relation without one."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name in _CHECKS:
                normalise(self, _CHECKS[each.name], each.name)

    @property
    @abstractmethod
    def pair(self) -> tuple[float, float]:
        """``(noise_multiplier, sample_rate)`` of the equivalent single subsampled Gaussian.

        Raises ValueError if there is none.
        """

    @property
    def is_pair(self) -> bool:
        """True if :attr:`pair` is all that it costs; where there is one, else, it is a bound."""
        return self.is_gaussian

    @property
    def num_steps(self) -> int:
        """Noised steps that this one charge covers, those of its field ``steps`` if it has one."""
        return getattr(self, "steps", int(self.is_step))

    @property
    def withdrawn(self) -> str | None:
        """The reason for which ε of all before it is withdrawn; None for a release."""
        return None

    def to_dict(self) -> dict[str, object]:
        """Return name and fields as strings, numbers and lists; ``event_from_dict`` is the inverse.

        What is written is never written differently later: a field that is added needs a default,
        which is what it is in files that were written before.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return {"event": type(self).__name__, **plain}


History: TypeAlias = Sequence[tuple[AbstractEvent, int]]


def check_history(history: object, name: str = "history") -> list[tuple[AbstractEvent, int]]:
    """Return a legal history, which was given as the argument of that name.

    Example:
        >>> check_history([3], "spent")
        Traceback (most recent call last):
        ValueError: spent must hold pairs (event, count), got 3.
    """
    return [check_entry(entry, name) for entry in listed(name, history, "pairs (event, count)")]


def check_entry(entry: object, name: str = "history") -> tuple[AbstractEvent, int]:
    """Return a legal entry of a history, or raise."""
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], AbstractEvent)):
        raise ValueError(f"{name} must hold pairs (event, count), got {reprlib.repr(entry)}.")
    event, count = entry
    if type(count) is int and count >= 0:  # nearly always, and histories are long
        return event, count
    return event, whole("count", count, 0, of=name)


def counted(history: Iterable[tuple[AbstractEvent, int]]) -> list[tuple[AbstractEvent, int]]:
    """Return a history with each event once."""
    counts: dict[AbstractEvent, int] = {}
    for event, count in history:
        counts[event] = counts.get(event, 0) + count
    return list(counts.items())


@dataclass(frozen=True)
class Gaussian(AbstractEvent):
    """Gaussian noise on a sum over all records.

    Args:
        noise_multiplier: ``z >= 0``: noise standard deviation over the sensitivity ``C`` of the sum
            under add/remove. 0 is legal and gives ``epsilon = inf``.

    Example:
        >>> Gaussian(noise_multiplier=2.0).pair
        (2.0, 1.0)
    """

    noise_multiplier: float

    @property
    def pair(self) -> tuple[float, float]:
        return self.noise_multiplier, 1.0


@dataclass(frozen=True)
class PoissonGaussian(AbstractEvent):
    """Gaussian noise on a sum over one Poisson sample of the records.

    Assumes that each record is taken independently with probability ``sample_rate``, freshly for
    every event, and that nothing but the noisy sum is released (in particular the batch size is not).

    Args:
        noise_multiplier: ``z >= 0``: noise standard deviation over the sensitivity ``C`` of the sum.
        sample_rate: ``q`` in (0, 1]: probability that a record takes part.

    Example:
        >>> PoissonGaussian(noise_multiplier=1.0, sample_rate=0.01).to_dict()
        {'event': 'PoissonGaussian', 'noise_multiplier': 1.0, 'sample_rate': 0.01}
    """

    noise_multiplier: float
    sample_rate: float

    @property
    def pair(self) -> tuple[float, float]:
        return self.noise_multiplier, self.sample_rate


@dataclass(frozen=True)
class PoissonRound(AbstractEvent):
    """Several Gaussian queries, one after another, on **one** Poisson sample.

    Given the sample, adaptively chosen Gaussian queries with multipliers ``z_s`` are one Gaussian
    with ``z = (sum_s z_s^-2)^(-1/2)``; the sample is drawn once, so amplification by ``q`` applies
    once, to the round. Booking the queries as independently subsampled events would be wrong.

    Args:
        noise_multipliers: ``z_s >= 0`` of each query, at least one.
        sample_rate: ``q`` in (0, 1]: probability that a record takes part in the round.

    Example:
        >>> PoissonRound(noise_multipliers=(2.0, 2.0, 2.0, 2.0), sample_rate=0.1).pair
        (1.0, 0.1)
    """

    noise_multipliers: tuple[float, ...]
    sample_rate: float

    @property
    def pair(self) -> tuple[float, float]:
        return noise_together(self.noise_multipliers), self.sample_rate


def noise_together(noise_multipliers: Sequence[float]) -> float:
    """Return z of Gaussian queries on the same records, which are one: ``(sum_s z_s^-2)^(-1/2)``.

    Example:
        >>> noise_together([2.0, 2.0, 2.0, 2.0])
        1.0
    """
    least = min(noise_multipliers)
    if least == 0.0:
        return 0.0
    # Relative to the least multiplier: 1 / z^2 alone would overflow for z < 1e-154.
    return least / math.sqrt(math.fsum([(least / z) ** 2 for z in noise_multipliers]))


def binomial_tail(least: int, number: int, probability: float) -> float:
    """Return ``P(Binomial(n, p) >= k)``, rounded up; ``bdtrc`` has no room for n above 2^31.

    Example:
        >>> round(binomial_tail(2, 2, 0.5), 5), binomial_tail(3, 2, 0.5)
        (0.25, 0.0)
    """
    if not 0 < least <= number:
        return float(least <= 0)
    tail = float(betainc(float(least), float(number - least + 1), probability))
    return min(1.0, tail * (1 + 1e-6))


@dataclass(frozen=True)
class CyclicRound(PoissonGaussian):
    """Several steps in a row with correlated noise, of which a record takes part in one at most.

    Records are divided into parts that take turns (:class:`~lightning_dp.CyclicPoisson`), and
    noise is remembered for no more steps than there are parts: all that the steps tell of a record is one
    Gaussian release on one Poisson sample (Choquette-Choo et al. 2023, arXiv:2306.08153, Theorem 4).
    It is charged whole before the first of them.

    Args:
        noise_multiplier: ``z >= 0``; the noise has standard deviation ``z C`` times the length of a
            column of its matrix.
        sample_rate: ``b q`` in (0, 1]: probability that a record takes part in the step of its part.
        steps: at most b.

    Example:
        >>> event = CyclicRound(noise_multiplier=1.0, sample_rate=0.08, steps=8)
        >>> event.pair, event.num_steps
        ((1.0, 0.08), 8)
    """

    steps: int = 1


@dataclass(frozen=True)
class FixedOrderPass(Gaussian):
    """A pass over the records in an order that stays, of which each record takes part in one step.

    Nothing is amplified: it is known which step uses whom. A pass of independent noise is one Gaussian
    release, E passes are √E/z-GDP. Noise that remembers makes later passes cost more, or less, than the
    first: ``noise_multiplier`` is that of the Gaussian which, composed with those of the passes before,
    is what the passes together are (:meth:`lightning_dp.noise.AbstractNoise.cost`).

    Under ``"zero_out"`` (a record has no effect, and keeps its place), or ``"replace_one"`` at twice
    the sensitivity. Not under ``"add_remove"``: a record more moves all others by a place.

    Args:
        noise_multiplier: ``z >= 0``.
        steps: at most as many as a pass has.

    Example:
        >>> from lightning_dp.accounting import Gaussian, epsilon
        >>> passes = [(FixedOrderPass(noise_multiplier=4.0, steps=100), 9)]
        >>> round(epsilon(passes, 1e-5, "zero_out") / epsilon(Gaussian(4.0 / 3), 1e-5), 9)
        1.0
    """

    no_bound: ClassVar[Mapping[str, str]] = {
        "add_remove": "FixedOrderPass is about records in a fixed order, where one record more or less "
        "moves others to other steps: relation='add_remove' has no bound there. Ask for "
        "relation='zero_out' (one record has no effect, and keeps its place; same ε as add_remove "
        "has elsewhere), or 'replace_one'."
    }

    steps: int = 1


@dataclass(frozen=True)
class TruncatedGaussian(AbstractEvent):
    """Gaussian noise on a sum over one Poisson sample, of which at most ``limit`` records are used.

    Where the sample has more, that many of it are chosen uniformly. One record x more or less (n others
    at most, S the sample of them, so independent of whether x is drawn):

    - ``|S| < limit``: all are used with and without x, which is one Gaussian release on a Poisson
      sample, of noise z and rate q;
    - ``|S| = m >= limit``: with x drawn, it is used with the chance ``limit / (m + 1)``, and then in the
      place of one uniformly chosen. So all is as without x, but with a chance of at most q, in which the
      sum moves by 2 C at most: that is a Gaussian release of noise z/2 and rate q.

    The latter has the chance ``tau = P(Binomial(n, q) >= limit)`` in both data sets. So, as divergences
    are jointly convex, a step is at most a choice, known to everybody, between the two, with weights
    ``1 - tau`` and ``tau``. With another record in the place of x it is the same: z/2 has room for two
    that differ by 2 C from the record that is pushed out. The mixture is of the kind that Chua et al.
    (2024, arXiv:2411.04205) bound by a δ.

    Args:
        noise_multiplier: ``z >= 0``.
        sample_rate: ``q`` in (0, 1], of the sample before the limit.
        limit: records of a sample that are used at most.
        num_records: n, from which it is drawn: those of one process, the largest.

    Example:
        >>> event = TruncatedGaussian(1.0, sample_rate=0.01, limit=150, num_records=10_000)
        >>> f"{event.chance_of_limit:.1e}"
        '1.7e-06'
    """

    no_bound: ClassVar[Mapping[str, str]] = {
        "zero_out": "TruncatedGaussian: a record without effect still takes the place of another where "
        "the limit is reached, for which relation='zero_out' has no bound. Ask for 'add_remove' or "
        "'replace_one'."
    }

    noise_multiplier: float
    sample_rate: float
    limit: int
    num_records: int

    @property
    def chance_of_limit(self) -> float:
        """``P(Binomial(n, q) >= limit)``, rounded up."""
        return binomial_tail(self.limit, self.num_records, self.sample_rate)

    @property
    def pair(self) -> tuple[float, float]:
        """``(noise_multiplier / 2, sample_rate)``, as if the limit were always reached."""
        return self.noise_multiplier / 2, self.sample_rate

    @property
    def is_pair(self) -> bool:
        """False, but where noise is too small to matter."""
        return self.noise_multiplier < _LITTLE_NOISE


@dataclass(frozen=True)
class RandomAllocationEpoch(Gaussian):
    """An epoch of t steps, each record in one of them, drawn uniformly by itself, and in secret.

    With z C of noise on each step's sum, what the epoch tells of a record is at most the pair
    ``P = (1/t) sum_i N(e_i, z^2 I)``, ``Q = N(0, z^2 I)`` in t dimensions, also if later steps depend on
    the sums of earlier ones: of coordinate i, each step is a post-processing (Feldman and Shenfeld 2024,
    arXiv:2412.16802). It is charged whole before its first record, and a stop inside is
    paid in full. How its loss is computed, as an upper bound: ``AllocationNode`` of
    ``lightning_dp.accounting._pmf``.

    Under "add_remove" and "zero_out", in which a record has no effect at its step: the same pair.
    :attr:`pair` is that of a full batch, as if it were told which step uses whom; Rényi accounting
    takes it.

    Args:
        noise_multiplier: ``z >= 0`` of each step.
        batches: t, the steps of the epoch.
        steps: that the charge covers, at most t.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian, epsilon
        >>> epochs = [(RandomAllocationEpoch(1.0, batches=100, steps=100), 10)]
        >>> steps = [(PoissonGaussian(1.0, 0.01), 1000)]
        >>> round(epsilon(epochs, 1e-5), 2), round(epsilon(steps, 1e-5), 2)
        (1.7, 1.83)
    """

    no_bound: ClassVar[Mapping[str, str]] = {
        "replace_one": "RandomAllocationEpoch: of two records that take each other's place in an "
        "allocated epoch no bound is known here that uses the secret. Ask for relation='add_remove' or "
        "'zero_out'."
    }

    batches: int
    steps: int = 1

    @property
    def is_pair(self) -> bool:
        """False, but where noise is too small to matter."""
        return self.noise_multiplier < _LITTLE_NOISE


def sampled_gaussian(noise_multiplier: float, sample_rate: float) -> Gaussian | PoissonGaussian:
    """Return the event of one Gaussian release on a Poisson sample, which may be of all records.

    Example:
        >>> sampled_gaussian(2.0, 1), sampled_gaussian(2.0, 0.1).sample_rate
        (Gaussian(noise_multiplier=2.0), 0.1)
    """
    if number("sample_rate", sample_rate) == 1:
        return Gaussian(noise_multiplier)
    return PoissonGaussian(noise_multiplier, sample_rate)


def _noises(name: str, value: object, *, of: str | None = None) -> tuple[float, ...]:
    try:
        given = listed(name, value, "numbers")
    except TypeError:
        given = ()
    if not given:
        raise ValueError(
            f"{name}={value!r} must be a list of numbers: one noise multiplier for each query."
        )
    return tuple(_NOISE(name, each) for each in given)


class VoidedRunError(Refusal, RuntimeError):
    """Real records failed a check, so the run is over for good and ε of it is withdrawn.

    Args:
        reason: module and kind of what was found; never a value, a count or a record.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"This private run is voided: {reason} The step was not released. That the run ended "
            "here depends on the records, and no ε covers it: ε of all that it released before is "
            "withdrawn, nothing more is saved, and neither it nor an earlier checkpoint of it can "
            "be resumed. Begin a new run, with a new DifferentialPrivacy and weights from before.",
            topic="voided-run",
        )
        self.reason = reason

    def __reduce__(self) -> tuple[type[VoidedRunError], tuple[str]]:
        return type(self), (self.reason,)


@dataclass(frozen=True)
class Voided(AbstractEvent):
    """The end of a run whose guarantee is withdrawn: for every accountant a step without noise.

    In a journal it outlives checkpoints and reports that were written before.

    Args:
        reason: as in :class:`VoidedRunError`.
    """

    is_step: ClassVar[bool] = False

    reason: str

    @property
    def pair(self) -> tuple[float, float]:
        return 0.0, 1.0

    @property
    def withdrawn(self) -> str | None:
        return self.reason


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


@dataclass(frozen=True)
class AbstractExternal(AbstractEvent):
    """A release that was made elsewhere, known by the guarantee that somebody states for it.

    What is declared is taken at its word, and reports say so.
    """

    is_gaussian: ClassVar[bool] = False
    is_step: ClassVar[bool] = False

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
    def pair(self) -> tuple[float, float]:
        """Raises ValueError, since no single Gaussian costs the same."""
        raise ValueError(
            f"{self} must be a Gaussian release for this guard or accountant. Use PLDAccountant() or "
            "StreamingRDPAccountant()."
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

    @property
    def declared(self) -> str:
        epsilon, delta = epsilon_text(self.epsilon, 6), epsilon_text(self.delta, 6)
        return f"{self.what}: ({epsilon}, {delta})-DP ({self.relation})"

    def costs(self, relation: Relation) -> tuple[float, float, float]:
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

    Example:
        >>> from lightning_dp.accounting import StreamingRDPAccountant
        >>> tables = ZCDP(0.1, relation="replace_one", what="tables of the census")
        >>> round(StreamingRDPAccountant().epsilon([(tables, 1)], 1e-5, "replace_one"), 2)
        1.92
    """

    rho: float
    relation: Relation
    what: str

    @property
    def declared(self) -> str:
        return f"{self.what}: {epsilon_text(self.rho, 6)}-zCDP ({self.relation})"

    def costs(self, relation: Relation) -> tuple[float, float, float]:
        return 0.0, 0.0, self.rho if self.relation == _checked(self, relation) else 4 * self.rho


def _words(name: str, value: object, *, of: str | None = None) -> str:
    """Return one line of a user's own words, which a report will print."""
    is_line = isinstance(value, str) and 0 < len(value.strip()) <= _LONGEST
    if not (is_line and isinstance(value, str) and value.isprintable()):
        raise ValueError(
            f"{name}={value!r} must be one line of 1 to {_LONGEST} characters that names the release."
        )
    return value.strip()


def _text(name: str, value: object, *, of: str | None = None) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} must be a string.")
    return value


def _checked(event: ApproximateDP | ZCDP, relation: Relation) -> Relation:
    """Return the relation that ε is asked for, or refuse a guarantee that does not speak of it."""
    if event.relation == "replace_one" and relation != "replace_one":
        raise ValueError(
            f"{event} holds for replacing a record only, since it may release the number of records. "
            "State a guarantee under add_remove, or compute ε under relation='replace_one'."
        )
    if event.relation == "zero_out" and relation == "add_remove":
        raise ValueError(
            f"{event} is a guarantee for a record that keeps its place, and says nothing about one "
            "more or less. Ask for ε under relation='zero_out' or 'replace_one'."
        )
    # Without the record is a data set in which it has no effect, and costs as much.
    return event.relation if relation == "zero_out" else relation


_CHECKS: dict[str, Check] = {
    "noise_multiplier": _NOISE,
    "noise_multipliers": _noises,
    "sample_rate": _RATE,
    **dict.fromkeys(("steps", "batches", "limit", "num_records"), whole),
    **dict.fromkeys(("epsilon", "rho"), not_negative),
    "delta": between("[0, 1)"),
    "relation": one_of(get_args(Relation)),
    "what": _words,
    "reason": _text,
}
_KNOWN: dict[str, type[AbstractEvent]] = {
    kind.__name__: kind
    for kind in (
        *(Gaussian, PoissonGaussian, PoissonRound, CyclicRound, FixedOrderPass),
        *(TruncatedGaussian, RandomAllocationEpoch),
        *(ApproximateDP, ZCDP, Voided),
    )
}


def event_from_dict(d: Mapping[str, object]) -> AbstractEvent:
    """Rebuild an event from :meth:`AbstractEvent.to_dict`; a field with a default may be absent.

    Raises:
        ValueError: if the event or a field is unknown, a field is missing, or a value is illegal;
            for ``RepeatAndSelect`` of lightning-dp 0.1 and 0.2, which has no reader any more.

    Example:
        >>> event_from_dict({"event": "Gaussian", "noise_multiplier": 3.0})
        Gaussian(noise_multiplier=3.0)
    """
    if not isinstance(d, Mapping):
        raise ValueError(f"an event must be a dictionary, got {d!r}.")
    values = dict(d)
    name = values.pop("event", None)
    if name == "RepeatAndSelect":
        raise RefusedSetting(
            "RepeatAndSelect, a search of which only the best run is released, is an event of "
            "lightning-dp 0.1 and 0.2 only. Compute ε of this file at some δ with the version that "
            "wrote it, and count ApproximateDP(ε, δ, ...) in the file's place.",
            topic="other-version",
        )
    if not isinstance(name, str) or name not in _KNOWN:
        raise RefusedSetting(
            f"unknown event {name!r} in {dict(d)!r}; known: {sorted(_KNOWN)}.",
            topic="other-version",
        )
    known = {each.name: each.default is MISSING for each in fields(_KNOWN[name])}
    if unknown := [key for key in values if key not in known]:
        raise RefusedSetting(
            f"unknown field {unknown[0]!r} of {name} in {dict(d)!r}; known: {sorted(known)}. It may "
            "have been written by a later version of lightning-dp, and may change what was spent.",
            topic="other-version",
        )
    if missing := [key for key, is_needed in known.items() if is_needed and key not in values]:
        raise ValueError(f"{name} lacks the field {missing[0]!r}, got {dict(d)!r}.")
    return _KNOWN[name](**values)


# -- in the words of dp-accounting, Google's library ----------------------------------------------


def to_dp_event(history: History) -> DpEvent:
    """Return a history as one event of dp-accounting (``pip install dp-accounting``).

    It costs the same under its relation ``ADD_OR_REMOVE_ONE``, which is ``"add_remove"`` here.

    Args:
        history: events and their counts.

    Returns:
        a ``ComposedDpEvent``: of Gaussian releases, on a Poisson sample where they are, and of zCDP.

    Raises:
        TypeError: for an event that is neither.
        ValueError: for no history; for zCDP under another relation, which says nothing about this one.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> event = to_dp_event([(PoissonGaussian(1.0, 0.01), 1000)])
        >>> event.events[0].count, event.events[0].event.sampling_probability
        (1000, 0.01)
    """
    from dp_accounting import dp_event as theirs

    def one(event: AbstractEvent) -> DpEvent:
        if isinstance(event, ZCDP):
            return theirs.ZCDpEvent(event.costs("add_remove")[2])
        if not event.is_pair or event.withdrawn is not None or "add_remove" in event.no_bound:
            raise TypeError(
                f"history={type(event).__name__}: dp-accounting has no event that costs the same. "
                "Take ε from lightning_dp.accounting.epsilon."
            )
        noise_multiplier, sample_rate = event.pair
        release = theirs.GaussianDpEvent(noise_multiplier)
        return release if sample_rate == 1 else theirs.PoissonSampledDpEvent(sample_rate, release)

    entries = check_history(history)
    composed = [theirs.SelfComposedDpEvent(one(event), count) for event, count in entries]
    return theirs.ComposedDpEvent(composed)
