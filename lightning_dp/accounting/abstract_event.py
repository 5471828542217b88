"""The interface of privacy events, and histories of them."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from lightning_dp._validate import listed, whole

__all__ = ["AbstractEvent", "History", "Relation", "check_entry", "check_history"]

Relation: TypeAlias = Literal["add_remove", "replace_one"]
"""Neighbouring data sets: one record more or less, or one record exchanged."""


@dataclass(frozen=True)
class AbstractEvent(ABC):
    """One noisy release, described by public numbers only.

    Every event whose ``is_gaussian`` is true is, for accounting, one Gaussian release on one Poisson
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

    @property
    def is_gaussian(self) -> bool:
        """True if there is a :attr:`pair`."""
        return True

    @property
    def is_step(self) -> bool:
        """True for a noised step of this package; False for what others released."""
        return self.withdrawn is None

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
    """Return a legal history, or raise.

    Args:
        history: from anybody.
        name: of the argument that it was given as.

    Raises:
        TypeError: for what has no entries.
        ValueError: for an entry that is none.

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
    try:
        return event, whole("count", count, 0)
    except ValueError:
        raise ValueError(
            f"count must be an integer of at least 0, got {count!r} for {event!r}."
        ) from None
