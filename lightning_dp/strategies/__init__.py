"""Lightning strategies that train privately."""

from lightning_dp.report.files import CHECKPOINT_KEY
from lightning_dp.strategies.ready_made import (
    PrivateDDPStrategy,
    PrivateSingleDeviceStrategy,
    make_private,
)
from lightning_dp.strategies.strategy import DifferentialPrivacyStrategy

__all__ = [
    "CHECKPOINT_KEY",
    "DifferentialPrivacyStrategy",
    "PrivateDDPStrategy",
    "PrivateSingleDeviceStrategy",
    "make_private",
]
