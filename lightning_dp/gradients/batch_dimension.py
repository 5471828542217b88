"""The dimension of the records in a layer's input: the first, and one of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_dp.gradients.base import UnsupportedModelError

__all__ = ["refuse_without_records"]


def _dimensions(layer: nn.Module) -> int:
    """Return how many dimensions the input has at least, of records in the first one."""
    if isinstance(layer, nn.Linear | nn.GroupNorm):
        return 2
    if isinstance(layer, _ConvNd | _ConvTransposeNd):
        return 2 + len(layer.kernel_size)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return 1 + len(layer.normalized_shape)
    for kind, places in ((nn.InstanceNorm1d, 1), (nn.InstanceNorm2d, 2), (nn.InstanceNorm3d, 3)):
        if isinstance(layer, kind):
            return 2 + places
    if isinstance(layer, nn.RNNCellBase | nn.Bilinear):
        return 2
    return 1


def refuse_without_records(name: str, layer: nn.Module, given: Any) -> None:
    """Refuse a call whose input has no dimension for records.

    Args:
        name: of the layer in the model.
        layer: is called.
        given: its first input.

    Raises:
        UnsupportedModelError: naming the layer and the cure.
    """
    if isinstance(given, Tensor) and given.dim() < (least := _dimensions(layer)):
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) was called with a tensor of "
            f"{given.dim()} dimensions, where {least} are needed: the first one is of the records. "
            "Call it once with all records of the batch, without a loop over them; for one record, "
            "with x.unsqueeze(0)."
        )
