"""Records with other values: labels that are equal, numbers of other scales, NaN, the last class."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.isolation.comparison import Batch, Change, Comparisons
from lightning_dp.isolation.kinds import (
    EITHER,
    REAL_LABELS,
    Part,
    SyntheticKind,
    SyntheticKinds,
    Values,
    exchange_in_turn,
    parts_of,
    real_labels,
)
from lightning_dp.isolation.nesting import map_rows
from lightning_dp.isolation.outcome import Isolation
from lightning_dp.isolation.own_constants import ComparedWith, compared_in_code
from lightning_dp.isolation.own_numbers import padding_numbers
from lightning_dp.isolation.synthetic import take_rows
from lightning_dp.isolation.targets import IGNORED

__all__ = ["probe_values"]

# Real numbers of other scales than 0 to 1; what stands together is tried in one batch.
_SCALES = {
    "0 and -1": (Values(0, 0, 1), Values(-1, -1, 1)),
    "0 to 255, and tiny numbers": (Values(0, 255), Values(0, 1e-6)),
    "large numbers": (Values(-1000, 1000),),
    "NaN": (Values(math.nan, math.nan, 1),),
    "inf": (Values(math.inf, math.inf, 1),),
}
_PIXELS = Values(0, 255, 256)
_CONSTANTS = 6  # of the user's code
_FEW = 2  # tries, where passes take long


@dataclass(frozen=True)
class _Try:
    """Something to be tried.

    Args:
        kinds: of the exchanged records, in turn.
        alone: kinds that are tried one by one where the model does not take those.
        name: for the report, if it takes none of them.
        base: kinds of all records, in turn, among which they are exchanged; none: the tamest.
        may_ignore: it may be the number of targets that are ignored, for which each batch is watched.
    """

    kinds: tuple[SyntheticKind, ...]
    alone: tuple[SyntheticKind, ...] = ()
    name: str = ""
    base: tuple[SyntheticKind, ...] = ()
    may_ignore: bool = False


def probe_values(
    comparisons: Comparisons,
    pool: Any,
    n: int,
    tamest: SyntheticKind,
    last: Sequence[int],
    *,
    in_short: bool = False,
) -> Isolation:
    """Exchange records for others with other values; what the model does not take is left out.

    Args:
        pool: synthetic records, the first n of which are the batch.
        n: at least 4.
        tamest: their kind.
        last: for each part of the batch the largest whole number that the model takes.
        in_short: make the first tries only.
    """
    ran: list[SyntheticKind] = [tamest]
    left_out: list[str] = []
    padding = padding_numbers(comparisons.passes.module)
    constants, texts = _constants(comparisons, pool, n)
    tries = list(_tries(parts_of(pool), tamest, last, padding, constants))
    if in_short and len(tries) > _FEW:
        left_out.append("records with most other values")
    for number, each in enumerate(tries[:_FEW] if in_short else tries):
        base = _base(pool, n, each.base)
        taken: list[SyntheticKind] = []
        for kinds in (each.kinds, *((kind,) for kind in each.alone)):
            if taken == list(each.kinds):
                break
            found = _exchanged(comparisons, base, kinds, number, each.may_ignore)
            if found is None:
                continue
            if found.outcome != "isolated":
                return found
            taken += kinds
        if each.name and not taken:
            left_out.append(each.name)
        ran += taken
    for text in texts:
        found = _with_text(comparisons, Batch.of(pool, range(n)), text)
        if found is not None and found.outcome != "isolated":
            return found
    known = SyntheticKinds(tuple(dict.fromkeys(ran)))
    return Isolation("isolated", kinds=known, left_out=tuple(left_out))


def _base(pool: Any, n: int, kinds: Sequence[SyntheticKind]) -> Batch:
    if not kinds:
        return Batch.of(pool, range(n))
    records = exchange_in_turn(take_rows(pool, range(n)), range(n), kinds, 0)
    return Batch(records, n, (id(pool), kinds))


def _exchanged(
    comparisons: Comparisons,
    base: Batch,
    kinds: Sequence[SyntheticKind],
    number: int,
    may_ignore: bool = False,
) -> Isolation | None:
    """Exchange half of the records; None if the model does not take the new ones, or ignores them."""
    rows = range(1, base.n - 1) if number % 2 else [*range(base.n // 4), *range(-(base.n // 4), 0)]
    rows = [row % base.n for row in rows]
    after = exchange_in_turn(base.records, rows, kinds, number)
    try:
        change = Change.exchanged(base, after, rows)
        found = comparisons.outcome(change)
        is_ignored = may_ignore and found.outcome == "coupled" and _ignores(comparisons, change)
        return None if is_ignored else found
    except UnsupportedModelError:
        raise
    except Exception:
        return None


def _ignores(comparisons: Comparisons, change: Change) -> bool:
    """Tell whether torch's own losses ignore other targets after a change."""
    before, after = (comparisons.answer(each) for each in (change.before, change.after))
    return before.ignored != after.ignored


def _constants(comparisons: Comparisons, pool: Any, n: int) -> tuple[list[float], list[str]]:
    """Return numbers and texts that the model's code compares something with."""
    numbers, texts = compared_in_code(comparisons.passes.module)
    with ComparedWith() as seen, contextlib.suppress(Exception):
        comparisons.passes.loss(take_rows(pool, range(n)))
    return list(dict.fromkeys([*seen.numbers, *numbers]))[:_CONSTANTS], texts[:_CONSTANTS]


