"""Rounds that fail half-way, and rounds that were refused, asked for again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_dp import CubicNewton
from lightning_dp.accounting import PoissonGaussian
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.synchronous import QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import Poisson
from lightning_dp.schedules import Constant

SIZE, RECORDS = 4, 30


class ThreeTimes(CubicNewton):
    """Three questions on one batch, all about gradients."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0, 3)

    def ask(self, state, params, step, noise_multiplier):
        return super().ask({**state, "offset": None}, params, step, noise_multiplier)

    def recall(self, query, step, part):
        return {**super().recall(query, step, part), "offset": None}


def failing(log_cosh, at: int) -> Any:
    """Records of which the ``at``-th question fails, once."""

    class Failing(log_cosh):
        def bounded_sum(self, query, records):
            if len(self.asked) == at:
                self.asked.append((query, list(records)))
                raise OSError("record-17.png cannot be read")
            return super().bounded_sum(query, records)

    return Failing(RECORDS)


@pytest.mark.parametrize("at", range(3))
def test_an_error_between_the_queries_of_a_round_costs_no_second_charge(log_cosh, tmp_path, at):
    """One batch and one charge for all queries; what was sent before comes again as it was."""
    data, plan = failing(log_cosh, at), NoisePlan(2.0, Constant(), Poisson(), 0.3, ThreeTimes())
    start = torch.zeros(SIZE, dtype=torch.float64)
    server = SynchronousServer(
        "trial", plan, start, 1, 1, RECORDS, learning_rate=0.1, noise="client"
    )
    settings = {"run": "trial", "rounds": 1, "target_epsilon": math.inf, "target_delta": 1e-5}
    ledger = ReleaseLedger(tmp_path, "data")
    sent: list[tuple[bytes, bytes]] = []
    failures = 0
    while not server.is_done:
        request = server.request(0)
        client = QueryClient(data, plan, ledger, **settings)
        try:
            reply = client.answer(request)
        except OSError:
            failures += 1
            for old_request, old_reply in sent:
                assert client.answer(old_request) == old_reply
            continue
        sent.append((request, reply))
        server.receive(0, reply)
    assert failures == 1 and len(sent) == 3
    assert ledger.history() == [(PoissonGaussian(2.0, 0.3), 1)]
    assert len({tuple(batch) for _, batch in data.asked}) == 1
