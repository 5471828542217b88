"""Callbacks for a Lightning Trainer; installed as ``lightning_dp.callbacks``."""

from lightning_dp.callbacks.differential_privacy import DifferentialPrivacy

__all__ = ["DifferentialPrivacy"]
