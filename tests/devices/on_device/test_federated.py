"""A client that computes on the device; what it is asked comes in messages, on the host."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE
from models import NETS, Model
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_dp.boundary import Query, Term
from lightning_dp.federated.local import LocalRecords

SIZE = 83


def point(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) / 3


QUERIES = {
    "gradient": Query((Term(1.0, point(1)),), 0.5, 1.0),
    "difference": Query((Term(1.0, point(1)), Term(-0.5, point(2))), 0.5, 1.0),
    "product": Query(
        (Term(1.0, point(1)), Term(1.0, point(1), direction=point(3))),
        clip_norm=0.5,
        noise_multiplier=1.0,
        coordinates=torch.arange(0, SIZE, 4),
    ),
}


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("query", QUERIES)
def test_a_client_answers_as_on_the_cpu(query: str, unit: str) -> None:
    answers = []
    for where in (DEVICE, "cpu"):
        torch.manual_seed(0)
        model = Model(NETS["mlp"]["net"](), torch.optim.SGD)
        data = TensorDataset(torch.randn(20, 6), torch.arange(20) % 3)
        local = LocalRecords(model, data, unit=unit, chunk_size=8, device=where)
        chosen = range(20) if unit == "client" else [0, 3, 4, 5, 11, 12, 13, 14, 15, 19]
        answers.append(local.bounded_sum(QUERIES[query], list(chosen)).value.cpu())
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-6)
    assert answers[0].any()
