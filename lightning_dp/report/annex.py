"""The engineer's annex of a report: all that is needed to compute ε again, and to judge the run.

A new fact about a run is a field of :class:`PrivacyReport` with a default, filled in ``of_run.py``,
and one line in a section here. If people must know it as well, it has its words in ``people.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.render import Fact, charged

if TYPE_CHECKING:
    from lightning_dp.report.facts import AbstractReport

__all__ = ["code", "sections", "statements"]


def statements(report: AbstractReport) -> list[str]:
    """Return the numbers in a line, after what makes them void."""
    wrong, target = report.why_not_private, report.target_epsilon
    of_target = "" if target is None else f", target ε = {epsilon_text(target)}"
    return [
        *([f"{wrong}: the numbers below do not hold."] if wrong else []),
        f"ε = {epsilon_text(report.epsilon)} at δ = {report.delta:g} ({report.relation}), "
        f"{report.steps} steps{of_target}",
    ]


def sections(report: AbstractReport, *, is_draft: bool = False) -> Mapping[str, Sequence[Fact]]:
    """Return the facts by title, in the order of the page; in a draft none that takes long."""
    found = {
        "Guarantee": [*_guarantee(report), *([] if is_draft else _tolerance(report))],
        "Charged": _charged(report),
        "Mechanism": _mechanism(report),
        "Stated by the user, not checked": _stated(report),
        "Learning": [Fact(each, name) for name, each in report.learning.items()],
        "Not covered": [Fact(each) for each in report.not_covered],
        "Versions": [Fact(f"{name} {each}") for name, each in report.versions.items()],
    }
    return {title: facts for title, facts in found.items() if facts}


def _guarantee(report: AbstractReport) -> list[Fact]:
    facts = []
    if report.claims_budget:
        facts.append(Fact("ε is that of the whole budget: noise is chosen at run time"))
    if report.epsilon_of_plan is not None and report.epsilon_of_plan != report.epsilon:
        whole_plan = f"ε = {epsilon_text(report.epsilon_of_plan)} (whole plan)"
        facts.append(Fact(whole_plan, "if a result chose when to stop"))
    if report.stop_reason is not None:
        facts.append(Fact(report.stop_reason, "stopped"))
    return [
        *facts,
        Fact(report.accountant, "accountant"),
        *(
            Fact(str(value), f"accountant's {name}")
            for name, value in report.accountant_settings.items()
        ),
        Fact(report.guard, "budget guard"),
        Fact(report.isolation, "isolation"),
        Fact(report.spot_checks, "comparisons"),
        *_declared(report),
        Fact("yes, so nothing is private" if report.seeded else "none", "test seed"),
    ]


def _tolerance(report: AbstractReport) -> list[Fact]:
    """Return ε under the largest coupling that comparisons let pass."""
    if not report.private or not report.ran_whole or report.claims_budget or not report.steps:
        return []
    found = epsilon_text(report.epsilon_at_tolerance())
    return [Fact(f"ε = {found}: {_AT_TOLERANCE}", "with noise multipliers z / 1.05")]


_AT_TOLERANCE = (
    "records ran together, and comparisons let pass a record that moves the others' clipped sum by "
    "0.05 C; if one did, its part would be 1.05 C long"
)


def _declared(report: AbstractReport) -> list[Fact]:
    """Return what rests on the user's word."""
    said = {"gradient edits": report.gradient_edits, "public state": ", ".join(report.public_state)}
    return [Fact(f"{text} ({_UNCHECKED})", name) for name, text in said.items() if text]


_UNCHECKED = "declared by the user, not checked"


def _charged(report: AbstractReport) -> list[Fact]:
    return [
        *(Fact(line, "charged") for line in charged(report.history())),
        Fact(str(report.runs), "runs"),
        Fact(report.ledger_id, "ledger", is_code=True),
        Fact(
            "none yet" if report.journal is None else PurePath(report.journal).name,
            "journal",
            is_code=True,
        ),
        *_when(report),
    ]


def _when(report: AbstractReport) -> list[Fact]:
    if report.started is None or report.ended is None:
        return []
    return [Fact(f"{report.started} to {report.ended}", "first to latest charge")]


def _stated(report: AbstractReport) -> list[Fact]:
    return [Fact(text, name.replace("_", " ")) for name, text in report.about.items()]


def _mechanism(report: AbstractReport) -> list[Fact]:
    facts = [Fact(value, name, is_code=True) for name, value in report.mechanism.items()]
    facts += [Fact(f"{value:g}", f"clip norm {name}") for name, value in report.clip_norms.items()]
    if report.sample_rate is None:
        return facts
    return [
        *facts,
        Fact(f"{report.sample_rate:.4g}", "sampling rate q"),
        Fact(f"{report.expected_batch_size:g} of {report.num_records} records", "expected batch"),
        Fact(str(report.noise_multiplier), "noise multiplier of the latest step"),
    ]


def code(report: AbstractReport) -> str:
    """Return a program that computes ε from the events in the report's file."""
    return "\n".join(
        (
            "import json",
            "",
            "from lightning_dp.accounting import epsilon, trade_off",
            "from lightning_dp.report import PrivacyReport",
            "",
            f'with open("privacy_report-{report.ledger_id}.json", encoding="utf-8") as file:',
            "    report = PrivacyReport.from_dict(json.load(file))",
            "events = report.history()",
            f'print(epsilon(events, {report.delta!r}, "{report.relation}"))',
            f'tests = trade_off(events, {report.delta!r}, "{report.relation}")',
            "print(tests.advantage, tests.true_positive_rate(0.01))",
        )
    )
