"""Synthetic records on which a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_dp.isolation.class_numbers import ClassNumbers
from lightning_dp.isolation.kinds import (
    REAL_LABELS,
    SyntheticKind,
    Values,
    base_kind,
    exchange_in_turn,
    parts_of,
    real_labels,
)
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.synthetic import (
    NoSyntheticBatch,
    has_other_rows,
    synthetic_pool,
    take_rows,
)

__all__ = ["pool_that_runs", "pools_that_run"]

_RECORDS = 8
# How many class numbers, from which on: models may have few, and lengths may not be 0.
_CLASSES = ((8, 0), (4, 0), (3, 0), (2, 0), (2, 1), (1, 1))


def pool_that_runs(passes: Passes, like: Any) -> Any:
    """Make 8 synthetic records with as many class numbers as the model takes; raise what it raises."""
    pool, _ = next(pools_that_run(passes, like))
    return pool


def pools_that_run(passes: Passes, like: Any) -> Iterator[tuple[Any, SyntheticKind]]:
    """Make at least one pool of 8 synthetic records on which the model runs, with their kind.

    After the first, for losses to which that gives nothing: with fewer class numbers, so that more of
    them are equal, and with real labels that are 0 and 1, or -1 and 1.

    Raises:
        NoSyntheticBatch: if the batch cannot be imitated.
        Exception: what the model raises, if it takes none.
    """
    failure: Exception | None = None
    first: tuple[Any, SyntheticKind] | None = None
    left = list(_CLASSES)
    while left:
        each, seen = left.pop(0), ClassNumbers()
        pool, kind = _with_classes(like, *each)
        try:
            with seen:
                passes.operations_of(pool)
        except Exception as error:
            error.with_traceback(None)  # whose frames hold the whole pass
            if failure is None or not _is_too_many(each, seen.least):
                failure = error
            left.sort(key=partial(_is_too_many, known=seen.least))  # those are tried last
        else:
            first = first or (pool, kind)
            yield pool, kind
    if first is not None:
        yield from _with_real_labels(passes, *first)
    elif failure is not None and has_other_rows(like):
        raise NoSyntheticBatch(
            "the batch has tensors without one row for each record, and the model raised "
            f"{type(failure).__name__}"
        )
    elif failure is not None:
        raise failure


def _with_classes(like: Any, classes: int, first: int) -> tuple[Any, SyntheticKind]:
    pool = synthetic_pool(like, _RECORDS, classes, first)
    return take_rows(pool, range(_RECORDS)), base_kind(parts_of(like), classes, first)


def _is_too_many(each: tuple[int, int], known: int | None) -> bool:
    classes, first = each
    return known is not None and first + classes > known


def _with_real_labels(
    passes: Passes, pool: Any, kind: SyntheticKind
) -> Iterator[tuple[Any, SyntheticKind]]:
    places = real_labels(parts_of(pool))
    for values in REAL_LABELS if places else ():
        ends = [Values(number, number, 1) for number in (values.low, values.high)]
        kinds = [kind.everywhere(places, end) for end in ends]
        new = exchange_in_turn(pool, range(_RECORDS), kinds, seed=0)
        try:
            passes.loss(new)
        except Exception:
            continue
        yield new, kind.everywhere(places, values)
