"""What one private step costs: the Trainer with the callback, beside a bare PyTorch loop.

    python benchmarks/step.py [--quick]

Both use Opacus' per-sample gradients on the same model, batch size, clip norm, noise and SGD. The
bare loop books no privacy, draws fixed batches, logs nothing: the least that DP-SGD can cost. Runs
of the two alternate, so that a busy machine disturbs both; the goal for the ratio is at most 1.10.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import AbstractEstimator, MeanGradient
from lightning_dp.callbacks import DifferentialPrivacy

BATCH_SIZE = 256
NUM_RECORDS = 60_000
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.1
WARM_UP = 5
STEPS = 20
ROUNDS = 7
GOAL = 1.10
PLAIN = MeanGradient(CLIP_NORM)


def mlp() -> nn.Module:
    """784-512-512-10."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, 10),
    )


def cnn() -> nn.Module:
    """The network of examples/mnist_cnn.py."""
    return nn.Sequential(
        nn.ZeroPad2d(3),
        *(nn.Conv2d(1, 16, 8, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


class Module(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class Clock(L.Callback):
    """Seconds for each step after the first few, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def per_step(ends: list[float]) -> float:
    """The mean over all steps after the warm-up."""
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def through_the_trainer(
    net: nn.Module,
    data: TensorDataset,
    steps: int,
    estimator: AbstractEstimator = PLAIN,
) -> float:
    """Seconds of one private step inside Trainer.fit."""
    clock = Clock()
    privacy = DifferentialPrivacy(
        noise_multiplier=NOISE_MULTIPLIER, target_delta=1e-6, estimator=estimator
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=steps + WARM_UP,
            callbacks=[privacy, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(net), DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))
    return per_step(clock.ends)


def bare(net: nn.Module, data: TensorDataset, steps: int) -> float:
    """Seconds of one step of DP-SGD written out by hand."""
    hooks = GradSampleHooks(net, loss_reduction="mean")
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=LEARNING_RATE)
    ends: list[float] = []
    while len(ends) < steps + WARM_UP:
        for x, y in DataLoader(data, batch_size=BATCH_SIZE, shuffle=True):
            nn.functional.cross_entropy(net(x), y).backward()
            samples = [param.grad_sample for param in params]
            norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples]).norm(dim=0)
            factors = (CLIP_NORM / norms).clamp(max=1.0)
            for param, sample in zip(params, samples, strict=True):
                total = torch.einsum("n,n...->...", factors, sample)
                noise = torch.randn_like(total) * (NOISE_MULTIPLIER * CLIP_NORM)
                param.grad = (total + noise) / BATCH_SIZE
                param.grad_sample = None
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
            if len(ends) == steps + WARM_UP:
                break
    hooks.cleanup()
    return per_step(ends)


def compare(name: str, make: Callable[[], nn.Module], steps: int, rounds: int) -> float:
    """Print medians and ratios of interleaved runs; the median ratio."""
    data = TensorDataset(torch.rand(NUM_RECORDS, 1, 28, 28), torch.randint(10, (NUM_RECORDS,)))
    times: list[tuple[float, float]] = []
    for turn in range(rounds):
        pair = {}
        for run in (bare, through_the_trainer) if turn % 2 else (through_the_trainer, bare):
            pair[run] = run(make(), data, steps)
        times.append((pair[bare], pair[through_the_trainer]))
    plain, private = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
    ratios = sorted(ours / theirs for theirs, ours in times)
    ratio = statistics.median(ratios)
    verdict = "met" if ratio <= GOAL else "missed"
    print(
        f"{name}: bare {plain:.2f} ms, through the Trainer {private:.2f} ms a step (medians of "
        f"{rounds} runs)\n     ratio {ratio:.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}; "
        f"goal <= {GOAL:.2f}: {verdict}"
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    quick = parser.parse_args().quick
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    steps, rounds = (5, 3) if quick else (STEPS, ROUNDS)
    print(f"one private step, batch {BATCH_SIZE}, one thread, {steps} steps a run")
    for name, make in (("MLP", mlp), ("CNN", cnn)):
        compare(name, make, steps, rounds)


if __name__ == "__main__":
    main()
