"""Functions with a rule, on records in any place, against one record at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients.bookkeeping import Bookkeeping


class Direct(nn.Module):
    """Every function with a rule, on rows that are folded into the batch in some order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.inside = nn.Parameter(torch.randn(5, 6))
        self.outside = nn.Parameter(torch.randn(4, 6))
        self.bias, self.gain = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(9, 6))
        self.head = nn.Linear(6, 3)

    def fold(self, x: Tensor) -> Tensor:
        if self.order == "records":
            return x.flatten(0, 1)
        x = x.transpose(0, 1)
        return x.flatten(0, 1) if self.order == "frames" else x

    def unfold(self, x: Tensor, n: int) -> Tensor:
        if self.order == "records":
            return x.view(n, -1, 6).mean(1)
        return (x.view(-1, n, 6) if self.order == "frames" else x).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.fold(x)
        hidden = rows @ self.inside + self.bias
        if rows.dim() == 2:
            hidden = torch.addmm(self.bias, rows, self.inside)
        tokens = (rows[..., 0].abs() * 3).long().clamp(max=8)
        hidden = torch.tanh(hidden) * self.gain + F.embedding(tokens, self.table)
        hidden = torch.matmul(torch.tanh(F.linear(hidden, self.outside)), self.outside)
        return self.head(self.unfold(hidden + self.bias, len(x)))


@pytest.mark.parametrize("records", [1, 3, 4])  # as many as frames, too
@pytest.mark.parametrize("order", ["records", "frames", "sequence"])
def test_rows_in_any_order_equal_one_record_at_a_time(order, records, oracle):
    torch.manual_seed(0)
    engine = Bookkeeping(traces=True)
    assert oracle.is_equal(engine, Direct(order), torch.randn(records, 3, 5))
    engine.detach()
