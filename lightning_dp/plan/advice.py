"""Advice about a private training: before it from public numbers, after it from its releases.

Everything is computed from settings, sizes and the plan, or was released with noise and charged, so
advice costs no privacy. Each sentence is printed once: what was advised at the start is not repeated at
the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import optim
from torch.optim import Optimizer

from lightning_dp.accounting.base import Relation
from lightning_dp.functional import number_of_entries
from lightning_dp.plan.signal import Signal, Verdict, judge
from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS, best_plan, settings
from lightning_dp.plan.training_plan import Optimizer as Kind
from lightning_dp.plan.training_plan import TrainingPlan, learning_rate, rounded, weight_size

_ADAM = (
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.RMSprop, optim.Adagrad, optim.Adadelta),
)
_FAR = 3.0  # a learning rate is a scale: a smaller factor is no reason for advice
_MUCH = 0.1  # of C: with a smaller noise norm SGD is limited by what is stable without privacy
_FEW_CLIPPED = 0.05  # share of records below which C is a bound that hardly any gradient reaches
_WEAK = 20.0  # an ε above it promises next to nothing
_QUARTERS = 4  # of a run in a report


@dataclass(frozen=True)
class OptimizerSetting:
    """The settings of an optimizer that advice needs."""

    name: str  # of its class
    kind: Kind | None  # "adam" for all that divide by a running mean square
    learning_rate: float  # the largest of its groups, at the peak of a OneCycleLR
    momentum: float = 0.0
    argument: str = "lr"  # that sets the rate


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training as its user set it up: public numbers alone.

    It ``is_constant`` if every step asks for a mean gradient with the same z, C and q, and the budget is
    for these steps alone.
    """

    num_records: int  # N, of the training set
    batch_size: float  # B = qN, expected
    steps: float  # T, planned and afforded by the budget
    planned_steps: float  # as the Trainer has them
    steps_per_epoch: int
    noise_multiplier: float  # z, of the first step
    clip_norm: float  # C, of one record
    size: int  # d, trained weights
    weight_size: float | None  # s of lightning_dp.plan.weight_size, where it is known
    target_epsilon: float | None
    target_delta: float
    relation: Relation
    optimizer: OptimizerSetting | None  # None where there are several
    is_constant: bool
    steps_before: int = 0  # of this plan, made before the fit: it was resumed
    is_calibrated: bool = True  # the noise follows from the budget
    processes: int = 1  # that share each batch
    unit: str = "record"  # of privacy, in a word
    growth: float = 1.0  # standard deviation of a step's noise over z·C; above 1 if it remembers
    moves_clip_norm: bool = False  # C is that of the first step only

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.steps / max(1, self.steps_per_epoch)

    @property
    def noise_norm(self) -> float:
        """z·C·√d / B, the norm of the noise in a step's mean gradient; more if it remembers."""
        noise = self.noise_multiplier * self.clip_norm * math.sqrt(self.size) / self.batch_size
        return noise * self.growth

    @property
    def plan(self) -> TrainingPlan | None:
        """The training as a plan; None where the steps differ, have no end or no noise."""
        if not (self.is_constant and self.noise_multiplier > 0 and 1 <= self.steps < math.inf):
            return None
        return TrainingPlan(
            num_records=self.num_records,
            batch_size=max(1, round(self.batch_size)),
            steps=int(self.steps),
            noise_multiplier=self.noise_multiplier,
            target_epsilon=self.target_epsilon or 1.0,  # without one, only the rate is computed
            target_delta=self.target_delta,
            relation=self.relation,
        )

    @property
    def excess(self) -> float | None:
        """Noise over the run, in that of full batches with the same budget; None without one."""
        return None if self.plan is None or self.target_epsilon is None else self.plan.excess


