"""Calls in which parameters meet records, a backward pass to their outputs, and the sums it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp._refusals import Refusal
from lightning_dp.functional import full_precision, real, unflatten
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.batches import RowOwners
from lightning_dp.gradients.bilinear import Folding, Rows, Use, Uses, uses_of_records
from lightning_dp.gradients.parameter_sum import (
    Allowance,
    BookkeptGradients,
    ParameterGradients,
    ScratchPool,
    at_least_float32,
)
from lightning_dp.gradients.rules import Rule

__all__ = ["Call", "CallSums", "DualSums", "KeptInputs", "copied", "go_back", "run_along"]

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
        rule: tells the uses of its parameters.
        layer: has them, as the rule reads them.
        inputs: what the rule takes of the call.
        edge: where the gradient of the output arrives.
        is_first: no other call feeds it.
        folding: tells whose the rows are; None if they are the samples.
        owners: tells of which units the samples are, whose means are taken; None if each is one.
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
