"""The privacy report: what ran, what it cost, and what the numbers do not speak about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lightning_dp.accounting import (
    AbstractAccountant,
    AbstractEvent,
    PLDAccountant,
    StreamingRDPAccountant,
)
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.journal import Runs, history_of
from lightning_dp.accounting.ledger import runs_from_dict, runs_to_dict
from lightning_dp.report.render import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PrivacyReport", "accountant_named", "number", "plain"]


_FORMAT = "lightning-dp-report-1"
_NUMBERS = ("epsilon", "delta")
_OPTIONAL_NUMBERS = (
    "epsilon_of_plan",
    "target_epsilon",
    "noise_multiplier",
    "sample_rate",
    "expected_batch_size",
)


@dataclass(frozen=True)
class PrivacyReport:
    """A privacy statement about what ran.

    ``epsilon`` at ``delta`` is the guarantee of releasing the steps that were made, had their
    number been fixed in advance (as it is when the budget or the Trainer's own end stops the run).
    If a result stopped the run (EarlyStopping, a checkpoint chosen by its score), claim
    ``epsilon_of_plan`` instead: the guarantee of the whole declared plan.

    Args:
        epsilon, delta: spent, over all fits of this ledger.
        epsilon_of_plan: ε had the plan run to its end; None for a plan without an end.
        relation: what neighbouring data sets are.
        steps: noised steps charged.
        target_epsilon: the budget; None without one.
        claims_budget: whether ``epsilon`` is the whole budget from the first step on, since noise
            is chosen at run time; else it is the accountant's of ``events``.
        private: False without noise, or if ``seeded``.
        seeded: whether any part of the run had a test ``seed``: repeatable, and so not private.
        isolation: whether it was checked that no record changes another's gradient: probed, not
            probed (why), or opted out.
        guard: how the budget is guarded.
        accountant: which accountant computed the numbers.
        accountant_settings: its settings.
        mechanism: estimator, schedule, post-processing and sampling.
        clip_norms: the estimator's, by their names.
        noise_multiplier: z of the latest step.
        sample_rate, expected_batch_size, num_records: q, B = qN and N; None before a fit.
        stop_reason: why training stopped early; None if it did not.
        not_covered: what the numbers do not speak about.
        versions: of the packages that matter.
        ledger_id: of the ledger whose charges these are.
        journal: the path of its journal; None before a fit.
        events: what was charged: for each run (one fit in one process), events and their counts in
            the order of time.
    """

    epsilon: float
    delta: float
    epsilon_of_plan: float | None
    relation: Relation
    steps: int
    target_epsilon: float | None
    claims_budget: bool
    private: bool
    seeded: bool
    isolation: str
    guard: str
    accountant: str
    accountant_settings: dict[str, float | None]
    mechanism: dict[str, str]
    clip_norms: dict[str, float]
    noise_multiplier: float | None
    sample_rate: float | None
    expected_batch_size: float | None
    num_records: int | None
    stop_reason: str | None
    not_covered: tuple[str, ...]
    versions: dict[str, str]
    ledger_id: str
    journal: str | None
    events: Runs

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """All events with their counts, over all runs."""
        return history_of(self.events)

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON and for checkpoints; an infinite number is "inf"."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        content: dict[str, Any] = plain(
            {"format": _FORMAT, **parts, "events": runs_to_dict(self.events)}
        )
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PrivacyReport:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: naming the field, if it is missing, unknown or illegal.
        """
        values = dict(content)
        if (found := values.pop("format", None)) != _FORMAT:
            raise ValueError(f"format={found!r}: not a privacy report of this version ({_FORMAT}).")
        names = {field.name for field in fields(cls)}
        if wrong := sorted(names ^ set(values)):
            raise ValueError(f"A privacy report has other fields; missing or unknown: {wrong}.")
        for name in (*_NUMBERS, *(n for n in _OPTIONAL_NUMBERS if values[n] is not None)):
            values[name] = number(values[name], name)
        for name, kind in (("steps", int), ("events", dict), ("private", bool), ("seeded", bool)):
            if type(values[name]) is not kind:
                raise ValueError(f"{name}={values[name]!r} must be of type {kind.__name__}.")
        check_relation(values["relation"])
        for name in ("clip_norms", "accountant_settings"):
            values[name] = {k: v and number(v, k) for k, v in values[name].items()}
        values["events"] = runs_from_dict(values["events"])
        values["not_covered"] = tuple(values["not_covered"])
        return cls(**values)

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
                of their own above, in a new figure (in which σ_t has a panel, too).

        Returns:
            the axes of ε. That of σ_t is the last of its figure's axes.

        Raises:
            ImportError: without matplotlib.
            ValueError: if nothing was charged, or ``metrics`` are given beside ``ax``.

        Example, after a fit with a callback ``privacy``::

            ax = privacy.report().plot(metrics={"accuracy": [(10, 0.5), (20, 0.8)]})
            ax.figure.savefig("privacy.png")
        """
        from lightning_dp.plotting import plot_report

        return plot_report(self, ax, metrics=metrics)

    def __str__(self) -> str:
        return text(self)


def plain(value: Any) -> Any:
    """Dictionaries, lists, texts and numbers only.

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


def number(value: object, name: str) -> float:
    """The inverse for one number.

    Raises:
        ValueError: naming ``name``, if it is no number or "nan".

    Example:
        >>> number("inf", "epsilon"), number(2, "delta")
        (inf, 2.0)
    """
    if value in ("inf", "-inf"):
        return float(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name}={value!r} must be a number, or 'inf'.")
    return float(value)


_KNOWN: tuple[type[AbstractAccountant], ...] = (
    PLDAccountant,
    StreamingRDPAccountant,
)


def accountant_named(name: str, settings: Mapping[str, Any]) -> AbstractAccountant | None:
    """The accountant of this package with that name and these settings; None for any other.

    Example:
        >>> accountant_named("PLD", {"rtol": 0.001})
        PLDAccountant(rtol=0.001, spacing=0.04)
    """
    for kind in _KNOWN:
        if kind().name == name:
            try:
                return kind(**settings)
            except (TypeError, ValueError):
                return None
    return None
