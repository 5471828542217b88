"""A federation as real processes: the model and the ledgers are those of the loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

import torch
from processes import LoopbackFederation

from tests.federated.zoo import CLIENTS, TWO_ROUNDS, history

APP = Path(__file__).parent / "app"
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def processes(folder: Path, clients: int = CLIENTS, **changes) -> LoopbackFederation:
    return LoopbackFederation(folder / "flower", clients, environment=ENVIRONMENT, **changes)


def check_end(folder: Path) -> None:
    end = torch.load(folder / "server" / "model.pt", weights_only=True)["x"]
    torch.testing.assert_close(end, TWO_ROUNDS.twin(), rtol=0, atol=5e-10)
    for c in range(CLIENTS):
        assert dict(history(folder / "ledgers", f"client-{c}")) == dict(TWO_ROUNDS.events(c))


def test_the_simulation_ends_at_the_same_model(tmp_path):
    pytest.importorskip("ray", reason="needs lightning-dp[federated-sim]")
    with processes(tmp_path, simulation=True) as federation:
        federation.run(APP, {"out": str(tmp_path)})
    check_end(tmp_path)


STARTS = """
import sys, time
sys.path.insert(0, sys.argv[3])
from processes import LoopbackFederation
with LoopbackFederation(sys.argv[1], 1):
    print("up", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def alive(folder: Path) -> list[str]:
    """The command lines of processes whose FLWR_HOME this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("is_killed", [False, True])
def test_no_process_is_left_when_the_starting_one_is_gone(tmp_path, is_killed):
    arguments = [str(tmp_path), "600" if is_killed else "2", str(ROOT / "examples" / "federated")]
    process = subprocess.Popen([sys.executable, "-c", STARTS, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    commands = {Path(part).name for line in alive(tmp_path) for part in line.split()}
    assert {"flower-superlink", "flower-supernode"} <= commands
    if is_killed:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 20
    while alive(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(tmp_path) == []
