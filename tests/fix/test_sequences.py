"""``fix`` puts layers of Opacus in the places of recurrent ones and, on request, of attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_dp import fix

RECURRENT = {
    "LSTM": (lambda: nn.LSTM(3, 4, 2, bidirectional=True), DPLSTM),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True, bias=False), DPGRU),
    "RNN": (lambda: nn.RNN(3, 4, nonlinearity="relu"), DPRNN),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_becomes_opacus_one_with_the_same_function(name, said):
    make, kind = RECURRENT[name]
    torch.manual_seed(0)
    old = make().double().eval()
    old.weight_hh_l0.requires_grad_(False)
    net = fix(nn.Sequential(old))
    new, x = net[0], torch.randn(5, 6, 3, dtype=torch.float64)
    assert (type(new), new.training) == (kind, False)
    for a, b in zip(leaves(old(x)), leaves(new(x)), strict=True):
        torch.testing.assert_close(a, b)
    trained = {name for name, param in new.named_parameters() if param.requires_grad}
    assert trained == {name for name, param in old.named_parameters() if param.requires_grad}
    assert "make optimizers afterwards" in said()


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [leaf for each in output for leaf in leaves(each)]


def test_packed_sequences_come_out_the_same():
    torch.manual_seed(0)
    old = nn.LSTM(3, 4, batch_first=True)
    new, x, lengths = fix(copy.deepcopy(old)), torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 4])
    packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    pairs = (pad_packed_sequence(layer(packed)[0], True)[0] for layer in (old, new))
    torch.testing.assert_close(*pairs)


def test_a_layer_with_shared_parameters_stays(said):
    one, other = nn.GRU(3, 3), nn.GRU(3, 3)
    other.weight_hh_l0 = one.weight_hh_l0
    net = nn.Sequential(one, other)
    fix(net)
    assert net[0] is one
    assert net[1] is other
    assert "It trains as it is" in said()


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True}])
def test_attention_is_replaced_on_request(options):
    torch.manual_seed(0)
    old = nn.MultiheadAttention(4, 2, **options)
    net = nn.Sequential(copy.deepcopy(old))
    assert type(fix(net)[0]) is nn.MultiheadAttention
    new = fix(net, attention=True)[0]
    assert type(new) is DPMultiheadAttention
    query = torch.randn(3, 5, 4)
    key, value = torch.randn(6, 5, old.kdim), torch.randn(6, 5, old.vdim)
    for a, b in zip(old(query, key, value), new(query, key, value), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    half = nn.MultiheadAttention(4, 2)
    half.in_proj_weight.requires_grad_(False)
    assert type(fix(nn.Sequential(half), attention=True)[0]) is nn.MultiheadAttention
