"""Lightning callbacks and strategies for private training.

Installed as ``lightning_dp.callbacks``. The two strategies, which bring all that trains, are imported
when they are first asked for, by class or by the names that Lightning registers for them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dp._lazy import names_from
from lightning_dp.callbacks.differential_privacy import DifferentialPrivacy
from lightning_dp.callbacks.privacy_advice import PrivacyAdvice
from lightning_dp.callbacks.privacy_logger import PrivacyLogger
from lightning_dp.callbacks.privacy_report_files import PrivacyReportFiles

if TYPE_CHECKING:
    from lightning_dp.callbacks.private_strategies import (
        PrivateDDPStrategy,
        PrivateSingleDeviceStrategy,
    )
else:
    __getattr__ = names_from(__name__, "private_strategies")

__all__ = [
    "DifferentialPrivacy",
    "PrivacyAdvice",
    "PrivacyLogger",
    "PrivacyReportFiles",
    "PrivateDDPStrategy",
    "PrivateSingleDeviceStrategy",
]

_STRATEGIES = {
    "private_single_device": "PrivateSingleDeviceStrategy",
    "private_ddp": "PrivateDDPStrategy",
}


def _make(kind: str) -> Any:
    from lightning_dp.callbacks import private_strategies

    return getattr(private_strategies, kind)()


for _name, _kind in _STRATEGIES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name,
            partial(_make, _kind),
            description="Private training, configured by the DifferentialPrivacy callback",
        )
