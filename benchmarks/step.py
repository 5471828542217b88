"""The cost of one private step, next to the same step without privacy, and next to the peers.

    python benchmarks/step.py [--quick] [--models MLP CNN ...] [--check] [--processor]
    python benchmarks/step.py --rounds 3 --steps 15    # as on the GPU of benchmarks/results.md

Ours and the step without privacy both run through the Trainer; ours with its default engine, and with the
one that takes least memory (engine="ghost"). The peers (Opacus' four modes, vmap over
torch.func.grad, and book-keeping, which fast_dp.py writes from its paper) run in bare loops, which
favours them. All do the same work: forward, backward, clip, noise, SGD, on one thread, or on the
accelerator at hand, which each step waits for. Fits of the Trainer are timed after 42 steps (with --quick
after three, so that comparisons of records, frequent at the start, are in it; benchmarks/isolation.py has
them). Runs alternate, so that a busy machine disturbs all. Our
journal is in memory here where the system allows it; benchmarks/overhead.py tells what the disk costs.
--processor takes the time of the processor, of all threads together, for a machine with other work on it;
noise that is drawn in the background counts in full there.
--check compares the ratios with those recorded in benchmarks/step.json, and fails above 1.25 times.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from at_hand import DEVICE, finish, named, trainer_arguments
from fast_dp import FastDP
from models import MODELS, Model
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import AbstractEstimator, AbstractSampling, MeanGradient, Poisson
from lightning_dp.callbacks import DifferentialPrivacy

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01
WARM_UP, STEADY = 3, 42
PLAIN, POISSON = MeanGradient(CLIP_NORM), Poisson()
GOALS = {
    **{"logistic regression": 1.4, "MLP": 1.25, "CNN": 1.3},
    **{"transformer": 1.2, "ResNet": 1.25, "LSTM": 1.3},
}
RECORDED = Path(__file__).with_name("step.json")
Data = tuple[Tensor, Tensor]


class Module(L.LightningModule):
    """Any network, trained by cross-entropy and SGD."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def now() -> float:
    """Seconds, by the clock that was chosen, when the device has done all that it was asked."""
    finish()
    return _clock()


def after_comparisons() -> None:
    """Time fits of the Trainer where comparisons of records have become rare, from now on."""
    global _warm_up
    _warm_up = STEADY


_clock, _warm_up = time.perf_counter, WARM_UP


def by_processor() -> None:
    """Choose the time of the processor from now on."""
    global _clock
    _clock = time.process_time


class Clock(L.Callback):
    """The moment at which each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(now())


def per_step(ends: list[float], warm_up: int = WARM_UP) -> float:
    """The median of the steps after the warm-up, in seconds."""
    return statistics.median(
        b - a for a, b in zip(ends[warm_up:], ends[warm_up + 1 :], strict=False)
    )


def _batches(model: Model, steps: int) -> TensorDataset:
    n = model.batch_size * model.batches
    return TensorDataset(model.records(n), torch.randint(10, (n,)))


def _fit(model: Model, steps: int, callbacks: list[L.Callback]) -> float:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            **trainer_arguments(),
            max_steps=steps + _warm_up + 1,
            callbacks=[*callbacks, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        data = _batches(model, steps)
        trainer.fit(Module(model.make()), DataLoader(data, model.batch_size, shuffle=True))
    return per_step(clock.ends, _warm_up)


def without_privacy(model: Model, steps: int) -> float:
    """The Trainer alone."""
    return _fit(model, steps, [])


def ours(
    model: Model,
    steps: int,
    estimator: AbstractEstimator = PLAIN,
    engine: Any = "auto",
    sampling: AbstractSampling = POISSON,
) -> float:
    """The Trainer with the callback."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as journal:
        privacy = DifferentialPrivacy(
            noise_multiplier=NOISE_MULTIPLIER,
            target_delta=1e-6,
            estimator=estimator,
            engine=engine,
            sampling=sampling,
            ledger_dir=journal,
        )
        return _fit(model, steps, [privacy])


def opacus(mode: str) -> Callable[[Model, int], float]:
    """A bare loop around Opacus' wrapped model and optimizer."""

    def run(model: Model, steps: int) -> float:
        net = model.make().to(DEVICE)
        data = DataLoader(_batches(model, steps), model.batch_size)
        criterion: Any = nn.CrossEntropyLoss()
        more = {"criterion": criterion} if mode == "ghost" else {}
        private = PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=LEARNING_RATE),
            data_loader=data,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=CLIP_NORM,
            poisson_sampling=False,
            grad_sample_mode=mode,
            **more,
        )
        net, optimizer = private[0], private[1]
        criterion = private[2] if mode == "ghost" else criterion

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()

        return _loop(step, data, steps)

    return run


