"""One run of diff2.py: a method with its settings on a data set, through the package's mechanism."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from common import finished
from diff2_data import split
from diff2_formulas import paper_noise
from diff2_model import Answers, Network
from scratch_ledger import mechanism_of

from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting import calibrate
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import bounded_sum
from lightning_dp.estimators import Diff2, MeanGradient
from lightning_dp.estimators.base import AbstractEstimator
from lightning_dp.functional import flatten, unflatten
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import Constant

DELTA = 1e-5
EVERY, PATIENCE, WORSE = 20, 5, 1.05  # rounds between two looks, and the paper's rule for stopping
CHUNK = 32_768  # records that are answered together: they stay in the cache
Noise = Literal["none", "paper", "exact", "add/remove"]


@dataclass(frozen=True)
class Setting:
    """The settings that are tuned.

    Args:
        rate: η.
        clip: C1.
        interval: T; 1 is DP-GD.
        diff: C2.
        u: the split; None is the paper's.
    """

    rate: float
    clip: float = math.inf
    interval: int = 1
    diff: float = 1.0
    u: float | None = None

    def estimator(self) -> AbstractEstimator:
        if math.isinf(self.clip):
            return MeanGradient(math.inf)
        return Diff2(self.interval, self.clip, self.diff, self.u or "paper")


@dataclass(frozen=True)
class Run:
    """Everything that one run depends on.

    Args:
        seed: of the split and the first parameters.
        part: of the ``rounds`` that its noise is planned for, the first 1 / ``part`` are run.
    """

    name: str
    folder: str
    seed: int
    epsilon: float
    rounds: int
    noise: Noise
    setting: Setting
    noise_seed: int = 0
    is_tuning: bool = False
    part: int = 1

    @property
    def last(self) -> int:
        """The number of rounds that are run."""
        return -(-self.rounds // self.part)


@dataclass(frozen=True)
class Trace:
    """The course of a run.

    Args:
        values: train loss, squared norm of its gradient, test loss and test error (of classes), at
            every 20th round.
        spent: ε by relation.
        step_length: root mean square of ‖x_t - x_(t-1)‖ over the second half.
    """

    values: np.ndarray
    spent: dict[str, float]
    step_length: float

    @property
    def is_finished(self) -> bool:
        return bool(np.isfinite(self.values[0, -1]))

    def level(self, criterion: int) -> float:
        """The mean of the last ten values; infinite if the run was given up."""
        return float(self.values[criterion, -10:].mean()) if self.is_finished else math.inf


@lru_cache(maxsize=512)
def plan_of(setting: Setting, noise: Noise, epsilon: float, rounds: int, records: int) -> NoisePlan:
    """The paper's noise, or the least that the budget allows under replace-one or add/remove."""
    estimator = setting.estimator()
    scale = 0.0
    if noise == "paper":
        assert isinstance(estimator, Diff2)
        sigma, _ = paper_noise(estimator, epsilon, DELTA, steps=rounds, num_records=records)
        scale = sigma * records
        restarts = math.ceil(rounds / setting.interval)
        if restarts < rounds:  # as T need not divide R, σ2/σ1 is that of a slightly different u
            share = restarts / (rounds - restarts)
            u = 1 + (setting.interval - 1) * (estimator.u - 1) * share
            estimator = Diff2(setting.interval, setting.clip, setting.diff, u)
    elif noise != "none":
        relation = "replace_one" if noise == "exact" else "add_remove"
        scale = calibrate(estimator.traits.relative_noise, 1.0, rounds, epsilon, DELTA, relation)
    return NoisePlan(scale, Constant(), FullBatch(), 1.0, estimator)


def execute(run: Run) -> Trace:
    """Gradient descent with the released estimates; gives up what the paper's rule gives up."""
    torch.set_num_threads(1)
    data = split(run.name, run.folder, run.seed)
    params = Network(data).start(run.seed)
    chunks = [Answers(Network(part)) for part in data.chunks(CHUNK)]
    plan = plan_of(run.setting, run.noise, run.epsilon, run.rounds, data.train.count)
    seed = 1000 * run.seed + run.noise_seed
    mechanism = mechanism_of(plan, run.rounds, data.train.count, seed)
    values = np.full((4, run.last // EVERY + 1), np.nan)
    best, patience = math.inf, 0
    squares = []
    for done in range(run.last + 1):
        if done % EVERY == 0:
            values[:, done // EVERY] = look(chunks, params)
            loss = float(values[0, done // EVERY])
            patience = 0 if loss < best else patience + (not loss <= WORSE * best)
            best = min(best, loss)
            if not math.isfinite(loss) or (run.is_tuning and patience == PATIENCE):
                break
        if done == run.last:
            break
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrivacyWarning)  # of feedback: the grid seeks it
                query = mechanism.ask(params)
                for chunk in chunks if query is not None else ():
                    gradients = chunk.gradients(query, params)
                    mechanism.answer(bounded_sum(gradients, query.clip_norm))
                estimate = unflatten(mechanism.tell(params), params)
        except RuntimeError:  # Diff2: the parameters are no longer finite
            break
        params = [p - run.setting.rate * g for p, g in zip(params, estimate, strict=True)]
        squares.append(sum(float(g.square().sum()) for g in estimate))
    step_length = run.setting.rate * float(np.mean(squares[run.last // 2 :] or math.nan)) ** 0.5
    return Trace(values, spent(mechanism.ledger), step_length)


def walk(run: Run, survivors: int) -> dict[Setting, Trace]:
    """The paper's search for η: 1, 1/2, 1/4, ..., 1/512 until so many were not given up.

    It goes on after its last finished run: on the larger sets each takes long.
    """
    found = {}
    for power in range(10):
        setting = replace(run.setting, rate=0.5**power)
        found[setting] = finished(execute, replace(run, setting=setting))
        if sum(trace.is_finished for trace in found.values()) == survivors:
            break
    return found


def look(chunks: list[Answers], params: list[torch.Tensor]) -> tuple[float, ...]:
    """Train loss, ‖∇f‖² of the train loss, test loss, test error."""
    flat = flatten(params)
    loss, gradient, count = 0.0, torch.zeros(()), 0
    for chunk in chunks:
        point, train = chunk.at(flat, params), chunk.network.data.train
        loss += train.count * chunk.network.loss(point.outputs, train)
        gradient = gradient + point.gradient_sum()
        count += train.count
    square_norm = float((gradient / count).square().sum())
    return loss / count, square_norm, *chunks[0].network.on_test(params)


def spent(ledger: Ledger) -> dict[str, float]:
    """ε at δ of what ran, exactly: full batches are Gaussian mechanisms of Σ 1/z²."""
    if any(event.pair[0] == 0 for event, _ in ledger.history()):
        return {"replace-one": math.inf, "add/remove": math.inf}
    mu = math.sqrt(math.fsum(count / event.pair[0] ** 2 for event, count in ledger.history()))
    return {"replace-one": gdp_epsilon(2 * mu, DELTA), "add/remove": gdp_epsilon(mu, DELTA)}
