"""The check of one batch: runs of samples that differ in some, the verdict, and its schedule."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dp.boundary import Query
from lightning_dp.functional import full_precision
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.snapshot import RandomState, Snapshot, is_same_content, restored
from lightning_dp.isolation.comparison import (
    NOT_SAMPLED,
    TOLERANCE,
    Entries,
    GradientSample,
    are_given_the_same,
    are_same_rows,
    exchanged,
    first_that_mixes,
    have_same_shapes,
    movement,
    movement_if_ordered,
    places_in,
    resolution,
    take_sample,
    were_ordered,
)
from lightning_dp.isolation.replay import Run, Runner, StepAsRun, without_dropout
from lightning_dp.isolation.state import TwinState

__all__ = [
    "BY_CONSTRUCTION",
    "CURES",
    "Check",
    "Outcome",
    "Schedule",
    "Settings",
    "outcome_of",
    "stand_by",
]

# Further exchanges in which a fault must show; a tie that rounding decides does not come again.
_ATTEMPTS, _MUST_SHOW = 8, 2
_KEPT = ("buffer", "parameter")  # in every checkpoint
_TOO_COARSE = "the model computes in half precision, which is too coarse"


@dataclass(frozen=True)
class Settings:
    """The things that a check compares, and how finely.

    Args:
        query: says which gradients, and C.
        whole: the samples of the whole batch.
        eps: of the type in which the model computes.
        seed: public.
        gradients: compare them, and not only what the module keeps.
        is_count_public: each batch has as many samples, so public optimizers may step by their number.
        fewer: also run the kept samples without the others.
    """

    query: Query
    whole: int
    eps: float
    seed: int
    gradients: bool = True
    is_count_public: bool = False
    fewer: bool = True


@dataclass
class _PairResult:
    """The results of one pair of runs."""

    moved: dict[str, float] = field(default_factory=dict)  # by the kind of the pair of runs
    seen: set[str] = field(default_factory=set)  # other faults: their kinds, and names behind these
    why_not: str = ""  # nothing can be said of gradients
    where: str = ""
    runs: list[Run] = field(default_factory=list, repr=False)  # together, and exchanged
    alone_end: Snapshot | None = field(default=None, repr=False)


class Check:
    """Compares runs of samples, in which some are exchanged, or left out.

    All begin from the same state and the same random numbers, those of now. :meth:`look`
    makes the runs that are always made; if they show something, :meth:`settle` makes more before it is
    called a fault.

    Args:
        runner: runs the samples.
        samples: of a batch.
        settings: what is compared.
        kept: returns the places of the samples that are kept, by the number of the attempt.
        twins: attributes that followed the records at earlier steps.
        start: the random numbers of all runs; those of now by default.
    """

    def __init__(
        self,
        runner: Runner,
        samples: Sequence[Any],
        settings: Settings,
        kept: Callable[[int], list[int]],
        twins: TwinState,
        start: RandomState | None = None,
    ) -> None:
        self._runner, self._samples, self._settings = runner, list(samples), settings
        self._kept, self._twins = cache(kept), twins
        self._start = start or RandomState(runner.device)
        few = settings.query.coordinates  # all that the gradients have, if it asks for some
        self._entries = Entries.drawn(runner.params if few is None else [few], settings.seed)
        self._first = _PairResult()
        self._shown = Counter[str]()
        self._where = ""
        self._fault = ""
        self.not_compared = ""
        """The reason for which nothing can be said of the gradients; "" if they were compared."""
        self.same_in_both: set[str] = set()
        """Names of what the step writes, and writes alike whatever the records are."""
        self.step: StepAsRun | None = None
        """The step itself, if it can stand for the run of all samples together."""
        self.together: Run | None = None
        """An earlier run of all samples together, from the same start; else it is made."""
        self.begin = Snapshot.of(runner.module, parameters=self._moves_weights)
        """The state that all runs begin with."""
        self._trains = [param.requires_grad for param in runner.module.parameters()]

    # -- runs --------------------------------------------------------------------------------------

    def follow_step(self, batch: Any) -> None:
        """Let the fit's own step stand for the run of all samples together, where that can be.

        Args:
            batch: that ``training_step`` is about to take.
        """
        runner, engine = self._runner, self._runner.passes.engine
        is_alike = not (runner.runs_hooks or self._moves_weights)
        is_alike &= not full_precision(runner.device).changes_any  # as in the other runs
        is_plain = self._settings.gradients and self._settings.query.is_gradient
        is_whole = len(self._samples) == self._settings.whole
        if is_alike and is_plain and is_whole and not engine.isolates:
            look = partial(self._sample, rows=self._kept(0))
            self.step = StepAsRun(runner, batch, self._samples, look)

    def look(self) -> None:
        """Make the first runs, to be settled.

        Raises:
            UnsupportedModelError: of the model, whatever its samples are.
        """
        with self._at_begin():
            found = self._first = self._pair(0)
            self.not_compared = found.why_not
            self._note_twins(found)

    @contextmanager
    def _at_begin(self) -> Iterator[None]:
        """Put the module back to where it was when the check was made, inside."""
        module = self._runner.module
        # Of random numbers each run has its own.
        with restored(module, parameters=self._moves_weights, global_random=False):
            self.begin.restore()
            for param, trains in zip(module.parameters(), self._trains, strict=True):
                param.requires_grad_(trains)
            yield

    def _step_beside(self, other: Run, kept: list[int]) -> Run | None:
        """Return the step itself, if it did what the run of all samples together would do."""
        step, self.step = self.step, None
        if step is None or step.run.gradients is None or self._twins.has_ever:
            return None
        if step.run.has_drawn and self._runner.without_dropout:
            return None
        # Samples that are read twice may differ.
        places = places_in(self._samples, kept)
        is_same = are_given_the_same(step.run.batch, other.batch, other.rows, places)
        return step.run if is_same else None

    def settle(self, anyone: Callable[[bool], bool], attempts: int = _ATTEMPTS) -> Outcome:
        """Make further runs while they are needed, and return the outcome.

        Args:
            anyone: returns True if one of several processes still needs them: all make the same runs.
            attempts: how many at most.
        """
        first = self._first
        is_open = bool(self._seen(first))
        if not anyone(is_open):
            return self._outcome(first)
        with self._at_begin():
            # All ranks make the same runs: a model may wait for the others in them.
            is_suspect = bool(first.runs) and self._is_suspect(first)
            is_open = is_open and is_suspect
            for attempt in range(1, attempts + 1):
                if not anyone(is_open):
                    break
                found = self._pair(attempt, watched=True)
                self._shown.update(self._seen(found))
                self._where = self._where or found.where
                is_open = is_open and not self._verdict(first)
        return self._outcome(first)

    @property
    def _moves_weights(self) -> bool:
        """True if public optimizers may step before the private one, where it is settled."""
        return not self._runner.module.automatic_optimization

    def _is_suspect(self, first: _PairResult) -> bool:
        """Return False if the same samples give something else again, or were only put in an order."""
        control = self._run(self._samples, self._kept(0))
        ordered = max(self._moved_if_ordered(self._kept(i)) for i in range(2))  # on all ranks
        if not self._repeats(first, control):
            return False
        if ordered < math.inf and not first.seen:
            if not ordered <= TOLERANCE:
                self.not_compared = _TOO_COARSE
            return False
        kept, lists = self._kept(0), (self._samples, exchanged(self._samples, self._kept(0)))
        together, other = (self._runner.batch_of(samples, self._start) for samples in lists)
        rows = places_in(self._samples, kept)
        if control.has_drawn and were_ordered(together, other, control.rows, rows):
            self.not_compared = "records are put in an order, and meet other random numbers"
            return False
        return True

    def _moved_if_ordered(self, kept: list[int]) -> float:
        """Return how far the sum moved if a model only sorted or shuffled its samples; else infinity."""
        alone, k = [self._samples[place] for place in kept], len(kept)
        lists = (alone, self._samples)
        try:
            with without_dropout(self._runner.module):
                runs = [self._run(samples, range(len(samples))) for samples in lists]
                with self._runner.elsewhere():
                    others = exchanged(self._samples, kept)
                    runs.append(self._run(others, range(len(others))))
        except Exception:  # of the user's code, for which so few may be too few
            return math.inf
        found = [run.gradients for run in runs if run.gradients is not None]
        if len(found) < len(runs) or runs[1].has_drawn:
            return math.inf
        whole, eps = self._settings.whole, self._settings.eps
        few, *others = found  # also with copies an order changes nothing
        moved = max(movement_if_ordered(each, few, whole, k, eps) for each in others)
        # The mean's 1/n may be rounded the same way for all samples.
        return moved if moved <= max(self._limit(k), eps * whole) else math.inf

    def _pair(self, attempt: int, *, watched: bool = False) -> _PairResult:
        """Run the samples together, with some of them exchanged, and without these."""
        kept = self._kept(attempt)
        found = _PairResult()
        with self._runner.elsewhere():
            other = self._try(found, exchanged(self._samples, kept, attempt), kept, watched)
        step = None if other is None else self._step_beside(other, kept)
        if other is not None and step is not None:
            beside = _PairResult()
            self._compare_all(beside, step, other, kept, watched)
            if not (beside.why_not or self._seen(beside)):
                return beside
        earlier, self.together = self.together, None
        together = earlier or self._run(self._samples, kept, watched=watched)
        found.runs = [together]
        if other is not None:
            self._compare_all(found, together, other, kept, watched)
        return found

    def _compare_all(
        self, found: _PairResult, together: Run, other: Run, kept: list[int], watched: bool
    ) -> None:
        """Compare two runs, and the kept samples alone with the first one, where that is asked for."""
        self._compare(found, together, other, kept)
        counts_steps = bool(together.public_steps) and not self._settings.is_count_public
        if not (counts_steps or self._settings.fewer):
            return
        few = [self._samples[place] for place in kept]
        alone = self._try(found, few, range(len(kept)), watched)
        if alone is None:
            return
        if counts_steps and _steps_differ(together, alone):
            found.seen.add("public")
        if self._settings.fewer:
            if self._settings.gradients and not together.has_drawn:
                found.moved["alone"] = self._distance(together, alone, len(kept))
            self._compare_ends(found, together, alone)
            found.alone_end = alone.end

    def _try(
        self, found: _PairResult, samples: Sequence[Any], rows: Sequence[int], watched: bool
    ) -> Run | None:
        """Run samples of which the user's code may never have seen the like."""
        try:
            return self._run(samples, rows, watched=watched)
        except UnsupportedModelError:
            raise
        except Exception as error:
            found.why_not = f"{type(error).__name__} where records were exchanged"
            return None

    def _run(self, samples: Sequence[Any], rows: Sequence[int], *, watched: bool = False) -> Run:
        look, query = partial(self._sample, rows=list(rows)), self._settings.query
        with self._twins.noting_reads():
            return self._runner.run(samples, query, self._start, look, watched=watched)

    def _sample(self, gradients: AbstractPerSampleGradients, rows: list[int]) -> GradientSample:
        if not (self._settings.gradients or self._twins.has_ever):
            gradients.discard()
            return NOT_SAMPLED
        clip_norm, clipping = self._settings.query.clip_norm, self._runner.passes.clipping
        return take_sample(gradients, rows, clip_norm, self._entries, clipping)

    # -- what they show ----------------------------------------------------------------------------

    def _compare(self, found: _PairResult, a: Run, b: Run, kept: list[int]) -> None:
        """Compare the gradients of the same samples in two runs, and what the module keeps."""
        is_same_draw = a.drawn is not None and b.drawn is not None and a.drawn.is_same(b.drawn)
        isolates = self._runner.passes.engine.isolates
        # What runs alone and is given the same gives the same, whatever is drawn for it.
        is_settled = (
            (isolates and a.has_drawn and a.given is not None and b.given is not None)
            and not a.given.differences(b.given)
            and are_given_the_same(a.batch, b.batch, a.rows, places_in(a.samples, kept))
        )
        has_gradients = not is_settled and (a.gradients or b.gradients)
        if not is_same_draw and (a.gradients or b.gradients):
            if has_gradients:
                found.why_not = "records decide how many random numbers are drawn"
            if a.drawn is not None and b.drawn is not None and a.drawn.seed != b.drawn.seed:
                found.seen.add("setting torch's seed")
            return
        if a.has_drawn and has_gradients and (isolates or not have_same_shapes(a.batch, b.batch)):
            found.why_not = "records are padded to other lengths, and meet other random numbers"
            return
        found.why_not = a.hook_failed or b.hook_failed
        if self._settings.gradients and not is_settled:
            found.moved["exchanged"] = self._distance(a, b, len(kept))
            if a.gradients is None and b.gradients is None:
                found.why_not = found.why_not or "no sample had a gradient"
        if _steps_differ(a, b):
            found.seen.add("public")
        self._compare_ends(found, a, b)
        if found.moved.get("exchanged", 0.0) > TOLERANCE:
            rows, made_by = places_in(a.samples, kept), self._runner.pipeline.made_by
            if made_by and not are_same_rows(a.batch, b.batch, a.rows, rows):
                found.where = f"the batch itself, made by {made_by}"
            elif a.calls:
                layer = first_that_mixes(a.calls, b.calls, rows, a.rows)
                found.where = layer or OUTSIDE_OF_LAYERS
        found.runs = [a, b]

    def _compare_ends(self, found: _PairResult, a: Run, b: Run) -> None:
        """Compare what two runs leave: what follows the records, or their number."""
        if not is_same_content(a.settings, b.settings):
            found.seen.add("setting the optimizers' settings")
        if a.end is None or b.end is None:
            return
        moved = a.end.differences(b.end)
        kinds = {**dict.fromkeys(_KEPT, "buffer"), "setting": "setting"}
        found.seen |= {f"{kinds[each.kind]} {each.name}" for each in moved if each.kind in kinds}
        if a.start is not None:
            changed = {each.name for each in a.start.differences(a.end) if each.kind in _KEPT}
            self.same_in_both |= changed | a.written
        self.same_in_both -= {each.name for each in moved}

    def _distance(self, a: Run, b: Run, kept: int) -> float:
        if a.gradients is None or b.gradients is None:
            return 0.0 if a.gradients is b.gradients else math.inf
        distance = movement(a.gradients, b.gradients, self._settings.whole, kept)
        return float(distance) if bool(distance.isfinite()) else math.inf

    def _note_twins(self, found: _PairResult) -> None:
        """Run the samples again in the worlds that earlier records could have left."""
        twins = self._twins
        if twins.has_ever and found.runs:
            together, kept = found.runs[0], len(self._kept(0))
            twin = self._in_world(twins.in_place())
            one, other = map(self._in_world, twins.at_ends())
            pairs = [(together, twin), (one, other)]
            for sign in (1.0, -1.0):  # far from both: what one batch did may be small, and gone
                with suppress(Exception):  # of the user's, on values that no run had
                    pairs.append((together, self._in_world(twins.far(sign))))
            if any(self._trains_otherwise(*pair, kept) for pair in pairs):
                self._fault = twins.fault().removesuffix(".")
            if together.end is not None and twin.end is not None:
                twins.after_twin(together.end, twin.end)
        ends = [run.end for run in found.runs if run.end is not None]
        if len(ends) == 2 and not any(each.startswith("buffer") for each in found.seen):
            twins.after_pair(ends[0], ends[1], found.alone_end)

    def _trains_otherwise(self, a: Run, b: Run, kept: int) -> bool:
        """Return True if two runs of the same samples differ in what optimizers step by."""
        if not self._distance(a, b, kept) <= self._limit(kept) or _steps_differ(a, b):
            return True
        moved = a.end.differences(b.end) if a.end is not None and b.end is not None else ()
        is_set = any(each.kind == "setting" for each in moved)
        return is_set or not is_same_content(a.settings, b.settings)

    def _in_world(self, world: AbstractContextManager[object]) -> Run:
        with world:
            return self._run(self._samples, self._kept(0))

    def _limit(self, kept: int) -> float:
        settings = self._settings
        return max(TOLERANCE, resolution(settings.eps, settings.whole, kept))

    def _seen(self, found: _PairResult) -> list[str]:
        """Return the kinds of faults that a pair shows; what rounding may explain is not compared."""
        seen, limit = sorted(found.seen), self._limit(len(self._kept(0)))
        for kind, distance in found.moved.items():
            if not distance <= limit:
                seen.append(kind)
            elif not distance <= TOLERANCE:
                self.not_compared = _TOO_COARSE
        return seen

    def _repeats(self, first: _PairResult, control: Run) -> bool:
        """Return True if the same samples give what they gave."""
        if self._distance(first.runs[0], control, len(self._kept(0))) > TOLERANCE:
            self.not_compared = "the same records give other gradients when they are run again"
            return False
        end = first.runs[0].end
        if end is not None and control.end is not None:
            again = {each.name for each in end.differences(control.end)}
            if again & {each.partition(" ")[2] for each in first.seen}:
                return False
        return True

    def _verdict(self, first: _PairResult) -> str:
        """Return the kind of fault that has shown often enough; "" if none has."""
        return next((kind for kind in self._seen(first) if self._shown[kind] >= _MUST_SHOW), "")

    def _outcome(self, first: _PairResult) -> Outcome:
        kind = self._verdict(first).partition(" ")[0]
        if self._fault:
            return Outcome("coupled", self._fault)
        if kind:
            names = sorted(each.partition(" ")[2] for each in self._shown if each.startswith(kind))
            where = f", first in {self._where}" if self._where else ""
            cure = CURES[kind].format(names=", ".join(names[:5]), where=where)
            return Outcome("coupled", cure)
        if self.not_compared:
            return Outcome("not compared", self.not_compared)
        return Outcome("isolated")


