"""Full batches: one step per epoch."""

from __future__ import annotations

import pytest

from lightning_dp.sampling import BatchPlan, FullBatch


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, 20),
        ({"batch_size": 300}, 4),
        ({"batch_size": 5000}, 1),
        ({"batch_size": 300, "accumulate": 4}, 4),
        ({"batch_size": 300, "world_size": 2}, 2),
        ({"batch_size": 100, "world_size": 3}, 4),  # shards of 334, 333, 333
    ],
)
def test_full_batch_plan_has_one_step_per_epoch_in_as_many_chunks_as_needed(
    changes, chunks, plan_of
):
    assert plan_of(FullBatch(), **changes) == BatchPlan(1000, 1.0, chunks, 1)


def test_full_batch_contradicting_the_trainer_is_refused(plan_of):
    with pytest.raises(
        ValueError, match=r"accumulate_grad_batches=3\) contradicts .* make 4 chunks"
    ):
        plan_of(FullBatch(), batch_size=300, accumulate=3)
