"""Rows that are not records: which record each row of a tensor belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lightning_dp.gradients.base import UnsupportedModelError

__all__ = ["AbstractFolding", "Folded", "Owned"]


class AbstractFolding(ABC):
    """Brings the rows of each record together, in tensors of N rows."""

    records: int
    """n, how many there are."""

    @abstractmethod
    def apart(self, rows: Tensor) -> Tensor:
        """Return shape (n, f, ...) for shape (N, ...), f the most rows that a record has, and at least 1.

        Where a record has fewer, zeros follow.

        Raises:
            UnsupportedModelError: if N is another number of rows.
        """

    @abstractmethod
    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum over the rows of each record: shape (n, ...) for shape (N, ...).

        Raises:
            UnsupportedModelError: if N is another number of rows.
        """


@dataclass(frozen=True)
class Folded(AbstractFolding):
    """Equal numbers of rows: the one with index (o · n + i) · inner + k belongs to record i.

    Args:
        records: n, their number.
        outer: how many values o takes: 1 where the rows of a record follow each other, f for
            ``x.transpose(0, 1).flatten(0, 1)``, where the records of a frame do.
        inner: how many values k takes.

    Example:
        >>> import torch
        >>> Folded(2, outer=1, inner=3).apart(torch.arange(6)).tolist()
        [[0, 1, 2], [3, 4, 5]]
        >>> Folded(2, outer=3, inner=1).apart(torch.arange(6)).tolist()
        [[0, 2, 4], [1, 3, 5]]
    """

    records: int
    outer: int = 1
    inner: int = 1

    def apart(self, rows: Tensor) -> Tensor:
        parts = self._split(rows)
        if self.outer == 1:
            return parts[0]
        return parts.transpose(0, 1).flatten(1, 2)

    def sums(self, rows: Tensor) -> Tensor:
        return self._split(rows).sum((0, 2))

    def _split(self, rows: Tensor) -> Tensor:
        sizes = self.outer, self.records, self.inner
        _check_rows(rows, self.outer * self.records * self.inner)
        return rows.reshape(*sizes, *rows.shape[1:])


@dataclass(frozen=True, eq=False)
class Owned(AbstractFolding):
    """Rows with an owner each, as many of a record as it has.

    Args:
        records: n, their number.
        owners: shape (N,), whole numbers from 0 to n - 1.

    Example:
        >>> import torch
        >>> owned = Owned(3, torch.tensor([0, 2, 0]))
        >>> owned.apart(torch.tensor([5, 6, 7])).tolist()
        [[5, 7], [0, 0], [6, 0]]
        >>> owned.sums(torch.tensor([5, 6, 7])).tolist()
        [12, 0, 6]
    """

    records: int
    owners: Tensor

    def apart(self, rows: Tensor) -> Tensor:
        _check_rows(rows, len(self.owners))
        owners = self.owners.to(rows.device)
        order = owners.argsort(stable=True)
        counts = owners.bincount(minlength=self.records)
        most = max(1, int(counts.max()) if len(counts) else 0)
        sorted_owners = owners[order]
        start = counts.cumsum(0) - counts
        own_place = owners.new_ones(len(owners)).cumsum(0) - 1 - start[sorted_owners]
        padded = rows.new_zeros(self.records * most, *rows.shape[1:])
        padded.index_copy_(0, sorted_owners * most + own_place, rows[order])
        return padded.view(self.records, most, *rows.shape[1:])

    def sums(self, rows: Tensor) -> Tensor:
        _check_rows(rows, len(self.owners))
        total = rows.new_zeros(self.records, *rows.shape[1:])
        return total.index_add_(0, self.owners.to(rows.device), rows)


def _check_rows(rows: Tensor, expected: int) -> None:
    if len(rows) != expected:
        raise UnsupportedModelError(
            "was called with another number of rows than its records are known to have. Keep the "
            "rows of every record together: leave none out by what is in them.",
            topic="rows-and-records",
        )
