"""The engine that runs every sample alone, under vmap: samples cannot mix in the model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_dp._precision import full_precision
from lightning_dp._refusals import RefusedRun
from lightning_dp._training_step import loss_in
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    Around,
    Forward,
    UncoveredParameterError,
    UnsupportedModelError,
)
from lightning_dp.gradients.batches import SampleBatch, map_leaves
from lightning_dp.gradients.bilinear import Folded, Rows, Use, uses_of_records
from lightning_dp.gradients.composites import COMPOSITES
from lightning_dp.gradients.hessian import run_along, split
from lightning_dp.gradients.materialised import restricted
from lightning_dp.gradients.parameter_sum import (
    Allowance,
    BookkeptGradients,
    ParameterGradients,
    ScratchPool,
)
from lightning_dp.gradients.record_calls import (
    Call,
    CallRecorder,
    DifferentPaths,
    WritesIntoNew,
)
from lightning_dp.gradients.vmap import MISSING, is_sample, rows

__all__ = ["GroupedGradients", "Records"]

_NOT_HERE = "This torch lacks {} of functorch, which running each record under vmap needs."
_RAISED = (
    "training_step cannot run for each record alone under torch.func.vmap ({}), since an operation in "
    "it has no such form"
)
_OVERWRITTEN = (
    "The input of a layer was overwritten after the layer had used it. Do not change tensors in place "
    "between layers."
)
_EDITED = (
    "training_step changes the batch in place, and has to begin again with some of the records. Change a "
    "copy: x = x + noise instead of x += noise."
)
_LEFT = (
    "training_step leaves numbers of single records behind (in an attribute, a list, a closure), where "
    "later steps could read them"
)


@dataclass(slots=True, eq=False)
class _Group:
    """Samples that took the same path.

    Args:
        places: of them in the batch.
        calls: that they made.
        losses: of each, shape (k,); None if their step gave none.
        output: of ``training_step``, with rows in the places of what one sample sees.
    """

    places: Tensor
    calls: list[Call]
    losses: Tensor | None
    output: Any


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

    def __init__(self) -> None:
        if MISSING:
            raise UnsupportedModelError(_NOT_HERE.format(", ".join(MISSING)), topic="engines")
        self._module: nn.Module | None = None
        self._params: tuple[nn.Parameter, ...] = ()
        self._names: dict[int, str] = {}
        self._memory = ScratchPool()
        self._own_memory = self._along = self._edits = False
        self._groups: list[_Group] = []
        self._size = 0
        self._found: list[BookkeptGradients] | None = None

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        self._module, self._params = module, tuple(params)
        self._names = {id(param): name for name, param in module.named_parameters()}

    # -- forward ---------------------------------------------------------------------------

    def run(self, forward: Forward, batch: SampleBatch, around: Around | None = None) -> Any:
        self.drop()
        batch.check()
        self._size = batch.size
        places = torch.arange(batch.size)
        around = around or (lambda recorder, places: nullcontext())
        self._groups = self._split_by_texts(forward, batch, places, around)
        return self._output()

    def _split_by_texts(
        self, forward: Forward, batch: SampleBatch, places: Tensor, around: Around
    ) -> list[_Group]:
        """Run samples together whose texts, and other things that are no tensors, are equal."""
        if not (others := batch.others):
            return self._run(forward, batch, places, around)
        numbers: dict[str, int] = {}
        keys = [repr([each[i] for each in others]) for i in range(batch.size)]
        labels = [numbers.setdefault(key, len(numbers)) for key in keys]
        return self._run_split(labels, forward, batch, places, around)

    def _run(
        self, forward: Forward, batch: SampleBatch, places: Tensor, around: Around
    ) -> list[_Group]:
        while True:
            fresh = batch.copied() if self._edits else batch
            versions = fresh.versions
            try:
                return [self._run_together(forward, fresh, places, around)]
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
                return self._run_split(labels, forward, batch, places, around)

    def _run_split(
        self,
        labels: Sequence[int],
        forward: Forward,
        batch: SampleBatch,
        places: Tensor,
        around: Around,
    ) -> list[_Group]:
        label, found = torch.tensor(labels), list[_Group]()
        for number in range(int(label.max()) + 1):
            part = (label == number).nonzero().flatten()
            found += self._run(forward, batch.of(part), places[part], around)
        return found

    def _run_together(
        self, forward: Forward, batch: SampleBatch, places: Tensor, around: Around
    ) -> _Group:
        recorder = CallRecorder(
            batch.size, COMPOSITES, own_memory=self._own_memory, along=self._along
        )
        with recorder.running(), around(recorder, places):
            value = batch.map(
                lambda x: recorder.seen_alone(x) if isinstance(x, Tensor) else type(x)(x[:1])
            )
            try:
                output = forward(value)
            except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # Torch's own words tell sizes of a batch, which is private.
                reason = _RAISED.format(type(error).__name__)
                raise UnsupportedModelError(f"{reason}.", topic="unsupported-model") from error
            losses = self._losses(recorder, loss_in(output))
            output = map_leaves(output, lambda x: _all_rows(x) if isinstance(x, Tensor) else x)
        del value
        if recorder.leaves_samples:
            gc.collect()  # frames of an exception that was caught hold some, in a circle
            if recorder.leaves_samples:
                raise UnsupportedModelError(f"{_LEFT}.", topic="kept-records")
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
        first = groups[0].output
        if not known:
            return first if not isinstance(first, Tensor) else None
        first_losses = known[0].losses
        if len(groups) == 1 and isinstance(first, Tensor) and first_losses is not None:
            return first_losses.mean()
        order = torch.cat([group.places for group in groups]).argsort()
        none = torch.zeros((), device=self._params[0].device)
        losses = torch.cat(
            [none.expand(len(g.places)) if g.losses is None else g.losses for g in groups]
        )
        loss = losses.mean()
        if not isinstance(known[0].output, Mapping):
            return loss
        others = [{k: v for k, v in g.output.items() if k != "loss"} for g in known]
        joined = _joined(others, order) if len(known) == len(groups) else others[0]
        return {**joined, "loss": loss}

    # -- backward --------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        groups, self._groups = self._groups, []
        if not groups:
            raise RefusedRun("Records.run() must come before backward().", topic="out-of-order")
        pools = [self._new_sums() for _ in groups]
        calls = [
            (call, pool) for group, pool in zip(groups, pools, strict=True) for call in group.calls
        ]
        waiting = {id(call): call for call, _ in calls}
        handles = []

        def arrived(call: Call, sums: _Sums, u: Tensor | None) -> None:
            if waiting.pop(id(call), None) is not None and u is not None:
                with torch.no_grad():
                    sums.take(call, u, combined=combined)

        firsts = [pair for pair in calls if pair[0].is_first]
        for call, sums in calls:
            if not call.is_first:
                handles.append(_watch(call, partial(arrived, call, sums)))
        try:
            edges: list[Any] = [call.edge for call, _ in firsts]
            back: list[Tensor | None] = list(
                torch.autograd.grad(
                    loss, [*edges, *self._params], retain_graph=keep_graph, allow_unused=True
                )
            )
        finally:
            for handle in handles:
                handle.remove()
        self._refuse_missed(back[len(firsts) :])
        for place, (call, sums) in enumerate(firsts):
            u, back[place] = back[place], None
            arrived(call, sums, u)
        if waiting and _reaches(loss, [call.edge.node for call in waiting.values()]):
            raise UnsupportedModelError(
                "A use of a parameter got no gradient, though the loss depends on it.",
                topic="unseen-use",
            )
        for sums in pools:
            sums.pull_back(combined=combined)
        self._found = [
            sums.gradients(self._params, self._size / len(group.places))
            for group, sums in zip(groups, pools, strict=True)
        ]
        self._places = [group.places for group in groups]

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> AbstractPerSampleGradients:
        """Return w g_i + w' H_i u from one forward and backward pass in dual numbers.

        Where a rule is known, a gradient is a bilinear form, so that its derivative along the
        direction is two uses of the same form (:meth:`AbstractForm.along`).
        """
        assert self._module is not None
        module, self._along = self._module, True

        def run() -> list[_Sums]:
            loss = run_again()
            groups, self._groups = self._groups, []
            named = dict(module.named_parameters())
            duals = [named[self._names[id(param)]] for param in self._params]
            edges: list[Any] = [call.edge for group in groups for call in group.calls]
            back = torch.autograd.grad(loss, [*edges, *duals], create_graph=True, allow_unused=True)
            self._refuse_missed(back[len(edges) :])
            found, self._places = iter(back), [group.places for group in groups]
            pools = [_DualSums(self._params, self._memory, duals, weights) for _ in groups]
            with torch.no_grad():
                for group, sums in zip(groups, pools, strict=True):
                    for call in group.calls:
                        if (u := next(found)) is not None:
                            sums.take(call, u, combined=True)
            for sums in pools:
                sums.pull_back(combined=True)
            return list(pools)

        try:
            pools = run_along(module, self._params, direction, run)
        finally:
            self._along = False
        self._found = [
            sums.gradients(self._params, self._size / len(places))
            for sums, places in zip(pools, self._places, strict=True)
        ]
        return self.take(1.0)

    def _refuse_missed(self, found: Sequence[Tensor | None]) -> None:
        """Refuse parameters that have a gradient by themselves: they met samples unseen."""
        pairs = zip(self._params, found, strict=True)
        missed = [self._names[id(param)] for param, each in pairs if each is not None]
        if missed:
            raise UncoveredParameterError(missed)

    def _new_sums(self) -> _Sums:
        return _Sums(self._params, self._memory)

    def take(self, scale: float) -> AbstractPerSampleGradients:
        found, self._found = self._found, None
        if found is None:
            raise RefusedRun("Records.backward() must come before take().", topic="out-of-order")
        if scale != 1.0:
            found = [each.combine(scale, ()) for each in found]
        return found[0] if len(found) == 1 else GroupedGradients(found, self._places)

    def drop(self) -> None:
        self._groups, self._found = [], None

    def detach(self) -> None:
        self.drop()
        self._module, self._params, self._names = None, (), {}
        self._memory = ScratchPool()


def _watch(call: Call, done: Callable[[Tensor | None], None]) -> Any:
    number = call.edge.output_nr
    return call.edge.node.register_prehook(lambda gradients: done(gradients[number]))


def _all_rows(x: Tensor) -> Tensor:
    """Return what the batch has where one sample sees a tensor of a batch of one, or of no dimension."""
    if not is_sample(x):
        return x
    found = rows(x)
    return found.flatten(0, 1) if found.dim() > 1 else found


def _joined(outputs: Sequence[Any], order: Tensor) -> Any:
    """Return outputs of several groups as one, with rows in the order of the batch."""
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if isinstance(first, Tensor) and all(isinstance(each, Tensor) for each in outputs):
        if first.dim() and len({each.shape[1:] for each in outputs}) == 1:
            whole = torch.cat(list(outputs))
            return whole[order.to(whole.device)] if len(whole) == len(order) else whole
        return first
    if isinstance(first, Mapping):
        return {
            key: _joined([each[key] for each in outputs if key in each], order) for key in first
        }
    return first


def _reaches(loss: Tensor, nodes: Sequence[Any]) -> bool:
    """Return whether the graph of a loss holds one of some nodes."""
    wanted, seen, stack = set(nodes), set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node in wanted:
            return True
        seen.add(node)
        stack += [child for child, _ in node.next_functions]
    return False


class _Sums:
    """The uses of all parameters by one group of samples."""

    def __init__(self, params: Sequence[nn.Parameter], memory: ScratchPool) -> None:
        allowance = Allowance()
        self._params = params
        self._of = {id(p): ParameterGradients([], p.shape, memory, allowance) for p in params}
        self._parts: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def take(self, call: Call, u: Tensor, *, combined: bool) -> None:
        """Count in what came back for a call."""
        u = u if call.shape is None else u.reshape(call.shape)
        if call.rule is None:
            assert call.part is not None
            self._add(call.part, Rows.use(_at_least_float32(u)), combined)
            return
        v, call.v = call.v, None
        assert v is not None
        if v._version != call.version:
            raise UnsupportedModelError(_OVERWRITTEN, topic="overwritten-tensors")
        v, u = _at_least_float32(v), _at_least_float32(u)
        with full_precision(u.device):
            for param, use in uses_of_call(call, v, u):
                if param is not None:
                    self._add(param, use, combined)

    def _add(self, tensor: Tensor, use: Use, combined: bool) -> None:
        if id(tensor) in self._of:
            self._of[id(tensor)].add(use, combined=combined)
        elif tensor.requires_grad and tensor.grad_fn is not None:
            made = self._rows(use).reshape(len(use.u), *tensor.shape)
            self._parts.setdefault(id(tensor), (tensor, []))[1].append(made)

    def _rows(self, use: Use) -> Tensor:
        return use.form.rows(use.v, use.u)

    def pull_back(self, *, combined: bool) -> None:
        """Count in what came back for what is computed from parameters: it is linear."""
        parts, self._parts = list(self._parts.values()), {}
        for tensor, found in parts:
            total = reduce(torch.add, found).to(tensor.dtype)
            back = torch.autograd.grad(
                tensor,
                self._params,
                total,
                is_grads_batched=True,
                allow_unused=True,
                retain_graph=True,
            )
            with torch.no_grad():
                for param, gradient in zip(self._params, back, strict=True):
                    if gradient is not None:
                        self._add(param, Rows.use(_at_least_float32(gradient)), combined)

    def gradients(self, params: Sequence[nn.Parameter], scale: float) -> BookkeptGradients:
        each = [self._of[id(param)] for param in params]
        return BookkeptGradients(params, [g if g.uses else None for g in each], scale)


class _DualSums(_Sums):
    """The same inside dual numbers: for w g + w' H u in the place of the gradient g.

    Args:
        duals: in the places of the parameters.
        weights: w and w'.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        memory: ScratchPool,
        duals: Sequence[Tensor],
        weights: tuple[float, float],
    ) -> None:
        super().__init__(params, memory)
        self._duals, self._weights = duals, weights
        self._of |= {id(d): self._of[id(p)] for d, p in zip(duals, params, strict=True)}

    def _add(self, tensor: Tensor, use: Use, combined: bool) -> None:
        if id(tensor) in self._of:
            for each in use.form.along(split(use.v), split(use.u), self._weights):
                super()._add(tensor, each, combined)
        else:
            super()._add(tensor, use, combined)

    def _rows(self, use: Use) -> Tensor:
        v, u = split(use.v), split(use.u)
        moved = [part.form.rows(part.v, part.u) for part in use.form.along(v, u, (0.0, 1.0))]
        rows = use.form.rows(v[0], u[0])
        dual: Tensor = forward_ad.make_dual(rows, reduce(torch.add, moved))  # type: ignore[no-untyped-call]
        return dual

    def pull_back(self, *, combined: bool) -> None:
        parts, self._parts = list(self._parts.values()), {}
        for tensor, found in parts:
            total = reduce(torch.add, found).to(tensor.dtype)
            rows = [self._pulled_back(tensor, each) for each in total]
            with torch.no_grad():
                for param, each in zip(self._params, zip(*rows, strict=True), strict=True):
                    super()._add(param, Rows.use(torch.stack(each)), combined)

    def _pulled_back(self, tensor: Tensor, total: Tensor) -> list[Tensor]:
        back = torch.autograd.grad(tensor, self._duals, total, create_graph=True, allow_unused=True)
        found = []
        for param, each in zip(self._params, back, strict=True):
            if each is None:
                found.append(torch.zeros_like(param))
                continue
            value, moved = split(each)
            found.append(self._weights[0] * value)
            if moved is not None:
                found[-1] += self._weights[1] * moved
        return found


