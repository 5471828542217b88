"""Any other layer: its own forward pass, once more for each record, through ``torch.func``."""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.layers.base import Rows, Uses

__all__ = ["any_layer"]


class _ForwardOnly(nn.Module):
    """A layer without the hooks on it: they ran before its inputs, and after its output, were seen."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *tensors: Tensor) -> Tensor:
        output: Tensor = self.layer.forward(*tensors)
        return output


def any_layer(layer: nn.Module, *tensors: Tensor) -> Uses:
    """Every parameter that sits on the layer itself, of one call.

    The tensors are those that the layer was called with, and the gradient of its output.

    The layer must give the same output when it is run again, record by record.

    Raises:
        UnsupportedModelError: if ``torch.func`` cannot run it.
    """
    trained = [name for name, p in layer.named_parameters(recurse=False) if p.requires_grad]
    own = {f"layer.{name}": layer.get_parameter(name) for name in trained}
    bare = _ForwardOnly(layer)

    def of_record(*record: Tensor) -> dict[str, Tensor]:
        *inputs, gradient = (each.unsqueeze(0) for each in record)

        def forward(params: dict[str, Tensor]) -> Tensor:
            output: Tensor = functional_call(bare, params, tuple(inputs))
            return output

        gradients: dict[str, Tensor] = vjp(forward, dict(own))[1](gradient)[0]
        return gradients

    try:
        rows = vmap(of_record)(*tensors)
    except Exception as error:
        raise UnsupportedModelError(
            f"The layer {type(layer).__name__} cannot be run record by record with torch.func "
            f"({type(error).__name__}). Give its parameters to a layer of their own "
            "(nn.Linear, nn.Embedding, ...)."
        ) from error
    return [(own[name], Rows.call(rows[name])) for name in own]
