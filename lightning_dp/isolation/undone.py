"""State that a record's step changes, and that is put back where records run alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lightning_dp.gradients.compiled import as_written
from lightning_dp.isolation.collated import CollatedPool
from lightning_dp.isolation.module_state import ModuleState
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.pools import pool_that_runs
from lightning_dp.isolation.randomness import seed
from lightning_dp.isolation.synthetic import ValidLabels, take_rows

__all__ = ["UNDONE", "changed_by_a_record", "times_alone"]

_RECORDS = 4

UNDONE = (
    "training_step changes {}. With engine='one_by_one' each record begins with the state of the "
    "batch's beginning, so what training_step changes is undone and stays as it is. Count with "
    "self.global_step, collect with self.log or torchmetrics, and write other state in "
    "on_train_batch_end."
)


@as_written()
def changed_by_a_record(passes: Passes, like: Any) -> tuple[str, ...]:
    """Name buffers and attributes that a synthetic record changes; none where it cannot be tried.

    Args:
        passes: of the model.
        like: a batch, of which only shapes, dtypes and nesting are used.
    """
    with passes.quietly(), ValidLabels():
        try:
            return _changed(passes, take_rows(pool_that_runs(passes, like), [0]))
        except Exception:  # of the model's own
            return ()


def _changed(passes: Passes, batch: Any) -> tuple[str, ...]:
    """Name the buffers, attributes and variables that a forward pass changes."""
    with passes.on_copy() as module:
        seed()
        before = ModuleState.of(module)
        try:
            passes.forward(module, batch)
            found = before.differences(ModuleState.of(module))
        finally:
            before.restore()  # variables are not of the copy
    return tuple(each.name for each in found if each.kind in ("buffer", "attribute"))


@as_written()
def times_alone(passes: Passes, like: Any, pools: Sequence[CollatedPool] | None) -> float | None:
    """Return how many times as long made-up records take alone; None where it cannot be tried.

    Args:
        passes: of the model.
        like: a batch, of which only shapes, dtypes and nesting are used.
        pools: made-up batches, where rows are not records.
    """
    with passes.quietly(), ValidLabels():
        try:
            pool = pools[0] if pools else pool_that_runs(passes, like)

            def seconds(places: Sequence[int]) -> float:
                batch = pool.take(places) if pools else take_rows(pool, places)
                start = time.perf_counter()
                passes.loss(batch)
                return time.perf_counter() - start

            seconds(range(_RECORDS))
            return sum(seconds([i]) for i in range(_RECORDS)) / seconds(range(_RECORDS))
        except Exception:  # of the model's own
            return None
