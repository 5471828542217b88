"""Events read back from plain dictionaries."""

import math
from collections.abc import Callable, Mapping

from lightning_dp.accounting.events import (
    AbstractEvent,
    Gaussian,
    PoissonGaussian,
    PoissonRound,
    real,
)
from lightning_dp.accounting.repeat_and_select import RepeatAndSelect
from lightning_dp.accounting.voided import Voided

__all__ = ["event_from_dict"]


def event_from_dict(d: Mapping[str, object]) -> AbstractEvent:
    """Rebuild an event from :meth:`AbstractEvent.to_dict`, exactly.

    Args:
        d: the dictionary, e.g. as read back from JSON.

    Returns:
        An event equal to the one that wrote ``d``.

    Raises:
        ValueError: if the event is unknown, a key is missing or too many, or a value is illegal.

    Example:
        >>> event_from_dict({"event": "Gaussian", "noise_multiplier": 3.0})
        Gaussian(noise_multiplier=3.0)
    """
    if not isinstance(d, Mapping):
        raise ValueError(f"an event must be a dictionary, got {d!r}.")
    name = d.get("event")
    if not isinstance(name, str) or name not in _READERS:
        raise ValueError(f"unknown event {name!r} in {dict(d)!r}; known: {sorted(_READERS)}.")
    fields, read = _READERS[name]
    if set(d) != fields | {"event"}:
        raise ValueError(f"{name} needs exactly the keys {sorted(fields)}, got {dict(d)!r}.")
    return read(d)


def _read_gaussian(d: Mapping[str, object]) -> AbstractEvent:
    return Gaussian(real(d["noise_multiplier"], "noise_multiplier"))


def _read_poisson_gaussian(d: Mapping[str, object]) -> AbstractEvent:
    return PoissonGaussian(
        real(d["noise_multiplier"], "noise_multiplier"), real(d["sample_rate"], "sample_rate")
    )


def _read_poisson_round(d: Mapping[str, object]) -> AbstractEvent:
    values = d["noise_multipliers"]
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"noise_multipliers must be a list, got {values!r}.")
    multipliers = tuple(real(z, "noise_multipliers") for z in values)
    return PoissonRound(multipliers, real(d["sample_rate"], "sample_rate"))


def _read_repeat_and_select(d: Mapping[str, object]) -> AbstractEvent:
    runs = d["runs"]
    if not isinstance(runs, (list, tuple)) or any(
        not isinstance(entry, (list, tuple)) or len(entry) != 2 for entry in runs
    ):
        raise ValueError(f"runs must be a list of pairs [event, count], got {runs!r}.")
    shape = math.inf if d["shape"] == "inf" else real(d["shape"], "shape")
    history = [(event_from_dict(event), count) for event, count in runs]
    return RepeatAndSelect(history, real(d["mean"], "mean"), shape)


def _read_voided(d: Mapping[str, object]) -> AbstractEvent:
    return Voided(str(d["reason"]))


_Reader = Callable[[Mapping[str, object]], AbstractEvent]
_READERS: dict[str, tuple[set[str], _Reader]] = {
    "Gaussian": ({"noise_multiplier"}, _read_gaussian),
    "PoissonGaussian": ({"noise_multiplier", "sample_rate"}, _read_poisson_gaussian),
    "PoissonRound": ({"noise_multipliers", "sample_rate"}, _read_poisson_round),
    "RepeatAndSelect": ({"runs", "mean", "shape"}, _read_repeat_and_select),
    "Voided": ({"reason"}, _read_voided),
}
