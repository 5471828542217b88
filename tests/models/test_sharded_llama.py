"""A Llama of transformers in two real processes (gloo), sharded by FSDP2."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs transformers (the extra 'language-models')", allow_module_level=True)

JOB = Path(__file__).parent / "llama_job.py"


def trained(file: Path, processes: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, JOB, file, str(processes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def test_clipped_steps_on_shards_are_those_of_one_process(tmp_path: Path) -> None:
    """Its norms are written by hand, its head is its embedding, its blocks run again."""
    whole, sharded = trained(tmp_path / "one.pt", 1), trained(tmp_path / "two.pt", 2)
    assert whole["steps"] == sharded["steps"] == 3
    torch.testing.assert_close(sharded["weights"], whole["weights"], rtol=0, atol=1e-6)
    assert "compared on synthetic samples" in sharded["report"]
