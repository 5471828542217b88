"""Bytes of memory for each parameter at the peak of a training with AdamW: plain, and private.

    python benchmarks/bytes_per_parameter.py [--millions 25 126]

A chain of linear layers of width 2048 with batches of 8, so that what a layer keeps is little next to
its weights. Each run trains a few steps in a process of its own (Linux only), in which freed memory goes
back to the system at once. What is shown is the peak of resident memory above that of the process with
its libraries loaded, over the number of parameters; on an accelerator at hand the peak of what tensors
take on it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from at_hand import ON_CPU, allocated, named, peak, reset_peak, trainer_arguments
from memory import GIVE_BACK, resident
from models import MODELS
from step import quiet, without_privacy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, DifferentialPrivacy

WIDTH, BATCH, STEPS = 2048, 8, 6
WAYS = ("plain", "ours", "ours, no probe", "ours, no checks")


class Chain(L.LightningModule):
    """So many layers, one after another."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def run(way: str, millions: float) -> dict[str, float]:
    """Train in this process."""
    quiet()
    without_privacy(MODELS["logistic regression"], 1)  # loads what is loaded lazily
    before = resident("VmRSS") * 2**20 if ON_CPU else allocated()
    if ON_CPU:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    else:
        reset_peak()
    model = Chain(round(millions * 1e6 / WIDTH**2))
    loader = DataLoader(TensorDataset(torch.randn(BATCH * STEPS, WIDTH)), batch_size=BATCH)
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[L.Callback] = []
        if way != "plain":
            callbacks.append(
                DifferentialPrivacy(
                    noise_multiplier=1.0,
                    target_delta=1e-6,
                    checks=Checks(dry_run=way == "ours", comparisons=way != "ours, no checks"),
                    ledger_dir=folder,
                )
            )
        L.Trainer(
            max_epochs=1,
            **trainer_arguments(),
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, loader)
    size = sum(param.numel() for param in model.parameters())
    most = resident("VmHWM") * 2**20 if ON_CPU else peak()
    return {"bytes": (most - before) / size, "size": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[25, 126])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--one", nargs=2, metavar=("WAY", "MILLIONS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(arguments.one[0], float(arguments.one[1]))))
        return
    print(f"| parameters ({named()}) | way | bytes a parameter |\n| --- | --- | --- |")
    for millions in arguments.millions:
        for way in arguments.ways:
            command = [sys.executable, __file__, "--one", way, str(millions)]
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, **GIVE_BACK}
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {found['size'] / 1e6:.0f} million | {way} | {found['bytes']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
