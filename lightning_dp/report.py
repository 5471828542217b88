"""What may be claimed about a private run, in numbers and in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.private_run import PrivateRun

__all__ = ["PrivacyReport", "report"]

_NOT_COVERED = (
    "metrics logged from the training data (train_loss) and their effect on decisions",
    "validation on private data, and choices made by looking at it",
    "tuning runs, other fits of other callbacks on the same data",
    "losses that couple the records of a batch in ways that the isolation probe does not see",
    "floating-point rounding and timing",
)


_ROUND = (
    "{} on the batch of each step, charged together before the first as one Gaussian on one sample"
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
        private: False without noise, or if ``seeded``.
        seeded: whether any part of the run had a test ``seed``: repeatable, and so not private.
        isolation: whether it was checked that no record changes another's gradient: probed, not
            probed (why), or opted out.
        guard: how the budget is guarded.
        accountant: which accountant computed the numbers.
        mechanism: estimator, schedule, post-processing and sampling.
        noise_multiplier: z of the latest step.
        sample_rate, expected_batch_size, num_records: q, B = qN and N; None before a fit.
        stop_reason: why training stopped early; None if it did not.
        not_covered: what the numbers do not speak about.
        versions: of the packages that matter.
    """

    epsilon: float
    delta: float
    epsilon_of_plan: float | None
    relation: str
    steps: int
    target_epsilon: float | None
    private: bool
    seeded: bool
    isolation: str
    guard: str
    accountant: str
    mechanism: dict[str, str]
    noise_multiplier: float | None
    sample_rate: float | None
    expected_batch_size: float | None
    num_records: int | None
    stop_reason: str | None
    not_covered: tuple[str, ...]
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"ε = {self.epsilon:.4g} at δ = {self.delta:g} ({self.relation}), {self.steps} steps"
        ]
        if self.target_epsilon is not None:
            lines[0] += f", target ε = {self.target_epsilon:g}"
        if not self.private:
            why = "a seed was set" if self.seeded else "no noise"
            lines.insert(0, f"NOT PRIVATE ({why}): the numbers below do not hold")
        if self.epsilon_of_plan is not None and self.epsilon_of_plan != self.epsilon:
            lines.append(
                f"if a result chose when to stop: ε = {self.epsilon_of_plan:.4g} (whole plan)"
            )
        if self.stop_reason is not None:
            lines.append(f"stopped: {self.stop_reason}")
        if self.sample_rate is not None:
            lines.append(
                f"q = {self.sample_rate:.4g}, expected batch {self.expected_batch_size:g} of "
                f"{self.num_records} records, noise multiplier {self.noise_multiplier}"
            )
        lines += [f"{name}: {value}" for name, value in self.mechanism.items()]
        lines.append(f"isolation: {self.isolation}")
        lines.append(f"accountant: {self.accountant}; budget guard: {self.guard}")
        lines.append("not covered: " + "; ".join(self.not_covered))
        return "\n".join(lines)


def report(run: PrivateRun) -> PrivacyReport:
    """The report of a run, during or after a fit."""
    config, batches, epsilon = run.config, run.batches, run.epsilon
    estimator = config.resolved_estimator()
    queries = estimator.queries_per_step
    return PrivacyReport(
        epsilon=epsilon,
        delta=config.target_delta,
        epsilon_of_plan=run.epsilon_of_plan,
        relation=config.relation,
        steps=run.steps,
        target_epsilon=config.target_epsilon,
        private=math.isfinite(epsilon) and not run.is_seeded,
        seeded=run.is_seeded,
        isolation=run.isolation,
        guard=FixedGuard.description if run.mechanism is None else run.mechanism.guard.description,
        accountant=config.accountant.name,
        mechanism={
            "estimator": repr(estimator),
            **({"queries": _ROUND.format(queries)} if queries > 1 else {}),
            "noise schedule": repr(config.noise_schedule),
            "post-processing": repr(list(config.postprocessing)),
            "sampling": repr(config.sampling),
            "gradient engine": run.engine,
        },
        noise_multiplier=run.noise_multiplier,
        sample_rate=None if batches is None else batches.sample_rate,
        expected_batch_size=None if batches is None else batches.expected_batch_size,
        num_records=None if batches is None else batches.num_records,
        stop_reason=run.stop_reason,
        not_covered=_NOT_COVERED,
        versions={name: version(name) for name in ("lightning-dp", "lightning", "torch", "opacus")},
    )
