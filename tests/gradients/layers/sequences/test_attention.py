"""nn.MultiheadAttention: masks, dropout and everything else that its rule has to run once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RECORDS, LENGTH, WIDTH, HEADS = 5, 4, 6, 2


def attention_layer(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).double()
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(std=0.5)
    return layer


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([4, 3, 2, 4, 1]).view(RECORDS, 1)
BY_HEAD = torch.linspace(-2, 2, RECORDS * HEADS * LENGTH**2, dtype=torch.float64).view(
    -1, LENGTH, LENGTH
)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "bool": {"attn_mask": CAUSAL.roll(1, 0)},
    "float": {"attn_mask": torch.linspace(-1, 1, LENGTH**2).double().view(LENGTH, LENGTH)},
    "of_each_record_and_head": {"attn_mask": BY_HEAD.sin()},
    "bool_of_each_record_and_head": {"attn_mask": (BY_HEAD.sin() > 0.3) & CAUSAL},
    "padding": {"key_padding_mask": PADDING},
    "float_padding": {"key_padding_mask": PADDING.double() * -3},
    "padding_and_causal": {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "is_causal": True},
    "padding_and_float": {"key_padding_mask": PADDING.double(), "attn_mask": BY_HEAD.cos()},
}


@pytest.mark.parametrize("needed", [{"need_weights": False}, {}, {"average_attn_weights": False}])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_with_masks_and_dropout_equal_the_loop(engine, loop, x, dropout, mask, needed):
    layer = attention_layer(dropout=dropout)
    losses = loop.losses_of(layer, lambda m: m(x, x, value=x, **MASKS[mask], **needed)[0])
    loop.equals(engine, layer, losses)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
)
def test_added_keys_go_with_masks_and_dropout(engine, loop, x, options, needs_weights):
    layer = attention_layer(dropout=0.3, **options)
    masks = {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": needs_weights}
    loop.equals(engine, layer, loop.losses_of(layer, lambda m: m(x, x, x, **masks)[0]))


def test_eval_mode_has_no_dropout(engine, loop, x):
    layer = attention_layer(dropout=0.3).eval()
    loop.equals(engine, layer, loop.losses_of(layer, lambda m: m(x, x, x)[0]))


class MaskFromData(nn.Module):
    """The scores get something from a layer of their own; the gradient goes on through it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.bias = attention_layer(dropout=0.2), nn.Linear(WIDTH, LENGTH).double()

    def forward(self, x: Tensor) -> Tensor:
        mask = self.bias(x).repeat_interleave(HEADS, 0)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = attention_layer(dropout=0.3), nn.Linear(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda t: self.attention(t, t, t)[0], x, use_reentrant=False))


class OutOnItsOwn(nn.Module):
    """The last projection is also called as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = attention_layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention.out_proj(torch.tanh(self.attention(x, x, x)[0]))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


@pytest.mark.parametrize("make", [MaskFromData, Checkpointed, OutOnItsOwn, encoder])
def test_in_a_model_the_gradients_equal_the_loop(engine, loop, x, make):
    module = make()
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_training", [True, False])
def test_the_fast_path_of_an_encoder_in_eval_mode_is_not_mixed_up(engine, loop, x, is_training):
    module = encoder()
    engine.attach(module, loop.trained(module))
    module.eval()
    with torch.no_grad():  # as in validation: nested tensors, no call of the attention
        module(x, src_key_padding_mask=PADDING)
    engine.drop()
    module.train(is_training)
    losses = loop.losses_of(module, lambda m: m(x, src_key_padding_mask=PADDING))
    loop.equals(engine, module, losses)


@pytest.mark.parametrize(
    "names",
    [["out_proj.weight"], ["in_proj_bias"], ["in_proj_weight", "out_proj.bias"], ["bias_v"]],
)
def test_frozen_parts_cost_nothing_and_change_nothing(engine, loop, x, names):
    layer = attention_layer(dropout=0.3, add_bias_kv=True)
    for name, param in layer.named_parameters():
        param.requires_grad_(name in names)
    loop.equals(engine, layer, loop.losses_of(layer, lambda m: m(x, x, x)[0]))


def test_a_frozen_attention_passes_gradients_on(engine, loop, x):
    module = MaskFromData()
    module.attention.requires_grad_(False)
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


def test_differences_at_two_points_equal_the_loop(engine, loop, x):
    module = MaskFromData()
    loop.equals_in_differences(engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("needs_weights", [False, True])
def test_hessian_vector_products_with_masks_and_dropout_equal_the_loop(
    engine, loop, x, needs_weights
):
    layer = attention_layer(dropout=0.3, add_bias_kv=True)
    options = {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": needs_weights}
    losses = loop.losses_of(layer, lambda m: m(x, torch.sin(x), x, **options)[0])
    loop.equals_in_products(engine, layer, losses)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_half_precision_is_run_again_in_half_precision(engine, loop, x, whole, needs_weights):
    """By autocast, or of the whole model."""
    layer = attention_layer()
    masks = {"attn_mask": CAUSAL, "need_weights": needs_weights}
    losses = loop.losses_of(layer, lambda m: m(x, x, x, **masks)[0])
    expected = loop.one_by_one(losses, loop.trained(layer))
    layer, kind = layer.to(torch.bfloat16 if whole else torch.float32), torch.bfloat16
    layer.dropout = 1e-9  # draws random numbers
    x = x.to(kind if whole else torch.float32)
    engine.attach(layer, loop.trained(layer))
    with torch.autocast("cpu", kind, enabled=not whole):
        loss = losses().mean()
    engine.backward(loss)
    gradients = engine.take(1.0, {})
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=0.05, atol=0)
    total = gradients.weighted_sum(torch.ones(RECORDS))
    assert total.dtype == torch.float32
    assert (total - expected.sum(0)).norm() <= 0.05 * expected.sum(0).norm()
