"""Leaves of a batch that hold records, and such as do not: settled by two sizes, never by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dp.functional import flatten
from lightning_dp.gradients import RecordPasses, UnsupportedModelError
from lightning_dp.gradients.batches import Layout, SampleBatch
from tests.gradients.models import EXAMPLES
from tests.gradients.test_contract import N, made, only, trained


def collated(n: int) -> dict[str, Any]:
    """A batch of n, as a collate_fn of one's own makes it."""
    return {
        "x": torch.arange(6.0 * n).view(n, 6) / 10, "y": torch.arange(n) % 3, "k": 2.0,
        "table": torch.linspace(-1, 1, N * 6).view(N, 6), "names": ["ab"[i % 2] for i in range(n)],
    }  # fmt: skip


def test_which_leaves_hold_records_is_settled_by_two_sizes():
    layout = Layout.of(collated(2), collated(3))
    assert layout.holds_samples == (True, True, False, False, True)
    assert Layout.of([torch.ones(4)], [torch.ones(6)]).holds_samples == (None,)
    assert Layout.of({"n": 2}, {"n": 3}).holds_samples == (None,)
    assert Layout.of([1.0], [1.0, 2.0]).holds_samples == (None,)


def test_a_size_that_happens_to_be_that_of_the_batch_is_not_taken_for_records():
    module, _ = made(EXAMPLES["mlp"])
    module.float()

    def loss(batch: dict[str, Any]) -> Tensor:
        assert batch["table"].shape == (N, 6) and batch["k"] == 2.0
        signs = torch.tensor([1.0 if name == "a" else -1.0 for name in batch["names"]])
        x = batch["x"] * signs[:, None] + batch["table"].sum(0) * batch["k"]
        return F.cross_entropy(module(x), batch["y"])

    batch, found, expected = collated(N), [], []
    for i in range(N):
        one = {**batch, **{k: batch[k][i : i + 1] for k in ("x", "y", "names")}}
        parts = torch.autograd.grad(loss(one), trained(module))
        expected.append(flatten(parts).norm().double())
    for engine in ("records", "one_by_one"):
        choice = only(engine)
        choice.layout = Layout.of(collated(2), collated(3))
        with RecordPasses(module, trained(module), choice) as passes:
            found = passes.run(loss, batch, N).norms()
        torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4, 2), "k": torch.tensor(1.0)},
        {"x": torch.ones(4, 2), "y": torch.ones(3)},
        {"x": torch.ones(4, 2), "y": torch.ones(8, 2)},
        {"x": torch.ones(4, 2), "names": ["a", "b"]},
        {"x": torch.ones(4, 2), "numbers": [1, 2, 3, 4]},
    ],
    ids=["no dimension", "shorter", "longer", "fewer texts", "list of numbers"],
)
def test_a_batch_that_cannot_be_taken_apart_is_refused(batch):
    with pytest.raises(UnsupportedModelError, match="no entry for each record"):
        SampleBatch(batch, 4).check()
