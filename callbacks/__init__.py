"""Doors to private training, and all that users see of a run: callbacks of a Lightning Trainer.

Installed as ``lightning_dp.callbacks``.
"""

from lightning_dp.callbacks.differential_privacy import DifferentialPrivacy
from lightning_dp.callbacks.privacy_logger import PrivacyLogger
from lightning_dp.callbacks.privacy_report_files import PrivacyReportFiles
from lightning_dp.callbacks.private_strategies import (
    PrivateDDPStrategy,
    PrivateSingleDeviceStrategy,
)
from lightning_dp.callbacks.random_iterate import RandomIterate

__all__ = [
    "DifferentialPrivacy",
    "PrivacyLogger",
    "PrivacyReportFiles",
    "PrivateDDPStrategy",
    "PrivateSingleDeviceStrategy",
    "RandomIterate",
]
