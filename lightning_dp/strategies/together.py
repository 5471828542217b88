"""Ranks agree whether a step may be released, so that all go on or all end."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

__all__ = ["Place", "common_fault"]

_APART = (
    "the ranks went apart: one of them stepped the optimizer, and another did not. Call "
    "optimizer.step() for every batch, whatever its records are."
)


class Place(IntEnum):
    """Where ranks meet in the course of a step."""

    NO_RELEASE = 0
    RELEASE = 1


def common_fault(
    fault: str | None,
    place: Place,
    *,
    rank: int,
    size: int,
    device: torch.device,
    sum_over_ranks: Callable[[Tensor], Tensor],
    broadcast: Callable[[Any, int], Any],
) -> str | None:
    """The first rank's fault on every rank; None if there is none anywhere.

    One small sum at each place. A rank that comes to another place than the others is a fault too,
    where it would be a dead-lock.

    Args:
        fault: what this rank found, or None.
        place: where it is.
        rank, size: this process and how many there are.
        device: where tensors must be to be summed.
        sum_over_ranks: gives every rank the sum of a vector.
        broadcast: gives every rank the object of one of them.
    """
    if size == 1:
        return fault
    told = torch.zeros(len(Place) + size, device=device)
    told[place] = 1.0
    told[len(Place) + rank] = float(fault is not None)
    together = sum_over_ranks(told).tolist()
    if round(together[place]) != size:
        return _APART
    faulty = [each for each in range(size) if together[len(Place) + each]]
    return broadcast(fault, faulty[0]) if faulty else None