def outcome_of(checks: Iterable[Check], attempts: int = _ATTEMPTS) -> Outcome:
    """Return the outcome of one check after the other in this process, the first that is not isolated."""
    found = Outcome("isolated")
    for check in checks:
        check.look()
        found = check.settle(bool, attempts)
        if found.kind != "isolated":
            break
    return found


def stand_by(anyone: Callable[[bool], bool], attempts: int = _ATTEMPTS) -> None:
    """Take part in what other processes settle, where this one has made no runs."""
    for _ in range(1 + attempts):
        if not anyone(False):
            break


def _steps_differ(a: Run, b: Run) -> bool:
    """Return True if a public optimizer stepped otherwise."""
    if [each.place for each in a.public_steps] != [each.place for each in b.public_steps]:
        return True
    return any(
        _differ(one, other)
        for x, y in zip(a.public_steps, b.public_steps, strict=True)
        for one, other in zip(x.gradients, y.gradients, strict=True)
    )


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    if not one.numel():
        return False
    scale = torch.maximum(one.abs().max(), other.abs().max())
    return not bool((one - other).abs().max() <= 1e-3 * scale) and bool(scale != 0)


# -- the words -------------------------------------------------------------------------------------

BY_CONSTRUCTION = "by construction: each record runs alone"

OUTSIDE_OF_LAYERS = (
    "training_step itself, outside of layers: such as a statistic of the batch (x - x.mean(0), if "
    "loss > 2), a comparison of records with each other, or a loss that divides by the number of tokens "
    "or of targets that are not ignored in the whole batch, or by class weights (take each record's own "
    "loss first; of a language model, lightning_dp.losses_of_records(output.logits, labels, "
    "shift=True).mean())"
)

