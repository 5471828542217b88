"""A lower bound on ε from canaries in the user's own training: how private was the run, really?"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import probability, whole
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.base import epsilon_text
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.audit.bounds import (
    Errors,
    FloatArray,
    StepKind,
    history,
    largest_noise_scale,
    least_misses_in_run,
    least_misses_in_steps,
    log_ratio,
    one_run_epsilon,
    step_threshold,
)
from lightning_dp.audit.canary_engine import Canaries, CanaryData, CanaryEngine, CanaryEstimator
from lightning_dp.callbacks import PrivacyLogger
from lightning_dp.clipping import Flat
from lightning_dp.config import Checks, PrivacyConfig
from lightning_dp.gradients import AbstractGradientEngine
from lightning_dp.isolation.requirements import check_loader
from lightning_dp.run import PrivateRun
from lightning_dp.sampling.blocks import AbstractBlockSampling
from lightning_dp.strategies.strategy import DifferentialPrivacyStrategy, install

_MOST_SCALE = 1e2  # more noise than this many times what is claimed: nothing was learned
_GUESSES = ((0.02, 0.0), (0.1, 0.0), (0.1, 0.1), (0.5, 0.5))  # parts of m: called in, called out


@dataclass(frozen=True)
class AuditReport:
    """Bounds on ε of one run by its canaries.

    Args:
        lower_bound: ε is at least this, with probability ``confidence``; the larger of the next two.
        white_box: from the errors at single steps and of the whole run, if the mechanism is the
            declared one with another amount of noise; ``noise_scale`` says how much, at most.
        one_run: from the number of correct guesses (Steinke et al. 2023), whatever the mechanism.
        noise_scale: the noise is at most this many times the declared one.
        epsilon, delta: what the accountant says of the run.
        confidence: of all bounds together.
        steps, canaries: T and m.
    """

    lower_bound: float
    white_box: float
    one_run: float
    noise_scale: float
    epsilon: float
    delta: float
    confidence: float
    steps: int
    canaries: int

    @property
    def is_violated(self) -> bool:
        """True if the claim is refuted, since the lower bound is above it."""
        return self.lower_bound > self.epsilon

    def __str__(self) -> str:
        verdict = "the claim is REFUTED" if self.is_violated else "the claim stands"
        return (
            f"{verdict}: ε >= {self.lower_bound:.4g} with confidence {self.confidence:g}, "
            f"claimed ε = {epsilon_text(self.epsilon)} at δ = {self.delta:g}\n"
            f"white box {self.white_box:.4g} (noise at most {self.noise_scale:.3g} of the declared "
            f"one), one run {self.one_run:.4g}; {self.steps} steps, {self.canaries} canaries\n"
            "on a temporary ledger: these steps are in no other ledger"
        )


def audit(
    module: LightningModule,
    loader: DataLoader[Any],
    privacy: PrivacyConfig,
    *,
    trainer: Mapping[str, Any],
    num_canaries: int = 1000,
    confidence: float = 0.95,
) -> AuditReport:
    r"""Train a copy of the model with canaries, and bound ε from below by what is released.

    m canaries are added to the data set; a fair coin says for each whether it is in. Those that are
    in go through everything that a record goes through: sampling, chunks, the combination of
    points, clipping, the sum, noise. Their gradients are replaced at the boundary by
    ±10 C along one coordinate each, and an attacker who knows the coordinates reads the noised
    sums there. On correct code ``lower_bound <= epsilon`` with probability ``confidence``.

    - *White box.* Wrong calls at single steps and over whole runs bound how much noise there can
      be; ε is that of the declared steps with that much noise, as in Nasr et al. (2023,
      arXiv:2302.07956). Nearly tight. Calls over whole runs also refute what no amount of noise
      explains, such as a batch that is not a Poisson sample, or noise that repeats itself.
    - *One run.* The number of correct guesses alone (Steinke, Nasr and Jagielski 2023,
      arXiv:2305.08846). Nothing is assumed of the mechanism, and m guesses cannot show more than
      about ln(m / 3).

    The run is charged to a temporary ledger that ends with it. Its releases are as private as the
    claim is true, at the ε of one more run on your records: audit on public or synthetic records of
    the same shapes, or count it. No un-noised value leaves it.

    Args:
        module: your model; a copy is trained.
        loader: your training loader. Its records stay; batches grow so that q stays.
        privacy: what is audited, ``DifferentialPrivacy(...).config``. One query per step on all
            coordinates; noise above 0.
        trainer: arguments of ``lightning.pytorch.Trainer``, for one process.
        num_canaries: m, at most the number of trained parameters.
        confidence: 1 - γ in (0, 1).

    Example:
        ``print(audit(model, loader, privacy.config, trainer={"max_steps": 100}))``
    """
    _check(privacy, num_canaries, confidence)
    checked = check_loader(loader)
    canaries = Canaries(num_canaries, len(checked.dataset))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        run = _run(copy.deepcopy(module), checked, privacy, dict(trainer), canaries, folder)
        kinds, order = _kinds(canaries, run)
        event = run.config.sampling.event
        return _judge(canaries, kinds, order, event, run.epsilon, privacy.target_delta, confidence)


def _check(privacy: PrivacyConfig, num_canaries: int, confidence: float) -> None:
    probability("confidence", confidence)
    if not whole("num_canaries", num_canaries, 0) >= 10:
        raise ValueError(f"num_canaries={num_canaries} must be at least 10.")
    if privacy.noise_multiplier == 0:
        raise ValueError(
            "noise_multiplier=0: without noise there is no ε to audit. Give a positive one."
        )
    is_block = isinstance(privacy.sampling, AbstractBlockSampling)
    if privacy.noise.bands > 1 or is_block or not privacy.sampling.has_pairs:
        raise RefusedSetting(
            f"noise={privacy.noise} with sampling={privacy.sampling}: the audit takes the steps of a run "
            "for independent, on Poisson batches. Audit with Poisson() and IndependentNoise(), which "
            "test the same clipping.",
            topic="correlated-noise",
        )
    if privacy.runs_each_record_alone:
        raise ValueError(
            "engine='one_by_one' has no chunk to put canaries in. Audit with engine='auto': what "
            "is audited comes after the gradients, and is the same for all engines."
        )
    if privacy.has_several_rows:
        raise ValueError(
            "Canaries are single rows. Audit without unit and augmentations: what is audited comes "
            "after the gradients, and is the same for all units."
        )
    if not isinstance(privacy.clipping, Flat):
        raise ValueError(
            f"clipping={privacy.clipping} is not audited: a canary takes the whole of one constant clip "
            "norm. Audit with clipping=Flat(); noise and accounting are the same."
        )
    estimator = privacy.resolved_estimator()
    if estimator.traits.queries_per_step > 1 or estimator.traits.uses_hessian:
        raise ValueError(
            f"{estimator} asks several queries per step; an audit needs one. Use MeanGradient()."
        )


class _Audited(DifferentialPrivacyStrategy):
    """A private strategy with canaries."""

    canaries: Canaries

    def wrap_engine(self, engine: AbstractGradientEngine) -> AbstractGradientEngine:
        return CanaryEngine(engine, self.canaries)


class _Install(Callback):
    def __init__(self, run: PrivateRun, canaries: Canaries) -> None:
        self._run, self._canaries = run, canaries

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size != 1:
            raise ValueError(f"audit() runs in one process; the Trainer has {trainer.world_size}.")
        # No report files: what an audit spends is not what the user's own runs do.
        strategy = install(trainer, self._run, PrivacyLogger(), kind=_Audited)  # type: ignore[type-abstract]
        strategy.canaries = self._canaries


def _run(
    module: LightningModule,
    loader: DataLoader[Any],
    privacy: PrivacyConfig,
    arguments: dict[str, Any],
    canaries: Canaries,
    folder: str,
) -> PrivateRun:
    """Train, and let the canaries watch."""

    data = CanaryData(loader.dataset, canaries)

    def batch_size(step: int) -> float:
        return run.rate(step) * len(data)

    config = replace(
        privacy,
        estimator=CanaryEstimator(privacy.resolved_estimator(), canaries, batch_size),
        max_grad_norm=None,
        checks=Checks(dry_run=False, comparisons=False),
        ledger_dir=folder,
    )
    run = PrivateRun(config)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    callbacks = arguments.pop("callbacks", None) or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    trainer = Trainer(**{**quiet, **arguments}, callbacks=[*callbacks, _Install(run, canaries)])
    trainer.fit(module, data.loader(loader))
    if not canaries.seen:
        raise ValueError(
            f"trainer={arguments} made no step, so there is nothing to audit. Give max_steps or "
            "max_epochs of at least 1."
        )
    return run


def _kinds(canaries: Canaries, run: PrivateRun) -> tuple[list[StepKind], list[tuple[float, float]]]:
    """Return the kinds of steps, and (z, q) of every step."""
    pairs = [
        (z, run.rate(step))
        for z, step in zip(canaries.noise_multipliers, canaries.steps, strict=True)
    ][: len(canaries.seen)]
    return [StepKind(z, q, n) for (z, q), n in Counter(pairs).items()], pairs


def _judge(
    canaries: Canaries,
    kinds: list[StepKind],
    pairs: list[tuple[float, float]],
    event: Callable[[float, float], AbstractEvent],
    epsilon: float,
    delta: float,
    confidence: float,
) -> AuditReport:
    seen, included = np.array(canaries.seen), canaries.included
    ratios = np.array([log_ratio(y, z, q) for y, (z, q) in zip(seen, pairs, strict=True)])
    failure = (1 - confidence) / 2  # one half for each kind of bound
    scale = _noise_left(seen, ratios, included, kinds, pairs, event, failure / 3)
    white_box = math.inf if scale == 0 else 0.0
    if 0 < scale < _MOST_SCALE:
        white_box = PLDAccountant().epsilon(history(event, kinds, scale), delta)
    one_run = _one_run(ratios.sum(0), included, delta, failure)
    return AuditReport(
        lower_bound=max(white_box, one_run),
        white_box=white_box,
        one_run=one_run,
        noise_scale=scale,
        epsilon=epsilon,
        delta=delta,
        confidence=confidence,
        steps=len(seen),
        canaries=len(included),
    )


def _noise_left(
    seen: FloatArray,
    ratios: FloatArray,
    included: Any,
    kinds: list[StepKind],
    pairs: list[tuple[float, float]],
    event: Callable[[float, float], AbstractEvent],
    failure: float,
) -> float:
    """Return the most noise, as a share of the claim's, that no test refutes."""
    linear = np.array([1 / z**2 for z, _ in pairs])  # the weight of a step
    half = 0.5 * sum(q / z**2 for z, q in pairs)
    usual = max(kinds, key=lambda kind: kind.count).sample_rate
    alike = [kind for kind in kinds if kind.sample_rate == usual]
    single = [t for t, (_, q) in enumerate(pairs) if q == usual]
    margins = (seen[single] - 0.5) * linear[single, None]
    at_steps = _errors(margins > step_threshold(alike), included)

    # Each test refutes some amounts of noise, and the least of what is left holds. They share the
    # probability of failure, so that all of them hold together (a union bound).
    scale = _scale(least_misses_in_steps, (alike,), at_steps, failure, _MOST_SCALE)
    # Over the whole run, by the likelihood ratio under the claim, and by the sum with weights 1/z²,
    # called in above half of what is expected there if the canary is in.
    for called_in in (ratios.sum(0) > 0, linear @ seen > half):
        errors = _errors(called_in[None, :], included)
        scale = _scale(least_misses_in_run, (event, kinds), errors, failure, scale)
    return scale


