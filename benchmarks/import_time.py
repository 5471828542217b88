"""Seconds that `import lightning_dp.callbacks` takes beyond `import lightning.pytorch`.

    python benchmarks/import_time.py

Each import is timed in a fresh process, in turns, after one round that fills the caches. Lightning is
slower where transformers is installed, since torchmetrics imports it. The goal is at most 1 s more.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys

MODULES = ("lightning.pytorch", "lightning_dp.callbacks", "lightning_dp")
ROUNDS = 7
TIMED = """
import time
wall, processor = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - wall, time.process_time() - processor)
"""


def seconds(module: str) -> tuple[float, float]:
    """Wall and processor seconds of one import in a new process."""
    command = [sys.executable, "-I", "-W", "ignore", "-c", TIMED.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, processor = map(float, done.stdout.split())
    return wall, processor


def main() -> None:
    rounds = [{module: seconds(module) for module in MODULES} for _ in range(ROUNDS + 1)][1:]
    has_transformers = importlib.util.find_spec("transformers") is not None
    print(
        f"Python {sys.version.split()[0]}, {'with' if has_transformers else 'without'} transformers"
    )
    for kind, name in enumerate(("wall", "processor")):
        for module in MODULES:
            times = [each[module][kind] for each in rounds]
            print(f"{module:24} {statistics.median(times):6.2f} s ({name}), "
                  f"{min(times):.2f} to {max(times):.2f}")  # fmt: skip
        lightning, callbacks, _ = MODULES
        more = [each[callbacks][kind] - each[lightning][kind] for each in rounds]
        print(f"{'more than Lightning':24} {statistics.median(more):6.2f} s ({name}), "
              f"{min(more):.2f} to {max(more):.2f}; goal 1")  # fmt: skip


if __name__ == "__main__":
    main()