CURES = {
    "exchanged": (
        "when some records of a batch are exchanged for others, the clipped sum of the rest moves by "
        "more than 0.05 C{where}. Use a loss of single records, layers that treat each record alone, a "
        "collate_fn and hooks that mix none, and nothing that was computed from other records or, where "
        "gradients are accumulated over batches cut in their order, that follows batch_idx"
    ),
    "alone": (
        "without the other records of its batch, a record has another gradient{where}. Take "
        "the mean over the records, each counted once (reduction='mean', not 'sum'; a mean for each "
        "record first where lengths or ignored targets differ), whatever the size of the batch"
    ),
    "buffer": (
        "what the step sees of the records is written into weights or buffers, without noise: {names}. "
        "They are in every checkpoint, and steer later steps. Leave them fixed, compute them from "
        "weights, or make them parameters that are trained"
    ),
    "setting": (
        "{names} follow what the step sees of the records, without noise. Fix them in advance, or as "
        "functions of released values"
    ),
    "public": (
        "a public optimizer steps by gradients that follow the records, without noise. Give its loss "
        "released or synthetic values only, a fixed number of them"
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a comparison.

    Args:
        kind: "isolated": nothing moved; "coupled": a record changes what others contribute, or what
            outlives the step; "not compared": nothing can be said.
        reason: in words; for "coupled" with the cure.

    Example:
        >>> print(Outcome("not compared", "the model drew other random numbers"))
        not compared (the model drew other random numbers)
    """

    kind: Literal["isolated", "coupled", "not compared"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


# -- the schedule ----------------------------------------------------------------------------------

_EARLY = frozenset({0, 1, 2, 4, 8, 16, 32})  # and some odd ones, for what happens every other time
_ODD = frozenset({5, 11, 23})
_ONE_IN, _ALLOWANCE = 60, 24
_FEW = 16  # samples, where not all of the batch are compared
_ALSO = frozenset({2, 4})  # looks at all of it, at the beginning


@dataclass(frozen=True)
class Schedule:
    """The comparisons of a run, as a function of its public name: the same on all ranks.

    At steps 0, 1, 2, 4, 8, 16 and 32, at 5, 11 and 23, at one in 60 of all, and at the first step of each
    epoch, where epochs are long enough: 24 of them, and one for each 60 steps.

    Args:
        name: of the run, unknown when the model is written.

    Example:
        >>> schedule = Schedule("a run")
        >>> [step for step in range(90) if schedule.is_due(step, 0, begins_epoch=False)]
        [0, 1, 2, 4, 5, 8, 11, 16, 23, 32, 66, 77]
    """

    name: str

    def is_due(self, step: int, looks: int, *, begins_epoch: bool) -> bool:
        """Return True if a step is compared.

        Args:
            step: steps since the fit began.
            looks: steps of the schedule so far.
            begins_epoch: True at the first step of an epoch.
        """
        if step in _EARLY | _ODD or self._number(step, "due") % _ONE_IN == 0:
            return True
        return begins_epoch and looks < _ALLOWANCE + step // _ONE_IN

    def chunk(self, step: int, chunks: int) -> int:
        """Return which chunk of the step's batch is compared."""
        return self._number(step, "chunk") % chunks

    @staticmethod
    def takes_all(look: int) -> bool:
        """Return True if all samples of the batch are compared: from the second look to the sixth, and
        then at every other one.
        """
        return look % 2 == 1 or look in _ALSO

    def samples(self, step: int, look: int, n: int) -> list[int]:
        """Return the places in a batch of the samples that are compared, in their order.

        All of them, or 16 at most.
        """
        if self.takes_all(look) or n <= _FEW:
            return list(range(n))
        return sorted(self._permutation(step, "samples", n)[:_FEW])

    def kept(self, step: int, look: int, n: int, attempt: int = 0, *, first: int = 0) -> list[int]:
        """Return the places of the samples that are kept, in their order: at least one, and not all.

        A half or a quarter of all in turn, and of a few also an eighth and a sixteenth: what a rare
        sample does shows where few are kept, what a few places do where many are. Of the first and the
        last place, of which a module may keep something, one is exchanged each time, in turn.
        """
        turn = first + look // 2 + attempt
        share = 2 ** (1 + turn % (2 if self.takes_all(look) else 4))
        count = max(1, min(n - 1, -(-n // share)))
        places = self._permutation(step, f"kept {attempt}", n)
        places.remove(0 if (look + first + attempt) % 2 == 0 else n - 1)
        return sorted(places[:count])

    def _permutation(self, step: int, what: str, n: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._number(step, what))
        return torch.randperm(n, generator=generator).tolist()

    def _number(self, step: int, what: str) -> int:
        text = f"{self.name}/{step}/{what}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
