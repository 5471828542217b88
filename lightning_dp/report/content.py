"""The privacy report and its page.

The words of the page are in ``templates/people.j2`` and ``templates/annex.j2``, its markup in ``md.j2``
and ``html.j2``. Every number on page one is an upper bound of what can go wrong, and is rounded up.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from decimal import Decimal
from functools import cache, cached_property, partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import flag, number, one_of, shown, whole_from_0
from lightning_dp.accounting import PLDAccountant, StreamingRDPAccountant
from lightning_dp.accounting.base import AbstractAccountant, Relation, check_relation, epsilon_text
from lightning_dp.accounting.events import (
    AbstractEvent,
    AbstractExternal,
    History,
    RandomAllocationEpoch,
    TruncatedGaussian,
    sampled_gaussian,
)
from lightning_dp.accounting.journal import Charges
from lightning_dp.accounting.pld import EnvelopeAccountant, TradeOff, trade_off_up_to
from lightning_dp.accounting.rdp import OneOrderAccountant

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from typing_extensions import Self


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
_TOLERANCE = 0.05  # of comparisons, in C: see lightning_dp.isolation.comparison
_WEAK = 20.0  # an ε above it promises next to nothing: e^20 is 485 million


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """The privacy claim of a run, with its settings and limits.

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
        sample_rate, expected_batch_size, num_records: q, B = qN and N, of units; None before a fit.
        unit: of privacy, in a word: "record" (a row), or "user" with all of their rows.
        learning: what public numbers and releases show of what was learnt, by name; advice among it.
        about: the user's words about the data, see :class:`lightning_dp.About`.
        started, ended: minutes of the first and the latest charge; None where they are not known.
        stop_reason: why training stopped early; None if it did not.
        not_covered: what the numbers do not cover.
        versions: of the packages that matter.
        ledger_id: of the ledger whose charges these are.
        journal: the path of its journal; None before a fit.
        weights: hashes of the released weights that it speaks of, of some parameters:
            ``lightning_dp.report.run_report.fingerprints(model.parameters())`` has them all.
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
    unit: str = "record"
    learning: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    started: str | None = None
    ended: str | None = None
    stop_reason: str | None = None
    not_covered: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    ledger_id: str
    journal: str | None = None
    weights: tuple[str, ...] = ()
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
        """The ε to claim whatever stopped the run, that of the whole plan if it is larger."""
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

    def find_accountant(self) -> AbstractAccountant | None:
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
        history = [(_with_less_noise(event), count) for event, count in self.history()]
        accountant = self.find_accountant() or PLDAccountant()
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
                f"The privacy report has unknown fields: {unknown}. Read it with the version of "
                "lightning-dp that wrote it.",
                topic="other-version",
            )
        absent = [each for name, each in known.items() if name not in values]
        if missing := [
            each.name for each in absent if each.default is each.default_factory is MISSING
        ]:
            raise ValueError(
                f"The privacy report lacks fields: {missing}. Give the file as it was written."
            )
        types = get_type_hints(cls)
        return cls(**{name: _read(types[name], name, value) for name, value in values.items()})

    # -- for people ------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return nine lines: the claim first, and where the rest is."""
        return _environment("txt").get_template("summary.j2").render(page=Page(self), report=self)

    def summary(self, where: str | None = None) -> str:
        """Return one line for the end of a fit, and where the report's file is, or why there is none."""
        values = {"report": self, "where": where}
        return _environment("txt").get_template("end.j2").render(values).replace("\n", "")

    def markdown(self, reader: Reader | None = None) -> str:
        """Return a document: page one in plain words ("people"), and the annex ("engineers"), or one."""
        return render([Page(self)], "md", reader)

    def html(self, reader: Reader | None = None) -> str:
        """Return it as one HTML file; the annex has the picture, if matplotlib is there."""
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
            accountant=self.find_accountant() or PLDAccountant(),
            budget=self.target_epsilon,
            claim=self.epsilon if self.claims_budget else None,
            title=self.why_not_private,
            ax=ax,
            metrics=metrics,
        )


def plain(value: Any) -> Any:
    """Return dictionaries, lists, texts and numbers only, for JSON; infinity is the text "inf"."""
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


