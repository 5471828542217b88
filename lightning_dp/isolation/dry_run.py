"""The dry run before the first charge: the same comparison, on a few synthetic samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from timeit import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dp.boundary import Query, Term
from lightning_dp.functional import in_float64
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.batches import UNKNOWN_LAYOUT, Layout, is_image, leaves, map_leaves
from lightning_dp.gradients.parameter_sum import BookkeptGradients
from lightning_dp.gradients.snapshot import RandomState
from lightning_dp.isolation.check import CURES, Check, Outcome, Settings, outcome_of
from lightning_dp.isolation.comparison import (
    NOT_SAMPLED,
    Entries,
    GradientSample,
    UnitRows,
    take_sample,
)
from lightning_dp.isolation.replay import Run, Runner
from lightning_dp.isolation.state import TwinState

__all__ = ["DryRun", "find_layout", "mean_or_sum", "same_places", "size_of"]

_SAMPLES, _FEWEST, _CLASSES = 4, 2, 2
_NOTHING = 1e-30  # the norm of a gradient that is rounding alone
_SEED, _SEEDS = 2, 6  # of what is compared, and those with which norms are averaged
_FIRST = 1  # seed of runs: with it, and with 3, no permutation of four puts a half onto itself
_TIMES = 4  # as many samples
_SURE = 6.0  # standard errors
_TIMED = 4  # samples whose passes are timed, twice: the dry run has thirty calls in all
_CONSTANT = (
    "The loss of a record that is alone in its batch does not depend on the parameters (it compares "
    "records with each other, as a contrastive loss does), so the training would be on noise alone. "
    "Compare each record with itself (two views of it) or with a fixed set of classes, not with "
    "other records."
)


class DryRun:
    """Runs synthetic samples of the types and shapes of a real one, of which no value is used.

    Real numbers are uniform in (0, 1), whole ones are 0 or 1, texts and images are synthetic too. What is
    none of these (None, a path, an object without numbers) stays as it is.

    Args:
        like: the sample; None if there is none.
        have_lengths: the ``collate_fn`` may take samples of several lengths.
        in_units: samples are compared in units of several rows.
    """

    def __init__(self, like: Any, *, have_lengths: bool = True, in_units: bool = False) -> None:
        self._have_lengths, self._in_units = have_lengths, in_units
        self._like = like
        self.has_gradients = True  # until no sample has one

    def samples(self, count: int, *, are_longer: bool = True) -> list[Any]:
        """Return synthetic samples.

        Args:
            count: how many.
            are_longer: one is longer, where samples have lengths: none at an end, which a sort by
                length would leave where it is.

        Raises:
            ValueError: if none can be made.
        """
        if self._like is None:
            raise ValueError("no sample can be read twice")
        lengths = _lengths_in(self._like) if are_longer and self._have_lengths else ()
        longer = {length: 2 * length for length in lengths}
        return [
            _SampleMaker(i, longer if i == count // 2 else {}).like(self._like)
            for i in range(count)
        ]

    def run(
        self,
        runner: Runner,
        settings: Callable[..., Settings],
        clip_norm: float,
        twins: TwinState,
    ) -> Outcome:
        """Compare runs of a few samples.

        Where all gradients are shorter than C, the longest one is the unit: what couples a few samples by
        little couples a whole batch by more.

        Args:
            runner: runs them.
            settings: makes the settings of a comparison, by ``query``, ``whole``, ``seed`` and
                ``fewer``; asked when an engine has run.
            clip_norm: the bound C.
            twins: notes what follows the samples.

        Raises:
            UnsupportedModelError: if no engine takes the model, or no record has a gradient.
        """
        runner.without_dropout = runner.passes.is_synthetic = True
        try:
            with twins.noting_reads():
                first = self._first_run(runner, settings, clip_norm)
            checks = _checks(runner, first, partial(settings, query=_plain(first.unit)), twins)
            found = outcome_of(checks, attempts=2)
            if found.kind == "isolated" and not runner.passes.engine.isolates:
                return mean_or_sum(runner, first.samples)
            return found
        except UnsupportedModelError:
            raise
        except Exception as error:  # the user's code, on values that are none of the user's
            return Outcome("not compared", f"{type(error).__name__}: {error}")
        finally:
            runner.passes.is_synthetic = False

    def slowdown(self, runner: Runner) -> str:
        """Return the cost of records one after the other, in words; "" where none run together."""
        try:
            samples = self._units(_TIMED, are_longer=False)
            alone = partial(_norms, runner, samples, _FIRST)
            together = partial(runner.has_plain_gradient, samples)
            apart, whole = (min(repeat(each, number=1, repeat=2)) for each in (alone, together))
        except Exception:  # the user's code, on values that are none of the user's
            return ""
        return f" ({_TIMED} synthetic ones took {apart / whole:.1f} times as long as together)"

    def _first_run(
        self, runner: Runner, settings: Callable[..., Settings], clip_norm: float
    ) -> _FirstRun:
        """Run samples that the model takes.

        Raises:
            UnsupportedModelError: where a record alone has no gradient.
        """
        count = _FEWEST if runner.passes.engine.one_record else _SAMPLES
        try:
            first = _FirstRun(runner, self._units(count), settings, clip_norm)
        except UnsupportedModelError:
            raise
        except Exception:  # synthetic lengths that it does not take
            units = self._units(count, are_longer=False)
            first = _FirstRun(runner, units, settings, clip_norm)
        isolates = runner.passes.engine.isolates
        is_constant = isolates and not bool((first.norms > _NOTHING).any())
        if is_constant and runner.has_plain_gradient(first.samples):
            raise UnsupportedModelError(_CONSTANT, topic="coupled-records")
        if bool((first.norms <= _NOTHING).all()):  # a record without a loss is left out
            of = first.samples[: 1 if runner.passes.engine.one_record else None]
            self.has_gradients = runner.has_plain_gradient(of) is not False
        return first

    def _units(self, count: int, *, are_longer: bool = True) -> list[Any]:
        """Return synthetic units: single samples, or some with two rows and some with one."""
        if not self._in_units:
            return self.samples(count, are_longer=are_longer)
        rows = iter(self.samples(count + count // 2, are_longer=are_longer))
        return [UnitRows(islice(rows, 1 + place % 2)) for place in range(count)]


class _FirstRun:
    """A run of all samples: the norms of their gradients, and what comparisons take from it."""

    def __init__(
        self,
        runner: Runner,
        samples: list[Any],
        settings: Callable[..., Settings],
        clip_norm: float,
    ) -> None:
        self.samples, self.unit, self._settings = samples, clip_norm, settings
        self._clip_norm, self._clipping = clip_norm, runner.passes.clipping
        half = len(samples) // 2
        self.halves = [list(range(half)), list(range(half, len(samples)))]
        self.norms = torch.full((len(samples),), math.nan, dtype=torch.float64)  # until it has some
        self._entries = Entries.drawn(runner.params, _SEED)
        self._looks: list[GradientSample] = []
        start = RandomState.seeded(runner.device, _FIRST)
        self._run = runner.run(samples, _plain(1.0), start, self._look)

    def _look(self, gradients: AbstractPerSampleGradients) -> GradientSample:
        self.norms = in_float64(gradients.norms().detach())
        finite = self.norms[self.norms.isfinite()]
        longest = float(finite.max()) if len(finite) else 0.0
        self.unit = min(self._clip_norm, longest) if longest > _NOTHING else self._clip_norm
        if not self._settings(query=_plain(self.unit), whole=len(self.samples), seed=0).gradients:
            gradients.discard()
            return NOT_SAMPLED
        can_be_looked_at_again = isinstance(gradients, BookkeptGradients)
        for rows in self.halves if can_be_looked_at_again else self.halves[:1]:
            look = take_sample(gradients, rows, self.unit, self._entries, self._clipping)
            self._looks.append(look)
        return self._looks[0]

    def of_half(self, i: int, twins: TwinState) -> Run | None:
        """Return the run with what is compared of a half, if it need not be made again for it."""
        run, looks = self._run, self._looks
        if run.gradients is NOT_SAMPLED:  # those of twins are to be compared with it
            return None if twins.has_ever or (i and run.has_drawn) else run
        if i == 0:
            return run
        if len(looks) == 1 or run.has_drawn:
            return None
        return run if run.gradients is None else replace(run, gradients=looks[i])


def _checks(
    runner: Runner, first: _FirstRun, settings: Callable[..., Settings], twins: TwinState
) -> Iterator[Check]:
    """Yield two checks: what the first one leaves is what the second one may read."""
    for i, kept in enumerate(first.halves):
        together = first.of_half(i, twins)
        seed = _FIRST if together is not None else _FIRST + kept[0]
        start = RandomState.seeded(runner.device, seed)
        asked = settings(whole=len(first.samples), seed=_SEED, fewer=i == 0)
        check = Check(runner, first.samples, asked, partial(same_places, kept), twins, start)
        check.together = together
        yield check


def same_places(kept: list[int], attempt: int) -> list[int]:
    """Return the same places at every attempt."""
    return kept


def _plain(clip_norm: float) -> Query:
    return Query((Term(),), clip_norm, 0.0)


def _norms(runner: Runner, samples: Sequence[Any], seed: int) -> Tensor:
    """Return the norm of each sample's gradient, with random numbers of a seed."""
    norms: list[Tensor] = []

    def look(gradients: AbstractPerSampleGradients) -> GradientSample:
        norms.append(in_float64(gradients.norms().detach()))
        gradients.discard()
        return GradientSample(norms[0], norms[0], None)

    runner.run(samples, _plain(1.0), RandomState.seeded(runner.device, seed), look)
    return norms[0] if norms else torch.zeros(len(samples), dtype=torch.float64)


