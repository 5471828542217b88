"""The cost of one private step, next to the same step without privacy, and next to the peers.

    python benchmarks/step.py [--models MLP CNN ...] [--runs ours vmap ...] [--rounds 15] [--processor]
    python benchmarks/step.py --rounds 3 --steps 15    # as on the GPU of benchmarks/results.md

Ours and the step without privacy run through the Trainer with all defaults, and ours with every check
off besides; each over a data set of tensors, and over one that gives a record at a time. The peers
(Opacus' hooks and ghost clipping, vmap over torch.func.grad, and book-keeping, which fast_dp.py
writes from its paper) run in bare loops, which favours them. All do the same work: forward, backward,
clip, noise, SGD, on one thread, or on the accelerator at hand, which each step waits for. Runs
alternate, so that a busy machine disturbs all. Of each fit three numbers count:

- step: the median of the steps after the first 60, where comparisons of records have become rare;
- first: the mean of the first 60, which has them all, over that median (of large models the first 8);
- start: seconds from ``fit`` to the end of step 1.

Our journal is in memory here where the system allows it; benchmarks/overhead.py tells what the disk
costs. --processor takes the time of the processor, of all threads together, for a machine with other
work on it; noise that is drawn in the background counts in full there.
--runs leaves out what is not named; the step without privacy and ours are always there.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lightning as L
import torch
from at_hand import DEVICE, finish, named, trainer_arguments
from fast_dp import FastDP
from models import MODELS, Model
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dp import AbstractEstimator, AbstractSampling, Checks, MeanGradient, Poisson
from lightning_dp.callbacks import DifferentialPrivacy

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01
WARM_UP = 3
PLAIN, POISSON, ON = MeanGradient(CLIP_NORM), Poisson(), Checks()
OFF = Checks(dry_run=False, loss_graph=False, comparisons=False, gradient_edits="none")
GOALS = {
    **{"logistic regression": 1.35, "MLP": 1.2, "CNN": 1.35},
    **{"transformer": 1.2, "ResNet": 1.3, "nn.LSTM": 1.4},
}
RECORDED = Path(__file__).with_name("step.json")
T = TypeVar("T")


class Cost(NamedTuple):
    """Seconds of a step, the first steps in units of it, and seconds to the end of step 1."""

    step: float
    first: float = math.nan
    start: float = math.nan


class Module(L.LightningModule):
    """Any network, trained by cross-entropy and SGD."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(trained, lr=LEARNING_RATE)


class ByRecord(Dataset[Any]):
    """A data set that gives one record at a time."""

    def __init__(self, records: TensorDataset) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._records[index]


def now() -> float:
    """Seconds, by the clock that was chosen, when the device has done all that it was asked."""
    finish()
    return _clock()


_clock = time.perf_counter


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


def per_step(ends: Sequence[float], warm_up: int = WARM_UP) -> float:
    """The median of the steps after the warm-up, in seconds."""
    return statistics.median(
        b - a for a, b in zip(ends[warm_up:], ends[warm_up + 1 :], strict=False)
    )


def _batches(model: Model) -> TensorDataset:
    n = model.batch_size * model.batches
    return TensorDataset(model.records(n), torch.randint(10, (n,)))


