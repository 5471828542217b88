"""Calls of layers with trained parameters, and clipped sums from one backward pass to their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import attrgetter
from typing import Any, Literal, TypeVar
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp._refusals import Refusal
from lightning_dp.functional import full_precision, real, unflatten
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    AbstractPerSampleGradients,
    Around,
    Forward,
    UncoveredParameterError,
    UnsupportedModelError,
    as_unsupported,
    refuse_complex,
    refuse_without_records,
)
from lightning_dp.gradients.batches import RowOwners, SampleBatch, folding_in_force
from lightning_dp.gradients.bilinear import Folding, Rows, Use, Uses, uses_of_records
from lightning_dp.gradients.graph import Survey, changes_order, survey
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.parameter_sum import (
    Allowance,
    BookkeptGradients,
    ParameterGradients,
    ScratchPool,
    at_least_float32,
)
from lightning_dp.gradients.rules import Rule, own_parameters, refuse_options, rule_of
from lightning_dp.gradients.sharded import WholeParameters, is_unit, twin, unit_rule

__all__ = [
    "AbstractLayerEngine",
    "Call",
    "CallSums",
    "DualSums",
    "KeptInputs",
    "LayerCalls",
    "copied",
    "go_back",
    "run_along",
]

T = TypeVar("T")
_VERSION = attrgetter("_version")


class KeptInputs:
    """The inputs of a call, as they are."""

    def __init__(self, inputs: Sequence[Tensor], output: Tensor | None = None) -> None:
        self._inputs = tuple(inputs)
        self._versions = list(map(_VERSION, inputs))

    def take(self, *, keep: bool) -> tuple[Tensor, ...] | None:
        """Return the inputs, as often as they are kept; None if one was overwritten since."""
        inputs = self._inputs
        if not keep:
            self._inputs = ()
        return inputs if list(map(_VERSION, inputs)) == self._versions else None


@dataclass(eq=False, slots=True)
class Call:
    """One call of a layer or function with parameters, until the backward pass comes to it.

    Args:
        rule: returns the uses of its parameters.
        layer: has them, as the rule reads them.
        inputs: what the rule takes of the call.
        edge: where the gradient of the output arrives.
        is_first: no other call feeds it.
        folding: the record of each row; None if rows are the samples.
        owners: the unit of each sample, whose mean is taken; None if each is one.
        shape: of the gradient for the rule; None if it is as it arrives.
        name: in the model, or of the function.
    """

    rule: Rule
    layer: Any
    inputs: KeptInputs
    edge: GradientEdge
    is_first: bool = False
    folding: Folding | None = None
    shape: Sequence[int] | None = None
    name: str = ""
    owners: RowOwners | None = None

    def take_inputs(self, *, keep: bool = False) -> tuple[Tensor, ...]:
        """Hand over the inputs, unless one was overwritten; without ``keep`` they are free then."""
        if (inputs := self.inputs.take(keep=keep)) is None:
            raise UnsupportedModelError(
                f"The input of {self.name or 'the module'} ({type(self.layer).__name__}) was "
                "overwritten after the layer had used it. Do not change tensors in place between layers.",
                topic="overwritten-tensors",
            )
        return inputs

    def uses(self, *tensors: Tensor) -> Uses:
        """Return every parameter with its use, from the inputs and the gradient of the output."""
        *inputs, u = map(at_least_float32, tensors)
        uses = self.rule(self.layer, *inputs, u if self.shape is None else u.reshape(self.shape))
        if self.folding is not None:
            uses = uses_of_records(uses, self.folding)
        if self.owners is None:
            return uses
        if not self.owners.have_as_many:
            uses = [(param, use.times(self.owners.row_shares)) for param, use in uses]
        return uses_of_records(uses, self.owners)


def copied(part: Tensor, gradient: Tensor) -> Uses:
    """Return the use of a tensor, computed from parameters, of which each record has a copy."""
    return [(part, Rows.use(gradient))]


def go_back(
    loss: Tensor,
    calls: Sequence[Call],
    done: Callable[[Call, Tensor | None], object],
    *,
    keep_graph: bool = False,
    along: bool = False,
    others: Sequence[Tensor] = (),
) -> tuple[Sequence[Tensor | None], Sequence[Call]]:
    """Differentiate a loss as far as the outputs of calls, and hand each its gradient as it comes.

    The pass stops at the outputs of the calls that no other one feeds.

    Args:
        loss: depends on these calls.
        calls: recorded ones.
        done: is called with each call, once, and the gradient of its output.
        keep_graph: the graph is going to be used once more.
        along: inside of :func:`run_along`: the gradients carry their derivatives.
        others: leaves of the graph.

    Returns:
        The gradients of the others, and the calls that the pass did not come to.
    """
    ends = [call for call in calls if call.is_first or along]
    waiting = dict.fromkeys(() if along else (call for call in calls if not call.is_first))

    def arrived(call: Call, gradient: Tensor | None) -> None:
        if call in waiting:
            del waiting[call]
            done(call, gradient)

    if not ends and not others:
        return (), ()
    handles = [_watch(call, partial(arrived, call)) for call in waiting]
    edges: list[Any] = [call.edge for call in ends]
    try:
        found: list[Tensor | None] = list(
            torch.autograd.grad(
                loss,
                [*edges, *others],
                retain_graph=keep_graph or along,
                create_graph=along,
                allow_unused=True,
            )
        )
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():  # as during the pass itself
        for number, call in enumerate(ends):
            gradient, found[number] = found[number], None  # free when its call has seen it
            done(call, gradient)
        for call in waiting:
            done(call, None)
    return found[len(ends) :], list(waiting)


def _watch(call: Call, done: Callable[[Tensor | None], None]) -> Any:
    number = call.edge.output_nr
    return call.edge.node.register_prehook(lambda gradients: done(gradients[number]))


class CallSums:
    """The gradients of all parameters per record, from the calls of one backward pass.

    Args:
        params, memory, combined: as for :class:`ParameterGradients`.
        trained: returns the parameter for which a tensor stands.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        memory: ScratchPool,
        *,
        combined: bool = False,
        trained: Callable[[Any], Any] = lambda tensor: tensor,
    ) -> None:
        allowance = Allowance()
        self._params, self._combined, self._trained = params, combined, trained
        self._precision = full_precision(params[0].device)
        # Sums are of real numbers: both parts of complex ones.
        self._real = [real(p.detach()) if p.is_complex() else p for p in params]
        pairs = zip(params, self._real, strict=True)
        self._of = {id(p): ParameterGradients([], r.shape, memory, allowance) for p, r in pairs}
        self._parts: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def take(self, call: Call, gradient: Tensor | None) -> None:
        """Count in one call with the gradient of its output, and free what it holds."""
        inputs = call.take_inputs()
        if gradient is None:
            return
        with self._precision:
            for tensor, use in call.uses(*inputs, gradient):
                if tensor is not None:
                    self._add(self._trained(tensor), use)

    def _add(self, tensor: Tensor, use: Use) -> None:
        if id(tensor) in self._of:
            if tensor.is_complex():
                use = Rows.use(real(use.u))
            self._of[id(tensor)].add(use, combined=self._combined)
        elif tensor.requires_grad and tensor.grad_fn is not None:
            made = self._rows(use).reshape(len(use.u), *tensor.shape)
            self._parts.setdefault(id(tensor), (tensor, []))[1].append(made)

    def _rows(self, use: Use) -> Tensor:
        return use.form.rows(use.v, use.u)

    def pull_back(self) -> None:
        """Count in what came back for tensors that are computed from parameters: it is linear."""
        parts, self._parts = list(self._parts.values()), {}
        for tensor, found in parts:
            total = reduce(torch.add, found).to(tensor.dtype)
            for param, rows in zip(self._params, self._pulled_back(tensor, total), strict=True):
                if rows is not None:
                    with torch.no_grad():
                        CallSums._add(self, param, Rows.use(at_least_float32(rows)))

    def _pulled_back(self, tensor: Tensor, total: Tensor) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            tensor,
            self._params,
            total,
            is_grads_batched=True,
            allow_unused=True,
            retain_graph=True,
        )

    def gradients(self, scale: float, count: int | None = None) -> BookkeptGradients:
        """Return the gradients times a number, as :class:`BookkeptGradients` takes it."""
        each = [self._of[id(param)] for param in self._params]
        return BookkeptGradients(self._real, [g if g.uses else None for g in each], scale, count)


