"""The processes that share a step: one, or the ranks of a distributed job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["World"]


def _only_this(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class World:
    """The processes that share one step.

    Args:
        rank: this process, 0 <= rank < size. Rank 0 writes the ledger.
        size: number of processes.
        all_reduce: sums a flat vector over all processes and gives each the total.
        broadcast: gives every process what rank 0 passed.
        is_sharded: flat vectors hold this process's part of the parameters (FSDP2), and a sum over
            records is added up over all processes as it is made. If not, each process has them whole.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _only_this
    broadcast: Callable[[Any], Any] = _only_this
    is_sharded: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"World(rank={self.rank}, size={self.size}): need 0 <= rank < size.")

    @property
    def is_lead(self) -> bool:
        """True on the one process that writes the ledger."""
        return self.rank == 0

    def share(self, size: int) -> slice:
        """Return the entries of a vector of length ``size`` that this process draws noise for.

        Each entry is in the share of one process, and shares differ by one entry at most.

        Example:
            >>> [World(rank, 3).share(8) for rank in range(3)]
            [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        return slice(self.rank * size // self.size, (self.rank + 1) * size // self.size)
