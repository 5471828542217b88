"""Opacus' layers in the place of torch's: the same functions, in steps that keep records apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, DPRNNBase
from torch import nn

__all__ = ["Replaceable", "opacus_layer", "why_not"]

Replaceable: TypeAlias = nn.RNNBase | nn.MultiheadAttention

_RECURRENT: Mapping[type[nn.RNNBase], type[DPRNNBase]] = {
    nn.LSTM: DPLSTM,
    nn.GRU: DPGRU,
    nn.RNN: DPRNN,
}


def why_not(layer: Replaceable) -> str | None:
    """Return why Opacus has no such layer; None if it has one."""
    known: tuple[type[nn.Module], ...] = (*_RECURRENT, nn.MultiheadAttention)
    kind = next((each for each in known if isinstance(layer, each)), None)
    if kind is None or type(layer).forward is not kind.forward:
        return "has its own forward pass"
    if getattr(layer, "proj_size", 0):
        return "has proj_size, which Opacus' layer has not"
    trained = {param.requires_grad for param in layer.parameters()}
    if isinstance(layer, nn.MultiheadAttention) and len(trained) > 1:
        return "is trained in parts, which Opacus' layer has otherwise"
    return None


def opacus_layer(layer: Replaceable) -> nn.Module:
    """Return Opacus' layer with a layer's options and values of its parameters.

    Devices, types of numbers, and which parameters are trained, are the layer's as well.

    Args:
        layer: one that :func:`why_not` has nothing against.

    Example:
        >>> new = opacus_layer(nn.GRU(2, 3, batch_first=True))
        >>> type(new).__name__, new.batch_first
        ('DPGRU', True)
    """
    new = _attention(layer) if isinstance(layer, nn.MultiheadAttention) else _recurrent(layer)
    first = next(layer.parameters())
    new.to(first.device, first.dtype).load_state_dict(dict(layer.state_dict()))
    is_trained = {name: param.requires_grad for name, param in layer.named_parameters()}
    # Attention has other names, and is trained as a whole.
    for name, param in new.named_parameters():
        param.requires_grad_(is_trained.get(name, first.requires_grad))
    replaced: nn.Module = new.train(layer.training)
    return replaced


def _recurrent(layer: nn.RNNBase) -> DPRNNBase:
    kind = next(each for each in _RECURRENT if isinstance(layer, each))
    options = {"nonlinearity": layer.nonlinearity} if kind is nn.RNN else {}
    return _RECURRENT[kind](
        layer.input_size,
        layer.hidden_size,
        num_layers=layer.num_layers,
        bias=layer.bias,
        batch_first=layer.batch_first,
        dropout=layer.dropout,
        bidirectional=layer.bidirectional,
        **options,
    )


def _attention(layer: nn.MultiheadAttention) -> DPMultiheadAttention:
    return DPMultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=layer.in_proj_bias is not None,
        add_bias_kv=layer.bias_k is not None,
        add_zero_attn=layer.add_zero_attn,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
    )
