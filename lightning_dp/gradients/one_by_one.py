"""Gradients of one record at a time, by ordinary autograd: any model, slowly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import AbstractGradientEngine, UnsupportedModelError
from lightning_dp.gradients.compiled import as_written
from lightning_dp.gradients.graph import nodes, refuse_reentrant
from lightning_dp.gradients.materialised import MaterialisedGradients

__all__ = ["OneByOne"]

_NO_SECOND = (
    "A Hessian-vector product needs the second derivative of every operation, and one has none. "
    "Replace the operation, or use an estimator without Hessians."
)


class OneByOne(AbstractGradientEngine):
    """The gradient of a batch that is one record, with respect to the trained parameters.

    It sees neither layers nor calls, so a parameter may be used anywhere and in any way. What it is
    asked about must be the loss of a single record; whoever runs the model sees to that.
    """

    name = "one_by_one"
    has_products = True
    runs_backward = True
    one_record = True

    def __init__(self) -> None:
        self._params: tuple[nn.Parameter, ...] = ()
        self._found: Tensor | None = None

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self._params = tuple(params)

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        try:
            found = torch.autograd.grad(
                loss, self._params, retain_graph=keep_graph or None, allow_unused=True
            )
        except RuntimeError:
            refuse_reentrant(loss.grad_fn)
            raise
        self._found = self._flat(found)

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> AbstractPerSampleGradients:
        found, self._found = self._found, None
        if found is None:
            raise UnsupportedModelError("There was no backward pass.", topic="no-loss")
        return _of_one(found, scale)

    def along(
        self,
        run_again: Callable[[], Tensor],
        direction: Tensor,
        weights: tuple[float, float],
    ) -> AbstractPerSampleGradients:
        with as_written(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            loss = run_again()
            first = torch.autograd.grad(loss, self._params, create_graph=True, allow_unused=True)
            parts = unflatten(direction.to(loss.device), self._params)
            products = [
                (gradient * part).sum()
                for gradient, part in zip(first, parts, strict=True)
                if gradient is not None and gradient.requires_grad
            ]
            second = self._derivatives(products)
        return _of_one(weights[0] * self._flat(first) + weights[1] * self._flat(second), 1.0)

    def _derivatives(self, products: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradient of a sum; where the first gradients are constants, nothing."""
        if not products:
            return [None] * len(self._params)
        total = torch.stack(list(products)).sum()
        if _has_error_node(total):
            raise UnsupportedModelError(_NO_SECOND, topic="hessian-products")
        try:
            return torch.autograd.grad(total, self._params, allow_unused=True)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # and NotImplementedError
            raise UnsupportedModelError(_NO_SECOND, topic="hessian-products") from error

    def _flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return one vector, in at least float32, with zeros for what was not used."""
        dtype = reduce(torch.promote_types, (p.dtype for p in self._params), torch.float32)
        pairs = zip(self._params, gradients, strict=True)
        return torch.cat([_entries(param, gradient).to(dtype) for param, gradient in pairs])

    def drop(self) -> None:
        self._found = None

    def detach(self) -> None:
        self._params, self._found = (), None


def _has_error_node(tensor: Tensor) -> bool:
    """Tell whether a part of the graph says that it has no derivative (``once_differentiable``).

    Autograd raises only where it needs that part, and goes on without it otherwise.
    """
    return any(node.name().endswith("Error") for node in nodes(tensor.grad_fn))


def _entries(param: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(param).reshape(-1).detach()
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().reshape(-1)


def _of_one(found: Tensor, scale: float) -> MaterialisedGradients:
    return MaterialisedGradients([found], [found.unsqueeze(0)], scale)