# -- along a direction ----------------------------------------------------------------------------


class _Holder(nn.Module):
    """Lets ``functional_call`` replace the parameters of a module while any function runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], T]) -> T:
        return run()


def run_along(
    module: nn.Module,
    params: Sequence[nn.Parameter],
    direction: Tensor,
    run: Callable[[Sequence[Tensor]], T],
) -> T:
    """Call ``run(duals)`` with every trained parameter a dual number: its value and its direction.

    Every tensor that is computed inside carries its derivative along the direction, those of a
    backward pass too (forward-over-reverse; run it with ``create_graph=True``, since some fused
    backward kernels have no derivative).
    """
    names = {id(param): f"module.{name}" for name, param in module.named_parameters()}
    parts = unflatten(direction.to(params[0].device), params)
    try:
        # Fused attention has no second derivative.
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            duals = [dual_of(param, part) for param, part in zip(params, parts, strict=True)]
            replaced = {names[id(p)]: dual for p, dual in zip(params, duals, strict=True)}
            result: T = functional_call(_Holder(module), replaced, (partial(run, duals),))
    except (Refusal, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:  # other words of torch's tell sizes of a batch, which is private
        which = f": {error}" if isinstance(error, NotImplementedError) else "."
        raise UnsupportedModelError(
            f"A Hessian-vector product needs the second derivative of every operation, and one has "
            f"none{which} Replace the operation, or use an estimator without Hessians.",
            topic="hessian-products",
        ) from None
    return result


def dual_of(value: Tensor, moved: Tensor) -> Tensor:
    """Return a value with its derivative along the direction."""
    dual: Tensor = forward_ad.make_dual(value, moved)  # type: ignore[no-untyped-call]
    return dual


def split(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return value and derivative, None for zero, cut off from the graph; in :func:`run_along` only."""
    value, moved = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return value.detach(), None if moved is None else moved.detach()


