"""The tests in ``on_device`` need a process that has met the device before its first backward pass."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

LIBRARY = os.environ.get("LIGHTNING_DP_PRETENDED_DEVICE")

if LIBRARY is None:
    collect_ignore = ["on_device"]
else:
    import device

    device.register(Path(LIBRARY))
