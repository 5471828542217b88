"""Memory of a private step, next to the same step without privacy, and the peers.

    python benchmarks/memory.py [--models MLP CNN ...] [--who ours ...]

Each alternative of benchmarks/step.py runs a few steps in a process of its own (Linux only). What is
compared is the peak of resident memory above that of the process with libraries and model loaded, so
the checks before the first step are in it. All have the same batch in every step: the data set
is one batch, which ours takes whole (FullBatch), since Poisson sampling draws larger ones now and then.
Freed memory goes back to the system at once there: what an earlier run left to the allocator would
hide what the next one takes. On an accelerator at hand it is the peak of what tensors take on it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from at_hand import ON_CPU, allocated, named, peak, reset_peak
from models import SMALL, Transformer
from step import BARE, ours, quiet, without_privacy
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_dp import FullBatch


class Checkpointed(Transformer):
    """The transformer, with a checkpoint around each of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


MEASURED_MODELS = {
    **SMALL,
    "transformer, checkpoints": replace(SMALL["transformer"], make=Checkpointed),
}
ONE_BATCH = {name: replace(model, batches=1) for name, model in MEASURED_MODELS.items()}
MEASURED = {
    "without privacy": without_privacy,
    "ours": partial(ours, sampling=FullBatch()),
    "ours, ghost": partial(ours, sampling=FullBatch(), engine="ghost"),
    **BARE,
}
STEPS = 3
GIVE_BACK = {  # glibc's settings
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}


def resident(field: str) -> float:
    """MiB, from the system's own accounts: VmRSS now, VmHWM at most since the last reset."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def peak_of(who: str, name: str) -> float:
    """MiB above the start, in this process."""
    quiet()
    model = ONE_BATCH[name]
    MEASURED["without privacy"](model, 1)
    MEASURED[who](ONE_BATCH["logistic regression"], 1)  # loads everything that is loaded lazily
    gc.collect()
    if not ON_CPU:
        before = allocated()
        reset_peak()
        MEASURED[who](model, STEPS)
        return (peak() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what it leaves to the allocator is not the model's
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    MEASURED[who](model, STEPS)
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(ONE_BATCH), default=list(ONE_BATCH))
    parser.add_argument("--who", nargs="+", choices=list(MEASURED), default=list(MEASURED))
    parser.add_argument("--one", nargs=2, metavar=("WHO", "MODEL"), help="print one number")
    arguments = parser.parse_args()
    if arguments.one:
        print(peak_of(*arguments.one))
        return
    for name in arguments.models:
        print(f"{name}, batch {ONE_BATCH[name].batch_size}: {named()}; peak above the loaded model")
        peaks: dict[str, float] = {}
        for who in arguments.who:
            command = [sys.executable, __file__, "--one", who, name]
            environment = {**os.environ, **GIVE_BACK}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                print(f"  {who:16} cannot run this model")
                continue
            peaks[who] = float(done.stdout)
            plain = peaks.get("without privacy", float("nan"))
            print(f"  {who:16} {peaks[who]:8.0f} MiB  {peaks[who] / plain:6.2f} x", flush=True)


if __name__ == "__main__":
    main()