_WORDS: dict[type, str] = {str: "string", list: "list", dict: "dictionary"}
_CHECKS: dict[Any, Callable[[str, object], Any]] = {
    bool: flag,
    int: whole_from_0,
    float: _number,
    str: partial(_of_type, str),
    Relation: _relation,
    Charges: lambda name, value: Charges.from_dict(_of_type(dict, name, value)),
}


# -- its page ----------------------------------------------------------------------------------

_MOST_EVENTS = 8
_MOST_DATA = 200_000  # characters of a report that are shown; a longer one is in its file
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Total:
    """ε of several ledgers together, if they are about the same records.

    Those ``apart`` have no guarantee: seeded, without noise, voided, or of users among those of records.
    """

    ledgers: int
    steps: int
    epsilon: float  # of the union of their events at delta; infinite if one ledger is apart
    delta: float  # the least that a report in the folder states, unless one is given
    relation: Relation  # replace-one, if a report in the folder is under it
    seeded: tuple[str, ...] = ()  # by a test seed: anyone who repeats the noise can subtract it
    apart: tuple[str, ...] = ()
    epsilon_of_others: float | None = None  # of all ledgers that are not apart

    def __str__(self) -> str:
        seeded = f"; NOT PRIVATE (a seed was set: {', '.join(self.seeded)})" if self.seeded else ""
        others = (
            f"; ε = {epsilon_text(self.epsilon_of_others)} without {', '.join(self.apart)}, if nobody "
            "saw what those released"
            if self.epsilon_of_others is not None
            else ""
        )
        return (
            f"== total of {self.ledgers} ledgers, if they are about the same records: "
            f"ε = {epsilon_text(self.epsilon)} at δ = {epsilon_text(self.delta, 6)} ({self.relation}), "
            f"{self.steps} steps{seeded}{others}"
        )


@dataclass(frozen=True)
class Page:
    """A report, and the findings when its page is made."""

    report: PrivacyReport
    about: Mapping[str, str] = field(default_factory=dict)  # words that replace those of the report
    problems: Sequence[str] = ()  # contradictions
    day: str | None = None  # of the checks, if there were any
    has_journal: bool = False  # one was looked for
    epsilon: float | None = None  # of the journal, if it was read
    charges: Charges | None = None  # likewise
    together: Total | None = None  # with the ledgers in the same folder, if there are any
    is_over: bool = True  # else there is no page one, which takes a second

    @property
    def stated(self) -> dict[str, str]:
        """The user's words about the data, by name."""
        return {**self.report.about, **self.about}

    @cached_property
    def claim(self) -> dict[str, Any]:
        """The largest ε that may have to be claimed, why, and bounds on tests (:class:`TradeOff`)."""
        report, why = self.report, ""
        epsilon, history = report.epsilon, report.history()
        if self.charges is not None and self.epsilon is not None and self.epsilon > epsilon:
            # Another computer's rounding moves ε of the same charges.
            why = "journal" if self.charges.history() != history else ""
            epsilon, history = self.epsilon, self.charges.history()
        only_the_pair = report.claims_budget
        spent = epsilon
        if (of_plan := report.epsilon_of_plan) is not None and of_plan > epsilon:
            epsilon, only_the_pair, why = of_plan, True, "plan"
        pair = (epsilon, report.delta)
        if only_the_pair or not math.isfinite(epsilon):
            tests = TradeOff((pair,))
        else:
            judge = report.find_accountant() or PLDAccountant()
            tests = trade_off_up_to(pair, history, report.relation, judge)
        return {"epsilon": epsilon, "spent": spent, "why": why, "tests": tests}

    @property
    def journal(self) -> str | None:
        """The name of the journal, without its path on this machine."""
        return None if self.report.journal is None else PurePath(self.report.journal).name

    @property
    def data(self) -> str | None:
        """The report as JSON; None if it is too long to be shown."""
        content = {**self.report.to_dict(), "journal": self.journal}
        text = json.dumps(content, ensure_ascii=False, indent=1)
        return text if len(text) <= _MOST_DATA else None

    def picture(self) -> dict[str, str]:
        """Return the picture as a data URI, or the reason why there is none."""
        if not self.report.events:
            return {"missing": "nothing was charged."}
        from lightning_dp.plotting import svg

        try:
            content = base64.b64encode(svg(self.report.plot)).decode("ascii")
        except ImportError as error:
            return {"missing": str(error)}
        return {"uri": f"data:image/svg+xml;base64,{content}"}


