"""nn.MultiheadAttention: calls and layers that its rule does not hold for, and a wrong replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.gradients import UncoveredParameterError, UnsupportedModelError, attention
from lightning_dp.gradients.bookkeeping import Bookkeeping

LENGTH, WIDTH, HEADS = 4, 6, 2
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def attention_layer(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).double()


def test_attention_weights_in_the_loss_are_refused(refuses, x):
    for options in ({}, {"average_attn_weights": False}):
        refuses(
            attention_layer(),
            lambda m, o=options: sum(each.flatten(1).sum(1) for each in m(x, x, x, **o)).view(
                -1, 1
            ),
            UnsupportedModelError,
            "attention weights that nn.MultiheadAttention returns",
        )


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_a_use_of_a_parameter_outside_is_found(refuses, x, name):
    refuses(
        attention_layer(),
        lambda m: m(x, x, x)[0] + m.get_parameter(name).sum(),
        UncoveredParameterError,
        name,
    )


def test_a_call_without_records_is_refused(refuses, x):
    match = r"tensors of 2 dimensions.*\(records, positions, features\)"
    refuses(attention_layer(), lambda m: m(x[0], x[0], x[0])[0], UnsupportedModelError, match)


def test_an_overwritten_mask_is_refused(refuses, x):
    mask = CAUSAL.double()

    def run(module: nn.Module) -> Tensor:
        output = module(x, x, x, attn_mask=mask)[0]
        mask.zero_()
        return output

    refuses(attention_layer(), run, UnsupportedModelError, "overwritten")


def test_an_overwritten_output_is_refused(refuses, x):
    """It is a view: autograd replaces the node that was recorded."""
    run = lambda m: m(x, x, x)[0].mul_(2.0)  # noqa: E731
    refuses(attention_layer(), run, UncoveredParameterError, "in_proj_weight")


def test_records_in_the_second_dimension_are_refused_with_the_cure(engine, loop):
    module = nn.TransformerEncoderLayer(WIDTH, HEADS, 8)
    with pytest.raises(UnsupportedModelError, match=r"self_attn.*batch_first=True"):
        engine.attach(module, loop.trained(module))


def test_without_rules_the_layer_is_refused(loop):
    module = nn.Sequential(attention_layer())
    with pytest.raises(UnsupportedModelError, match=r"0 \(MultiheadAttention\) hides its records"):
        Bookkeeping(rules={}).attach(module, loop.trained(module))


class OwnAttention(nn.MultiheadAttention):
    """Another forward pass than the one that is known."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_forward_pass_of_its_own_is_refused(engine, loop):
    module = nn.Sequential(OwnAttention(WIDTH, HEADS, batch_first=True))
    with pytest.raises(UnsupportedModelError, match=r"0 \(OwnAttention\) hides its records"):
        engine.attach(module, loop.trained(module))


def test_an_own_parameter_on_the_layer_is_refused(engine, loop):
    layer = attention_layer()
    layer.gate = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedModelError, match=r"parameters that its type does not.*gate"):
        engine.attach(layer, loop.trained(layer))


def other_random_state(layer: nn.Module) -> Tensor:
    return torch.Generator().manual_seed(4).get_state()


def attend_without_mask(layer, leaves, mask, call):
    return ATTEND(layer, leaves, None, call)


def attend_across_records(layer, leaves, mask, call):
    return ATTEND(layer, [leaves[0].flip(0), *leaves[1:]], mask, call)


ATTEND = attention._attend


@pytest.mark.parametrize(
    "fault",
    [
        ("random_state", other_random_state),
        ("_attend", attend_without_mask),
        ("_attend", attend_across_records),
    ],
)
@pytest.mark.parametrize("needs_weights", [False, True])
def test_another_output_when_run_again_is_an_error(refuses, x, fault, needs_weights, monkeypatch):
    monkeypatch.setattr(attention, *fault)
    options = {"attn_mask": CAUSAL, "need_weights": needs_weights}
    refuses(
        attention_layer(dropout=0.3),
        lambda m: m(x, x, x, **options)[0],
        UnsupportedModelError,
        "run once more",
    )


def test_one_other_entry_of_one_record_is_an_error(refuses, x, monkeypatch):
    def changed(*arguments: Any) -> Tensor:
        found = ATTEND(*arguments)
        found.data[3, 1, 2] += 1e-3
        return found

    monkeypatch.setattr(attention, "_attend", changed)
    run = lambda m: m(x, x, x)[0]  # noqa: E731
    refuses(attention_layer(), run, UnsupportedModelError, "run once more")


def test_a_hook_that_draws_random_numbers_is_an_error_not_a_wrong_gradient(engine, loop, x):
    layer = attention_layer(dropout=0.3)
    engine.attach(layer, loop.trained(layer))
    layer.register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    loss = loop.losses_of(layer, lambda m: m(x, x, x)[0])().mean()
    with pytest.raises(UnsupportedModelError, match="run once more"):
        engine.backward(loss)
