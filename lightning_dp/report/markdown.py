"""The report as a Markdown document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.text import charged, not_private

if TYPE_CHECKING:
    from lightning_dp.report.content import PrivacyReport

__all__ = ["markdown"]


def markdown(report: PrivacyReport) -> str:
    """A document for people; what is in it is in :meth:`PrivacyReport.to_dict`, too."""
    sections = [
        ("Guarantee", _guarantee(report)),
        ("Charged", _charged(report)),
        ("Mechanism", _mechanism(report)),
        ("Not covered", list(report.not_covered)),
        ("Versions", [f"{name} {version}" for name, version in report.versions.items()]),
    ]
    lines = ["# Privacy report", ""]
    if wrong := not_private(report):
        lines += [f"**{wrong}the numbers below do not hold.**", ""]
    lines += [
        f"**(ε, δ) = ({epsilon_text(report.epsilon)}, {report.delta:g})** under "
        f"`{report.relation}`, after {report.steps} noised steps.",
        "",
    ]
    for title, items in sections:
        lines += [f"## {title}", "", *(f"- {item}" for item in items), ""]
    return "\n".join(lines[:-1]) + "\n"


def _guarantee(report: PrivacyReport) -> list[str]:
    items = []
    if report.target_epsilon is not None:
        items.append(f"budget: ε = {report.target_epsilon:g}")
    if report.claims_budget:
        items.append("noise is chosen at run time: ε is that of the whole budget")
    if report.epsilon_of_plan is not None:
        items.append(
            f"if a result chose when to stop: ε = {epsilon_text(report.epsilon_of_plan)} (the whole plan)"
        )
    if report.stop_reason is not None:
        items.append(f"stopped: {report.stop_reason}")
    return [
        *items,
        f"accountant: {report.accountant}",
        f"budget guard: {report.guard}",
        f"isolation of records: {report.isolation}",
        f"test seed: {'yes, so nothing is private' if report.seeded else 'none'}",
    ]


def _charged(report: PrivacyReport) -> list[str]:
    return [
        *(f"{line}" for line in charged(report.history())),
        f"in {len(report.events)} run{'' if len(report.events) == 1 else 's'} of ledger "
        f"`{report.ledger_id}`",
        f"journal: `{report.journal}`",
    ]


def _mechanism(report: PrivacyReport) -> list[str]:
    items = [f"{name}: `{value}`" for name, value in report.mechanism.items()]
    items += [f"clip norm `{name}`: {value:g}" for name, value in report.clip_norms.items()]
    if report.sample_rate is not None:
        items += [
            f"sampling rate q = {report.sample_rate:.4g}, expected batch "
            f"{report.expected_batch_size:g} of {report.num_records} records",
            f"noise multiplier of the latest step: {report.noise_multiplier}",
        ]
    return items
