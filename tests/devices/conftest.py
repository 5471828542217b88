"""The tests in ``on_device`` need a device: the accelerator at hand, or a pretended one.

A process has to meet the pretended one before its first backward pass.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import device

if device.DEVICE is None:
    collect_ignore = ["on_device"]
elif device.LIBRARY is not None:
    device.register(Path(device.LIBRARY))