def mean_or_sum(runner: Runner, samples: list[Any]) -> Outcome:
    """Tell a sum over the records from their mean, where random numbers differ with their number.

    Engines take the loss for the mean. If it is a sum, gradients grow with the number of records. The
    growth of each sample's is averaged over random numbers, and over the samples.
    """
    if not runner.has_drawn:
        return Outcome("isolated")
    small, large = (
        torch.cat([_norms(runner, samples * times, 100 + i) for i in range(_SEEDS)])
        .view(-1, len(samples))
        .log2()
        for times in (1, _TIMES)
    )
    growth = float((large.mean(0) - small.mean(0)).mean())
    variances = small.var(0) / len(small) + large.var(0) / len(large)
    error = math.sqrt(float(variances.sum())) / len(samples)
    is_as_of_sum = abs(growth - math.log2(_TIMES)) < max(0.25, 3 * error)
    if is_as_of_sum and growth > _SURE * error:
        return Outcome("coupled", CURES["alone"].format(where=""))
    return Outcome("isolated")


def find_layout(dry: DryRun | None, make_batch: Callable[[list[Any]], Any]) -> Layout:
    """Return where in a batch the samples are, from batches of 2 and of 3 synthetic ones.

    One of three is longer, where samples have lengths: what a batch takes from its longest one shows
    then.

    Args:
        dry: makes the samples; None if no code of the user's may run on any.
        make_batch: of a list of samples.
    """
    if dry is None:
        return UNKNOWN_LAYOUT
    for are_longer in (True, False):
        try:
            one, longer, other = dry.samples(3, are_longer=are_longer)
            return Layout.of(make_batch([one, other]), make_batch([one, longer, other]))
        except Exception:  # of the user's, on samples that are none
            continue
    return UNKNOWN_LAYOUT


