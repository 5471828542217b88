"""The steps whose batch is run once more, and the records exchanged in it: public randomness."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_dp.isolation.kinds import SyntheticKind, SyntheticKinds, exchange_rows
from lightning_dp.isolation.nesting import copied, leaves, number_of_rows
from lightning_dp.isolation.synthetic import take_rows

__all__ = ["Exchange", "PartsSeen", "SpotPlan"]

_EARLY = frozenset({0, 1, 2, 4, 8, 16, 32})
_ONE_IN = 60
# The first steps of epochs are checked while there are no more checks than these.
_ALLOWANCE, _ONE_IN_AT_MOST = 18, 60
_ALIKE = 3  # batches of one size, after which the same number of rows is no coincidence
_SINGLE = 4  # of so many checks, in one a single record is exchanged; in the others half of them


@dataclass(frozen=True)
class Exchange:
    """A batch with some of its records exchanged.

    Args:
        batch: the new batch; nothing in it is shared with the old one but what is no tensor.
        others: the rows that are as they were.
    """

    batch: Any
    others: tuple[int, ...]


@dataclass(frozen=True)
class SpotPlan:
    """The spot checks of a run, as a function of its public name: the same on all ranks.

    Args:
        name: of the run; nobody can know it when the model is written.
    """

    name: str

    def is_due(self, step: int, made: int, *, begins_epoch: bool) -> bool:
        """Tell whether a step is checked.

        At steps 0, 1, 2, 4, 8, 16 and 32, at one in 60 of all, and at the first of each epoch, as
        long as these are not too many.

        Args:
            step: steps since the fit began.
            made: checks so far.
            begins_epoch: True at the first step of an epoch.

        Example:
            >>> plan = SpotPlan("a run")
            >>> [step for step in range(200) if plan.is_due(step, 0, begins_epoch=False)][:8]
            [0, 1, 2, 4, 8, 16, 32, 66]
        """
        if step in _EARLY or self._number(step, "due") % _ONE_IN == 0:
            return True
        return begins_epoch and made < _ALLOWANCE + step // _ONE_IN_AT_MOST

    def chunk(self, step: int, chunks: int) -> int:
        """Return which chunk of the step's batch is run once more."""
        return self._number(step, "chunk") % chunks

    def places(self, step: int, sizes: list[int], parameters: int, entries: int) -> torch.Tensor:
        """Return places in flat gradients that are compared: sorted, distinct.

        Args:
            sizes: of the trained parameters.
            parameters: at most so many of them, drawn again at each step.
            entries: of each at most so many.
        """
        generator = self._generator(step, "places")
        starts = torch.tensor([0, *sizes]).cumsum(0)
        chosen = torch.randperm(len(sizes), generator=generator)[:parameters]
        found = [
            starts[i] + torch.randint(sizes[i], (min(entries, sizes[i]),), generator=generator)
            for i in chosen.tolist()
            if sizes[i]
        ]
        found_once: torch.Tensor = torch.cat(found).unique()  # type: ignore[no-untyped-call]
        return found_once

    def exchange(
        self, batch: Any, step: int, made: int, kinds: SyntheticKinds, attempt: int = 0
    ) -> Exchange:
        """Exchange half of the records, or one, for synthetic ones or for others of the same batch.

        Args:
            batch: with at least one record.
            step: steps since the fit began.
            made: checks so far; kinds of records take turns.
            kinds: those that the model took in the probe; the tamest if there are none.
            attempt: draws other records.
        """
        generator = self._generator(step, f"records {attempt}")
        n = number_of_rows(batch)
        order = torch.randperm(n, generator=generator).tolist()
        is_single = made % _SINGLE == _SINGLE - 1 and not attempt
        size = 1 if is_single else max(1, n // 2)
        rows, others = sorted(order[:size]), tuple(sorted(order[size:]))
        if made % 2 == 0 or not others:
            known = kinds.ran or (SyntheticKind(),)
            kind = known[made // 2 % len(known)]
            return Exchange(exchange_rows(copied(batch), rows, kind, generator), others)
        takes = list(range(n))
        for row in rows:
            takes[row] = others[int(torch.randint(len(others), (), generator=generator))]
        return Exchange(take_rows(copied(batch), takes), others)

    def _number(self, step: int, what: str) -> int:
        text = f"{self.name}/{step}/{what}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")

    def _generator(self, step: int, what: str) -> torch.Generator:
        return torch.Generator().manual_seed(self._number(step, what))


class PartsSeen:
    """Tells parts of batches with one row per record from others that once have as many rows.

    Batches of other sizes show it: sequences in front, masks and weights that all records share.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._sizes: set[int] = set()
        self._batches = self._size = 0
        self._others: set[int] = set()  # places of parts that have no row per record

    def see(self, batch: Any, size: int) -> None:
        """Look at the lengths of a batch's parts.

        Args:
            size: the number of its records.
        """
        lengths = [
            leaf.shape[0] if leaf.ndim else -1
            for leaf in leaves(batch)
            if isinstance(leaf, torch.Tensor | np.ndarray)
        ]
        if len(lengths) != len(self._lengths):
            self._sizes.clear()
            self._others.clear()
            self._batches = 0
        self._lengths = lengths
        self._batches += 1
        self._sizes.add(size)
        self._size = size
        self._others |= {place for place, length in enumerate(lengths) if length != size}

    @property
    def are_known(self) -> bool:
        """True if each part of the last batch that has as many rows as records holds records."""
        alike = {i for i, length in enumerate(self._lengths) if length == self._size}
        is_enough = len(self._sizes) > 1 or self._batches >= _ALIKE
        return is_enough and not alike & self._others
