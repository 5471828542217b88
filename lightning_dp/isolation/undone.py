"""State that a record's step changes, and that is put back where records run alone."""

from __future__ import annotations

from typing import Any

from lightning_dp.gradients.compiled import as_written
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.pools import pool_that_runs
from lightning_dp.isolation.synthetic import ValidLabels, take_rows

__all__ = ["UNDONE", "changed_by_a_record"]

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
            return passes.changed_by(take_rows(pool_that_runs(passes, like), [0]))
        except Exception:  # of the model's own
            return ()
