"""Parts 3 and 4 of dynamic_noise.py: the paper's figure 1, and the right of its figure 2."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import NOISES, TEST, TUNING_SEED, Summary, finished, finished_all, gains_text, table
from dynamic_noise_data import Records, ten_digits
from dynamic_noise_influence import quadratic_influence
from dynamic_noise_minibatches import influenced
from dynamic_noise_model import Problem
from dynamic_noise_run import CLIP_NORM, LEARNING_RATE, MAX_STEPS, descend, descent, plan_of

from lightning_dp.estimators import MeanGradient
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.postprocessing import Momentum
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import AbstractSchedule, Constant, FromInfluence

CURVATURES, RECORDS = (1.0, 5.0, 15.0), 1000
MOST = 10.0  # times the last noise: an influence knows no clipping (finding 4)
BETA, TUNING_NOISES, CONTROLS = 0.9, 3, 2
DECAYS = (0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99)  # γ of "expinfl"
MOMENTUM_DECAYS = tuple((decay, beta) for decay in (0.85, 0.9, 0.94, 0.98) for beta in (0.9, 0.7))


# -- figure 1 ----------------------------------------------------------------------------------------


def parabola(curvature: float) -> Problem:
    """λ (θ - 1)² / 2: RECORDS times the same record."""
    x = torch.full((RECORDS, 1), curvature**0.5, dtype=torch.float64)
    return Problem("squared", Records(x, x.squeeze(1)))


def schedule_of(noise: str, curvature: float) -> AbstractSchedule:
    if noise == "uniform":
        return Constant()
    std = CLIP_NORM / RECORDS
    found = np.array(
        quadratic_influence(
            [curvature], learning_rate=LEARNING_RATE, steps=MAX_STEPS, noise_std=std
        )
    )
    return FromInfluence(tuple(np.maximum(found / found.max(), MOST**-4).tolist()))


def courses(curvature: float, noise: str, repeats: int) -> np.ndarray:
    """The loss after each step (columns) of each repeat (rows)."""
    problem = parabola(curvature)
    plan = plan_of(schedule_of(noise, curvature), MAX_STEPS, "exact")
    return np.array(
        [
            [problem.value(params) for params in descent(problem, plan, MAX_STEPS, seed)]
            for seed in range(repeats)
        ]
    )


def curvature_part(output: Path, *, quick: bool) -> None:
    """Figure 1: noisy descent on parabolas of different curvature."""
    repeats = 10 if quick else 100
    print(
        f"\n## 3. Two curvatures: f = λ (θ - 1)² / 2, {repeats} repeats\n\nη = {LEARNING_RATE}, "
        f"T = {MAX_STEPS}, clip {CLIP_NORM:g}, {RECORDS} records, (4, 1e-8). Dynamic noise is at most "
        f"{MOST:g} times its last. Final losses times 1000. {TEST}\n"
    )
    found = {
        (curvature, noise): finished(courses, curvature, noise, repeats)
        for curvature in CURVATURES
        for noise in ("uniform", "dynamic")
    }
    last = {key: 1000 * losses[:, -1] for key, losses in found.items()}
    first = CURVATURES[0]
    pairs = [(last[c, "dynamic"], last[c, "uniform"]) for c in CURVATURES]
    pairs += [(last[c, "uniform"], last[first, "uniform"]) for c in CURVATURES[1:]]
    gains = gains_text(pairs, 3)
    over_first = ["", *gains[len(CURVATURES) :]]
    rows = [
        [
            f"{c:g}",
            *(Summary.of(last[c, noise]).text(3) for noise in ("uniform", "dynamic")),
            gain,
            more,
        ]
        for c, gain, more in zip(CURVATURES, gains, over_first, strict=False)
    ]
    header = ["λ", "uniform", "dynamic", "dynamic - uniform", f"uniform, over λ = {first:g}"]
    print(table(header, rows), flush=True)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for ax, noise in zip(axes, ("uniform", "dynamic"), strict=True):
        for number, c in enumerate(CURVATURES):
            losses = found[c, noise]
            colour = f"C{number}"
            ax.semilogy(losses[:10].T, color=colour, lw=0.3, alpha=0.3)
            ax.semilogy(losses.mean(0), color=colour, lw=1.5, label=f"λ = {c:g}")
            ax.axhline(losses[:, -1].mean(), color=colour, ls="--", lw=0.8)
        ax.set(title=noise, xlabel="step", ylim=(1e-6, None))
    axes[0].set_ylabel("loss")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(output / "curvatures.png", dpi=70)
    plt.close(figure)


# -- figure 2, right ---------------------------------------------------------------------------------


def momentum_run(
    folder: str, records: int, data_scale: float, shape: AbstractSchedule | None, seed: int
) -> float:
    """The final training loss of the network on some of ten digits, with momentum.

    Without a shape there is no noise, and the seed is that of the first weights.
    """
    torch.set_num_threads(1)
    problem = Problem("digits", ten_digits(folder, data_scale, records))
    plan = NoisePlan(0.0, Constant(), FullBatch(), 1.0, MeanGradient(CLIP_NORM))
    if shape is not None:
        plan = plan_of(shape, MAX_STEPS, "exact")
    return descend(problem, plan, MAX_STEPS, seed, (Momentum(BETA),))


def momentum_part(folder: str, records: int, jobs: int, *, quick: bool) -> None:
    """Figure 2, right: two forms of the influence, each tuned over eight settings."""
    scales, noises = ((10.0,), 2) if quick else ((2.0, 10.0, 25.0), NOISES)
    print(
        f"\n## 4. Momentum {BETA}, network of 2 x 100 on {records} of ten digits, T = {MAX_STEPS}, "
        "(4, 1e-8)"
        f"\n\nFinal training loss; {noises} noises, settings chosen on {TUNING_NOISES} others. {TEST}\n"
    )
    forms: dict[str, list[AbstractSchedule]] = {
        "uniform": [Constant()],
        "expinfl": [influenced(MAX_STEPS, decay) for decay in DECAYS],
        "momexpinfl": [influenced(MAX_STEPS, *both) for both in MOMENTUM_DECAYS],
    }
    names = {"expinfl": DECAYS, "momexpinfl": MOMENTUM_DECAYS}
    lines, pairs = [], []
    for scale in scales:
        found, words = {}, {}
        for form, tried in forms.items():
            best = 0
            if len(tried) > 1:
                shapes, trials = (tried[:2], 1) if quick else (tried, TUNING_NOISES)
                runs = [
                    (folder, records, scale, shape, TUNING_SEED + seed)
                    for shape in shapes
                    for seed in range(trials)
                ]
                of_each = np.reshape(finished_all(momentum_run, runs, jobs), (len(shapes), trials))
                best = int(of_each.mean(1).argmin())
            runs = [(folder, records, scale, tried[best], seed) for seed in range(noises)]
            found[form] = finished_all(momentum_run, runs, jobs)
            words[form] = f", {names[form][best]}" if form in names else ""
        runs = [(folder, records, scale, None, seed) for seed in range(CONTROLS)]
        plain = np.mean(finished_all(momentum_run, runs, jobs))
        lines.append(
            [
                f"{scale:g}",
                f"{plain:.4f}",
                *(Summary.of(found[f]).text(4) + words[f] for f in forms),
            ]
        )
        pairs += [(found["expinfl"], found["uniform"]), (found["momexpinfl"], found["uniform"])]
        pairs.append((found["momexpinfl"], found["expinfl"]))
    gains = gains_text(pairs, 4)
    rows = [[*line, *gains[3 * i : 3 * i + 3]] for i, line in enumerate(lines)]
    header = ["data scale", "no noise", "uniform", "expinfl, γ", "momexpinfl, (γ, β)"]
    header += ["expinfl - uniform", "momexpinfl - uniform", "momexpinfl - expinfl"]
    print(table(header, rows), flush=True)
