"""Callbacks for a Lightning Trainer; installed as ``lightning_dp.callbacks``."""

from lightning_dp.callbacks.differential_privacy import DifferentialPrivacy
from lightning_dp.callbacks.random_iterate import RandomIterate

__all__ = ["DifferentialPrivacy", "RandomIterate"]
