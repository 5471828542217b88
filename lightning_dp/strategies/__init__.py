"""Lightning strategies that train privately."""

from lightning_dp.strategies.hooks import PrivacyCallback
from lightning_dp.strategies.install import install
from lightning_dp.strategies.strategy import DifferentialPrivacyStrategy

__all__ = [
    "DifferentialPrivacyStrategy",
    "PrivacyCallback",
    "install",
]