def optimizer_setting(optimizer: Optimizer) -> tuple[OptimizerSetting, int, float | None]:
    """Return the settings of an optimizer, the number of weights it trains, and their size.

    The size is None where no trained parameter is a matrix.
    """
    groups = optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    names = ("lr", "initial_lr", "max_lr")  # numbers or tensors; the last one is a OneCycleLR's
    rates = [float(group[name]) for group in groups for name in names if name in group]
    is_sgd, is_adam = isinstance(optimizer, optim.SGD), isinstance(optimizer, _ADAM)
    setting = OptimizerSetting(
        type(optimizer).__name__,
        "adam" if is_adam else "sgd" if is_sgd else None,
        max(rates, default=math.nan),
        max(float(group.get("momentum", 0.0)) for group in groups),
        "max_lr" if any("max_lr" in group for group in groups) else "lr",
    )
    matrices = [tuple(p.shape) for p in trained if p.dim() > 1 and p.numel()]
    return setting, number_of_entries(trained), weight_size(matrices) if matrices else None


# -- before ------------------------------------------------------------------------------------


def before(setting: Setting) -> list[str]:
    """Return at most four lines about a training that begins, from public numbers alone."""
    if not setting.steps > setting.steps_before:
        return []  # the warning about the budget is enough
    return [_numbers(setting), *_budget(setting), *_noise(setting), *changes(setting)]


def _numbers(setting: Setting) -> str:
    s = setting
    start = "" if not s.steps_before else f"resumed after {s.steps_before} of "
    steps = f"{s.steps:.0f} steps" if math.isfinite(s.steps) else "an unknown number of steps"
    epochs = f"{round(s.epochs, 1):g} epoch{'' if round(s.epochs, 1) == 1 else 's'}"
    return (
        f"{s.num_records:,} {s.unit}s, {s.batch_size:g} a step on average (q = "
        f"{min(1.0, s.batch_size / s.num_records):.3g}), {start}{steps}"
        f"{f' ({epochs})' if math.isfinite(s.epochs) else ''}, noise multiplier z = "
        f"{s.noise_multiplier:.3g}{f', clip norm C = {s.clip_norm:g}' if s.clip_norm < math.inf else ''}"
    )


def _budget(setting: Setting) -> list[str]:
    """Return a line about a budget that promises nothing, or ends before the plan."""
    s = setting
    if s.target_epsilon is not None and s.target_epsilon > _WEAK:
        return [f"ε = {s.target_epsilon:,.4g} promises next to nothing: most uses take 10 or less"]
    if not s.steps < s.planned_steps:
        return []
    planned = f"{s.planned_steps:.0f}" if math.isfinite(s.planned_steps) else "an unknown number of"
    ends = f"the budget ends after {s.steps:.0f} of {planned} steps"
    if s.steps_before:
        return [f"{ends}; a resumed run keeps its noise"]
    if s.is_calibrated:
        return [f"{ends}; part of it was spent before"]
    return [f"{ends}; leave noise_multiplier out, and the noise is calibrated for all of them"]


def _noise(setting: Setting) -> list[str]:
    """Return a line about the noise of a step and of the run."""
    s, words = setting, []
    if s.noise_multiplier > 0 and s.clip_norm < math.inf:
        averages = "; it averages out over steps" if s.noise_norm > s.clip_norm else ""
        words.append(
            f"noise norm {s.noise_norm:.3g} per step (gradient norm ≤ {s.clip_norm:g}{averages})"
        )
    if s.excess is not None:
        words.append(
            f"over the run {s.excess:.1f} times the noise of full batches with the same ε "
            f"({ENOUGH:g} or less is good)"
        )
    return ["; ".join(words)] if words else []


def changes(setting: Setting) -> list[str]:
    """Return a line that can be followed; nothing if the setting is good, or a run was resumed."""
    plan = better_plan(setting)
    rate = advised_rate(setting, plan)
    if setting.steps_before or (plan is None and rate is None):
        return []
    words = [] if plan is None else [settings(plan, setting.processes)]
    if rate is not None and setting.optimizer is not None:
        words.append(
            f"{_with_rate(setting.optimizer, rate)}, a third of it for pre-trained weights"
        )
    if plan is not None:
        words.append(f"{plan.steps} steps, {plan.excess:.1f} times the noise of full batches")
    return [f"try: {'; '.join(words)}"]


