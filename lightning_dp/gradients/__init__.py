"""Gradients of single records: the engines that compute them, and the passes that ask for them."""

from __future__ import annotations

from lightning_dp.gradients.base import (
    ALONE,
    AbstractGradientEngine,
    OtherRowsError,
    UncoveredParameterError,
    UnsupportedModelError,
)
from lightning_dp.gradients.engines import EngineChoice
from lightning_dp.gradients.graph import CoupledLossError
from lightning_dp.gradients.passes import (
    RawGradientGuard,
    RawGradientHookError,
    RecordPasses,
    Replay,
)

__all__ = [
    "ALONE",
    "AbstractGradientEngine",
    "CoupledLossError",
    "EngineChoice",
    "OtherRowsError",
    "RawGradientGuard",
    "RawGradientHookError",
    "RecordPasses",
    "Replay",
    "UncoveredParameterError",
    "UnsupportedModelError",
]
