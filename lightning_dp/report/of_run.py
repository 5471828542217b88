"""The report of a run."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.clipping import Flat
from lightning_dp.noise import IndependentNoise
from lightning_dp.plan.advice import facts
from lightning_dp.report.content import PrivacyReport
from lightning_dp.run import PrivateRun

__all__ = ["report"]

_NOT_COVERED = (
    "figures written down about the training data (such as train_loss), and decisions that follow them",
    "tests on other private data (validation), and choices made by looking at their results",
    "other trainings on the same data, such as trials, and any other use of them",
    "records that change each other's part in a step (such as by a loss over all records of a batch) "
    "where the checks do not see it",
    "records into which others are mixed when the data are read (such as mixup in the data set)",
    "rounding in the computer (floating point) and the time it takes: the promise is about the ideal "
    "mathematics",
)
_REPLANNED = (
    "the moment of a crash: the noise of the steps after it was planned again, as if neither records nor "
    "releases had led to it (a lack of memory may follow them)"
)

_ROUND = (
    "{} on the batch of each step, charged together before the first as one Gaussian on one sample"
)

_SEEDED = "PCG64, seeded by the operating system; on other devices than the CPU, theirs"
_CIPHER = (
    "AES-256 in counter mode, keyed by the operating system; releases rounded to 2^-20 of the noise"
)
_UNIT = "a user, of whom a step reads at most {} rows; their mean gradient is clipped once"
_VIEWS = "{} of each row that a step reads; the mean of their gradients is clipped"


def report(run: PrivateRun) -> PrivacyReport:
    """Return the report of a run, during or after a fit."""
    config, batches, epsilon = run.config, run.batches, float(run.epsilon)
    of_plan, latest = run.epsilon_of_plan, run.noise_multiplier
    journal = run.ledger.journal_path
    return PrivacyReport(
        epsilon=epsilon,
        delta=float(config.target_delta),
        epsilon_of_plan=None if of_plan is None else float(of_plan),
        relation=config.relation,
        steps=run.steps,
        target_epsilon=None if config.target_epsilon is None else float(config.target_epsilon),
        claims_budget=run.is_adaptive,
        private=math.isfinite(epsilon) and not run.is_seeded,
        seeded=run.is_seeded,
        isolation=run.isolation,
        spot_checks=_spot_checks(run),
        gradient_edits=config.checks.gradient_edits,
        public_state=tuple(config.checks.public_state),
        guard=FixedGuard.description if run.mechanism is None else run.mechanism.guard.description,
        accountant=config.accountant.name,
        accountant_settings=_settings(config.accountant),
        mechanism=_mechanism(run),
        clip_norms=_clip_norms(run),
        noise_multiplier=None if latest is None else float(latest),
        sample_rate=None if batches is None else float(batches.sample_rate),
        expected_batch_size=None if batches is None else float(batches.expected_batch_size),
        num_records=None if batches is None else int(batches.num_records),
        unit=config.unit_word,
        learning=facts(run.setting, run.signal) if config.advice else {},
        about={} if config.about is None else config.about.to_dict(),
        started=run.started or _minute(run.ledger.began),
        ended=_minute(run.ledger.latest),
        stop_reason=run.stop_reason,
        not_covered=(*_NOT_COVERED, *run.not_covered, *[_REPLANNED] * run.ledger.is_replanned),
        versions=dict(_versions()),
        ledger_id=run.ledger.id,
        journal=None if journal is None else str(journal),
        events=run.ledger.runs,
    )


def _minute(moment: datetime | None) -> str | None:
    """Return a moment to the minute: times of single steps stay private."""
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M UTC")


def _spot_checks(run: PrivateRun) -> str:
    """Return how many steps passed a comparison, and the reasons why others were not compared."""
    if not run.config.checks.comparisons:
        return "opted out"
    if run.config.engine == "one_by_one":
        return "not needed: each record runs alone"
    passed = run.spot_checks - sum(run.not_compared.values())
    of = f"of {run.steps_begun} steps" if run.started is None else "steps since the run was resumed"
    reasons = "; ".join(f"{reason} ({count})" for reason, count in sorted(run.not_compared.items()))
    state = "; gradients by construction" if run.isolation.startswith("by construction") else ""
    return f"passed at {passed} {of}{state}{f'; not compared: {reasons}' if reasons else ''}"


def _mechanism(run: PrivateRun) -> dict[str, str]:
    config = run.config
    estimator = config.resolved_estimator()
    queries = estimator.traits.queries_per_step
    return {
        "estimator": repr(estimator),
        **({} if isinstance(config.clipping, Flat) else {"clipping": repr(config.clipping)}),
        **({"queries": _ROUND.format(queries)} if queries > 1 else {}),
        "noise schedule": repr(config.noise_schedule),
        "post-processing": repr(list(config.postprocessing)),
        "sampling": repr(config.sampling),
        **({} if config.unit is None else {"unit": _UNIT.format(config.unit.most_rows)}),
        **(
            {}
            if config.augmentations == 1
            else {"augmentations": _VIEWS.format(config.augmentations)}
        ),
        **({} if config.noise == IndependentNoise() else {"noise": repr(config.noise)}),
        "gradient engine": run.engine,
        "random numbers": _CIPHER if config.secure_noise else _SEEDED,
        **({} if run.optimizers is None else {"private optimizer": run.optimizers}),
    }


def _clip_norms(run: PrivateRun) -> dict[str, float]:
    """Return the fields of the estimator whose names end with "norm": all of this package's do.

    And where the clip norm moves, where it is now.
    """
    found = {
        name: float(value)
        for name, value in _settings(run.config.resolved_estimator()).items()
        if name.endswith("_norm") and value is not None
    }
    moved = None if run.mechanism is None else run.mechanism.clip_norm
    return found if moved is None else {**found, "latest": moved}


def _settings(part: object) -> dict[str, float | None]:
    """Return the numbers among the fields of a dataclass."""
    if not is_dataclass(part):
        return {}
    values: dict[str, Any] = {field.name: getattr(part, field.name) for field in fields(part)}
    return {
        name: value
        for name, value in values.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Look versions up once: at every checkpoint it would cost more than ε."""
    names = ("lightning-dp", "lightning", "torch", "opacus", "numpy", "scipy")
    return (("python", python_version()), *((name, _version(name)) for name in names))


def _version(name: str) -> str:
    """Return what is installed; packages may be on the path without having been installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"
