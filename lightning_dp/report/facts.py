"""The facts of a privacy report: as fields, as data, in one line, and as a picture."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_type_hints

from lightning_dp import _validate
from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import Check, flag, optional, shown, whole_from_0
from lightning_dp.accounting import PLDAccountant, StreamingRDPAccountant
from lightning_dp.accounting.base import AbstractAccountant, Relation, check_relation
from lightning_dp.accounting.charges import Charges
from lightning_dp.accounting.declared_in_advance import EnvelopeAccountant, OneOrderAccountant
from lightning_dp.accounting.events import AbstractEvent, sampled_gaussian
from lightning_dp.accounting.rounding import epsilon_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from typing_extensions import Self

__all__ = ["READERS", "AbstractReport", "Reader", "plain"]

Reader: TypeAlias = Literal["people", "engineers"]
"""The readers of a part of a page, page one or the annex."""

READERS: tuple[Reader, ...] = ("people", "engineers")

_FORMAT = "lightning-dp-report-1"
_ACCOUNTANTS: tuple[type[AbstractAccountant], ...] = (
    PLDAccountant,
    StreamingRDPAccountant,
    OneOrderAccountant,
    EnvelopeAccountant,
)


_COMPARED = ("compared", "by construction", "probed")  # which is the word of earlier versions
_TOLERANCE = 0.05  # of comparisons, in C: see lightning_dp.isolation.comparison


@dataclass(frozen=True, kw_only=True)
class AbstractReport(ABC):
    """The facts of a report, and all that follows from them but its layouts.

    Its fields are those of :class:`PrivacyReport`, which says what they mean.
    """

    epsilon: float
    delta: float
    epsilon_of_plan: float | None = None
    relation: Relation
    steps: int
    target_epsilon: float | None = None
    claims_budget: bool = False
    private: bool
    seeded: bool
    isolation: str = "unknown"
    spot_checks: str = "unknown"
    gradient_edits: str | None = None
    public_state: tuple[str, ...] = ()
    guard: str = "unknown"
    accountant: str = "unknown"
    accountant_settings: dict[str, float | None] = field(default_factory=dict)
    mechanism: dict[str, str] = field(default_factory=dict)
    clip_norms: dict[str, float] = field(default_factory=dict)
    noise_multiplier: float | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    num_records: int | None = None
    learning: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    started: str | None = None
    ended: str | None = None
    stop_reason: str | None = None
    not_covered: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    ledger_id: str
    journal: str | None = None
    events: Charges

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """Return all events with their counts, over all runs."""
        return self.events.history()

    @property
    def runs(self) -> int:
        """The number of runs of the program that were charged; what others released is none."""
        return len(self.events) - len(self.events.external)

    def known_accountant(self) -> AbstractAccountant | None:
        """Return the accountant of this package that the report names; None if it names another."""
        for kind in _ACCOUNTANTS:
            if kind().name == self.accountant:
                try:
                    return kind(**self.accountant_settings)
                except (TypeError, ValueError):
                    return None
        return None

    @property
    def ran_whole(self) -> bool:
        """True if the engine ran the whole batch at once, so that records could mix in the model."""
        return self.mechanism.get("gradient engine", "").startswith(("layers", "ghost", "hooks"))

    @property
    def steps_compared(self) -> bool:
        """True if at least one step's batch was compared with others."""
        return re.match("(compared )?at [1-9]", self.spot_checks) is not None

    def epsilon_at_tolerance(self) -> float:
        """Return ε had each record moved the others' clipped sum by all of the tolerance of comparisons.

        Then it moves the sum by 1.05 C, on which noise z·C has the noise multiplier z / 1.05.
        """
        history = [
            (_with_less_noise(event) if event.is_gaussian else event, count)
            for event, count in self.history()
        ]
        accountant = self.known_accountant() or PLDAccountant()
        return accountant.epsilon(history, self.delta, self.relation)

    # -- as data ---------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON and for checkpoints; an infinite number is "inf"."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        content: dict[str, Any] = plain(
            {"format": _FORMAT, **parts, "events": self.events.to_dict()}
        )
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read a report field by field: one that is absent has its default.

        Raises:
            ValueError: naming the field, if it is unknown or illegal, or if it has no default.
        """
        values = dict(content)
        if (found := values.pop("format", None)) != _FORMAT:
            raise RefusedSetting(
                f"format={found!r}: not a privacy report of this version ({_FORMAT}).",
                topic="other-version",
            )
        known = {each.name: each for each in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise RefusedSetting(
                f"The privacy report has unknown fields: {unknown}. A later version may know them.",
                topic="other-version",
            )
        needed = [
            name
            for name, each in known.items()
            if each.default is MISSING and each.default_factory is MISSING
        ]
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"The privacy report lacks fields: {missing}.")
        types = get_type_hints(cls)
        return cls(**{name: _CHECKS[types[name]](name, value) for name, value in values.items()})

    # -- for people ------------------------------------------------------------------------

    @property
    def why_not_private(self) -> str:
        """The reason for which the numbers do not hold, in words; empty if they do."""
        if self.private:
            return ""
        if (reason := self.events.voided) is not None:
            return f"VOIDED, NOT PRIVATE ({reason})"
        return f"NOT PRIVATE ({'a seed was set' if self.seeded else 'no noise'})"

    @abstractmethod
    def markdown(self, reader: Reader | None = None) -> str:
        """Return a document for a reader; by default for all of them."""

    def summary(self, where: str | None = None) -> str:
        """Return one line for the end of a fit.

        Args:
            where: the report's file, or what became of it.
        """
        target = self.target_epsilon
        of = "" if target is None else f" of {epsilon_text(target)}"
        parts = [
            f"ε = {epsilon_text(self.epsilon)}{of} at δ = {self.delta:g} ({self.relation}) "
            f"after {self.steps} noised step{'' if self.steps == 1 else 's'}"
        ]
        if self.stop_reason is not None:
            parts.append(self.stop_reason)
        if not (self.isolation.startswith(_COMPARED) or self.steps_compared):
            parts.append("isolation of records was not checked")
        if where is not None:
            parts.append(f"report: {where}")
        wrong = f"{self.why_not_private}: " if self.why_not_private else ""
        return f"privacy: {wrong}{'; '.join(parts)}"

    # -- as a picture ----------------------------------------------------------------------

    def plot(
        self,
        ax: Axes | None = None,
        *,
        metrics: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    ) -> Axes:
        """Draw ε over the steps against the budget, and the noise multiplier of each step.

        ε after t steps is recomputed from the charged events in their order, at some 24 steps.

        Args:
            ax: where to draw; a new figure by default.
            metrics: by name, pairs (step, value), e.g. of the held-out accuracy. They get a panel
                above, in a new figure (in which σ_t has its panel as well).

        Returns:
            the axes of ε. That of σ_t is the last of its figure's axes.

        Raises:
            ImportError: without matplotlib.
            ValueError: if nothing was charged, or ``metrics`` are given with ``ax``.

        Example, after a fit with a callback ``privacy``::

            ax = privacy.report().plot(metrics={"accuracy": [(10, 0.5), (20, 0.8)]})
            ax.figure.savefig("privacy.png")
        """
        from lightning_dp.plotting import plot_charges

        return plot_charges(
            self.events,
            delta=self.delta,
            relation=self.relation,
            accountant=self.known_accountant() or PLDAccountant(),
            budget=self.target_epsilon,
            claim=self.epsilon if self.claims_budget else None,
            title=self.why_not_private,
            ax=ax,
            metrics=metrics,
        )


def _with_less_noise(event: AbstractEvent) -> AbstractEvent:
    noise_multiplier, sample_rate = event.pair
    return sampled_gaussian(noise_multiplier / (1 + _TOLERANCE), sample_rate)


def plain(value: Any) -> Any:
    """Return dictionaries, lists, texts and numbers only, as JSON and checkpoints know them.

    Infinity is the text "inf".

    Example:
        >>> plain({"epsilon": float("inf"), "path": ("a", 1.5)})
        {'epsilon': 'inf', 'path': ['a', 1.5]}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):  # also np.float64, which spoils a checkpoint
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