def vmapped(model: Model, steps: int) -> float:
    """A bare loop around vmap(grad(loss)), the textbook form."""
    net = model.make().to(DEVICE)
    params = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(net, values, (x.unsqueeze(0),))
        return F.cross_entropy(output, y.unsqueeze(0))

    rows = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> None:
        samples = rows({name: p.detach() for name, p in params.items()}, x, y)
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples.values()]).norm(dim=0)
        factors = (CLIP_NORM / norms).clamp(max=1.0)
        for name, sample in samples.items():
            total = torch.tensordot(factors, sample, dims=1)
            noise = torch.randn_like(total) * (NOISE_MULTIPLIER * CLIP_NORM)
            params[name].grad = (total + noise) / model.batch_size
        optimizer.step()

    return _loop(step, DataLoader(_batches(model, steps), model.batch_size), steps)


def fast_dp(model: Model, steps: int) -> float:
    """A bare loop around book-keeping as its paper has it."""
    net = model.make().to(DEVICE)
    engine = FastDP(net, CLIP_NORM)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> None:
        for param, total in engine.backward(F.cross_entropy(net(x), y, reduction="none")):
            noise = torch.randn_like(total) * (NOISE_MULTIPLIER * CLIP_NORM)
            param.grad = (total + noise) / model.batch_size
        optimizer.step()

    return _loop(step, DataLoader(_batches(model, steps), model.batch_size), steps)


def _loop(step: Callable[[Tensor, Tensor], None], data: Any, steps: int) -> float:
    ends: list[float] = []
    while len(ends) < steps + WARM_UP + 1:
        for x, y in data:
            step(x.to(DEVICE), y.to(DEVICE))
            ends.append(now())
            if len(ends) == steps + WARM_UP + 1:
                break
    return per_step(ends)


PEERS: dict[str, Callable[[Model, int], float]] = {
    "Opacus hooks": opacus("hooks"),
    "Opacus ew": opacus("ew"),
    "Opacus functorch": opacus("functorch"),
    "Opacus ghost": opacus("ghost"),
    "vmap": vmapped,
    "book-keeping": fast_dp,
}
RUNS = {
    "without privacy": without_privacy,
    "ours": ours,
    "ours, ghost": partial(ours, engine="ghost"),
    **PEERS,
}


def measure(
    runs: dict[str, Callable[[Model, int], float]], model: Model, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per step of every alternative, round by round; inf where it cannot run."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 else reversed(list(runs)):
            try:
                times[name].append(runs[name](model, steps))
            except Exception as error:
                print(f"  {name} cannot run this model: {str(error).splitlines()[0][:90]}")
                times[name].append(math.inf)
    return times


def ratios(times: dict[str, list[float]], to: str) -> dict[str, list[float]]:
    """Of every alternative to one of them, round by round, sorted."""
    return {
        name: sorted(a / b for a, b in zip(values, times[to], strict=True))
        for name, values in times.items()
    }


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--check", action="store_true", help="compare with the recorded ratios")
    parser.add_argument("--record", action="store_true", help="record the ratios")
    parser.add_argument("--processor", action="store_true", help="the processor's time")
    parser.add_argument("--rounds", type=int, help="default: 5, or 3 with --quick")
    parser.add_argument("--steps", type=int, help="default: 15, or 4 where they are slow")
    arguments = parser.parse_args()
    quiet()
    if arguments.processor:
        by_processor()
    if not arguments.quick:
        after_comparisons()
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found, slower = {}, []
    for name in arguments.models:
        model = MODELS[name]
        slow = name in ("transformer", "ResNet")
        steps = arguments.steps or (4 if slow or arguments.quick else 15)
        print(f"{name}, batch {model.batch_size}, {named()}")
        times = measure(RUNS, model, steps, rounds)
        for who, values in ratios(times, "without privacy").items():
            middle = statistics.median(values)
            print(
                f"  {who:16} {1e3 * statistics.median(times[who]):9.2f} ms  "
                f"{middle:6.2f} x  ({values[0]:.2f} to {values[-1]:.2f})"
            )
        found[name] = statistics.median(ratios(times, "without privacy")["ours"])
        fastest = min((statistics.median(times[peer]), peer) for peer in PEERS)
        ahead = fastest[0] / statistics.median(times["ours"])
        goal = GOALS[name]
        print(
            f"  ours {found[name]:.2f} x; goal <= {goal}: {'met' if found[name] <= goal else 'missed'}"
            f"; {ahead:.2f} times as fast as the fastest peer, {fastest[1]}"
        )
        if arguments.check and found[name] > 1.25 * recorded.get(name, math.inf):
            slower.append(f"{name}: {found[name]:.2f}, recorded {recorded[name]:.2f}")
    print(f"geometric mean {statistics.geometric_mean(found.values()):.2f}")
    if arguments.record:
        RECORDED.write_text(json.dumps({**recorded, **found}, indent=2) + "\n")
    if slower:
        sys.exit("slower than recorded: " + "; ".join(slower))


if __name__ == "__main__":
    main()
