"""Marks of tests that older versions of torch cannot run."""

from __future__ import annotations

import pytest
import torch

fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 runs on CPUs from torch 2.7 on."
)