# -- reading: one check for each type of a field ------------------------------------------------


def _number(name: str, value: object, *, of: str | None = None) -> float:
    result = math.inf if value == "inf" else _validate.number(name, value, of=of)
    if math.isnan(result):
        raise ValueError(f"{shown(name, value, of)} must be a number, or 'inf'.")
    return result


def _text(name: str, value: object, *, of: str | None = None) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(name, value, of)} must be a text.")
    return value


def _texts(name: str, value: object, *, of: str | None = None) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{shown(name, value, of)} must be a list of texts.")
    return tuple(_text(name, each, of=of) for each in value)


def _dictionary(name: str, value: object, *, of: str | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{shown(name, value, of)} must be a dictionary.")
    return value


def _dictionary_of(check: Check) -> Check:
    def checked(name: str, value: object, *, of: str | None = None) -> dict[str, Any]:
        return {
            _text(name, key): check(f"{name}[{key!r}]", each, of=of)
            for key, each in _dictionary(name, value, of=of).items()
        }

    return checked


def _relation(name: str, value: object, *, of: str | None = None) -> str:
    check_relation(text := _text(name, value, of=of))
    return text


def _events(name: str, value: object, *, of: str | None = None) -> Charges:
    return Charges.from_dict(_dictionary(name, value, of=of))


_CHECKS: dict[Any, Check] = {
    bool: flag,
    int: whole_from_0,
    int | None: optional(whole_from_0),
    float: _number,
    float | None: optional(_number),
    str: _text,
    str | None: optional(_text),
    tuple[str, ...]: _texts,
    dict[str, str]: _dictionary_of(_text),
    dict[str, float]: _dictionary_of(_number),
    dict[str, float | None]: _dictionary_of(optional(_number)),
    Relation: _relation,
    Charges: _events,
}
