"""Clipped sums from what layers saw and what came back to them, in one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from lightning_dp.clipping import AbstractPerSampleGradients
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    UncoveredParameterError,
    UnsupportedModelError,
    number_of_records,
)
from lightning_dp.gradients.forward_mode import Dual, run_along, split, uses_along
from lightning_dp.gradients.graph import Survey, survey
from lightning_dp.gradients.layers import (
    RULES,
    Memory,
    ParameterGradients,
    Rule,
    Uses,
    any_layer,
    rule_of,
)
from lightning_dp.gradients.materialised import restricted

__all__ = ["Bookkeeping", "BookkeptGradients", "Functional"]

# Gradients of all records that are made for the norms, and that are larger than what they are made
# from, are kept for the sum up to this much.
_KEEP_BYTES = 32 << 20
_CURE = "Use engine='hooks', or change the layer."


@dataclass
class _Record:
    """One call of a layer."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    versions: list[int]
    sources: set[Any]  # the graph nodes that made the inputs
    edge: GradientEdge
    moved: tuple[Dual, ...] = ()  # along a direction: the inputs with their derivatives

    def take_inputs(self) -> tuple[Tensor, ...]:
        """The inputs, which are not held any longer. Raises if they are not what they were."""
        inputs, self.inputs = self.inputs, ()
        if [each._version for each in inputs] != self.versions:
            raise UnsupportedModelError(
                f"The input of a layer ({type(self.layer).__name__}) was overwritten after "
                "the layer had used it. Do not change tensors in place between layers."
            )
        return inputs


