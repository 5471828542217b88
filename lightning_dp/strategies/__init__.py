"""Lightning strategies that train privately."""

from lightning_dp.report.files import CHECKPOINT_KEY
from lightning_dp.strategies.hooks import PrivacyCallback
from lightning_dp.strategies.install import install
from lightning_dp.strategies.strategy import DifferentialPrivacyStrategy

__all__ = [
    "CHECKPOINT_KEY",
    "DifferentialPrivacyStrategy",
    "PrivacyCallback",
    "install",
]
