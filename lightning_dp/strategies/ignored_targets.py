"""Real batches, watched for targets that the loss ignores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dp.isolation import Isolation
from lightning_dp.isolation.ignored import target_means
from lightning_dp.isolation.synthetic import leaves_of

__all__ = ["IGNORED", "IgnoredTargets"]

IGNORED = (
    "{}: the loss divides by the number of targets that it does not ignore (ignore_index) in the "
    "whole batch, and a batch has ignored ones, so records change each other's gradients. Take the "
    "loss of each record first, with reduction='none' and the record's own denominator, and then its "
    "mean over the records."
)


class IgnoredTargets:
    """Looks where the isolation probe found that ignored targets would couple records.

    What it finds stays a tensor, so that no device is waited for.

    Args:
        found: what the probe found.
    """

    def __init__(self, found: Isolation) -> None:
        self._found = found

    def in_loss(self, loss: Tensor) -> list[Tensor]:
        """For each mean over targets whether it ignores one; before the backward pass."""
        if not self._found.is_mean_of_targets:
            return []
        return [mean.ignores_some for mean in target_means(loss)]

    def in_batch(self, batch: Any) -> list[Tensor]:
        """The same for losses written by hand, by the values that the probe tried."""
        if not self._found.sentinels:
            return []
        leaves = leaves_of(batch)
        return [
            (leaves[place] == sentinel).any()
            for place, sentinel in self._found.sentinels
            if place < len(leaves) and not torch.is_floating_point(leaves[place])
        ]
