"""Flower's processes live as long as the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

STARTS = """
import sys, time
from lightning_dp.testing import LoopbackFederation
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("is_killed", [False, True])
def test_no_process_is_left_when_the_starting_one_is_gone(tmp_path, is_killed):
    arguments = [str(tmp_path), "600" if is_killed else "2"]
    process = subprocess.Popen([sys.executable, "-c", STARTS, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert {"flower-superlink", "flower-supernode"} <= {
        Path(part).name for line in alive(tmp_path) for part in line.split()
    }

    if is_killed:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()

    end = time.monotonic() + 20
    while alive(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(tmp_path) == []
