"""A network and its records, answering queries through the package's engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_dp.boundary import BoundedSum, Query
from lightning_dp.gradients import RecordPasses, Replay
from lightning_dp.gradients.passes import passes_of


@dataclass
class Trainee:
    """A network, and the records that it is asked about."""

    net: nn.Module
    x: Tensor
    y: Tensor
    unit = "record"

    def __post_init__(self) -> None:
        self.params = list(self.net.parameters())
        self.passes = RecordPasses(self.net, self.params, "layers")
        self.evaluations = 0

    @property
    def num_records(self) -> int:
        return len(self.y)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        """The answer of some records; an empty batch answers with nothing."""
        chosen = torch.as_tensor(records, dtype=torch.int64)
        batch = self.x[chosen], self.y[chosen]
        self.evaluations += len(chosen) * len(passes_of(query))
        answer = self.passes.answer(query, Replay(self.loss, batch, len(chosen)))
        return BoundedSum.empty(query, self.params) if answer is None else answer

    @torch.no_grad()
    def measure(self, records: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """Cross-entropy and accuracy; infinite and 0 once the parameters are not finite."""
        outputs, y = self.net(records[0]), records[1]
        loss = float(nn.functional.cross_entropy(outputs, y))
        if not math.isfinite(loss):
            return math.inf, 0.0
        return loss, float((outputs.argmax(1) == y).float().mean())
