"""The public hint about rows whose records nothing in a model tells: graph nodes, packed texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from lightning_dp._validate import whole_from_0
from lightning_dp.gradients.base import UnsupportedModelError

__all__ = ["RowOwners", "folding_in_force", "rows_of_records"]


@dataclass(frozen=True, eq=False)
class RowOwners:
    """Brings the rows of each record together, as many as it has.

    Args:
        records: n, their number.
        owners: shape (N,), the record of each row: whole numbers from 0 to n - 1.

    Example:
        >>> import torch
        >>> RowOwners(3, torch.tensor([0, 2, 0]))(torch.tensor([5, 6, 7])).tolist()
        [[5, 7], [0, 0], [6, 0]]
    """

    records: int
    owners: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Return shape (n, f, ...) for shape (N, ...), f the most rows that a record has, at least 1.

        Where a record has fewer, zeros follow.

        Raises:
            UnsupportedModelError: if N is another number of rows.
        """
        if len(rows) != len(self.owners):
            raise UnsupportedModelError(
                "was called with another number of rows than its records are known to have. Keep the "
                "rows of every record together: leave none out by what is in them.",
                topic="rows-and-records",
            )
        owners, order = self.owners.to(rows.device).sort(stable=True)
        counts = owners.bincount(minlength=self.records)
        most = max(1, int(counts.max()) if len(counts) else 0)
        start = counts.cumsum(0) - counts
        own_place = owners.new_ones(len(owners)).cumsum(0) - 1 - start[owners]
        padded = rows.new_zeros(self.records * most, *rows.shape[1:])
        padded.index_copy_(0, owners * most + own_place, rows[order])
        return padded.view(self.records, most, *rows.shape[1:])


_in_force: ContextVar[RowOwners | None] = ContextVar("rows_of_records", default=None)


@contextmanager
def rows_of_records(owners: Tensor, records: int) -> Iterator[None]:
    """Inside, row j of every trained layer's input belongs to the record ``owners[j]`` of the batch.

    For models that see all graph nodes, tokens or crops of a batch in one tensor of N rows, where a
    record may have any number of them. Without private training it does nothing. Layers that see a
    row for each record are called outside. Contexts may stand inside each other; the inner one holds.

    Args:
        owners: shape (N,), whole numbers from 0 to ``records - 1``; ``batch.batch`` of a PyTorch
            Geometric batch.
        records: n, how many records the batch has, those without any row counted too.

    Raises:
        ValueError: if ``owners`` is no tensor of one dimension with whole numbers, or ``records`` no
            whole number of at least 0.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_dp import rows_of_records
        >>> embed, head = nn.Linear(3, 4), nn.Linear(4, 2)
        >>> def forward(nodes, owners, n):  # nodes of n graphs, one after the other
        ...     with rows_of_records(owners, n):
        ...         hidden = embed(nodes).relu()
        ...     return head(hidden.new_zeros(n, 4).index_add(0, owners, hidden))
        >>> forward(torch.ones(5, 3), torch.tensor([0, 0, 0, 1, 1]), 2).shape
        torch.Size([2, 2])
    """
    where = "rows_of_records"
    is_whole = isinstance(owners, Tensor) and not (
        owners.is_floating_point() or owners.is_complex() or owners.dtype.itemsize == 0
    )
    if not is_whole or owners.dim() != 1:
        seen = type(owners).__name__
        if isinstance(owners, Tensor):  # its size may be that of a private batch
            seen = f"a tensor of {owners.dim()} dimensions and {owners.dtype}"
        raise ValueError(
            f"{where}: owners is {seen}, where a tensor of shape (N,) with the whole number of each "
            "row's record is needed (batch.batch of a batch of graphs)."
        )
    count = whole_from_0("records", records, of=where)
    token = _in_force.set(RowOwners(count, owners.detach().clone()))
    try:
        yield
    finally:
        _in_force.reset(token)


def folding_in_force() -> RowOwners | None:
    """Return what the innermost :func:`rows_of_records` says; None outside of all."""
    return _in_force.get()
