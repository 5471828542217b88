"""DPMultiheadAttention of Opacus, with records first and in the second dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.bookkeeping import Bookkeeping

RECORDS, LENGTH, WIDTH, HEADS = 5, 4, 6, 2
MEMORY = 7


class Attention(nn.Module):
    """Between linear layers that see records first; called twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = DPMultiheadAttention(WIDTH, HEADS, **options)
        self.before, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.double()

    def attend(self, *three: Tensor, **masks: Any) -> tuple[Tensor, Tensor | None]:
        if self.layer.batch_first:
            return self.layer(*three, **masks)
        output, weights = self.layer(*(each.transpose(0, 1) for each in three), **masks)
        return output.transpose(0, 1), weights

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        y = torch.tanh(self.before(x))
        z = self.attend(y, y, y, **masks)[0]
        return self.head(self.attend(z, y, z, need_weights=False, **masks)[0])


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([4, 3, 2, 4, 1]).view(RECORDS, 1)
BY_HEAD = torch.linspace(-2, 2, RECORDS * HEADS * LENGTH**2).double().view(-1, LENGTH, LENGTH)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "bool": {"attn_mask": CAUSAL},
    "float": {"attn_mask": CAUSAL.double() * -3},
    "of_each_record_and_head": {"attn_mask": BY_HEAD.sin()},
    "padding": {"key_padding_mask": PADDING},
    "padding_and_causal": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_gradients_with_masks_and_dropout_equal_the_loop(engine, loop, x, batch_first, added, mask):
    if batch_first and "attn_mask" in MASKS[mask]:
        pytest.skip("Opacus 1.6 wants the mask of another shape then")
    options = {"add_bias_kv": added, "add_zero_attn": added}
    module = Attention(batch_first=batch_first, dropout=0.3, **options)
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x, **MASKS[mask])))


class Cross(Attention):
    """Queries, keys and values of different lengths and widths; the weights are used, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(kdim=4, vdim=3, add_bias_kv=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.cat([x.sin(), x.cos()], 1)[:, :MEMORY]
        output, weights = self.attend(self.before(x), memory[..., :4], memory[..., 3:])
        return torch.cat([self.head(output).flatten(1), weights.flatten(1)], 1)


@pytest.mark.parametrize("batch_first", [False, True])
def test_cross_attention_equals_the_loop(engine, loop, x, batch_first):
    module = Cross(batch_first=batch_first)
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("make", [Attention, Cross])
def test_differences_and_products_equal_the_loop(engine, loop, x, make, batch_first):
    module = make(batch_first=batch_first, dropout=0.2)
    losses = loop.losses_of(module, lambda m: m(x))
    loop.equals_in_products(engine, module, losses)
    loop.equals_in_differences(engine, module, losses)


@pytest.mark.parametrize(("records", "length"), [(4, 4), (5, 4), (1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("batch_first", [False, True])
def test_as_many_positions_as_records_or_one_of_them_mixes_nothing_up(
    engine, loop, batch_first, records, length
):
    x = torch.randn(records, length, WIDTH, dtype=torch.float64)
    module = Attention(batch_first=batch_first, add_bias_kv=True)
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


class AlsoOutside(Attention):
    """A projection is called by itself, with records first as all layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.layer.qlinear(x)))


@pytest.mark.parametrize("length", [4, 5])
def test_a_projection_called_by_itself_sees_records_first(engine, loop, length):
    x = torch.randn(5, length, WIDTH, dtype=torch.float64)
    module = AlsoOutside()
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("names", [["klinear.weight"], ["seq_bias_v.bias"], ["out_proj.bias"]])
def test_frozen_parts_change_nothing(engine, loop, x, names):
    module = Attention(add_bias_kv=True)
    for name, param in module.layer.named_parameters():
        param.requires_grad_(name in names)
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


def test_an_encoder_fixed_by_opacus_equals_the_loop(engine, loop, x):
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.2, batch_first=True)
    module = ModuleValidator.fix(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False))
    module = module.double()
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


class Biased(nn.Module):
    """A sequence bias by itself: it says where the records are."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.bias = SequenceBias(WIDTH, batch_first=batch_first).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.bias.batch_first:
            return self.bias(x) * x[:, :1]
        return (self.bias(x.transpose(0, 1)) * x[:, 0]).transpose(0, 1)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("length", [4, 5])
def test_a_sequence_bias_by_itself_equals_the_loop(engine, loop, batch_first, length):
    x = torch.randn(5, length, WIDTH, dtype=torch.float64)
    module = Biased(batch_first)
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("length", [4, 7])
def test_records_in_the_dimension_of_positions_are_refused(refuses, length):
    """A layer that takes them for positions, and all others for records."""
    x = torch.randn(5, length, WIDTH, dtype=torch.float64)
    run = lambda m: m.head(m.layer(m.before(x), x, x)[0])  # noqa: E731
    refuses(Attention(), run, UnsupportedModelError, "more rows than there are records")


def test_a_key_without_records_is_refused(refuses):
    x = torch.randn(WIDTH, LENGTH, WIDTH, dtype=torch.float64)  # as many records as features
    key = torch.randn(WIDTH, WIDTH, dtype=torch.float64)

    def run(module: Any) -> Tensor:
        return module.layer(x.transpose(0, 1), key, key)[0].transpose(0, 1)

    refuses(Attention(), run, UnsupportedModelError, "three dimensions each")


class OwnForward(DPMultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def with_another_projection() -> nn.Module:
    layer = DPMultiheadAttention(WIDTH, HEADS)
    layer.out_proj = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))
    return layer


def with_own_parameter() -> nn.Module:
    layer = DPMultiheadAttention(WIDTH, HEADS)
    layer.gain = nn.Parameter(torch.ones(1))
    return layer


@pytest.mark.parametrize(
    "make",
    [lambda: OwnForward(WIDTH, HEADS), with_another_projection, with_own_parameter],
)
def test_the_rules_alone_refuse_a_changed_layer(loop, make):
    module, engine = nn.Sequential(make()), Bookkeeping()
    with pytest.raises(UnsupportedModelError, match=r"0.* is a layer of Opacus that was changed"):
        engine.attach(module, loop.trained(module))
