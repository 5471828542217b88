"""Doors to private training, and all that users see of a run: callbacks of a Lightning Trainer.

Installed as ``lightning_dp.callbacks``. The two strategies, which bring all that trains, are imported
when they are first asked for, by class or by the names that Lightning registers for them.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp.callbacks.differential_privacy import DifferentialPrivacy
from lightning_dp.callbacks.privacy_logger import PrivacyLogger
from lightning_dp.callbacks.privacy_report_files import PrivacyReportFiles
from lightning_dp.callbacks.random_iterate import RandomIterate

if TYPE_CHECKING:
    from lightning_dp.callbacks.private_strategies import (
        PrivateDDPStrategy,
        PrivateSingleDeviceStrategy,
    )

__all__ = [
    "DifferentialPrivacy",
    "PrivacyLogger",
    "PrivacyReportFiles",
    "PrivateDDPStrategy",
    "PrivateSingleDeviceStrategy",
    "RandomIterate",
]

_STRATEGIES = {
    "private_single_device": "PrivateSingleDeviceStrategy",
    "private_ddp": "PrivateDDPStrategy",
}


def __getattr__(name: str) -> Any:
    if name not in _STRATEGIES.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_dp.callbacks import private_strategies

    return getattr(private_strategies, name)


def _make(kind: str) -> Any:
    return __getattr__(kind)()


for _name, _kind in _STRATEGIES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name,
            partial(_make, _kind),
            description="Private training, configured by the DifferentialPrivacy callback",
        )
