"""Lightning strategies that train privately."""

from lightning_dp.strategies.mixin import CHECKPOINT_KEY, DifferentialPrivacyStrategy
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
