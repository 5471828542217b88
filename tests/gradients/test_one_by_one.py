"""The engine of single records: all types of gradients as one row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp._refusals import RefusedRun
from lightning_dp.gradients.one_by_one import OneByOne


def test_gradients_of_all_types_and_shapes_are_one_row():
    """Sparse, unused, scalar and half-precision parameters."""
    torch.manual_seed(0)
    sparse, unused = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)
    half, scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.tensor(2.0))
    params = [*sparse.parameters(), *unused.parameters(), half, scale]
    engine = OneByOne(nn.Module(), params)
    engine.backward((sparse(torch.tensor([[3]])) * half * scale).sum())
    gradients = engine.take(1.0)
    row = gradients.weighted_sum(torch.ones(1))
    assert gradients.count == 1 and row.dtype == torch.float32
    dense = torch.zeros(5, 2)
    dense[3] = 2.0
    assert torch.equal(row[:10], dense.flatten()) and not row[10:16].any()
    torch.testing.assert_close(row[18], sparse.weight[3].sum().detach())


def test_nothing_is_taken_without_a_backward_pass():
    engine = OneByOne(nn.Module(), list(nn.Linear(2, 2).parameters()))
    with pytest.raises(RefusedRun, match=r"backward\(\) must come before take"):
        engine.take(1.0)