def _with_rate(optimizer: OptimizerSetting, rate: float) -> str:
    now = f"now {optimizer.learning_rate:g}"
    return f"{optimizer.argument}={rate:g} for {optimizer.name} ({now})"


def better_plan(setting: Setting) -> TrainingPlan | None:
    """Return the planner's choice with no fewer epochs; None if the setting is as good."""
    plan = setting.plan
    if plan is None or setting.excess is None or not plan.target_delta * plan.num_records < 1:
        return None  # of so large a delta nothing but the warning is said
    if plan.excess <= ENOUGH and plan.steps >= LEAST_STEPS:
        return None
    if plan.sample_rate == 1:  # full batches are a choice
        return plan.changed(steps=LEAST_STEPS)
    best = best_plan(
        plan.num_records,
        plan.target_epsilon,
        target_delta=plan.target_delta,
        relation=plan.relation,
        least_epochs=max(1, math.ceil(setting.epochs - 1e-9)),
    )
    is_same = (best.batch_size, best.steps) == (plan.batch_size, plan.steps)
    return None if is_same else best


def planned_rate(setting: Setting, plan: TrainingPlan | None = None) -> float | None:
    """Return the planner's learning rate for the setting, or for another plan.

    None for an optimizer without such a rate, and for SGD with hardly any noise, which sets no scale.
    """
    optimizer, plan = setting.optimizer, plan or setting.plan
    if plan is None or optimizer is None or optimizer.kind is None or setting.weight_size is None:
        return None
    if not (setting.clip_norm < math.inf and 0 <= optimizer.momentum < 1):
        return None
    noise = plan.noise_length(setting.size, setting.clip_norm)
    if optimizer.kind == "sgd" and not _MUCH * setting.clip_norm < noise < math.inf:
        return None
    return learning_rate(
        plan,
        setting.weight_size,
        optimizer=optimizer.kind,
        max_grad_norm=setting.clip_norm,
        momentum=optimizer.momentum,
    )


def advised_rate(
    setting: Setting, plan: TrainingPlan | None, factor: float | None = None
) -> float | None:
    """Return the learning rate to try; None if there is no reason to change it.

    Args:
        setting: of the training.
        plan: to be tried instead.
        factor: by which the releases advise to change the rate. It is followed as long as the result
            is within a factor of three of the planner's, which would be advised at the next start.
    """
    now = 0.0 if setting.optimizer is None else setting.optimizer.learning_rate
    planned = planned_rate(setting, plan)
    if not now > 0:
        return None
    if planned is not None and not 1 / _FAR < planned / now < _FAR:
        return rounded(planned)
    if factor is None:
        return None
    rate = rounded(factor * now)
    return rate if planned is None or 1 / _FAR < planned / rate < _FAR else None


# -- after -------------------------------------------------------------------------------------


def after(setting: Setting, signal: Signal) -> list[str]:
    """Return sentences about a training that ended, without the advice of :func:`before`."""
    verdict = judge(signal) if setting.steps > setting.steps_before else None
    return [*([] if verdict is None else _judgement(setting, verdict)), *_clipping(setting, signal)]


def _judgement(setting: Setting, verdict: Verdict) -> list[str]:
    if not verdict.learns:
        found = f"largest agreement {verdict.largest:.1f}, below {verdict.threshold:.1f}"
        return [
            f"No gradient signal above the noise was found ({found}, the 99 % limit of noise alone). "
            f"Check that the loss is a finite number on synthetic data{_or_less_noise(setting)}."
        ]
    if verdict.stops_short:
        return [
            "Training had not converged: gradients still pointed the same way at the end (agreement "
            f"{verdict.quarters[-1]:.0f} in the last quarter, noise alone gives 0 ± 1). "
            f"{_next(setting, _FAR, 'more epochs')}"
        ]
    if verdict.jumps:
        return [
            "Training overshot: in the second half gradients pointed against earlier ones. "
            f"{_next(setting, 1 / _FAR, 'a rate that decays')}"
        ]
    return []


