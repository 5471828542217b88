"""Gradients of one record at a time, by ordinary autograd: any model, slowly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.functional import flat_dtype, real, unflatten
from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    AbstractPerSampleGradients,
    Around,
    Forward,
    UnsupportedModelError,
)
from lightning_dp.gradients.batches import SampleBatch, loss_in
from lightning_dp.gradients.graph import nodes, refuse_reentrant
from lightning_dp.gradients.module_hooks import as_written
from lightning_dp.gradients.parameter_sum import MaterialisedGradients

__all__ = ["OneByOne"]

_NO_SECOND = (
    "A Hessian-vector product needs the second derivative of every operation, and one has none. "
    "Replace the operation, or use an estimator without Hessians."
)


class OneByOne(AbstractGradientEngine):
    """The gradient of each record, or unit, by itself, with respect to the trained parameters.

    It sees neither layers nor calls, so a parameter may be used anywhere and in any way. A batch of
    several records is taken apart, and ``training_step`` runs for each of them.
    """

    name = "one_by_one"
    has_products = True
    one_record = True
    isolates = True

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        super().__init__(module, params)
        self._along: tuple[Tensor, tuple[float, float]] | None = None
        self._rows: Tensor | None = None  # of several records, and their losses
        self._losses: Tensor | None = None

    def run(self, forward: Forward, batch: SampleBatch, around: Around | None = None) -> Any:
        self.drop()
        singles = batch.singles
        if len(singles) < 2:
            return forward(singles[0])
        rows, losses = list[Tensor](), list[Tensor]()
        for single in singles:
            loss = loss_in(forward(single))
            if not isinstance(loss, Tensor):  # it contributes zero
                loss = torch.zeros((), device=self._params[0].device)
            rows.append(self._row(loss))
            losses.append(loss.detach().mean().float())
        self._rows, self._losses = torch.stack(rows), torch.stack(losses).requires_grad_()
        return self._losses.mean()

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        if self._rows is None or self._losses is None:
            rows = self._row(loss, keep_graph=keep_graph).unsqueeze(0)
        else:
            (shares,) = torch.autograd.grad(loss, self._losses)
            rows = self._rows * (len(shares) * shares).unsqueeze(1).to(self._rows)
        self.drop()
        parts = torch.split(rows, [real(param).numel() for param in self._params], dim=1)
        self._found = partial(MaterialisedGradients, [part[0] for part in parts], parts)

    def _row(self, loss: Tensor, *, keep_graph: bool = False) -> Tensor:
        """Return the gradient of one record, or what :meth:`along` asks for in its place."""
        if not loss.requires_grad:
            return self._flat([None] * len(self._params))
        if self.loss_scale != 1:
            loss = loss.float() * self.loss_scale
        row = self._gradient(loss, keep_graph) if self._along is None else self._product(loss)
        return row if self.loss_scale == 1 else row / self.loss_scale

    def _gradient(self, loss: Tensor, keep_graph: bool) -> Tensor:
        """Return the gradient of a loss."""
        try:
            found = torch.autograd.grad(
                loss, self._params, retain_graph=keep_graph or None, allow_unused=True
            )
        except RuntimeError:
            refuse_reentrant(loss.grad_fn)
            raise
        return self._flat(found)

    def along(
        self, run_again: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> AbstractPerSampleGradients:
        self._along = direction, weights
        try:
            # Fused attention has no second derivative.
            with as_written(), sdpa_kernel(SDPBackend.MATH):
                self.backward(run_again())
        finally:
            self._along = None
        return self.take(1.0)

    def _product(self, loss: Tensor) -> Tensor:
        """Return w g + w' H u."""
        assert self._along is not None
        direction, weights = self._along
        first = torch.autograd.grad(loss, self._params, create_graph=True, allow_unused=True)
        parts = unflatten(direction.to(loss.device), self._params)
        products = [
            (real(gradient) * real(part)).sum()
            for gradient, part in zip(first, parts, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        if not products:  # the first gradients are constants
            return weights[0] * self._flat(first)
        total = torch.stack(products).sum()
        # A node of a part without derivative (``once_differentiable``): autograd raises only where it
        # needs that part, and goes on without it otherwise.
        if any(node.name().endswith("Error") for node in nodes(total.grad_fn)):
            raise UnsupportedModelError(_NO_SECOND, topic="hessian-products")
        try:
            second = torch.autograd.grad(total, self._params, allow_unused=True)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # and NotImplementedError
            raise UnsupportedModelError(_NO_SECOND, topic="hessian-products") from error
        return weights[0] * self._flat(first) + weights[1] * self._flat(second)

    def _flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return one vector, in at least float32, with zeros for what was not used."""
        parts, dtype = [], flat_dtype(self._params)
        for param, gradient in zip(self._params, gradients, strict=True):
            dense = torch.zeros_like(param) if gradient is None else gradient
            dense = dense.to_dense() if dense.is_sparse else dense
            parts.append(real(dense.detach()).reshape(-1).to(dtype))
        return torch.cat(parts)

    def drop(self) -> None:
        self._rows = self._losses = self._found = None
