"""Costs of frozen parts: memory, the start of a fit, and a step, under a frozen backbone.

    python benchmarks/frozen.py                      # LoRA of rank 8 in a frozen model of GPT-2's size
    python benchmarks/frozen.py --models MLP CNN     # the models of models.py, all trained

Each fit runs in a process of its own (Linux only), on one thread; those of one round take turns, and
medians of the rounds count. Times are processor seconds. "start" is from ``fit`` to the beginning of the
second step, "step" the median of later ones that no comparison runs again. "peak" is the largest resident
memory from ``fit`` on, above the process without the model; the model is in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from memory import resident
from models import MODELS, Model
from step import Module, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_dp import Checks
from lightning_dp.callbacks import DifferentialPrivacy

WIDTH, HEADS, BLOCKS, WORDS, LENGTH, RANK, BATCH = 768, 12, 12, 50257, 32, 8, 8
STEPS, CHECKED = 12, frozenset({1, 2, 4, 8})  # steps that are compared
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ours": {},
    "ours, no dry run": {"checks": Checks(dry_run=False)},
    "ours, no comparisons": {"checks": Checks(comparisons=False)},
}


class Drawn(Sampler[list[int]]):
    """Batches of as many records as private ones have: each record is in one by chance."""

    def __init__(self, records: int, size: int) -> None:
        self._records, self._rate = records, size / records

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield (torch.rand(self._records) < self._rate).nonzero().flatten().tolist()

    def __len__(self) -> int:
        return round(1 / self._rate)


class LowRank(nn.Module):
    """A frozen linear layer, and the product of two narrow ones that are trained."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(into, out).requires_grad_(False)
        self.down, self.up = nn.Linear(into, RANK, bias=False), nn.Linear(RANK, out, bias=False)
        nn.init.normal_(self.up.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    """A block of GPT-2, with adapters on query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = LowRank(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        heads = self.attention(self.before(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.between(x)), approximate="tanh"))


class Adapted(L.LightningModule):
    """A classifier: a frozen language model of 124M weights, and 0.4M that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks, self.last = (
            nn.Sequential(*(Block() for _ in range(BLOCKS))),
            nn.LayerNorm(WIDTH),
        )
        for name, param in self.named_parameters():
            param.requires_grad_("attention.down" in name or "attention.up" in name)
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, classes = batch
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return F.cross_entropy(self.head(self.last(self.blocks(x))[:, -1]), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Clock(L.Callback):
    """The processor time at which each step begins."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begins.append(time.process_time())


def fit(module: L.LightningModule, loader: DataLoader[Any], way: str) -> tuple[float, list[float]]:
    """Processor seconds: when ``fit`` began, and each step."""
    clock, checks = Clock(), WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        privacy = [] if checks is None else [DifferentialPrivacy(
            noise_multiplier=1.0, target_delta=1e-6, ledger_dir=folder, **checks)]  # fmt: skip
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            callbacks=[*privacy, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        begin = time.process_time()
        trainer.fit(module, loader)
    return begin, clock.begins


def case(name: str, way: str) -> tuple[L.LightningModule, DataLoader[Any]]:
    """A model and its records."""
    if name == "LoRA":
        n = BATCH * STEPS * 2
        data = TensorDataset(torch.randint(WORDS, (n, LENGTH)), torch.randint(2, (n,)))
        return Adapted(), _loader(data, BATCH, way)
    model: Model = MODELS[name]
    size = model.batch_size * STEPS * 2
    data = TensorDataset(model.records(size), torch.randint(10, (size,)))
    return Module(model.make()), _loader(data, model.batch_size, way)


def _loader(data: TensorDataset, size: int, way: str) -> DataLoader[Any]:
    if WAYS[way] is None:
        return DataLoader(data, batch_sampler=Drawn(len(data), size))
    return DataLoader(data, size)


def measure(name: str, way: str) -> dict[str, float]:
    """One fit, in this process."""
    quiet()
    torch.manual_seed(0)
    for each in ("plain", way):  # loads everything that is loaded lazily
        fit(*_tiny(), each)
    gc.collect()
    before = resident("VmRSS")
    module, loader = case(name, way)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin, begins = fit(module, loader, way)
    later = [b - a for n, (a, b) in enumerate(pairwise(begins[1:]), 1)
             if n not in CHECKED]  # fmt: skip
    return {
        "peak": resident("VmHWM") - before,
        "start": begins[1] - begin,
        "step": statistics.median(later),
    }


def _tiny() -> tuple[L.LightningModule, DataLoader[Any]]:
    data = TensorDataset(torch.rand(8 * STEPS, 4), torch.randint(2, (8 * STEPS,)))
    return Module(nn.Linear(4, 2)), DataLoader(data, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=["LoRA", *MODELS], default=["LoRA"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help="print one measurement")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    for name in arguments.models:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in arguments.ways}
        for _ in range(arguments.rounds):
            for way in arguments.ways:
                command = [sys.executable, __file__, "--one", name, way]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, env=environment
                )
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{name:22s}{'peak MiB':>10s}{'start s':>9s}{'step s':>9s}{'start in steps':>16s}")
        for way, rounds in found.items():
            peak, start, step = (
                statistics.median(each[key] for each in rounds) for key in ("peak", "start", "step")
            )
            print(f"{way:22s}{peak:10.0f}{start:9.2f}{step:9.4f}{start / step:16.1f}", flush=True)


if __name__ == "__main__":
    main()