class Bookkeeping(AbstractGradientEngine):
    """One backward pass for the gradients of layer outputs only; the rest is book-keeping.

    Forward hooks keep each layer's input. The backward pass stops at the layers' outputs, so
    autograd computes no weight gradient at all. Norms come from inputs and output gradients
    (an outer product has the product of the norms), and the clipped sum is an ordinary weight
    gradient with the records scaled. Gradients per record are made where that is cheaper or there is
    no other way: of convolutions, norm layers and biases, of linear layers on long sequences, of
    weights that layers of different types share. Where they are smaller than what they are made
    from, they take its place as soon as the backward pass has come to the layer; of larger ones at
    most 32 MiB are kept from the norms to the sum, and beyond that they are made in slices. Layers
    without a rule have theirs made for all records at once.

    Covers Linear, Conv1d to 3d, Embedding, LayerNorm, GroupNorm, InstanceNorm, RMSNorm, any other
    layer with tensors in and one out (slower), layers called several times, and shared parameters.
    A use of a parameter outside its layer, an input that was overwritten, or layers that see
    different numbers of rows are detected in every batch.

    Bu, Wang, Zha and Karypis, Differentially Private Optimization on Large Model at Small Cost
    (2023, arXiv:2210.00038), with the graph cut at the layers' outputs.

    Args:
        rules: what is known of layer types. Without any, every layer goes through ``torch.func``.
    """

    name = "bookkeeping"
    runs_backward = True
    has_products = True

    def __init__(self, rules: Mapping[type[nn.Module], Rule] = RULES) -> None:
        self._rules = rules
        self._module: nn.Module | None = None
        self._params: Sequence[nn.Parameter] = ()
        self._names: dict[int, str] = {}
        self._own: dict[
            nn.Module, list[int]
        ] = {}  # of each layer; along a direction others stand there
        self._handles: list[RemovableHandle] = []
        self._records: list[_Record] = []
        self._found: dict[int, ParameterGradients] | None = None  # of the last backward pass
        self._problem: str | None = None
        self._memory = Memory()
        self._is_watching = True
        self._is_along = False  # a direction

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        trained = {id(param) for param in params}
        layers = [
            (name, layer)
            for name, layer in module.named_modules()
            if any(id(param) in trained for param in layer.parameters(recurse=False))
        ]
        for name, layer in module.named_modules():
            _refuse_compiled(name, layer)
            if any(id(param) in trained for param in layer.parameters()):
                _refuse_options(name, layer, self._rule_of(layer))
        self._module, self._params = module, params
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._own = {layer: [id(p) for p in layer.parameters(recurse=False)] for _, layer in layers}
        self._handles = [
            # Before the user's hooks, which may change the output.
            layer.register_forward_hook(self._watch, prepend=True, with_kwargs=True)
            for _, layer in layers
        ]

    def _rule_of(self, layer: nn.Module) -> Rule:
        return rule_of(layer, self._rules)

    def _watch(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self._is_watching or not torch.is_grad_enabled():
            return
        if kwargs or not args or not all(isinstance(each, Tensor) for each in (*args, output)):
            self._problem = (
                f"The layer {type(layer).__name__} has parameters of its own, and something else "
                "than tensors goes in (or by name) or comes out. Give the parameters to a layer of "
                "their own, called with tensors by position and returning one tensor."
            )
        elif output.requires_grad:
            inputs = tuple(each.detach() for each in args)
            versions, sources = [each._version for each in inputs], {each.grad_fn for each in args}
            edge = get_gradient_edge(output)
            moved = tuple(split(each) for each in args) if self._is_along else ()
            self._records.append(_Record(layer, inputs, versions, sources, edge, moved=moved))

    def backward(self, loss: Tensor, *, keep_graph: bool = False, may_fold: bool = True) -> None:
        records, graph = self._calls_of(loss)
        with self._not_watching():  # checkpointed layers run again, others record by record
            self._differentiate(loss, records, graph.innermost, keep_graph, may_fold)

    def _calls_of(self, loss: Tensor) -> tuple[list[_Record], Survey]:
        """The recorded calls that the loss depends on, if they are all that it depends on."""
        records, problem = self._records, self._problem
        self.drop()
        if problem is not None:
            raise UnsupportedModelError(problem)
        graph = survey(loss.grad_fn, {record.edge.node for record in records})
        records = [record for record in records if record.edge.node in graph.reached]
        self._refuse_uncovered(records, graph)
        self._found = {id(p): ParameterGradients([], p.shape, self._memory) for p in self._params}
        return records, graph

    def _refuse_uncovered(self, records: Sequence[_Record], graph: Survey) -> None:
        """Every use of a parameter in the graph must be a recorded call of its layer."""
        recorded = Counter[int]()
        for record in records:
            own = self._own[record.layer]
            if self._rule_of(record.layer) is not any_layer:
                recorded.update(own)
            else:
                inside = survey(record.edge.node, graph.reached, record.sources).uses
                recorded.update({key: inside[key] for key in own})
        missing = [self._names[id(p)] for p in self._params if graph.uses[id(p)] > recorded[id(p)]]
        if missing:
            raise UncoveredParameterError(missing)

    @contextmanager
    def _not_watching(self) -> Iterator[None]:
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True

    def _differentiate(
        self,
        loss: Tensor,
        records: Sequence[_Record],
        innermost: set[Any],
        keep_graph: bool,
        may_fold: bool,
    ) -> None:
        """Keep what is needed of a layer as soon as the backward pass comes to its output.

        It has to go on to the innermost layers' outputs only; there it stops, and gives what came.
        What is not needed of a layer is free before the pass comes to the next one.
        """
        ends = [record for record in records if record.edge.node in innermost]
        if not ends:
            return
        handles = []
        for record in records:
            if record.edge.node not in innermost:
                hook = partial(self._on_gradients, record, may_fold)
                handles.append(record.edge.node.register_prehook(hook))
        edges = [record.edge for record in ends]
        try:
            found = torch.autograd.grad(loss, edges, retain_graph=keep_graph, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for record, gradient in zip(ends, found, strict=True):
            self._keep(record, gradient, may_fold)

    def _on_gradients(
        self, record: _Record, may_fold: bool, gradients: tuple[Tensor | None, ...]
    ) -> None:
        self._keep(record, gradients[record.edge.output_nr], may_fold)

    @torch.no_grad()
    def _keep(self, record: _Record, gradient: Tensor | None, may_fold: bool) -> None:
        """Of one call of a layer what the norms and the sum are made from."""
        inputs = record.take_inputs()
        if gradient is not None:
            tensors = [_at_least_float32(each) for each in (*inputs, gradient)]
            uses = self._rule_of(record.layer)(record.layer, *tensors)
            self._count_in(uses, may_fold)

    def _count_in(self, uses: Uses, may_fold: bool) -> None:
        assert self._found is not None
        for param, call in uses:
            if (found := self._found.get(id(param))) is not None:
                found.add(call, may_fold=may_fold)

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> BookkeptGradients:
        """One forward and backward pass in dual numbers; each layer's gradient is a bilinear form,

        so that its derivative is two calls of the same form (:meth:`AbstractForm.along`).
        """
        assert self._module is not None
        self.drop()
        self._is_along = True
        try:
            calls = run_along(
                self._module, self._params, direction, lambda: self._duals_of(run_again())
            )
        finally:
            self._is_along = False
        parts = unflatten(direction, self._params)
        of = {id(param): part for param, part in zip(self._params, parts, strict=True)}
        with self._not_watching(), torch.no_grad():
            for record, gradient in calls:
                record.take_inputs()
                inputs = [_both_at_least_float32(each) for each in record.moved]
                back = _both_at_least_float32(gradient)
                rule = self._rule_of(record.layer)
                uses = uses_along(rule, record.layer, inputs, back, of, weights)
                self._count_in(uses, may_fold=True)
        return self.take(1.0, {})

    def _duals_of(self, loss: Tensor) -> list[tuple[_Record, Dual]]:
        """Inside dual numbers: every call, with the gradient of its output and its derivative."""
        records, _ = self._calls_of(loss)
        if not records:
            return []
        with self._not_watching():
            edges = [record.edge for record in records]
            found = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
        pairs = zip(records, found, strict=True)
        return [(record, split(gradient)) for record, gradient in pairs if gradient is not None]

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> BookkeptGradients:
        found, self._found = self._found, None
        if found is None:
            raise RuntimeError("Bookkeeping.backward() must come before take().")
        gradients = [found[id(param)] for param in self._params]
        return BookkeptGradients(self._params, [g if g.calls else None for g in gradients], scale)

    def drop(self) -> None:
        self._records, self._found, self._problem = [], None, None

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._params, self._names, self._own = [], (), {}, {}
        self._module = None
        self._memory = Memory()
        self.drop()


class Functional(Bookkeeping):
    """Every layer record by record through ``torch.func``: slow, and knows nothing of layer types.

    Materialises one gradient per record and parameter.
    """

    name = "functional"

    def __init__(self) -> None:
        super().__init__(rules={})


class BookkeptGradients(AbstractPerSampleGradients):
    """For each parameter what its layers saw and what came back.

    Args:
        params: the trained parameters, in the order of flat vectors.
        gradients: for each parameter, or None where it was not used.
        scale: multiplies all of them; the loss was the mean over the records.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[ParameterGradients | None],
        scale: float,
    ) -> None:
        self._params, self._gradients = params, gradients
        self._used = [gradient for gradient in gradients if gradient is not None]
        counts: set[int] = set().union(*(gradient.counts for gradient in self._used))
        self._count = number_of_records(counts)
        self._dtype = params[0].dtype if params else torch.float32
        self._scale, self._factor = scale, scale * self._count

    @property
    def count(self) -> int:
        return self._count

    def norms(self) -> Tensor:
        if not self._used:
            return torch.zeros(0, dtype=torch.float64)
        squares, left = [], _KEEP_BYTES
        for gradient in self._used:
            squares.append(gradient.squared_norms(left))
            left -= gradient.kept_bytes
        return reduce(torch.add, squares).sqrt() * abs(self._factor)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weights = weights * self._factor
        records = None
        if not weights.all():  # 0 * NaN is NaN
            records = weights.nonzero().flatten()
            weights = weights[records]
        weights = weights.to(torch.promote_types(self._dtype, torch.float32))
        parts = []
        for param, gradient in zip(self._params, self._gradients, strict=True):
            dtype = torch.promote_types(param.dtype, torch.float32)
            if gradient is None:
                parts.append(torch.zeros(param.numel(), dtype=dtype, device=param.device))
            else:
                total = gradient.weighted_sum(weights, records)
                parts.append(total if total.dtype == dtype else total.to(dtype))
        return torch.cat(parts)

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        parts, start = [], 0
        sizes = [param.numel() for param in self._params]
        ends = torch.tensor(sizes, device=coordinates.device).cumsum(0)
        cuts = torch.searchsorted(coordinates.contiguous(), ends).cpu()
        chosen = torch.tensor_split(coordinates, cuts)
        for param, gradient, own in zip(self._params, self._gradients, chosen, strict=False):
            places = (own - start).to(param.device)
            dtype = torch.promote_types(param.dtype, torch.float32)
            if gradient is None or not len(places):
                parts.append(
                    torch.zeros(self._count, len(places), dtype=dtype, device=param.device)
                )
            else:
                parts.append(gradient.entries(places).to(dtype))
            start += param.numel()
        return restricted(parts, self._factor)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> BookkeptGradients:
        combined: list[ParameterGradients | None] = []
        factors = []
        for other_weight, other in others:
            if not isinstance(other, BookkeptGradients) or other.count != self.count:
                raise TypeError("Only gradients of the same records and engine can be combined.")
            factors.append((other_weight * other._scale, other))
        for position, (param, gradient) in enumerate(
            zip(self._params, self._gradients, strict=True)
        ):
            here = ParameterGradients([], param.shape) if gradient is None else gradient
            there = [(f, g) for f, o in factors if (g := o._gradients[position]) is not None]
            is_used = gradient is not None or there
            combined.append(here.combine(weight * self._scale, there) if is_used else None)
        return BookkeptGradients(self._params, combined, 1.0)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision as float32; integers and float64 as they are."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


def _both_at_least_float32(dual: Dual) -> Dual:
    value, moved = dual
    return _at_least_float32(value), None if moved is None else _at_least_float32(moved)


def _refuse_compiled(name: str, layer: nn.Module) -> None:
    """Inside a compiled module hooks do not see the graph that is differentiated."""
    is_compiled = getattr(layer, "_compiled_call_impl", None) is not None
    if is_compiled or type(layer).__name__ == "OptimizedModule":
        raise UnsupportedModelError(f"{name or 'The module'} is compiled. {_CURE}")


def _refuse_options(name: str, layer: nn.Module, rule: Rule) -> None:
    """Options under which a layer's gradient is not what its rule says."""
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise UnsupportedModelError(f"{name} (Embedding) has {option} set. {_CURE}")
    if type(layer).__module__.startswith("opacus.layers"):  # Opacus knows their order of dimensions
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) is a layer of Opacus. {_CURE}"
        )
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention | nn.RNNCellBase):
        raise UnsupportedModelError(f"{name} ({type(layer).__name__}) hides its records. {_CURE}")
    if is_parametrized(layer):
        raise UnsupportedModelError(f"{name} ({type(layer).__name__}) is parametrized. {_CURE}")
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if rule is not any_layer and not names <= {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) has parameters that its type does not: "
            f"{sorted(names - {'weight', 'bias'})}. {_CURE}"
        )
    if rule is any_layer and any(True for _ in layer.buffers(recurse=False)):
        raise UnsupportedModelError(f"{name} ({type(layer).__name__}) has buffers. {_CURE}")
