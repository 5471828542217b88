"""The privacy report: what ran, what it cost, and what the numbers do not cover."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import flag, number, shown, whole_from_0
from lightning_dp.accounting import PLDAccountant, StreamingRDPAccountant
from lightning_dp.accounting.base import AbstractAccountant, Relation, check_relation
from lightning_dp.accounting.charges import Charges
from lightning_dp.accounting.declared_in_advance import EnvelopeAccountant, OneOrderAccountant
from lightning_dp.accounting.events import AbstractEvent, sampled_gaussian
from lightning_dp.accounting.rounding import epsilon_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from typing_extensions import Self

__all__ = ["READERS", "PrivacyReport", "Reader", "plain"]

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
_WEAK = 20.0  # an ε above it promises next to nothing: e^20 is 485 million


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """A privacy statement about what ran.

    ``epsilon`` at ``delta`` is the guarantee of releasing the steps that were made, had their
    number been fixed in advance (as it is when the budget or the Trainer's own end stops the run).
    If a result stopped the run (EarlyStopping, a checkpoint chosen by its score), claim
    :attr:`claimable_epsilon` instead: the guarantee of the whole declared plan.

    Args:
        epsilon, delta: spent, over all fits of this ledger.
        epsilon_of_plan: ε had the plan run to its end; None for a plan without an end.
        relation: what neighbouring data sets are.
        steps: noised steps charged.
        target_epsilon: the budget; None without one.
        claims_budget: True if ``epsilon`` is the whole budget from the first step on, since noise
            is chosen at run time; else it is the accountant's of ``events``.
        private: False without noise, or if ``seeded``.
        seeded: True if any part of the run had a test ``seed``: repeatable, and so not private.
        isolation: of the check before the first step that no record changes another's gradient:
            compared on synthetic samples, not compared (why), by construction, or opted out.
        gradient_edits: the user's own words for what was done to the private gradient before the
            optimizer used it; None where nothing but Lightning's clipping was allowed.
        public_state: buffers and frozen weights that, by the user's word, callbacks and validation
            write from weights and public numbers alone.
        spot_checks: how many steps passed a comparison of runs of the batch in which records are
            exchanged, and why others were not compared.
        guard: how the budget is guarded.
        accountant: which accountant computed the numbers.
        accountant_settings: its settings.
        mechanism: estimator, schedule, post-processing and sampling.
        clip_norms: the estimator's, by their names.
        noise_multiplier: z of the latest step.
        sample_rate, expected_batch_size, num_records: q, B = qN and N; None before a fit.
        learning: what public numbers and releases show of what was learnt, by name; advice among it.
        about: the user's words about the data, see :class:`lightning_dp.About`.
        started, ended: minutes of the first and the latest charge; None where they are not known.
        stop_reason: why training stopped early; None if it did not.
        not_covered: what the numbers do not cover.
        versions: of the packages that matter.
        ledger_id: of the ledger whose charges these are.
        journal: the path of its journal; None before a fit.
        events: what was charged: for each run (one fit in one process), events and their counts in
            the order of time.
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
        """The number of runs of the program that were charged, without declared other releases."""
        return len(self.events) - len(self.events.external)

    @property
    def claimable_epsilon(self) -> float:
        """ε that may be claimed whatever stopped the run: of the whole plan, if that is larger."""
        return max(self.epsilon, self.epsilon_of_plan or 0.0)

    @property
    def is_weak(self) -> bool:
        """True if the claim is so large that it promises next to nothing."""
        return self.private and self.claimable_epsilon > _WEAK

    @property
    def why_not_private(self) -> str:
        """The reason for which the numbers do not hold; empty if they do."""
        if self.private:
            return ""
        if (reason := self.events.voided) is not None:
            return f"VOIDED, NOT PRIVATE ({reason})"
        return f"NOT PRIVATE ({'a seed was set' if self.seeded else 'no noise'})"

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
        return re.match("((compared|passed) )?at [1-9]", self.spot_checks) is not None

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
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        content: dict[str, Any] = plain(
            {"format": _FORMAT, **values, "events": self.events.to_dict()}
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
        return cls(**{name: _read(types[name], name, value) for name, value in values.items()})

    # -- for people ------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return nine lines: the claim first, and where the rest is."""
        from lightning_dp.report.page import summarise

        return summarise(self)

    def summary(self, where: str | None = None) -> str:
        """Return one line for the end of a fit: ε of the steps made, then that of the plan.

        Args:
            where: the report's file, or what became of it.
        """
        budget = "" if self.target_epsilon is None else f" of {epsilon_text(self.target_epsilon)}"
        parts = [
            f"ε = {epsilon_text(self.epsilon)}{budget} at δ = {self.delta:g} ({self.relation}) "
            f"after {self.steps} noised step{'' if self.steps == 1 else 's'}"
        ]
        if self.claimable_epsilon > self.epsilon:
            parts.append(
                f"ε = {epsilon_text(self.claimable_epsilon)} for the whole plan, to be claimed if a "
                "result chose when to stop"
            )
        if self.is_weak:
            parts.append("so large an ε promises next to nothing")
        if self.stop_reason is not None:
            parts.append(self.stop_reason)
        if not (self.isolation.startswith(_COMPARED) or self.steps_compared):
            parts.append("isolation of records was not checked")
        if where is not None:
            parts.append(f"report: {where}")
        wrong = f"{self.why_not_private}: " if self.why_not_private else ""
        return f"privacy: {wrong}{'; '.join(parts)}"

    def markdown(self, reader: Reader | None = None) -> str:
        """Return a document: page one in plain words, and the annex for engineers.

        Args:
            reader: ``"people"`` for page one alone, ``"engineers"`` for the annex alone.

        Raises:
            ValueError: for another reader.
        """
        from lightning_dp.report.page import Page, render

        return render([Page(self)], "md", reader)

    def html(self, reader: Reader | None = None) -> str:
        """Return the document as one HTML file; the annex has the picture, if matplotlib is there.

        Args:
            reader: as in :meth:`markdown`.
        """
        from lightning_dp.report.page import Page, render

        return render([Page(self)], "html", reader)

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
    """Return dictionaries, lists, texts and numbers only, for JSON and checkpoints.

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


def _read(kind: Any, name: str, value: object) -> Any:
    """Return a value of a JSON file as its field's type, or raise a ValueError with its name."""
    items = get_args(kind)
    if type(None) in items:
        return None if value is None else _read(items[0], name, value)
    if kind in _CHECKS:
        return _CHECKS[kind](name, value)
    if get_origin(kind) is tuple:
        return tuple(_read(str, name, each) for each in _of_type(list, name, value))
    pairs = _of_type(dict, name, value).items()
    return {_read(str, name, key): _read(items[1], f"{name}[{key!r}]", each) for key, each in pairs}


def _of_type(kind: type, name: str, value: object) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{shown(name, value, None)} must be a {_WORDS[kind]}.")
    return value


def _number(name: str, value: object) -> float:
    result = math.inf if value == "inf" else number(name, value)
    if math.isnan(result):
        raise ValueError(f"{shown(name, value, None)} must be a number, or 'inf'.")
    return result


def _relation(name: str, value: object) -> str:
    text: str = _of_type(str, name, value)
    check_relation(text)
    return text


_WORDS = {str: "string", list: "list", dict: "dictionary"}
_CHECKS: dict[Any, Callable[[str, object], Any]] = {
    bool: flag,
    int: whole_from_0,
    float: _number,
    str: partial(_of_type, str),
    Relation: _relation,
    Charges: lambda name, value: Charges.from_dict(_of_type(dict, name, value)),
}