class DualSums(CallSums):
    """The same inside dual numbers: for w g + w' H u in the place of the gradient g.

    Where a rule is known, the gradient is a bilinear form of tensors that carry their derivatives along
    the direction, so that its own is two uses of the same form (:meth:`AbstractForm.along`).
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

    def _add(self, tensor: Tensor, use: Use) -> None:
        if id(tensor) in self._of:
            for each in use.form.along(split(use.v), split(use.u), self._weights):
                super()._add(tensor, each)
        else:
            super()._add(tensor, use)

    def _rows(self, use: Use) -> Tensor:
        v, u = split(use.v), split(use.u)
        moved = [part.form.rows(part.v, part.u) for part in use.form.along(v, u, (0.0, 1.0))]
        return dual_of(use.form.rows(v[0], u[0]), reduce(torch.add, moved))

    def _pulled_back(self, tensor: Tensor, total: Tensor) -> Sequence[Tensor | None]:
        found = [self._row(tensor, each) for each in total]
        return [torch.stack(rows) for rows in zip(*found, strict=True)]

    def _row(self, tensor: Tensor, total: Tensor) -> list[Tensor]:
        back = torch.autograd.grad(
            tensor, self._duals, total, create_graph=True, materialize_grads=True
        )
        rows = []
        for value, moved in map(split, back):
            rows.append(self._weights[0] * value)
            if moved is not None:
                rows[-1] += self._weights[1] * moved
        return rows


_OTHER_ORDER = (
    "Between layers, rows are chosen or put into another order (an index, flip, roll or sort along the "
    "first dimension), so that a row is not the same record everywhere. Leave the records in the order "
    "in which they came."
)
_EXCHANGED = (
    "{} ({}) was called with other parameters than its own (torch.func.functional_call, or a hook that "
    "replaces them). Call it as it is, or freeze it with requires_grad_(False)."
)
_NO_TENSORS = (
    "The layer {} ({}) itself has parameters, and something else than tensors goes in (or by name) or "
    "comes out. Give the parameters to a separate layer, called with tensors by position and returning "
    "one tensor."
)
_TENSORS = frozenset((Tensor, nn.Parameter))


class AbstractLayerEngine(AbstractGradientEngine):
    """An engine whose forward hooks record every call of a layer with trained parameters.

    Args:
        module, params: as for :class:`AbstractGradientEngine`.
        keeps: holds the inputs of a call.
        units: layers of no known type run again for each record: in copies of sharded models.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        keeps: Callable[[Sequence[Tensor], Tensor], KeptInputs] = KeptInputs,
        *,
        units: bool = False,
    ) -> None:
        super().__init__(module, params)
        refuse_complex(module, params)
        self._whole, self._keeps, self._memory = WholeParameters(module), keeps, ScratchPool()
        self._known = list(module.parameters())  # no whole ones in the places of shards
        self._param_names = {id(param): name for name, param in module.named_parameters()}
        self._names = {layer: name for name, layer in module.named_modules()}
        self._what: Literal["values", "nothing", "duals"] = "values"
        self._owners: RowOwners | None = None  # of the samples that run
        self.drop()
        trained = {id(param) for param in params}
        rules = self._rules(trained, units)
        # Along a direction other tensors stand in the places of the parameters.
        self._held = {layer: dict(layer._parameters) for layer in rules}
        self._used = {layer: [id(param) for param in _used_by(layer)] for layer in rules}
        self._hooks = ModuleHooks()
        me: Any = proxy(self)  # so that its memory is free as soon as the engine is
        for layer, rule in rules.items():  # before the user's hooks, which may change the output
            register = partial(layer.register_forward_hook, prepend=True, with_kwargs=True)
            self._hooks.add(layer, register, partial(type(self)._watch, me, rule))
            if rule is None:  # after the user's hooks, which do not run again
                begin = partial(type(self)._begin, me)
                self._hooks.add(layer, layer.register_forward_pre_hook, begin)
        self._whole.hang_on(self._hooks)

    def _rules(self, trained: Collection[int], units: bool) -> dict[nn.Module, Rule | None]:
        """Return the layers whose calls use trained parameters, with their rules; None for shards."""
        found: dict[nn.Module, Rule | None] = {}
        for layer, name in self._names.items():
            if not any(id(param) in trained for param in layer.parameters()):
                continue
            rule = rule_of(layer)
            own = [param for param in own_parameters(layer) if id(param) in trained]
            is_known = rule is not None or units or is_unit(layer)
            refuse_options(name, layer, has_rule=is_known, has_own=bool(own))
            if own:
                found[layer] = rule
        return found

    def drop(self) -> None:
        super().drop()
        self._forget()

    def _forget(self) -> None:
        self._calls: list[Call] = []
        self._before: dict[nn.Module, nn.Module] = {}  # layers that are running, as they began
        self._problem: UnsupportedModelError | None = None
        self._unseen: dict[Any, str] = {}  # graph nodes of outputs with other parameters, and why

    def run(self, forward: Forward, batch: SampleBatch, around: Around | None = None) -> Any:
        self._owners = batch.owners
        return super().run(forward, batch, around)

    def watching(self) -> AbstractContextManager[None]:
        return self._hooks

    @contextmanager
    def _recording(self, what: Literal["nothing", "duals"]) -> Iterator[None]:
        """Inside, record nothing, since checkpointed layers run again; or calls of dual numbers."""
        before, self._what = self._what, what
        try:
            yield
        finally:
            self._what = before

    @contextmanager
    def repeating(self) -> Iterator[None]:
        # What runs again saves what it saved before; it is not recorded.
        seen = self._calls, self._problem, self._unseen
        self._forget()
        try:
            with self._hooks:
                yield
        finally:
            self._calls, self._problem, self._unseen = seen

    def _begin(self, layer: nn.Module, args: Any) -> None:
        self._before[layer] = twin(layer)

    def _watch(
        self,
        rule: Rule | None,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        name = self._names[layer]
        if self._what == "nothing" or not torch.is_grad_enabled():
            return
        if self._is_exchanged(layer):  # the loss must not depend on it
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self._unseen[output.grad_fn] = _EXCHANGED.format(
                    name or "The module", type(layer).__name__
                )
        elif kwargs or not args or not _are_tensors((*args, output)):
            problem = _NO_TENSORS.format(name or "of the whole module", type(layer).__name__)
            self._problem = UnsupportedModelError(problem, topic="unsupported-layer")
        elif output.requires_grad:
            refuse_without_records(name, layer, args[0])
            rule = unit_rule(layer, self._before.pop(layer, layer)) if rule is None else rule
            inputs = [x if self._what == "duals" else x.detach() for x in args]
            kept, edge = self._keeps(inputs, output), get_gradient_edge(output)
            call = Call(rule, layer, kept, edge, folding=folding_in_force(), name=name)
            call.owners = self._owners
            self._calls.append(call)

    def _is_exchanged(self, layer: nn.Module) -> bool:
        """Return whether other tensors are in the places of a layer's parameters now."""
        held, now = self._held[layer], layer._parameters
        if self._what == "duals":
            return False
        reads_others = any(getattr(layer, name) is not param for name, param in now.items())
        if reads_others or now.keys() != held.keys():
            return True  # pruned, say: its forward pass reads what is computed from them
        if all(now[name] is param for name, param in held.items()):
            return False
        self._whole.look(layer)  # the whole parameters may be there, in the places of shards
        return any(self._whole.trained(now[name]) is not param for name, param in held.items())

    def used_by(self, call: Call) -> Sequence[int]:
        """Return the parameters that a call uses, by ``id``."""
        return self._used[call.layer]

    def outputs_of_layers(self) -> set[Any]:
        return {call.edge.node for call in self._calls} | self._unseen.keys()

    def calls_of(self, loss: Tensor) -> list[Call]:
        """Hand over the recorded calls that the loss depends on; refuse all else that it depends on."""
        calls, problem, unseen = self._calls, self._problem, self._unseen
        outputs = self.outputs_of_layers()
        self._forget()
        if problem is not None:
            raise problem
        graph = survey(loss.grad_fn, outputs)
        self._whole.refuse_unknown(graph.leaves, self._known)
        if any(map(self._changes_order, graph.choosing)) and all(c.folding is None for c in calls):
            raise UnsupportedModelError(_OTHER_ORDER, topic="rows-and-records")
        for node in graph.reached & unseen.keys():
            raise UnsupportedModelError(unseen[node], topic="unseen-use")
        calls = [call for call in calls if call.edge.node in graph.reached]
        self._refuse_uncovered(calls, graph)
        for call in calls:
            call.is_first = call.edge.node in graph.innermost
        return calls

    def _changes_order(self, node: Any) -> bool:
        return changes_order(node)

    def _refuse_uncovered(self, calls: Sequence[Call], graph: Survey) -> None:
        """Refuse trained parameters that have more or fewer uses in a graph than recorded calls."""
        recorded = Counter([key for call in calls for key in self._used[call.layer]])
        # Fewer uses than calls: a call used another tensor in the parameter's place.
        uses = self._whole.translated(graph.uses)
        missing = [id(param) for param in self._params if uses[id(param)] != recorded[id(param)]]
        if missing:
            raise UncoveredParameterError([self._param_names[key] for key in missing])


def _are_tensors(given: Sequence[Any]) -> bool:
    return _TENSORS.issuperset(map(type, given)) or all(isinstance(x, Tensor) for x in given)


def _used_by(layer: nn.Module) -> list[Any]:
    """Return the parameters that one call uses; one that is weight and bias is used twice."""
    if rule_of(layer) is None:
        return list(own_parameters(layer))
    found = (getattr(layer, name, None) for name in ("weight", "bias"))
    return [param for param in found if param is not None]


class LayerCalls(AbstractLayerEngine):
    """One backward pass for the gradients of layer outputs only; the rest is book-keeping.

    Forward hooks keep each layer's input. The backward pass stops at the layers' outputs, so
    autograd computes no weight gradient at all. Norms come from inputs and output gradients
    (an outer product has the product of the norms), and the clipped sum is an ordinary weight
    gradient with the records scaled. Gradients per record are made where that is cheaper or there is
    no other way: of convolutions, norm layers and biases, of linear layers on long sequences, of
    weights that layers of different types share. Where they are smaller than what they are made
    from, they take its place as soon as the backward pass has come to the layer; of larger ones at
    most 64 MiB are kept for the sum, and beyond that they are made in slices.

    Covers the layers of ``RULES``, called any number of times, and shared parameters. A use of a
    parameter outside its layer, an input that was overwritten, rows in another order, or layers
    that see different numbers of rows are detected in every batch.

    Bu, Wang, Zha and Karypis, Differentially Private Optimization on Large Model at Small Cost
    (2023, arXiv:2210.00038), with the graph cut at the layers' outputs.
    """

    name = "layers"
    has_products = True
    takes_shards = True

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        trained = self._whole.trained
        sums = CallSums(self._params, self._memory, combined=combined, trained=trained)
        self._go_back(loss, sums, keep_graph=keep_graph)

    def _go_back(
        self, loss: Tensor, sums: CallSums, *, keep_graph: bool = False, along: bool = False
    ) -> None:
        self._found = None
        calls = self.calls_of(loss)

        def done(call: Call, gradient: Tensor | None) -> None:
            try:
                sums.take(call, gradient)
            except Exception as error:
                raise as_unsupported(error, call.name, call.layer) from None

        with self._recording("nothing"):
            go_back(loss, calls, done, keep_graph=keep_graph, along=along)
        self._found = sums.gradients

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> AbstractPerSampleGradients:
        def run(duals: Sequence[Tensor]) -> None:
            sums = DualSums(self._params, self._memory, duals, weights)
            self._go_back(run_again(), sums, along=True)

        with self._recording("duals"):
            run_along(self._module, self._params, direction, run)
        return self.take(1.0)
