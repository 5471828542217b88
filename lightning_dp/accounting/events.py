"""Privacy events: one frozen, checked record for each kind of noisy release."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

from lightning_dp._refusals import Refusal, RefusedSetting
from lightning_dp._validate import listed, number
from lightning_dp.accounting.abstract_event import (
    AbstractEvent,
    History,
    Relation,
    check_entry,
    check_history,
)
from lightning_dp.accounting.external import ZCDP, ApproximateDP

__all__ = [
    "ZCDP",
    "AbstractEvent",
    "ApproximateDP",
    "Gaussian",
    "History",
    "PoissonGaussian",
    "PoissonRound",
    "Relation",
    "Voided",
    "VoidedRunError",
    "check_entry",
    "check_history",
    "event_from_dict",
    "sampled_gaussian",
]


@dataclass(frozen=True)
class Gaussian(AbstractEvent):
    """Gaussian noise on a sum over all records.

    Args:
        noise_multiplier: ``z >= 0``: noise standard deviation over the sensitivity ``C`` of the sum
            under add/remove. 0 is legal and gives ``epsilon = inf``.

    Raises:
        ValueError: if ``noise_multiplier`` is negative, infinite or NaN.

    Example:
        >>> Gaussian(noise_multiplier=2.0).pair
        (2.0, 1.0)
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise_multiplier(self.noise_multiplier))

    @property
    def pair(self) -> tuple[float, float]:
        """``(noise_multiplier, 1.0)``."""
        return self.noise_multiplier, 1.0


@dataclass(frozen=True)
class PoissonGaussian(AbstractEvent):
    """Gaussian noise on a sum over one Poisson sample of the records.

    Assumes that each record is taken independently with probability ``sample_rate``, freshly for
    every event, and that nothing but the noisy sum is released (in particular the batch size is not).

    Args:
        noise_multiplier: ``z >= 0``: noise standard deviation over the sensitivity ``C`` of the sum.
        sample_rate: ``q`` in (0, 1]: probability that a record takes part.

    Raises:
        ValueError: if an argument is out of range or NaN.

    Example:
        >>> PoissonGaussian(noise_multiplier=1.0, sample_rate=0.01).to_dict()
        {'event': 'PoissonGaussian', 'noise_multiplier': 1.0, 'sample_rate': 0.01}
    """

    noise_multiplier: float
    sample_rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise_multiplier(self.noise_multiplier))
        object.__setattr__(self, "sample_rate", _sample_rate(self.sample_rate))

    @property
    def pair(self) -> tuple[float, float]:
        """``(noise_multiplier, sample_rate)``."""
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

    Raises:
        ValueError: if an argument is out of range, NaN, or ``noise_multipliers`` is empty.

    Example:
        >>> PoissonRound(noise_multipliers=(2.0, 2.0, 2.0, 2.0), sample_rate=0.1).pair
        (1.0, 0.1)
    """

    noise_multipliers: tuple[float, ...]
    sample_rate: float

    def __post_init__(self) -> None:
        try:
            given = listed("noise_multipliers", self.noise_multipliers, "numbers")
        except TypeError:
            given = ()
        if not given:
            raise ValueError(
                f"noise_multipliers must be a non-empty sequence, got {self.noise_multipliers!r}; "
                "pass one noise multiplier for each query of the round."
            )
        checked = tuple(_noise_multiplier(z, "noise_multipliers") for z in given)
        object.__setattr__(self, "noise_multipliers", checked)
        object.__setattr__(self, "sample_rate", _sample_rate(self.sample_rate))

    @property
    def pair(self) -> tuple[float, float]:
        """``((sum_s z_s^-2)^(-1/2), sample_rate)``."""
        least = min(self.noise_multipliers)
        if least == 0.0:
            return 0.0, self.sample_rate
        # Relative to the least multiplier: 1 / z^2 alone would overflow for z < 1e-154.
        total = math.fsum((least / z) ** 2 for z in self.noise_multipliers)
        return least / math.sqrt(total), self.sample_rate


def sampled_gaussian(noise_multiplier: float, sample_rate: float) -> Gaussian | PoissonGaussian:
    """Return the event of one Gaussian release on a Poisson sample, which may be of all records.

    Example:
        >>> sampled_gaussian(2.0, 1), sampled_gaussian(2.0, 0.1).sample_rate
        (Gaussian(noise_multiplier=2.0), 0.1)
    """
    if number("sample_rate", sample_rate) == 1:
        return Gaussian(noise_multiplier)
    return PoissonGaussian(noise_multiplier, sample_rate)


def _noise_multiplier(value: object, name: str = "noise_multiplier") -> float:
    """Return a legal noise multiplier as a float, or raise."""
    z = number(name, value)
    if not 0.0 <= z < math.inf:
        raise ValueError(
            f"{name} must be finite and at least 0, got {z}; "
            "it is the noise standard deviation divided by the sensitivity (0 means no privacy)."
        )
    return z


def _sample_rate(value: object) -> float:
    """Return a legal sample rate as a float, or raise."""
    q = number("sample_rate", value)
    if not 0.0 < q <= 1.0:
        raise ValueError(
            f"sample_rate must be in (0, 1], got {q}; it is the probability that a record takes "
            "part in a step: the expected batch size divided by the number of records."
        )
    return q


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

    Raises:
        ValueError: if ``reason`` is no text.

    Example:
        >>> from lightning_dp.accounting import PLDAccountant
        >>> PLDAccountant().epsilon([(Voided("a chunk had no answer."), 1)], delta=1e-5)
        inf
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise ValueError(f"reason={self.reason!r} must be a text.")

    @property
    def pair(self) -> tuple[float, float]:
        """``(0.0, 1.0)``, for no noise, on all records."""
        return 0.0, 1.0

    @property
    def withdrawn(self) -> str | None:
        """:attr:`reason`."""
        return self.reason


_KNOWN: dict[str, type[AbstractEvent]] = {
    kind.__name__: kind
    for kind in (
        Gaussian,
        PoissonGaussian,
        PoissonRound,
        ApproximateDP,
        ZCDP,
        Voided,
    )
}


def event_from_dict(d: Mapping[str, object]) -> AbstractEvent:
    """Rebuild an event from :meth:`AbstractEvent.to_dict`, exactly.

    Args:
        d: the dictionary, e.g. as read back from JSON. A field with a default may be absent.

    Returns:
        An event equal to the one that wrote ``d``.

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
