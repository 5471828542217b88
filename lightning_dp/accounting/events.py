"""What was asked of the data: one frozen, checked record for each kind of noisy release."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_dp._validate import number


class AbstractEvent(ABC):
    """One noisy release, described by public numbers only.

    Every event but :class:`RepeatAndSelect` is, for accounting, one Gaussian release on one Poisson
    sample: each record takes part independently with probability ``sample_rate``, the sum over the
    participating records has sensitivity ``C`` to adding or removing one record, and noise
    ``N(0, (noise_multiplier * C)^2 I)`` is added to it. How a sequence of events is
    analysed is the business of an accountant.
    """

    @property
    @abstractmethod
    def pair(self) -> tuple[float, float]:
        """``(noise_multiplier, sample_rate)`` of the equivalent single subsampled Gaussian.

        Raises ValueError if there is none.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Return the event as strings, floats and lists; ``event_from_dict`` is the inverse."""


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

    def to_dict(self) -> dict[str, object]:
        """Return ``{"event": "Gaussian", "noise_multiplier": z}``."""
        return {"event": "Gaussian", "noise_multiplier": self.noise_multiplier}


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

    def to_dict(self) -> dict[str, object]:
        """Return the name and the two numbers."""
        return {
            "event": "PoissonGaussian",
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
        }


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
        if isinstance(self.noise_multipliers, (str, int, float)) or not self.noise_multipliers:
            raise ValueError(
                f"noise_multipliers must be a non-empty sequence, got {self.noise_multipliers!r}; "
                "pass one noise multiplier for each query of the round."
            )
        checked = tuple(_noise_multiplier(z, "noise_multipliers") for z in self.noise_multipliers)
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

    def to_dict(self) -> dict[str, object]:
        """Return the name, the list of multipliers and the sample rate."""
        return {
            "event": "PoissonRound",
            "noise_multipliers": list(self.noise_multipliers),
            "sample_rate": self.sample_rate,
        }


def real(value: object, name: str) -> float:
    """Return ``value`` as a Python float, or raise."""
    return number(name, value)


def _noise_multiplier(value: object, name: str = "noise_multiplier") -> float:
    """Return a legal noise multiplier as a float, or raise."""
    z = real(value, name)
    if not 0.0 <= z < math.inf:
        raise ValueError(
            f"{name} must be finite and at least 0, got {z}; "
            "it is the noise standard deviation divided by the sensitivity (0 means no privacy)."
        )
    return z


def _sample_rate(value: object) -> float:
    """Return a legal sample rate as a float, or raise."""
    q = real(value, "sample_rate")
    if not 0.0 < q <= 1.0:
        raise ValueError(
            f"sample_rate must be in (0, 1], got {q}; it is the probability that a record takes "
            "part in a step: the expected batch size divided by the number of records."
        )
    return q
