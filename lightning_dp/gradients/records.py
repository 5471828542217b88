"""The engine that runs every sample alone, under vmap: samples cannot mix in the model."""

from __future__ import annotations

import gc
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp._refusals import RefusedRun
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    AbstractPerSampleGradients,
    Around,
    Forward,
    UncoveredParameterError,
    UnsupportedModelError,
)
from lightning_dp.gradients.batches import (
    SampleBatch,
    SampleRows,
    joined,
    loss_in,
    map_leaves,
    whole_batch,
)
from lightning_dp.gradients.composites import COMPOSITES
from lightning_dp.gradients.graph import nodes
from lightning_dp.gradients.layer_calls import Call, CallSums, DualSums, go_back, run_along
from lightning_dp.gradients.parameter_sum import (
    BookkeptGradients,
    ScratchPool,
    at_least_float32,
    restricted,
)
from lightning_dp.gradients.record_calls import (
    MISSING,
    CallRecorder,
    DifferentPaths,
    WritesIntoNew,
    is_sample,
    numbered,
    rows,
)

__all__ = ["GroupedGradients", "Records"]

_NOT_HERE = "This torch lacks {} of functorch, which running each record under vmap needs."
_RAISED = (
    "training_step cannot run for each record alone under torch.func.vmap ({}), since an operation in "
    "it has no such form, or asks for more records than one"
)
_EDITED = (
    "training_step changes the batch in place, and has to begin again with some of the records. Change a "
    "copy: x = x + noise instead of x += noise."
)
_LEFT = (
    "training_step leaves numbers of single records behind (in {}), where later steps could read them; "
    "self.log and torchmetrics may have them"
)
_LIBRARIES = {Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))}


@dataclass(slots=True, eq=False)
class _Group:
    """Samples that took the same path."""

    places: Tensor  # of them in the batch
    calls: list[Call]
    losses: Tensor | None  # of each, shape (k,); None if their step gave none
    output: Any  # of training_step, with SampleRows in the places of what one sample sees


# Runs samples together, which are in these places of the batch.
_Step: TypeAlias = Callable[[SampleBatch, Tensor], _Group]


