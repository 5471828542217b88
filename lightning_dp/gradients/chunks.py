"""A chunk of records that is run for a query, the point where it runs, and the faults that it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor, nn

from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import ALONE, Forward, UnsupportedModelError
from lightning_dp.gradients.random_state import RandomState

__all__ = [
    "OTHER_ROWS",
    "UNANSWERED",
    "NoLoss",
    "OtherRowsError",
    "Replay",
    "at_point",
    "is_differentiable",
]

UNANSWERED = (
    "{} gave no gradient for a chunk that has records (training_step returned no loss, nothing was "
    "back-propagated, or the loss does not depend on trained layers), and noise alone in its place "
    "would tell which records do that. Let the package zero records whose gradients are not finite: "
    "return the loss as it is, and don't skip batches."
)
OTHER_ROWS = (
    "the model saw more or fewer rows than the batch has records, so a record's gradient cannot be "
    "bounded. The collate_fn must make exactly one row of each record, and the model must keep "
    f"records in the first dimension. {ALONE}"
)


class NoLoss(Exception):
    """A run gave nothing to go back from."""


class OtherRowsError(UnsupportedModelError):
    """The model saw another number of rows than the chunk has records."""

    def __init__(self) -> None:
        super().__init__(f"{OTHER_ROWS[0].upper()}{OTHER_ROWS[1:]}", topic="rows-and-records")


def is_differentiable(loss: object) -> TypeGuard[Tensor]:
    """Tell whether there is anything to go back from."""
    return isinstance(loss, Tensor) and loss.requires_grad


@contextmanager
def at_point(params: Sequence[nn.Parameter], point: Tensor) -> Iterator[None]:
    """Inside, the parameters hold the flat vector ``point``; afterwards they are what they were."""
    kept = [param.data for param in params]
    for param, data in zip(params, unflatten(point, params), strict=True):
        param.data = data.to(param.device)
    try:
        yield
    finally:
        for param, data in zip(params, kept, strict=True):
            param.data = data


@dataclass(frozen=True)
class Replay:
    """A chunk of records that can be run as often as a query asks.

    Args:
        forward: runs a batch and returns its loss, the mean over the records, or None if it gives
            none. None if it cannot be run again.
        batch: what the records are in.
        size: how many records it has.
        randomness: as its first run found it; None if that run is still to come.
    """

    forward: Forward | None
    batch: Any
    size: int
    randomness: RandomState | None = None
