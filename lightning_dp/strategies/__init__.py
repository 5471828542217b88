"""Lightning strategies that train privately."""

from lightning_dp.report.documents import CHECKPOINT_KEY
from lightning_dp.strategies.mixin import DifferentialPrivacyStrategy
from lightning_dp.strategies.ready_made import (
    PrivateDDPStrategy,
    PrivateSingleDeviceStrategy,
    make_private,
)

__all__ = [
    "CHECKPOINT_KEY",
    "DifferentialPrivacyStrategy",
    "PrivateDDPStrategy",
    "PrivateSingleDeviceStrategy",
    "make_private",
]
