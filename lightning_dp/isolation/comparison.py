"""Two batches that differ in some records: did the gradients of the others move, and through what?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dp.isolation.answers import Answer
from lightning_dp.isolation.coupling import (
    CURES,
    Pair,
    common_factor,
    mixing_module,
    moved,
    reordered,
)
from lightning_dp.isolation.outcome import ISOLATED, Isolation
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.prepared import NoLoss
from lightning_dp.isolation.stand_ins import NotProbed
from lightning_dp.isolation.synthetic import take_rows

__all__ = ["NOTHING", "Batch", "Change", "Comparisons"]

NOTHING = 1e-30  # engines add a little to norms, so that a bound holds


@dataclass(frozen=True)
class Batch:
    """Some records.

    Args:
        records: the batch.
        n: how many.
        key: under which answers about it are kept; None if it comes but once.
    """

    records: Any = field(repr=False)
    n: int
    key: Any = None

    @classmethod
    def of(cls, pool: Any, rows: Sequence[int]) -> Batch:
        """Take records of a pool."""
        return cls(take_rows(pool, rows), len(rows), (id(pool), tuple(rows)))


@dataclass(frozen=True)
class Change:
    """A batch, and another one in which some of its records are gone, or others.

    Args:
        before, after: the batches.
        rows_before, rows_after: where those stand that are the same in both, in the same order.
        seed_number: of the random numbers with which both begin.
        same_first_rows: what is drawn does not depend on the number of rows.
    """

    before: Batch
    after: Batch
    rows_before: Sequence[int]
    rows_after: Sequence[int]
    seed_number: int = 0
    same_first_rows: bool = False

    @classmethod
    def exchanged(
        cls, before: Batch, after: Any, rows: Sequence[int], seed: int = 0, *, key: Any = None
    ) -> Change:
        """Return the change of a batch in some rows to what stands there in another one.

        Args:
            key: of the second batch.
        """
        others = [row for row in range(before.n) if row not in rows]
        return cls(before, Batch(after, before.n, key), others, others, seed)


class Comparisons:
    """Answers about batches, compared. What a batch that comes again gives is kept.

    Args:
        passes: of the model.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._kept: dict[Any, Answer] = {}

    def knows(self, batch: Batch) -> bool:
        """Tell whether a batch was run before."""
        return (batch.key, 0) in self._kept

    def answer(
        self, batch: Batch, seed_number: int = 0, *, same_first_rows: bool = False
    ) -> Answer:
        """Run a batch, unless the answer is known."""
        sure = self._kept.get((batch.key, 0))
        if sure is not None and not sure.is_random:
            return sure
        key = batch.key, (-1 - seed_number if same_first_rows else seed_number)
        if batch.key is not None and key in self._kept:
            return self._kept[key]
        answer = self.passes.run(
            batch.records, batch.n, seed_number=seed_number, same_first_rows=same_first_rows
        )
        if batch.key is not None:
            self._kept[key] = answer
        return answer

    def outcome(self, change: Change, *, why: bool = True) -> Isolation:
        """Tell whether the gradients of the unchanged records are the same in both batches.

        Args:
            change: between the batches.
            why: if they are not, find out through what; else no reason is given.

        Raises:
            NotProbed: if there is nothing to compare, or what there is is not finite.
            Exception: what the model raises.
        """
        before, after = self._answers(change)
        if before.count != change.before.n:
            return Isolation("coupled", CURES["rows"])
        if after is None or not after.count:
            return Isolation("coupled", CURES["no loss"])
        if after.count != change.after.n:
            return Isolation("coupled", CURES["rows"])
        here, there = before.about(change.rows_before), after.about(change.rows_after)
        if not bool((here.norms > NOTHING).any()):
            if bool((there.norms > NOTHING).any()):  # all records alike give none, for instance
                return Isolation("coupled", CURES["pairs"])
            raise NotProbed("the batch gives no gradient")
        changed = change.after.n - len(change.rows_after)
        if moved(here, there) and not reordered(before, after, changed):
            return self._diagnosed(change, here, there) if why else Isolation("coupled")
        return ISOLATED

    def _answers(self, change: Change) -> tuple[Answer, Answer | None]:
        """Return both answers; None for the second if it has no loss."""
        how = change.seed_number, change.same_first_rows
        before = self.answer(change.before, how[0], same_first_rows=how[1])
        if before.count == change.before.n:
            norms = before.norms[list(change.rows_before)]
            if not bool(torch.isfinite(norms).all()):
                raise NotProbed("gradients are not finite on the synthetic batch")
        elif not before.count:
            raise NotProbed("the batch gives no gradient")
        try:
            return before, self.answer(change.after, how[0], same_first_rows=how[1])
        except NoLoss:
            return before, None

    def _diagnosed(self, change: Change, here: Answer, there: Answer) -> Isolation:
        batches = change.before, change.after
        watched = [
            self.passes.run(
                batch.records,
                batch.n,
                seed_number=change.seed_number,
                same_first_rows=change.same_first_rows,
                watch_modules=True,
            ).calls
            for batch in batches
        ]
        sizes = change.before.n, change.after.n
        pair = Pair(watched[0], watched[1], change.rows_before, change.rows_after, sizes)
        module = mixing_module(pair)
        if module is not None:
            name = f"{module.name} ({module.kind})" if module.name else module.kind
            return Isolation("coupled", f"{name} {CURES['module']}", (module.name or module.kind,))
        # All gradients scaled alike: the loss is divided by something that the changed record moves.
        factor = common_factor(here, there)
        return Isolation("coupled", CURES["pairs" if factor is None else "denominator"])
