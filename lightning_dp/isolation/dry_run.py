"""The dry run before the first charge: the same comparison, on a few made-up samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dp._snapshot import RandomState
from lightning_dp.boundary import Query, Term
from lightning_dp.functional import in_float64
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.batches import UNKNOWN_LAYOUT, Layout
from lightning_dp.isolation.check import Check, Settings
from lightning_dp.isolation.comparison import GradientSample
from lightning_dp.isolation.made_up import SampleMaker, lengths_in
from lightning_dp.isolation.outcome import CURES, Outcome
from lightning_dp.isolation.replay import Runner
from lightning_dp.isolation.state import TwinState

__all__ = ["DryRun", "find_layout", "mean_or_sum"]

_SAMPLES, _FEWEST, _CLASSES = 4, 2, 2
_NOTHING = 1e-30  # the norm of a gradient that is rounding alone
_SEEDS = 6  # with which norms are averaged
_SURE = 6.0  # standard errors
_CONSTANT = (
    "The loss of a record that is alone in its batch does not depend on the parameters (it compares "
    "records with each other, as a contrastive loss does), so the training would be on noise alone. "
    "Compare each record with itself (two views of it) or with a fixed set of classes, not with "
    "other records."
)


class DryRun:
    """Runs made-up samples of the types and shapes of a real one, of which no value is used.

    Args:
        like: the sample; None if there is none.
        have_lengths: the ``collate_fn`` may take samples of several lengths.
    """

    def __init__(self, like: Any, *, have_lengths: bool = True) -> None:
        self._have_lengths = have_lengths
        self._maker = None if like is None else SampleMaker(like, _CLASSES)

    def samples(self, count: int, *, are_longer: bool = True) -> list[Any]:
        """Return made-up samples.

        Args:
            count: how many.
            are_longer: the last one is longer, where samples have lengths.

        Raises:
            ValueError: if none can be made.
        """
        if self._maker is None:
            raise ValueError("no sample can be read twice")
        lengths = lengths_in(self._maker.like) if are_longer and self._have_lengths else ()
        longer = {length: 2 * length for length in lengths}
        made = [self._maker.make(i) for i in range(count - 1)]
        return [*made, self._maker.make(count - 1, longer)]

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
            twins: is told what follows the samples.

        Raises:
            UnsupportedModelError: if no engine takes the model, or no record has a gradient.
        """
        runner.without_dropout = True
        try:
            samples, longest = self._that_run(runner)
            unit = min(clip_norm, longest) if longest > _NOTHING else clip_norm
            asked = partial(settings, query=_plain(unit))
            found = self._compared(runner, samples, asked, twins)
            if found.kind == "isolated" and not runner.passes.watched.engine.isolates:
                return mean_or_sum(runner, samples)
            return found
        except UnsupportedModelError:
            raise
        except Exception as error:  # the user's code, on values that are none of the user's
            return Outcome("not compared", f"{type(error).__name__}: {error}")

    def _that_run(self, runner: Runner) -> tuple[list[Any], float]:
        """Return samples on which the model runs, and the longest of their gradients.

        Raises:
            UnsupportedModelError: where a record alone has no gradient.
        """
        count = _FEWEST if runner.passes.watched.engine.one_record else _SAMPLES
        samples = self.samples(count)
        try:
            first = _norms(runner, samples, 0)
        except UnsupportedModelError:
            raise
        except Exception:  # made-up lengths that it does not take
            samples = self.samples(count, are_longer=False)
            first = _norms(runner, samples, 0)
        is_constant = not bool((first > _NOTHING).any())
        if (
            runner.passes.watched.engine.isolates
            and is_constant
            and runner.has_plain_gradient(samples)
        ):
            raise UnsupportedModelError(_CONSTANT, topic="coupled-records")
        finite = first[first.isfinite()]
        return samples, float(finite.max()) if len(finite) else 0.0

    def _compared(
        self,
        runner: Runner,
        samples: list[Any],
        settings: Callable[..., Settings],
        twins: TwinState,
    ) -> Outcome:
        """Compare twice: what the first time leaves is what the second time may read."""
        found, half = Outcome("isolated"), len(samples) // 2
        for kept in (list(range(half)), list(range(half, len(samples)))):
            start = RandomState.seeded(runner.device, kept[0])
            asked = settings(whole=len(samples), seed=half, fewer=not kept[0])
            check = Check(runner, samples, asked, partial(_same, kept), twins, start)
            check.look()
            found = check.settle(bool, attempts=2)
            if found.kind != "isolated":
                return found
        return found


def _same(kept: list[int], attempt: int) -> list[int]:
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

    Engines take the loss for the mean. If it is a sum, gradients double with the number of records.
    """
    if not runner.has_drawn:
        return Outcome("isolated")
    small, large = (
        torch.cat(
            [_norms(runner, samples * times, 100 + i)[: len(samples)] for i in range(_SEEDS)]
        ).log2()
        for times in (1, 2)
    )
    growth = float(large.mean() - small.mean())
    error = math.sqrt(float(small.var() / len(small) + large.var() / len(large)))
    if abs(growth - 1) < 0.25 and growth > _SURE * error:
        return Outcome("coupled", CURES["alone"].format(where=""))
    return Outcome("isolated")


def find_layout(dry: DryRun | None, make_batch: Callable[[list[Any]], Any]) -> Layout:
    """Return where in a batch the samples are, from batches of 2 and of 3 made-up ones.

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
            *two, last = dry.samples(3, are_longer=are_longer)
            return Layout.of(make_batch(two), make_batch([*two, last]))
        except Exception:  # of the user's, on samples that are none
            continue
    return UNKNOWN_LAYOUT