# -- synthetic samples ---------------------------------------------------------------------------------

_WORDS = ("one", "two", "six", "ten", "cat", "dog", "sun", "sea", "red", "sky")  # of one length
_NO_NUMBERS = "OSUMmV"  # kinds of arrays


def _lengths_in(sample: Any) -> set[int]:
    """Return the lengths of a sample's arrays and lists of numbers in their first dimension."""
    shapes = map(_shape_of, leaves(sample, rows=True))
    return {shape[0] for shape in shapes if shape and shape[0] > 1}


def size_of(sample: Any) -> int:
    """Return the number of entries of a sample's arrays, lists of numbers and texts."""
    found = leaves(sample, rows=True)
    return sum(len(x) if isinstance(x, str | bytes) else math.prod(_shape_of(x)) for x in found)


def _shape_of(leaf: Any) -> Sequence[int]:
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.shape
    if _is_list_of_numbers(leaf):
        return (len(leaf),)
    return leaf.size if is_image(leaf) else ()


class _SampleMaker:
    """Makes the i-th sample like one of the data set, with other lengths for those in the keys."""

    def __init__(self, i: int, lengths: Mapping[int, int]) -> None:
        self.i, self.lengths = i, lengths
        self.generator = torch.Generator().manual_seed(1 + i)

    def like(self, sample: Any) -> Any:
        """Make something of the same type and structure."""
        return map_leaves(sample, self._leaf, rows=True)

    def _leaf(self, like: Any) -> Any:
        if isinstance(like, Tensor):
            return self._tensor(like)
        if isinstance(like, np.ndarray):
            return like if like.dtype.kind in _NO_NUMBERS else self._array(like)
        if isinstance(like, bool | int | float | complex | np.number | np.bool_):
            return self._number(like)
        if isinstance(like, str | bytes):
            return self._text(like)
        if is_image(like):
            return self._image(like)
        if _is_list_of_numbers(like):
            size = self.lengths.get(len(like), len(like))
            made = self._values(_dtype_of(like[0]), (size,)).tolist()
            return type(like)(type(like[0])(each) for each in made)
        return type(like)(map(self._leaf, like)) if isinstance(like, list | tuple) else like

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            return shape
        size = self.lengths.get(shape[0], shape[0]) if shape[0] > 1 else shape[0]
        return (size, *shape[1:])

    def _tensor(self, like: Tensor) -> Tensor:
        if like.layout != torch.strided or like.is_nested or like.is_quantized:
            raise ValueError("a sample holds a tensor that is not dense")
        shape = self._shape(tuple(like.shape))
        made = self._values(like.dtype, shape).to(like.device)
        return made if type(like) is Tensor else made.as_subclass(type(like))

    def _array(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        kind = {"b": torch.bool, "f": torch.float64, "c": torch.complex128}
        dtype = kind.get(like.dtype.kind, torch.int64)
        made: np.ndarray[Any, Any] = self._values(dtype, self._shape(like.shape)).numpy()
        return made.astype(like.dtype)

    def _number(self, like: Any) -> Any:
        return type(like)(self._values(_dtype_of(like), ()).item())

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if dtype.is_floating_point:
            return self._real(shape).to(dtype)
        if dtype.is_complex:
            return torch.complex(self._real(shape), self._real(shape)).to(dtype)
        if not shape:
            return torch.tensor(self.i % _CLASSES).to(dtype)
        made = torch.randint(_CLASSES, shape, generator=self.generator)
        made.view(-1)[:1] = 1  # no mask is empty
        return made.to(dtype)

    def _real(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def _text(self, like: str | bytes) -> Any:
        words = [_WORDS[(self.i + 3 * k) % len(_WORDS)] for k in range(2)]
        text = " ".join(words)
        return text.encode() if isinstance(like, bytes) else type(like)(text)

    def _image(self, like: Any) -> Any:
        images = sys.modules["PIL.Image"]
        new = images.new(like.mode, like.size)
        if like.mode in ("I", "F"):
            new.putdata([self.i + k % 7 for k in range(like.size[0] * like.size[1])])
            return new
        size = len(new.tobytes())
        content = torch.randint(256, (size,), generator=self.generator).to(torch.uint8)
        new.frombytes(bytes(content.numpy()))
        return new


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, bool | np.bool_):
        return torch.bool
    if isinstance(number, int | np.integer):
        return torch.int64
    return torch.float64 if isinstance(number, float | np.floating) else torch.complex128


def _is_list_of_numbers(part: Any) -> bool:
    is_list = isinstance(part, list | tuple) and bool(part)
    return is_list and all(isinstance(each, int | float | np.number) for each in part)
