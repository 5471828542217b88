"""The strategy door: strategies that train privately, by class and by registered name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

from lightning_dp.config import PrivacyConfig
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.strategy import DifferentialPrivacyStrategy

__all__ = ["PrivateDDPStrategy", "PrivateSingleDeviceStrategy", "make_private"]


class PrivateSingleDeviceStrategy(DifferentialPrivacyStrategy, SingleDeviceStrategy):
    """Private training on one device.

    Args:
        device: "cpu", "cuda:0", ...
        privacy: the configuration; None when a DifferentialPrivacy callback gives it.

    Example:
        >>> from lightning_dp import PrivacyConfig
        >>> privacy = PrivacyConfig(target_epsilon=3.0, target_delta=1e-5)
        >>> PrivateSingleDeviceStrategy("cpu", privacy=privacy).private_run.epsilon
        0.0
    """

    strategy_name = "private_single_device"

    def __init__(
        self, device: str | torch.device = "cpu", *, privacy: PrivacyConfig | None = None
    ) -> None:
        super().__init__(device)
        if privacy is not None:
            self.use_privacy(PrivateRun(privacy))


class PrivateDDPStrategy(DifferentialPrivacyStrategy, DDPStrategy):
    """Private training on several devices: each rank draws its own part of every batch.

    Rank 0 draws the noise once and writes the ledger. There is no DDP wrapper, so options of
    ``DistributedDataParallel`` (buckets, communication hooks) do not exist here.

    Args:
        privacy: the configuration; None when a DifferentialPrivacy callback gives it.
        process_group_backend: "gloo" or "nccl"; default by device.
        timeout: of collectives.
    """

    strategy_name = "private_ddp"

    def __init__(
        self,
        *,
        privacy: PrivacyConfig | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if privacy is not None:
            self.use_privacy(PrivateRun(privacy))


def make_private(
    strategy: Strategy, kind: type[DifferentialPrivacyStrategy] = DifferentialPrivacyStrategy
) -> DifferentialPrivacyStrategy:
    """Make the strategy a private one, in place: the Trainer keeps the object it chose.

    Its class becomes a subclass of the mixin and the class it had. Replacing the object would
    lose what the Trainer has connected to it already.
    """
    if not isinstance(strategy, DifferentialPrivacyStrategy):
        strategy.__class__ = _private_class(kind, type(strategy))
    assert isinstance(strategy, DifferentialPrivacyStrategy)
    return strategy


def _private_class(kind: type, base: type) -> Any:
    return type(f"Private{base.__name__}", (kind, base), {"__reduce_ex__": _reduce})


def _reduce(strategy: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle an object whose class has no name to import as what the class is made from."""
    reduced: Any = object.__reduce_ex__(strategy, max(2, protocol))  # (constructor, class, state)
    return _new, type(strategy).__bases__, *reduced[2:]


def _new(kind: type, base: type) -> Any:
    made = _private_class(kind, base)
    return made.__new__(made)


for _strategy in (PrivateSingleDeviceStrategy, PrivateDDPStrategy):
    if _strategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            _strategy.strategy_name,
            _strategy,
            description="Private training, configured by the DifferentialPrivacy callback",
        )
