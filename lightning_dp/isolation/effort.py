"""The work of a pass, known from shapes alone: models of which one takes long are probed in fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_dp.isolation.collated import CollatedPool
from lightning_dp.isolation.nesting import number_of_rows
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.synthetic import take_rows

__all__ = ["Effort"]

_LONG = 1e10  # operations: a fifth of a second of one core
_OF_WEIGHT = 50  # operations in the time that reading and writing one weight takes
_OPERATIONS = 1e11  # of a forward pass over a whole batch: a second or two
_NUMBERS = 2**29  # in the gradients of all records, where an engine makes them
_MOST = 1024


@dataclass(frozen=True)
class Effort:
    """Work of a pass of a model: the same in every process and every run.

    Args:
        operations: of the forward pass, for one record.
        weights: numbers in all parameters.
        trained: numbers in those that are trained.
    """

    operations: float
    weights: int
    trained: int

    @classmethod
    def of(cls, passes: Passes, pool: Any, n: int) -> Effort:
        """Count the operations of a forward pass over a pool, or over the first n of its records."""
        is_made = isinstance(pool, CollatedPool)
        operations = passes.operations_of(take_rows(pool, range(n)) if is_made else pool)
        records = n if is_made else number_of_rows(pool)
        sizes = {name: param.numel() for name, param in passes.module.named_parameters()}
        trained = sum(sizes[name] for name in passes.trained)
        return cls(operations / records, sum(sizes.values()), trained)

    def is_long(self, n: int) -> bool:
        """Tell whether passes of n records are so long that only the most telling are made.

        Example:
            >>> Effort(2e8, 10**8, 10**8).is_long(4), Effort(2e10, 10**8, 10**8).is_long(4)
            (False, True)
        """
        return 3 * n * self.operations + _OF_WEIGHT * self.weights > _LONG

    @property
    def records(self) -> int:
        """The largest number of records for a single pass."""
        most = _OPERATIONS / max(self.operations, 1), _NUMBERS / max(self.trained, 1)
        return int(min(_MOST, *most))
