"""Runs the tests with the two newest minor versions of Lightning and of torch that are allowed.

    python .ci/versions.py                                     # the newest three pairs
    python .ci/versions.py --pair 2.6.6 2.15.0 --pair 2.6.0 2.13.0
    python .ci/versions.py --dry-run                           # only say which
    python .ci/versions.py -- tests/strategies -x                 # what follows -- goes to pytest

Each pair gets a fresh virtual environment, made from the project's files alone and removed
after use. The newest Lightning meets both torches, the newest torch both Lightnings. PyPI's torch
takes some 5 GB of disk with its CUDA libraries; PIP_INDEX_URL and PIP_FIND_LINKS say where a CPU
build is. Ends with a table; the exit status is the number of pairs that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINORS = 2


@dataclass(frozen=True)
class Row:
    lightning: str
    torch: str
    result: str
    seconds: float
    is_good: bool

    def __str__(self) -> str:
        return f"{self.lightning:10} {self.torch:14} {self.seconds:7.0f} s  {self.result}"


def newest_of_minors(package: str) -> list[str]:
    """Of the newest minor versions that the project allows the newest release each.

    If it allows one minor only: the newest and the oldest release of that.
    """
    (floor,) = re.findall(rf'"{package}>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    releases = re.search(r"Available versions: (.*)", said)
    assert releases is not None, said
    minors: dict[tuple[int, ...], list[str]] = {}
    for version in releases[1].split(", "):  # pip names the newest first
        minors.setdefault(minor(version), []).append(version)
    allowed = [found for number, found in minors.items() if number >= minor(floor)]
    newest = [found[0] for found in allowed[:MINORS]]
    return newest if len(newest) == MINORS else [allowed[0][0], allowed[0][-1]]


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def pairs() -> list[tuple[str, str]]:
    (lightning, *older_lightning), (torch, *older_torch) = map(
        newest_of_minors, ("lightning", "torch")
    )
    others = [(older, torch) for older in older_lightning]
    return [(lightning, torch), *others, *((lightning, older) for older in older_torch)]


def check(lightning: str, torch: str, arguments: list[str], logs: Path) -> Row:
    """Install, test, remove."""
    start, log = time.monotonic(), logs / f"lightning-{lightning}-torch-{torch}.log"

    def row(result: str, is_good: bool = False) -> Row:
        return Row(lightning, torch, result, time.monotonic() - start, is_good)

    print(f"== lightning {lightning}, torch {torch}: {log}", flush=True)
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:

        def run(*command: str) -> int:
            return subprocess.run(command, cwd=ROOT, stdout=output, stderr=output).returncode

        run(sys.executable, "-m", "venv", folder)
        python = str(Path(folder) / "bin" / "python")
        wanted = [f"lightning=={lightning}", f"torch=={torch}"]
        if run(python, "-m", "pip", "install", "-e", ".[test]", *wanted):
            return row("cannot be installed")
        start = time.monotonic()  # of the tests alone
        status = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    return row(summary(log), status == 0)


def summary(log: Path) -> str:
    """The last line of pytest, such as "5045 passed, 430 skipped"."""
    (*_, last) = log.read_text().splitlines()
    return ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", last)) or "no test ran"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", nargs=2, action="append", metavar=("LIGHTNING", "TORCH"))
    parser.add_argument("--logs", type=Path, help="folder for the output of pip and pytest")
    parser.add_argument("--dry-run", action="store_true", help="say which pairs, run nothing")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()

    chosen = [tuple(pair) for pair in options.pair] if options.pair else pairs()
    if options.dry_run:
        print("\n".join(f"lightning {lightning}, torch {torch}" for lightning, torch in chosen))
        return 0
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", MPLBACKEND="Agg")
    os.environ.pop("PYTHONPATH", None)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="versions-"))
    logs.mkdir(parents=True, exist_ok=True)
    rows = [check(lightning, torch, options.pytest, logs) for lightning, torch in chosen]
    print(f"\n{'lightning':10} {'torch':14} {'tests':>9}  result")
    print("\n".join(map(str, rows)))
    return sum(not row.is_good for row in rows)


if __name__ == "__main__":
    sys.exit(main())