class Records(AbstractGradientEngine):
    """Every sample runs alone, as a batch of one, and all of them at once.

    The forward pass is ``torch.func.vmap`` of ``training_step``; what samples and parameters do to
    each other is recorded (:mod:`~lightning_dp.gradients.record_calls`) and one backward pass, for
    the gradients of the recorded outputs only, gives norms and clipped sums by the rules of
    :class:`~lightning_dp.gradients.parameter_sum.ParameterGradients`.

    Samples that would take different branches (``if``, ``.item()``, shapes that depend on values) are
    split into groups that agree, each of which runs by itself.

    By construction no sample sees another in ``training_step``. It does not see what comes before: how
    the batch was collated and moved. Each sample draws its own random numbers.
    """

    name = "records"
    has_products = True
    isolates = True

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        if MISSING:
            raise UnsupportedModelError(_NOT_HERE.format(", ".join(MISSING)), topic="engines")
        super().__init__(module, params)
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._memory = ScratchPool()
        self._own_memory = self._along = self._edits = self._has_owners = False
        self._groups: list[_Group] = []
        self._size = 0

    # -- forward ---------------------------------------------------------------------------

    def run(self, forward: Forward, batch: SampleBatch, around: Around | None = None) -> Any:
        self.drop()
        batch.check()
        self.has_asked = not batch.is_all_rows
        self._size, places = batch.size, torch.arange(batch.size)
        self._has_owners = batch.owners is not None
        step = partial(self._run_together, forward, around or (lambda *_: nullcontext()))
        if others := batch.others:  # texts and what else is no tensor are equal in a group
            keys = [repr([each[i] for each in others]) for i in range(batch.size)]
            self._groups = self._run_split(step, numbered(keys), batch, places)
        else:
            self._groups = self._run(step, batch, places)
        return self._output()

    def _run(self, step: _Step, batch: SampleBatch, places: Tensor) -> list[_Group]:
        while True:
            fresh = batch.copied() if self._edits else batch
            versions = fresh.versions
            try:
                return [step(fresh, places)]
            except DifferentPaths as paths:
                labels = paths.labels
            except WritesIntoNew:
                self._own_memory, labels = True, None
            finally:
                is_edited = fresh.versions != versions and not self._edits
                self._edits |= is_edited
            if is_edited:  # and what it was is gone; from now on, each pass has its own
                raise UnsupportedModelError(_EDITED, topic="overwritten-tensors")
            if labels is not None:
                return self._run_split(step, labels, batch, places)

    def _run_split(
        self, step: _Step, labels: Sequence[int], batch: SampleBatch, places: Tensor
    ) -> list[_Group]:
        label, found = torch.tensor(labels), list[_Group]()
        for number in range(max(labels) + 1):
            part = (label == number).nonzero().flatten()
            found += self._run(step, batch.of(part), places[part])
        return found

    def _run_together(
        self, forward: Forward, around: Around, batch: SampleBatch, places: Tensor
    ) -> _Group:
        recorder = CallRecorder(
            batch.size, COMPOSITES, own_memory=self._own_memory, along=self._along
        )
        with recorder.running():
            value = batch.map(
                lambda x: (
                    recorder.sample(x.unsqueeze(1)) if isinstance(x, Tensor) else type(x)(x[:1])
                )
            )
            with _refusing(), recorder, around(recorder, places):
                output = forward(value)
            self.has_asked |= recorder.has_asked
            for call in recorder.calls:
                call.owners = batch.owners
            losses = self._losses(recorder, loss_in(output))
            output = map_leaves(output, _as_rows)
        del value
        if recorder.samples_left:
            gc.collect()  # frames of an exception that was caught hold some, in a circle
            if recorder.samples_left:
                where = _holders(self._module, recorder.samples_left) or "a list, a closure"
                raise UnsupportedModelError(f"{_LEFT.format(where)}.", topic="kept-records")
        return _Group(places, recorder.calls, losses, output)

    def _losses(self, recorder: CallRecorder, loss: Any) -> Tensor | None:
        """Return the loss of each sample."""
        if not isinstance(loss, Tensor):
            return None
        if not is_sample(loss):  # a function of parameters alone
            loss = recorder.own(loss) if loss.requires_grad else loss
        found = rows(loss) if is_sample(loss) else loss.expand(recorder.n, *loss.shape)
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    def _output(self) -> Any:
        """Return what ``training_step`` would have given for the whole batch."""
        groups = self._groups
        known = [group for group in groups if group.losses is not None]
        if not known:
            return map_leaves(groups[0].output, whole_batch)
        none = torch.zeros((), device=self._params[0].device)
        losses = [none.expand(len(g.places)) if g.losses is None else g.losses for g in groups]
        loss = at_least_float32(torch.cat(losses) if len(losses) > 1 else losses[0]).mean()
        if not isinstance(known[0].output, Mapping):
            return loss
        others = [{k: v for k, v in g.output.items() if k != "loss"} for g in known]
        if len(known) < len(groups) or len({frozenset(each) for each in others}) > 1:
            others = others[:1]
        whole = joined(others, [group.places for group in groups]) if others[1:] else others[0]
        return {**map_leaves(whole, whole_batch), "loss": loss}

    # -- backward --------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        sums = [CallSums(self._params, self._memory, combined=combined) for _ in self._groups]
        with _refusing():
            self._go_back(loss, sums, self._params, keep_graph=keep_graph)

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> AbstractPerSampleGradients:
        def run(duals: Sequence[Tensor]) -> None:
            loss = run_again()
            sums = [DualSums(self._params, self._memory, duals, weights) for _ in self._groups]
            self._go_back(loss, sums, duals, along=True)

        self._along = True
        try:
            run_along(self._module, self._params, direction, run)
        finally:
            self._along = False
        return self.take(1.0)

    def _go_back(
        self,
        loss: Tensor,
        sums: Sequence[CallSums],
        params: Sequence[Tensor],
        *,
        keep_graph: bool = False,
        along: bool = False,
    ) -> None:
        """Go back to the calls of all groups at once; the parameters are as they are in the graph."""
        groups, self._groups = self._groups, []
        if not groups:
            raise RefusedRun("Records.run() must come before backward().", topic="out-of-order")
        of = {call: each for group, each in zip(groups, sums, strict=True) for call in group.calls}

        def done(call: Call, u: Tensor | None) -> None:
            if u is not None:
                of[call].take(call, u)

        found, missed = go_back(
            loss, list(of), done, keep_graph=keep_graph, along=along, others=params
        )
        self._refuse_missed(loss, found, {call.edge.node for call in missed})
        for each in sums:
            each.pull_back()
        places = [group.places for group in groups]
        self._found = partial(self._together, sums, None if self._has_owners else places)

    def _refuse_missed(
        self, loss: Tensor, found: Sequence[Tensor | None], calls: Collection[Any]
    ) -> None:
        """Refuse parameters that have a gradient by themselves, and calls that got none."""
        pairs = zip(self._params, found, strict=True)
        missed = [self._names[id(param)] for param, each in pairs if each is not None]
        if missed:
            raise UncoveredParameterError(missed)
        if calls and any(node in calls for node in nodes(loss.grad_fn)):
            raise UnsupportedModelError(
                "A use of a parameter got no gradient, though the loss depends on it.",
                topic="unseen-use",
            )

    def _together(
        self, sums: Sequence[CallSums], places: Sequence[Tensor] | None, scale: float
    ) -> AbstractPerSampleGradients:
        if places is None:  # a unit has samples in several groups, so that each group has all units
            of_units = [each.gradients(scale) for each in sums]
            first, *others = [each for each in of_units if each.count] or of_units[:1]
            return first.combine(1.0, [(1.0, each) for each in others]) if others else first
        if len(sums) == 1:
            return sums[0].gradients(scale)
        sizes = map(len, places)
        found = [
            each.gradients(scale * self._size / k, k) for each, k in zip(sums, sizes, strict=True)
        ]
        return GroupedGradients(found, places)

    def drop(self) -> None:
        super().drop()
        self._groups = []


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse what raises, inside: torch's own words tell sizes of a batch, which is private."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedModelError as error:
        error.place = _place_in_code(error)
        raise
    except Exception as error:
        text = f"{_RAISED.format(type(error).__name__)}."
        reason = UnsupportedModelError(text, topic="unsupported-model")
        reason.place = _place_in_code(error)
        raise reason from None


