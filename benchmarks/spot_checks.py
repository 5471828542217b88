"""What spot checks add to a run of 2,000 steps with 10 epochs, for some models and estimators.

    python benchmarks/spot_checks.py [models ...]

A step with a check is compared with the steps around it, in CPU time, so that a busy machine disturbs
little; and whole fits with and without checks take turns. The goal is at most 3 % of the run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from models import MODELS, Model
from step import CLIP_NORM, Module, quiet
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import AbstractEstimator, Diff2, MeanGradient
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation.spot_plan import SpotPlan

STEPS, EPOCHS, MEASURED, ROUNDS = 2000, 10, 140, 3


class Clock(L.Callback):
    """CPU time at the end of each step, and the number of checks so far."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.checks: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ends.append(time.process_time())
        self.checks.append(trainer.strategy.private_run.spot_checks)


def fit(model: Model, estimator: AbstractEstimator, *, checks: bool) -> Clock:
    """A fit of some steps."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        privacy = DifferentialPrivacy(
            noise_multiplier=1.0,
            target_delta=1e-6,
            estimator=estimator,
            ledger_dir=folder,
            spot_checks=checks,
        )
        clock = Clock()
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=MEASURED,
            callbacks=[privacy, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        n = model.batch_size * MEASURED
        data = TensorDataset(model.records(n), torch.randint(10, (n,)))
        trainer.fit(Module(model.make()), DataLoader(data, model.batch_size))
    return clock


def planned() -> float:
    """Checks in a run of 2,000 steps with 10 epochs, on average."""
    numbers = []
    for run in range(20):
        plan, made = SpotPlan(str(run)), 0
        for step in range(STEPS):
            made += plan.is_due(step, made, begins_epoch=step % (STEPS // EPOCHS) == 0)
        numbers.append(made)
    return statistics.mean(numbers)


def main() -> None:
    quiet()
    names = sys.argv[1:] or ["MLP", "CNN", "transformer"]
    checks = planned()
    print(f"{checks:.1f} checks in {STEPS} steps with {EPOCHS} epochs")
    estimators = {"DP-SGD": MeanGradient(CLIP_NORM), "Diff2": Diff2(10, CLIP_NORM, 1.0)}
    for name in names:
        for title, estimator in estimators.items():
            extra, ratios = [], []
            for _ in range(ROUNDS):
                off = fit(MODELS[name], estimator, checks=False)
                on = fit(MODELS[name], estimator, checks=True)
                times = [b - a for a, b in zip(on.ends[2:], on.ends[3:], strict=False)]
                made = [b > a for a, b in zip(on.checks[2:], on.checks[3:], strict=False)]
                usual = statistics.median(
                    t for t, is_made in zip(times, made, strict=True) if not is_made
                )
                extra += [t / usual - 1 for t, is_made in zip(times, made, strict=True) if is_made]
                ratios.append((on.ends[-1] - on.ends[2]) / (off.ends[-1] - off.ends[2]))
            cost = statistics.median(extra)
            print(
                f"{name}, {title}: a check costs {cost:.2f} steps, {checks * cost / STEPS:.2%} of the "
                f"run; fits of {MEASURED} steps take {statistics.median(ratios) - 1:.1%} more"
            )


if __name__ == "__main__":
    main()