def _with_text(comparisons: Comparisons, base: Batch, text: str) -> Isolation | None:
    """Give half of the records another text; None if there is none, or the model does not take it."""
    rows = range(base.n // 2)
    texts = 0

    def of_rows(part: Any) -> Any:
        nonlocal texts
        if type(part) not in (list, tuple) or not all(isinstance(each, str) for each in part):
            return part
        texts += 1
        return type(part)(text if row in rows else each for row, each in enumerate(part))

    after = map_rows(base.records, base.n, of_rows, lambda leaf: leaf)
    try:
        return comparisons.outcome(Change.exchanged(base, after, rows)) if texts else None
    except UnsupportedModelError:
        raise
    except Exception:
        return None


def _tries(
    parts: Sequence[Part],
    tamest: SyntheticKind,
    last: Sequence[int],
    padding: Sequence[int],
    constants: Sequence[float] = (),
) -> Iterator[_Try]:
    """List what is tried for a batch with these parts."""
    yield from _of_labels(parts, tamest)
    yield from _of_ends(parts, tamest)
    for place, part in enumerate(parts):
        if not part.is_real:
            numbers = dict.fromkeys((0, 1, last[place], *(n for n in padding if n >= 0)))
            yield from _of_whole_numbers(place, part, tamest, tuple(numbers), last[place])
    reals = [place for place, part in enumerate(parts) if part.is_real]
    yield from _of_equal_records(parts, tamest)
    for name, scales in _SCALES.items() if reals else ():
        every = tuple(tamest.everywhere(reals, values) for values in scales)
        each = tuple(tamest.at(place, v) for v in scales for place in reals)
        alone = (*(every if len(every) > 1 else ()), *(each if len(reals) > 1 else ()))
        yield _Try(every, alone, name)
    for number in constants:
        yield from _of_constant(number, parts, tamest)


def _of_constant(number: float, parts: Sequence[Part], tamest: SyntheticKind) -> Iterator[_Try]:
    """List a number that the user's code compares something with, and what lies beyond it."""
    values = Values(number, number, 1), Values(2 * number, 2 * number, 1)
    reals = [place for place, part in enumerate(parts) if part.is_real]
    if reals:
        kinds = tuple(tamest.everywhere(reals, each) for each in values)
        each_part = tuple(tamest.at(place, values[0]) for place in reals)
        yield _Try(kinds, (*kinds, *(each_part if len(reals) > 1 else ())))
    for place, part in enumerate(parts):
        is_whole = not part.is_real and number == int(number) and number not in IGNORED
        if is_whole and values[0].fit(part.dtype):
            yield _Try((tamest.at(place, values[0]),), may_ignore=True)


def _of_labels(parts: Sequence[Part], tamest: SyntheticKind) -> Iterator[_Try]:
    """List records with equal labels, and those whose real labels are two numbers."""
    singles = [p for p, part in enumerate(parts) if part.is_single and not part.is_real]
    if singles:
        first = tamest.values[singles[0]].low
        equal = tamest.everywhere(singles, Values(first, first, 1))
        yield _Try((equal,), base=(equal,))
        yield _Try((tamest,), base=(equal,))
    labels = real_labels(parts)
    for values in REAL_LABELS if labels else ():
        ends = [Values(number, number, 1) for number in (values.low, values.high)]
        base = tuple(tamest.everywhere(labels, end) for end in ends)
        yield _Try(base[::-1], base=base)


def _of_ends(parts: Sequence[Part], tamest: SyntheticKind) -> Iterator[_Try]:
    """List records of ones, of which some become zeros, where no other try has them: many labels."""
    labels = real_labels(parts)
    for place, part in enumerate(parts):
        if part.is_real and place not in labels:
            zeros, ones = (tamest.at(place, Values(end, end, 1)) for end in (0, 1))
            yield _Try((zeros,), base=(ones,))


def _of_equal_records(parts: Sequence[Part], tamest: SyntheticKind) -> Iterator[_Try]:
    """List a batch whose records are all equal, and one of zeros, where some become others."""
    for real in (0.5, 0.0) if any(part.is_real for part in parts) else (0.5,):
        values = tuple(
            Values(real, real, 1)
            if part.is_real
            else Values(first := tamest.of(place, part.dtype).low, first, 1)
            for place, part in enumerate(parts)
        )
        yield _Try((tamest,), base=(SyntheticKind(values),))


def _of_whole_numbers(
    place: int, part: Part, tamest: SyntheticKind, numbers: Sequence[int], last: int
) -> Iterator[_Try]:
    """List some numbers in a part of whole numbers, and all up to the last one."""
    ends = [Values(number, number, 1) for number in numbers]
    between = Values(0, last, last + 1)
    if part.dtype == torch.uint8 and not part.is_single:
        ends, between = [EITHER, Values(255, 255, 1)], _PIXELS
    kinds = [tamest.at(place, values) for values in (*ends, between) if values.fit(part.dtype)]
    for first in range(0, len(kinds), 2):
        pair = tuple(kinds[first : first + 2])
        yield _Try(pair, pair if len(pair) > 1 else ())