def fit(
    model: Model,
    steps: int,
    privacy: Sequence[L.Callback] = (),
    *,
    first: int | None = None,
    by_record: bool = False,
) -> Cost:
    """Train by the Trainer: the first steps (default: the model's), and these after them."""
    first = model.first if first is None else first
    clock, data = Clock(), _batches(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            **trainer_arguments(),
            max_steps=first + steps + 1,
            callbacks=[*privacy, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        records = ByRecord(data) if by_record else data
        loader = DataLoader(records, model.batch_size, shuffle=True)
        module, begin = Module(model.make()), now()
        trainer.fit(module, loader)
    ends, step = clock.ends, per_step(clock.ends, first)
    return Cost(step, (ends[first] - ends[0]) / first / step, ends[1] - begin)


def private_fit(
    model: Model,
    steps: int,
    estimator: AbstractEstimator = PLAIN,
    engine: Any = "auto",
    sampling: AbstractSampling = POISSON,
    checks: Checks = ON,
    **how: Any,
) -> Cost:
    """The same with the callback."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as journal:
        privacy = DifferentialPrivacy(
            noise_multiplier=NOISE_MULTIPLIER,
            target_delta=1e-6,
            estimator=estimator,
            engine=engine,
            sampling=sampling,
            checks=checks,
            ledger_dir=journal,
        )
        return fit(model, steps, [privacy], **how)


def without_privacy(model: Model, steps: int) -> float:
    """Seconds of a step of the Trainer alone, soon after the start."""
    return fit(model, steps, first=WARM_UP).step


def ours(model: Model, steps: int, **settings: Any) -> float:
    """Seconds of a step with the callback, soon after the start."""
    return private_fit(model, steps, first=WARM_UP, **settings).step


def opacus(mode: str) -> Callable[[Model, int], float]:
    """A bare loop around Opacus' wrapped model and optimizer."""

    def run(model: Model, steps: int) -> float:
        net = model.make().to(DEVICE)
        data = DataLoader(_batches(model), model.batch_size)
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

    return _loop(step, DataLoader(_batches(model), model.batch_size), steps)


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

    return _loop(step, DataLoader(_batches(model), model.batch_size), steps)


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
    "Opacus ghost": opacus("ghost"),
    "vmap": vmapped,
}
BARE = {**PEERS, "book-keeping": fast_dp}  # the floor, which no peer of a user's is
FITS: dict[str, Callable[[Model, int], Cost]] = {
    "without privacy": fit,
    "ours": private_fit,
    "ours, checks off": partial(private_fit, checks=OFF),
    "without, by record": partial(fit, by_record=True),
    "ours, by record": partial(private_fit, by_record=True),
    "ours, off, by record": partial(private_fit, checks=OFF, by_record=True),
}


def measure(
    runs: dict[str, Callable[[Model, int], T]], model: Model, steps: int, rounds: int
) -> dict[str, list[T]]:
    """Return the measurements of every alternative that can run, round by round."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(found) if turn % 2 else reversed(list(found)):
            try:
                found[name].append(runs[name](model, steps))
            except Exception as error:
                print(f"  {name} cannot run this model: {str(error).splitlines()[0][:90]}")
                del found[name]
    return found


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


def bare(run: Callable[[Model, int], float], model: Model, steps: int) -> Cost:
    """Run a bare loop, of which a step counts and nothing else."""
    return Cost(run(model, steps))


def row(name: str, costs: list[Cost], ratios: list[float]) -> str:
    """One line of a table."""
    step, first, start = map(statistics.median, zip(*costs, strict=True))
    spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    line = f"  {name:21}{1e3 * step:9.2f} ms {statistics.median(ratios):6.2f} x  {spread:16}"
    return line if math.isnan(first) else f"{line} first {first:5.2f} x  start {start:6.2f} s"


RUNS = {**FITS, **{who: partial(bare, run) for who, run in BARE.items()}}


def compare(name: str, steps: int | None, rounds: int, chosen: Sequence[str]) -> float | None:
    """Print the table of a model; return the ratio of ours, or None if the model is not at hand."""
    model = MODELS[name]
    try:
        model.make()
    except ImportError as missing:
        print(f"{name} is left out: {missing}")
        return None
    print(f"{name}, batch {model.batch_size}, {named()}, first {model.first} steps", flush=True)
    runs = {who: RUNS[who] for who in RUNS if who in ("without privacy", "ours", *chosen)}
    costs = measure(runs, model, steps or model.steps, rounds)
    times = {who: [each.step for each in found] for who, found in costs.items()}
    to_plain = ratios(times, "without privacy")
    for who, found in costs.items():
        of_records = "by record" in who and "without, by record" in times
        to = ratios(times, "without, by record") if of_records else to_plain
        print(row(who, found, to[who]), flush=True)
    middle = {who: statistics.median(values) for who, values in to_plain.items()}
    peers = [(middle[peer], peer) for peer in PEERS if peer in middle]
    fastest = f"; fastest peer {min(peers)[0]:.2f}, {min(peers)[1]}" if peers else ""
    low, high = to_plain["ours"][0], to_plain["ours"][-1]
    goal = GOALS.get(name, math.nan)
    verdict = "met" if high <= goal else "missed" if low > goal else "not decided"
    print(f"  ours {middle['ours']:.2f} x; goal <= {goal}: {verdict}{fastest}", flush=True)
    return middle["ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--check", action="store_true", help="compare with the recorded ratios")
    parser.add_argument("--record", action="store_true", help="record the ratios")
    parser.add_argument("--processor", action="store_true", help="the processor's time")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--steps", type=int, help="after the first; default: 15, or 5 of large models"
    )
    arguments = parser.parse_args()
    quiet()
    if arguments.processor:
        by_processor()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    how = arguments.steps, arguments.rounds, arguments.runs
    compared = {name: compare(name, *how) for name in arguments.models}
    found = {name: ratio for name, ratio in compared.items() if ratio is not None}
    print(f"geometric mean {statistics.geometric_mean(found.values()):.2f}")
    if arguments.record:
        RECORDED.write_text(json.dumps({**recorded, **found}, indent=2) + "\n")
    slower = [
        f"{name}: {found[name]:.2f}, recorded {recorded[name]:.2f}"
        for name in found.keys() & recorded.keys()
        if found[name] > 1.25 * recorded[name]
    ]
    if arguments.check and slower:
        sys.exit("slower than recorded: " + "; ".join(slower))


if __name__ == "__main__":
    main()