def _place_in_code(error: Exception) -> str:
    """Return the innermost line of the user's own code that an error went through, in words."""
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        is_installed = {"site-packages", "dist-packages"} & {*path.parts}
        if not (is_installed or _LIBRARIES & {*path.parents}):
            found = f"In {frame.f_code.co_name}, line {line} of {path.name}"
    return found


def _holders(module: nn.Module, tensors: Sequence[Tensor]) -> str:
    """Return the names of attributes that hold some tensors, themselves or in a list."""
    known = set(map(id, tensors))
    return ", ".join(
        f"self.{name}.{key}" if name else f"self.{key}"
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if not known.isdisjoint(map(id, [value, *(value if type(value) in (list, tuple) else ())]))
    )


def _as_rows(x: Any) -> Any:
    return SampleRows(rows(x)) if isinstance(x, Tensor) and is_sample(x) else x


class GroupedGradients(AbstractPerSampleGradients):
    """Gradients of samples that ran in several groups.

    Args:
        groups: their gradients.
        places: of the samples of each group in the batch.
    """

    def __init__(self, groups: Sequence[BookkeptGradients], places: Sequence[Tensor]) -> None:
        self._groups, self._places = list(groups), list(places)

    @property
    def count(self) -> int:
        return sum(map(len, self._places))

    def norms(self) -> Tensor:
        return self._in_order([each.norms() for each in self._groups])

    def norms_by_parameter(self) -> Tensor:
        return self._in_order([each.norms_by_parameter() for each in self._groups])

    def _in_order(self, found: Sequence[Tensor]) -> Tensor:
        """Return what there is of each record in the order of the batch."""
        whole = torch.cat(list(found))
        return whole[torch.cat(self._places).argsort().to(whole.device)]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._groups[0].weighted_sum(weights[self._places[0].to(weights.device)])
        for each, places in zip(self._groups[1:], self._places[1:], strict=True):
            each.add_weighted_sum(weights[places.to(weights.device)], total)
        return total

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        for each, places in zip(self._groups, self._places, strict=True):
            each.add_weighted_sum(weights[places.to(weights.device)], onto)

    def discard(self) -> None:
        for each in self._groups:
            each.discard()

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        found = [each.restrict(coordinates).entries() for each in self._groups]
        return restricted([self._in_order(found)], 1.0)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> AbstractPerSampleGradients:
        """Combine samples that ran together at all points; the groups may differ between points."""
        weights = [weight, *(each for each, _ in others)]
        points = [self, *(_grouped(each, self.count) for _, each in others)]
        labels = torch.zeros(self.count, len(points), dtype=torch.int64)
        for column, point in enumerate(points):
            for number, places in enumerate(point._places):
                labels[places, column] = number
        groups, places_of = list[BookkeptGradients](), list[Tensor]()
        for label in torch.unique(labels, dim=0):
            places = (labels == label).all(1).nonzero().flatten()
            (own, first), *rest = [
                (w, point._part(int(number), places))
                for w, point, number in zip(weights, points, label, strict=True)
            ]
            groups.append(first.combine(own, rest))
            places_of.append(places)
        return GroupedGradients(groups, places_of)

    def _part(self, number: int, places: Tensor) -> BookkeptGradients:
        """Return the gradients of some samples of a group, by their places in the batch."""
        group, own = self._groups[number], self._places[number]
        return group if len(places) == len(own) else group.of(torch.searchsorted(own, places))


def _grouped(gradients: AbstractPerSampleGradients, n: int) -> GroupedGradients:
    if isinstance(gradients, GroupedGradients) and gradients.count == n:
        return gradients
    if isinstance(gradients, BookkeptGradients) and gradients.count == n:
        return GroupedGradients([gradients], [torch.arange(n)])
    raise TypeError("Only gradients of the same records and engine can be combined.")
