"""Pairs of synthetic batches that differ in one sample, made by the user's code and compared."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from lightning_dp.isolation.copies import ReadsDataset, random_state, seeded
from lightning_dp.isolation.nesting import map_leaves
from lightning_dp.isolation.rows import Difference, OtherRows, layout_of
from lightning_dp.isolation.samples import LONGER, WORDS, SampleMaker, Values, lengths_in, size_of

__all__ = ["Collate", "SamplePairs", "Untried"]

Collate: TypeAlias = Callable[[list[Any]], Any]

_SAMPLES = 4
_SEEDS = 16  # a draw with probability 1/4 is missed once in a hundred
_LARGEST, _BYTES = 256, 2**24  # of a batch that is made up
_OTHER = 1001  # added to the number of a sample to exchange it: odd, so that labels differ


class Untried(RuntimeError):
    """Nothing can be said; the message holds no value."""


@dataclass(frozen=True)
class _Spec:
    """A synthetic sample that is made again for each batch, since a ``collate_fn`` may change it."""

    i: int
    values: Values = "plain"
    lengths: dict[int, int] = field(default_factory=dict)
    dim: int = 0


class SamplePairs:
    """Collates pairs of batches that differ in one sample.

    Args:
        fresh: returns what makes batches, each time in the state in which it is now.
        sample: of which types, shapes and dtypes are used.

    Raises:
        Untried: if nothing can be said.
        OtherRows: if rows are not records.
    """

    def __init__(self, fresh: Callable[[], Collate], sample: Any) -> None:
        self._fresh, self._sample, self._size = fresh, sample, size_of(sample)
        self._collate = fresh()
        self._is_random = False
        self._drawn: object = None  # random states after the latest batch
        self._compared = 0
        self._maker = self._maker_that_works()
        one, two = (self._run(_plain(n), 0) for n in (_SAMPLES, 2 * _SAMPLES))
        self._layout = layout_of(one, two, _SAMPLES)
        if not self._layout.has_rows:
            raise Untried("nothing in a batch has a row for each record")

    @property
    def _seeds(self) -> range:
        return range(2 if self._is_random else 1)

    @property
    def is_blind(self) -> bool:
        """True if no pair could be compared."""
        return not self._compared

    def fault(self, batch_size: int) -> tuple[str, str] | None:
        """Return how samples are mixed and where in a batch it shows; None if they are not.

        "rows" and "shared" as :class:`Difference`; "other rows": rows are not records; "state": a batch
        depends on the one before.
        """
        size = min(batch_size, _LARGEST, _BYTES // (1 + self._size))
        try:
            found = next((f for f in self._differences(size) if f is not None), None)
        except OtherRows:
            return "other rows", ""
        if found is not None:
            return found.kind, found.where
        return ("state", "") if self._keeps_state() else None

    def drops(self) -> bool:
        """Tell whether samples are left out that are None or hold NaN."""
        for samples in (
            [_Spec(i, "none" if i else "plain") for i in range(_SAMPLES)],
            [_Spec(i, "missing" if i else "plain") for i in range(_SAMPLES)],
        ):
            try:
                batch = self._run(samples, 0, self._fresh())
                self._layout.difference(batch, batch, (_SAMPLES, _SAMPLES), exchanged=0)
            except OtherRows:
                return True
            except _Refused:
                continue
        return False

    def pads(self) -> bool:
        """Tell whether a batch is as long as its longest sample, or as a length into which that fits."""
        ways = itertools.product((0, -1), LONGER)
        return any(self._pads(dim, times) for dim, times in ways if times * self._size <= _BYTES)

    def _pads(self, dim: int, times: int) -> bool:
        """Tell whether shapes change where the last sample is so many times longer, or by 6."""
        found = lengths_in(self._sample, dim)
        lengths = {WORDS: 6 + 8 * times, **{n: n + 6 + times * n for n in found}}

        def shapes(last: dict[int, int]) -> list[Any]:
            specs = [*_plain(_SAMPLES - 1), _Spec(_SAMPLES - 1, "plain", last, dim)]
            return _shapes_of_rows(self._run(specs, 0, self._fresh()))

        try:
            return shapes({}) != shapes(lengths)
        except _Refused:
            return False

    def _differences(self, batch_size: int) -> Iterator[Difference | None]:
        for seed in range(_SEEDS):
            if seed < _SAMPLES or self._is_random:  # else all seeds are alike
                yield self._exchanged(_plain(_SAMPLES), seed % _SAMPLES, seed)
        if batch_size > _SAMPLES:
            for seed in self._seeds:
                yield self._exchanged(_plain(batch_size), seed * (batch_size - 1), seed)
        for values, other in _KINDS:
            specs = [_Spec(i, values) for i in range(_SAMPLES)]
            yield from self._changed(specs, 2, _Spec(_OTHER, other))
        for values in ("missing", "none"):  # something may take the place of one without values
            specs = [_Spec(i, values if i == 1 else "plain") for i in range(_SAMPLES)]
            for place in (0, 2, 3):
                yield from self._changed(specs, place, _Spec(_OTHER))
        for dim in (0, -1):
            yield from self._with_lengths(dim)
        if not self._is_random:  # else fewer records draw other numbers
            yield self._left_out()

    def _changed(self, specs: list[_Spec], place: int, new: _Spec) -> Iterator[Difference | None]:
        for seed in self._seeds:
            try:
                yield self._pair(specs, [*specs[:place], new, *specs[place + 1 :]], seed)
            except OtherRows:  # such samples are left out
                continue
            except _Refused:
                return

    def _with_lengths(self, dim: int) -> Iterator[Difference | None]:
        """Exchange a sample for a longer one: first there is a longer one still, then there is not."""
        lengths = lengths_in(self._sample, dim)

        def long(i: int, more: int) -> _Spec:
            return _Spec(i, "plain", {WORDS: more, **{n: n + more for n in lengths}}, dim)

        specs = [long(0, 6), long(1, 2), long(2, 0), long(3, 3)]
        for new, ragged in ((long(_OTHER, 4), False), (long(_OTHER, 9), True)):
            for seed in self._seeds:
                others = [*specs[:2], new, *specs[3:]]
                try:
                    yield self._pair(specs, others, seed, ragged=ragged, of_lengths=True)
                except _Refused:
                    return

    def _exchanged(self, specs: list[_Spec], j: int, seed: int) -> Difference | None:
        others = [replace(s, i=s.i + _OTHER * (s.i == j)) for s in specs]
        try:
            return self._pair(specs, others, seed)
        except _Refused:
            return None

    def _left_out(self) -> Difference | None:
        try:
            return self._pair(_plain(_SAMPLES), _plain(_SAMPLES - 1), 0, exchanged=0)
        except _Refused:
            return None

    def _pair(
        self,
        a: list[_Spec],
        b: list[_Spec],
        seed: int,
        *,
        exchanged: int = 1,
        ragged: bool = False,
        of_lengths: bool = False,
    ) -> Difference | None:
        def difference(one: Any, other: Any) -> Difference | None:
            compare = partial(
                self._layout.difference, one, other, (len(a), len(b)), exchanged=exchanged
            )
            found = compare(ragged=ragged, of_lengths=of_lengths)
            if found is None or found.kind != "rows" or of_lengths:
                return found
            return compare(ragged=True)  # the values may say where records end

        one, drawn = self._run(a, seed), self._drawn
        other = self._run(b, seed)
        if drawn != self._drawn:
            self._is_random = True
            return None  # the two drew other random numbers
        self._compared += 1
        if difference(one, other) is None:
            return None
        # Is it the exchange, or what the call before has left?
        one, same, other = (self._run(each, seed, self._fresh()) for each in (a, a, b))
        self._check_repeats(one, same, len(a))
        return difference(one, other)

    def _check_repeats(self, one: Any, same: Any, n: int) -> None:
        if self._layout.difference(one, same, (n, n), exchanged=0) is not None:
            raise Untried("it makes other batches of the same samples and random state")

    def _keeps_state(self) -> bool:
        """Tell whether a batch depends on the one before it."""
        specs, first = _plain(_SAMPLES), _plain(_SAMPLES)
        second = [_Spec(s.i + _OTHER, "wide") for s in specs]

        def after(earlier: list[_Spec]) -> Any:
            collate = self._fresh()
            self._run(earlier, 1, collate)
            return self._run(specs, 0, collate)

        one, other, again = after(first), after(second), after(first)
        sizes = (_SAMPLES, _SAMPLES)
        if self._layout.difference(one, other, sizes, exchanged=0) is None:
            return False
        self._check_repeats(one, again, _SAMPLES)
        return True

    def _made(self, specs: Sequence[_Spec]) -> list[Any]:
        return [self._maker.make(s.i, s.values, s.lengths, s.dim) for s in specs]

    def _run(self, specs: list[_Spec], seed: int, collate: Collate | None = None) -> Any:
        collate = collate or self._collate
        samples = self._made(specs)
        try:
            with seeded(seed, collate):
                before = random_state(collate)
                batch = collate(samples)
        except ReadsDataset:
            raise
        except Exception as error:
            raise _Refused(type(error).__name__) from None
        self._drawn = random_state(collate)
        self._is_random = self._is_random or self._drawn != before
        return batch

    def _maker_that_works(self) -> SampleMaker:
        failure = ""
        for classes in (8, 2):
            for keeps_text in (False, True):
                self._maker = SampleMaker(self._sample, classes, keeps_text)
                try:
                    self._run(_plain(_SAMPLES), 0)
                except _Refused as error:
                    failure = failure or str(error)
                    continue
                return self._maker
        raise Untried(f"it raised {failure} on made-up samples")


class _Refused(Exception):
    """The function that makes batches raised an exception; the message is its type."""


_KINDS: tuple[tuple[Values, Values], ...] = (
    ("equal", "plain"),
    ("missing", "plain"),
    ("plain", "low"),
    ("plain", "high"),
    ("low", "high"),
    ("wide", "wide"),
)


def _plain(n: int) -> list[_Spec]:
    return [_Spec(i) for i in range(n)]


def _shapes_of_rows(batch: Any) -> list[Any]:
    """Return the shapes of what holds a row for each sample, and more than one entry in it."""
    found: list[Any] = []

    def look(leaf: Any) -> None:
        shape = tuple(getattr(leaf, "shape", ()))
        if len(shape) > 1 and _SAMPLES in shape:
            found.append(shape)

    with contextlib.suppress(Exception):  # a batch of a kind that cannot be made again, packed say
        map_leaves(batch, look)
    return found
