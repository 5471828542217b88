"""Installs the built wheel with other Pythons, and with the oldest and newest libraries allowed.

    python .ci/pythons.py --python 3.10 --python 3.13       # the newest libraries
    python .ci/pythons.py --python 3.10 --oldest            # the oldest
    python .ci/pythons.py --python 3.14 --resolve           # downloads nothing that is large

Both distributions are built from what git knows, the wheel from the source distribution. Each Python
gets a virtual environment with the wheel in it, and is asked, in an empty folder, to import every
module, to show an entry of the troubleshooting page, and to run the quickstart of the source
distribution. Environments stay in the folder of ``--logs``, where a later call finds them; each takes
some 5 GB of disk where torch comes with CUDA libraries. With ``--resolve``, pip says which versions it
would install, and the package's files are compiled by the Python that runs this. Ends with a table;
the exit status is the number of rows that failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = {  # a test compares them with pyproject.toml
    "torch": "2.6.0",
    "lightning": "2.6.0",
    "opacus": "1.6.0",
    "torchmetrics": "1.4.0",
    "numpy": "1.26.0",
    "scipy": "1.11.1",
    "filelock": "3.12.0",
    "jinja2": "3.1.0",
}
SHOWN = ("torch", "lightning", "opacus", "numpy")
_IMPORT_ALL = """
import importlib, pkgutil, lightning_dp, lightning_dp.callbacks
skipped = "lightning_dp.federated.flower"  # it needs Flower
names = [m.name for m in pkgutil.walk_packages(lightning_dp.__path__, "lightning_dp.")]
for name in names:
    if not name.startswith(skipped) and not name.endswith("__main__"):
        importlib.import_module(name)
"""


@dataclass(frozen=True)
class Row:
    python: str
    versions: tuple[str, ...]
    result: str
    seconds: float
    is_good: bool

    def __str__(self) -> str:
        cells = (self.python, *self.versions, self.result, f"{self.seconds:.0f} s")
        return f"| {' | '.join(cells)} |"


def build(folder: Path) -> Path:
    """Return the folder of the unpacked source distribution, which holds the wheel in ``dist``."""
    checkout = folder / "checkout"
    checkout.mkdir()
    archive = folder / "checkout.tar"
    subprocess.run(["git", "archive", "-o", str(archive), "HEAD"], cwd=ROOT, check=True)
    unpack(archive, checkout)
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(checkout)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (source,) = (folder / "dist").glob("*.tar.gz")
    unpack(source, folder)
    return folder / source.name.removesuffix(".tar.gz")


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


def installed(python: str, wheel: Path, source: Path, pins: list[str], log: Path) -> Row:
    """Make an environment with the wheel next to the log, if there is none, and use it."""
    start, environment = time.monotonic(), log.with_suffix("")
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:

        def run(*command: str) -> int:
            done = subprocess.run(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            return done.returncode

        own = str(environment / "bin/python")
        if not environment.exists():
            run(python, "-m", "venv", str(environment))
        install = (own, "-m", "pip", "install", "--no-cache-dir", "--no-compile")
        steps: dict[str, Callable[[], int]] = {
            "install": lambda: run(*install, f"{wheel}[examples]", *pins),
            "replace": lambda: run(*install, "--no-deps", "--force-reinstall", str(wheel)),
            "import": lambda: run(own, "-c", _IMPORT_ALL),
            "help": lambda: run(own, "-m", "lightning_dp.help", "batch-norm"),
            "quickstart": lambda: run(own, str(source / "examples/quickstart.py")),
        }
        failed = next((name for name, step in steps.items() if step()), None)
        versions = tuple(version_in(own, name) for name in SHOWN)
    result = "run" if failed is None else f"FAILED: {failed}"
    return Row(version_of(python), versions, result, time.monotonic() - start, failed is None)


def resolved(python: str, wheel: Path, source: Path, pins: list[str], log: Path) -> Row:
    """Ask pip what it would install for that Python, and compile the sources."""
    start, version = time.monotonic(), python.removeprefix("python")
    with tempfile.TemporaryDirectory() as folder:
        report, new = Path(folder) / "report.json", str(Path(folder) / "venv/bin/python")
        subprocess.run([sys.executable, "-m", "venv", str(Path(folder) / "venv")], check=True)
        # pip 23 compares Requires-Python with the Python that runs it, not with the one asked for.
        subprocess.run([new, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        command = [new, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), "--python-version", version]
        command += ["--only-binary", ":all:", "--target", folder, str(wheel), *pins]
        done = subprocess.run(command, capture_output=True, text=True)
        log.write_text(done.stdout + done.stderr)
        found = json.loads(report.read_text())["install"] if report.exists() else []
    named = {each["metadata"]["name"]: each["metadata"]["version"] for each in found}
    compile_all = [sys.executable, "-m", "compileall", "-q", str(source / "lightning_dp")]
    is_good = done.returncode == 0 and subprocess.run(compile_all).returncode == 0
    versions = tuple(named.get(name, "?") for name in SHOWN)
    result = "resolved" if is_good else "FAILED: resolve"
    return Row(version, versions, result, time.monotonic() - start, is_good)


def version_of(python: str) -> str:
    said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split()[1]


def version_in(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return (
        subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() or "?"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", required=True, help="3.12, or a path")
    parser.add_argument("--oldest", action="store_true", help="the oldest libraries allowed")
    parser.add_argument("--resolve", action="store_true", help="install nothing")
    parser.add_argument("--pin", action="append", default=[], help="such as torch==2.13.0")
    parser.add_argument("--logs", type=Path, help="folder for output and environments")
    options = parser.parse_args()

    logs = options.logs or Path(tempfile.mkdtemp(prefix="pythons-"))
    logs.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}=={version}" for name, version in OLDEST.items()] if options.oldest else []
    check = resolved if options.resolve else installed
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = build(Path(folder))
        (wheel,) = (Path(folder) / "dist").glob("*.whl")
        for name in options.python:
            python = name if "/" in name else f"python{name}"
            which = "oldest" if options.oldest else "newest"
            version = name if options.resolve else version_of(python)
            log = logs / f"python-{version}-{which}.log"
            rows.append(check(python, wheel, source, [*pins, *options.pin], log))
            print(rows[-1], log, flush=True)
    print(f"\n| Python | {' | '.join(SHOWN)} | result | time |")
    print("\n".join(map(str, rows)))
    return sum(not row.is_good for row in rows)


if __name__ == "__main__":
    sys.exit(main())