def render(pages: Sequence[Page], form: Literal["md", "html"], reader: Reader | None = None) -> str:
    """Return a document with a page for each ledger; the HTML loads nothing and runs no script."""
    if reader is not None:
        one_of(READERS)("reader", reader)
    environment = _environment(form)
    text = environment.get_template("document.j2").render(pages=pages, reader=reader)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def filled(template: str, **values: object) -> str:
    """Return the text of one template."""
    return _environment("txt").get_template(template).render(values).strip() + "\n"


@cache
def _environment(form: str) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    def safe(value: object) -> Markup:
        """Escape what the form would take for markup, unless it is markup."""
        if isinstance(value, Markup):
            return value
        return escape(value) if form == "html" else Markup(_escaped(str(value)))

    def flow(value: object) -> Markup:
        """Return a text of several lines as one line."""
        return Markup(" ".join(str(safe(value)).split()))  # a Markup splits slowly

    def paragraphs(text: Markup) -> Markup:
        """Mark up what blank lines separate, except for lists and tables."""
        markup = "<p>{}</p>" if form == "html" else "{}"
        blocks = filter(None, map(str.strip, re.split(r"\n\s*\n", text)))
        is_made = ("<", "- ", "| ")
        marked = (b if b.startswith(is_made) else markup.format(flow(Markup(b))) for b in blocks)
        return Markup("\n\n".join(marked))

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=form != "txt",
        undefined=StrictUndefined,
        finalize=safe if form == "md" else None,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["markup"] = f"{form}.j2"
    environment.filters |= {
        "eps": epsilon_text,
        "percent": lambda probability: epsilon_text(min(100.0, 100 * probability), 3),
        "plural": lambda number, word: f"{number:,} {word}{'' if number == 1 else 's'}",
        "flow": flow,
        "paragraphs": paragraphs,
        "lines": lambda text: Markup("\n".join(filter(None, map(str.strip, text.splitlines())))),
        "raw": Markup,
        "exact": lambda number: f"{Decimal(repr(number)):f}",
        "odds": lambda probability: f"{int(1 / Decimal(repr(probability))):,}",
        "charged": charged,
    }
    environment.globals["exp"] = lambda x: math.exp(x) if x < 700 else math.inf
    return environment


def _escaped(text: str) -> str:
    """Return a text in which a user's words are neither HTML nor Markdown."""
    marked = re.sub(r"[\\`*\[]|__", lambda found: "".join(f"\\{each}" for each in found[0]), text)
    return marked.replace("&", "&amp;").replace("<", "&lt;")


def _with_less_noise(event: AbstractEvent) -> AbstractEvent:
    """Return an event whose sensitivity is more by the tolerance of comparisons."""
    if isinstance(event, TruncatedGaussian | RandomAllocationEpoch):
        return replace(event, noise_multiplier=event.noise_multiplier / (1 + _TOLERANCE))
    if event.is_gaussian:
        return sampled_gaussian(event.pair[0] / (1 + _TOLERANCE), event.pair[1])
    return event


def charged(history: History) -> list[str]:
    """Return the charges, a line for each kind of event; a range where there are many kinds."""
    external = [event for event, _ in history if isinstance(event, AbstractExternal)]
    if external:
        declared = [f"{each.declared}, declared by the user and not checked" for each in external]
        return [*declared, *charged([each for each in history if each[0] not in external])]
    if len(history) <= _MOST_EVENTS:
        return [f"{count} × {event}" for event, count in history]
    multipliers, rates = zip(*(event.pair for event, _ in history), strict=True)
    steps = sum(count for _, count in history)
    low, high = f"{min(rates):.4g}", f"{max(rates):.4g}"
    return [
        f"{steps} events of {len(history)} kinds: noise multipliers {min(multipliers):.4g} to "
        f"{max(multipliers):.4g}, sampling rate {low if low == high else f'{low} to {high}'}"
    ]
