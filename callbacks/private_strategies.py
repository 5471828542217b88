"""Lightning strategies that train privately."""

from __future__ import annotations

from datetime import timedelta

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    SingleDeviceStrategy,
)

from lightning_dp.callbacks.privacy_advice import PrivacyAdvice
from lightning_dp.callbacks.privacy_logger import PrivacyLogger
from lightning_dp.callbacks.privacy_report_files import PrivacyReportFiles
from lightning_dp.config import PrivacyConfig
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.strategy import DifferentialPrivacyStrategy


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
            self.use_privacy(
                PrivateRun(privacy), PrivacyLogger(), PrivacyAdvice(), PrivacyReportFiles()
            )


class PrivateDDPStrategy(DifferentialPrivacyStrategy, DDPStrategy):
    """Private training on several devices: each rank draws its own part of every batch.

    Each rank draws the noise of its share of the weights, and rank 0 writes the ledger. There is no DDP
    wrapper, so options of ``DistributedDataParallel`` (buckets, communication hooks) do not exist here.

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
            self.use_privacy(
                PrivateRun(privacy), PrivacyLogger(), PrivacyAdvice(), PrivacyReportFiles()
            )
