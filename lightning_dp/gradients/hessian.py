"""The derivative of a forward and backward pass along a direction: Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp._refusals import Refusal
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import Uses
from lightning_dp.gradients.rules import Rule

__all__ = ["Dual", "run_along", "split", "uses_along"]


T = TypeVar("T")

# A tensor and its derivative along the direction; None where it does not depend on parameters.
Dual = tuple[Tensor, Tensor | None]


class _Holder(nn.Module):
    """Lets ``functional_call`` replace the parameters of a module while any function runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], T]) -> T:
        return run()


def run_along(
    module: nn.Module, params: Sequence[nn.Parameter], direction: Tensor, run: Callable[[], T]
) -> T:
    """Call ``run()`` with every trained parameter a dual number: its value and its part of the direction.

    Every tensor that is computed inside carries its derivative along the direction, those of a
    backward pass too (forward-over-reverse; run it with ``create_graph=True``, since some fused
    backward kernels have no derivative). Read it there with :func:`split`.

    Raises:
        UnsupportedModelError: if an operation of the model has no derivative in forward mode.
    """
    names = {id(param): f"module.{name}" for name, param in module.named_parameters()}
    parts = unflatten(direction.to(params[0].device), params)
    try:
        # Fused attention has no second derivative.
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            duals = {
                names[id(param)]: forward_ad.make_dual(param, part)  # type: ignore[no-untyped-call]
                for param, part in zip(params, parts, strict=True)
            }
            result: T = functional_call(_Holder(module), duals, (run,))
    except (Refusal, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:  # other words of torch's tell sizes of a batch, which is private
        which = f": {error}" if isinstance(error, NotImplementedError) else "."
        raise UnsupportedModelError(
            f"A Hessian-vector product needs the second derivative of every operation, and one has "
            f"none{which} Replace the operation, or use an estimator without Hessians.",
            topic="hessian-products",
        ) from error
    return result


def split(tensor: Tensor) -> Dual:
    """Return value and derivative, both cut off from the graph; inside :func:`run_along` only."""
    value, derivative = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return value.detach(), None if derivative is None else derivative.detach()


def uses_along(
    rule: Rule,
    layer: nn.Module,
    inputs: Sequence[Dual],
    gradient: Dual,
    directions: dict[int, Tensor],
    weights: tuple[float, float],
) -> Uses:
    """Return the uses of one call by its rule, for w g + w' H u in the place of the gradient g.

    Args:
        rule: of the layer.
        layer: with its ordinary parameters.
        inputs: what it was called with.
        gradient: what came back for its output.
        directions: u by ``id`` of the parameter.
        weights: w and w'.
    """
    moving = {name: param for name, param in layer.named_parameters() if id(param) in directions}
    along: Uses = []
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {name: _dual_of((param, directions[id(param)])) for name, param in moving.items()}
        params = {id(dual): moving[name] for name, dual in duals.items()}
        replaced = {f"module.{name}": dual for name, dual in duals.items()}
        tensors = [_dual_of(each) for each in (*inputs, gradient)]
        # The rule runs on dual numbers, so every v and u that it makes (normalised inputs, attention
        # made again) carries its derivative; the product rule of the form needs no more.
        found: Uses = functional_call(_Holder(layer), replaced, (lambda: rule(layer, *tensors),))
        for param, use in found:
            v, u = split(use.v), split(use.u)
            own = params.get(id(param), param)
            along += [(own, part) for part in use.form.along(v, u, weights)]
    return along


def _dual_of(dual: Dual) -> Tensor:
    value, derivative = dual
    if derivative is None:
        return value
    joined: Tensor = forward_ad.make_dual(value, derivative)  # type: ignore[no-untyped-call]
    return joined