def _errors(called_in: np.ndarray[Any, np.dtype[np.bool_]], included: Any) -> Errors:
    """Count the errors of calls of shape (any, m)."""
    outside, inside = called_in[:, ~included], called_in[:, included]
    return Errors(int(outside.sum()), outside.size, int((~inside).sum()), inside.size)


def _scale(
    least_misses: Callable[..., float],
    of: tuple[Any, ...],
    errors: Errors,
    failure: float,
    most: float,
) -> float:
    """Return the largest amount of noise under which so few errors are possible."""
    if most == 0:
        return 0.0
    alarms, misses = errors.upper_rates(failure)
    return largest_noise_scale(lambda scale: misses < least_misses(*of, scale, alarms), most)


def _one_run(scores: FloatArray, included: Any, delta: float, failure: float) -> float:
    """Return the best bound of a few ways to guess, each with its part of the failure probability."""
    order = included[np.argsort(-scores)]
    best = 0.0
    for part_in, part_out in _GUESSES:
        top, bottom = int(part_in * len(order)), int(part_out * len(order))
        correct = int(order[:top].sum()) + int((~order[len(order) - bottom :]).sum())
        found = one_run_epsilon(len(order), top + bottom, correct, delta, failure / len(_GUESSES))
        best = max(best, found)
    return best