def uses_of_call(call: Call, v: Tensor, u: Tensor) -> list[tuple[Tensor | None, Use]]:
    """Return the parameters of a call with their uses, for the samples."""
    assert call.rule is not None
    if not call.folds:
        return call.rule(call.layer, v, u)
    n, b = v.shape[:2]
    uses = call.rule(call.layer, v.flatten(0, 1), u.flatten(0, 1))
    return uses if b == 1 else uses_of_records(uses, Folded(n, 1, b))


def _at_least_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


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
        found = [
            each.norms() if each.count else torch.zeros(len(places), dtype=torch.float64)
            for each, places in zip(self._groups, self._places, strict=True)
        ]
        like = max(found, key=lambda norms: norms.device.type != "cpu")
        order = torch.cat(self._places).argsort().to(like.device)
        return torch.cat([each.to(like) for each in found])[order]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        first, *others = self._filled()
        total = first[0].weighted_sum(weights[first[1].to(weights.device)])
        for each, places in others:
            each.add_weighted_sum(weights[places.to(weights.device)], total)
        return total

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        for each, places in self._filled():
            each.add_weighted_sum(weights[places.to(weights.device)], onto)

    def _filled(self) -> list[tuple[BookkeptGradients, Tensor]]:
        pairs = list(zip(self._groups, self._places, strict=True))
        return [pair for pair in pairs if pair[0].count] or pairs[:1]

    def discard(self) -> None:
        for each in self._groups:
            each.discard()

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        found = [(each.restrict(coordinates), places) for each, places in self._filled()]
        rows = [part.entries() for part, _ in found]
        whole = rows[0].new_zeros(self.count, len(coordinates))
        for part, (_, places) in zip(rows, found, strict=True):
            whole[places.to(whole.device)] = part
        return restricted([whole], 1.0)

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
            parts = [
                (w, point._part(int(number), places))
                for w, point, number in zip(weights, points, label, strict=True)
            ]
            (own, first), *rest = [pair for pair in parts if pair[1].count] or parts[:1]
            groups.append(first.combine(own, rest))
            places_of.append(places)
        return GroupedGradients(groups, places_of)

    def _part(self, number: int, places: Tensor) -> BookkeptGradients:
        """Return the gradients of some samples of a group, by their places in the batch."""
        group, own = self._groups[number], self._places[number]
        if not group.count or len(places) == len(own):
            return group
        return group.of(torch.searchsorted(own, places))


def _grouped(gradients: AbstractPerSampleGradients, n: int) -> GroupedGradients:
    if isinstance(gradients, GroupedGradients) and gradients.count == n:
        return gradients
    if isinstance(gradients, BookkeptGradients) and gradients.count == n:
        return GroupedGradients([gradients], [torch.arange(n)])
    raise TypeError("Only gradients of the same records and engine can be combined.")
