"""Opacus' ``SequenceBias``: one more position at the end of each sequence, the same for all."""

from __future__ import annotations

from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor

from lightning_dp.gradients.layers.base import Rows, Uses

__all__ = ["sequence_bias"]


def sequence_bias(layer: SequenceBias, inputs: Tensor, gradient: Tensor) -> Uses:
    """The bias of one call, from the gradient of the last position; records come first here."""
    return [(layer.bias, Rows.call(gradient[:, -1]))]
