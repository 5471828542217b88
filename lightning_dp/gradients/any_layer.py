"""Any other layer: its own forward pass, once more for each record, through ``torch.func``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.forms import Rows, Uses
from lightning_dp.gradients.opacus_layers import own_parameters

__all__ = ["any_layer", "any_layer_along"]


class _ForwardOnly(nn.Module):
    """A layer without the hooks on it: they ran before its inputs, and after its output, were seen."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *tensors: Tensor) -> Tensor:
        output: Tensor = self.layer.forward(*tensors)
        return output


def any_layer(layer: nn.Module, *tensors: Tensor) -> Uses:
    """Return the gradients per record of the layer's own parameters, of one call.

    The tensors are those that the layer was called with, and the gradient of its output.

    The layer must give the same output when it is run again, record by record.

    Raises:
        UnsupportedModelError: if ``torch.func`` cannot run it.
    """
    own = _own(layer)
    bare = _ForwardOnly(layer)

    def of_record(*record: Tensor) -> dict[str, Tensor]:
        return _gradients(bare, own, *record)

    with _as_unsupported(layer):
        rows = vmap(of_record)(*tensors)
    return [(own[name], Rows.use(rows[name])) for name in own]


def any_layer_along(
    layer: nn.Module,
    inputs: Sequence[tuple[Tensor, Tensor | None]],
    gradient: tuple[Tensor, Tensor | None],
    directions: Mapping[int, Tensor],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each parameter of the layer with the records' gradients and Hessian-vector products.

    Args:
        layer: of one call.
        inputs, gradient: what it was called with and what came back, with their derivatives.
        directions: of the parameters, by ``id``.

    Raises:
        UnsupportedModelError: if ``torch.func`` cannot run it.
    """
    own = _own(layer)
    inside = {f"layer.{name}": param for name, param in layer.named_parameters()}  # of children too
    moving = {name: param for name, param in inside.items() if id(param) in directions}
    along = {name: directions[id(param)] for name, param in moving.items()}
    bare = _ForwardOnly(layer)
    values = [value for value, _ in (*inputs, gradient)]
    moved = {i: d for i, (_, d) in enumerate((*inputs, gradient)) if d is not None}

    def of_record(record: list[Tensor], derivatives: dict[int, Tensor]) -> Any:
        def gradients(params: dict[str, Tensor], changed: dict[int, Tensor]) -> dict[str, Tensor]:
            tensors = [changed.get(i, each) for i, each in enumerate(record)]
            mine = {name: params.get(name, param) for name, param in own.items()}
            return _gradients(bare, mine, *tensors, others=params)

        here = moving, {i: record[i] for i in derivatives}
        return jvp(gradients, here, (along, derivatives))

    with (
        _as_unsupported(layer),
        torch.enable_grad(),
    ):  # some backward kernels are not differentiable
        rows, products = vmap(of_record)(values, moved)
    return [(own[name], rows[name].detach(), products[name].detach()) for name in own]


def _own(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that only its own calls use, by their name in ``_ForwardOnly``."""
    own = set(own_parameters(layer))
    named = layer.named_parameters(recurse=False)
    return {f"layer.{name}": param for name, param in named if param.requires_grad and param in own}


def _gradients(
    bare: nn.Module,
    params: Mapping[str, Tensor],
    *record: Tensor,
    others: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the gradients of one record, which the layer sees as a batch of one."""
    *inputs, gradient = (each.unsqueeze(0) for each in record)

    def forward(params: dict[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(bare, {**(others or {}), **params}, tuple(inputs))
        return output

    gradients: dict[str, Tensor] = vjp(forward, dict(params))[1](gradient)[0]
    return gradients


@contextmanager
def _as_unsupported(layer: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnsupportedModelError(
            f"The layer {type(layer).__name__} cannot be run record by record with torch.func "
            f"({type(error).__name__}). Give its parameters to a separate layer "
            "(nn.Linear, nn.Embedding, ...)."
        ) from error