def _or_less_noise(setting: Setting) -> str:
    if setting.excess is not None and setting.excess > ENOUGH:
        return ", then try less noise over the run, as advised at the start"
    return (
        ", then try a larger ε, more records, fewer trained weights (freeze layers, LoRA), or "
        "pre-trained weights"
    )


def _next(setting: Setting, factor: float, otherwise: str) -> str:
    """Return what to try in another training; a spent budget allows no more steps of this one."""
    plan, optimizer = better_plan(setting), setting.optimizer
    rate = advised_rate(setting, plan)
    now = 0.0 if optimizer is None else optimizer.learning_rate
    is_opposite = rate is not None and (rate > now) != (factor > 1)
    if (plan is not None or rate is not None) and not (is_opposite or setting.steps_before):
        return "Follow the advice at the start in another training."
    rate = None if is_opposite else advised_rate(setting, None, factor)
    words = [] if rate is None or optimizer is None else [_with_rate(optimizer, rate)]
    cost = ", whose ε adds to this one on the same records" if setting.target_epsilon else ""
    return f"For another training{cost}: {' or '.join([*words, otherwise])}."


def _clipping(setting: Setting, signal: Signal) -> list[str]:
    """Return a word about C, where the share of clipped records was released and is very small."""
    share = signal.whole.share_clipped
    if share is None or setting.moves_clip_norm or not share[0] + 2 * share[1] < _FEW_CLIPPED:
        return []
    return [
        f"Less than {100 * _FEW_CLIPPED:g} % of the records were clipped: the noise is made for "
        f"gradients of norm C = {setting.clip_norm:g}, which hardly any has. Try max_grad_norm="
        f"{rounded(setting.clip_norm / _FAR):g}."
    ]


# -- in a report -------------------------------------------------------------------------------


def facts(setting: Setting | None, signal: Signal | None) -> dict[str, str]:
    """Return named facts for a report: public numbers, released ones, and all advice.

    Args:
        setting: of the training; None before it began.
        signal: of its releases; None where they were not followed.
    """
    found: dict[str, str] = {}
    if setting is not None and setting.noise_multiplier > 0 and setting.clip_norm < math.inf:
        found["noise norm in a mean gradient"] = (
            f"{setting.noise_norm:.3g}, z·C·√d/B with d = {setting.size:,}; the gradient norm is at "
            f"most {setting.clip_norm:g}"
        )
        if setting.excess is not None:
            found["noise over the run"] = (
                f"{setting.excess:.1f} times that of full batches with the same budget"
            )
    if signal is not None and signal.whole.steps:
        found.update(_of_releases(signal))
    if setting is not None:
        advice = [*([] if signal is None else after(setting, signal))]
        if advice := [*advice, *changes(replace(setting, steps_before=0))]:
            found["advice"] = " ".join(advice)
    return found


def _of_releases(signal: Signal) -> dict[str, str]:
    count = len(signal.stretches)
    ends = [round(part * count / _QUARTERS) for part in range(_QUARTERS + 1)]
    quarters = [signal.between(a, b) for a, b in pairwise(ends) if a < b]
    found = {
        "norm of releases": "; ".join(
            f"up to step {each.last_step}: {each.released_norm:.3g}, of it noise "
            f"{each.noise_norm:.3g}"
            for each in quarters
        )
    }
    if (verdict := judge(signal)) is not None:
        quarters_text = ", ".join(f"{each:.1f}" for each in verdict.quarters)
        found["gradient signal above the noise"] = (
            f"{'yes' if verdict.learns else 'no'}: largest agreement of successive releases "
            f"{verdict.largest:.1f}, noise alone stays below {verdict.threshold:.1f} in 99 of 100 "
            f"runs; by quarters of the run {quarters_text}"
        )
    if (share := signal.whole.share_clipped) is not None:
        found["share of clipped records"] = (
            f"{share[0]:.3f} ± {share[1]:.3f} (released with this noise, charged with the gradients)"
        )
    return found
