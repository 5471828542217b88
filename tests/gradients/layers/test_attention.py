"""nn.MultiheadAttention: masks, dropout and everything else that its rule has to run once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.gradients import (
    Bookkeeping,
    Functional,
    UncoveredParameterError,
    UnsupportedModelError,
)
from lightning_dp.gradients.layers import attention

RECORDS, LENGTH, WIDTH, HEADS = 5, 4, 6, 2

Losses = Callable[[], Tensor]  # of each record, always with the same random numbers


@pytest.fixture
def engine() -> Iterator[Bookkeeping]:
    engine = Bookkeeping()
    yield engine
    engine.detach()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(RECORDS, LENGTH, WIDTH, dtype=torch.float64)


def attention_layer(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).double()
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(std=0.5)
    return layer


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def losses_of(module: nn.Module, run: Callable[[nn.Module], Tensor]) -> Losses:
    def losses() -> Tensor:
        torch.manual_seed(3)
        output = torch.tanh(run(module)).flatten(1)
        return (output - torch.linspace(-1, 1, output.shape[1])).square().sum(1)

    return losses


def one_by_one(losses: Losses, params: list[nn.Parameter]) -> Tensor:
    """(n, d): the gradient of each record's loss, by a backward pass of its own."""
    rows = []
    for i in range(RECORDS):
        parts = torch.autograd.grad(losses()[i], params, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def equal_the_loop(engine: Bookkeeping, module: nn.Module, losses: Losses) -> None:
    expected = one_by_one(losses, trained(module))
    assert (expected.norm(dim=1) > 1e-3).all()
    losses()
    state = torch.get_rng_state()
    engine.attach(module, trained(module))
    engine.backward(losses().mean())
    assert torch.equal(torch.get_rng_state(), state)
    gradients = engine.take(1.0, {})
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=1e-9, atol=1e-12)
    weights = torch.linspace(-1, 2, RECORDS, dtype=torch.float64)
    total = gradients.weighted_sum(weights)
    torch.testing.assert_close(total, weights @ expected, rtol=1e-9, atol=1e-10)


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
def test_gradients_with_masks_and_dropout_equal_the_loop(engine, x, dropout, mask, needed):
    layer = attention_layer(dropout=dropout)
    losses = losses_of(layer, lambda m: m(x, x, value=x, **MASKS[mask], **needed)[0])
    equal_the_loop(engine, layer, losses)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
)
def test_added_keys_go_with_masks_and_dropout(engine, x, options, needs_weights):
    layer = attention_layer(dropout=0.3, **options)
    masks = {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": needs_weights}
    equal_the_loop(engine, layer, losses_of(layer, lambda m: m(x, x, x, **masks)[0]))


def test_eval_mode_has_no_dropout(engine, x):
    layer = attention_layer(dropout=0.3).eval()
    equal_the_loop(engine, layer, losses_of(layer, lambda m: m(x, x, x)[0]))


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
def test_in_a_model_the_gradients_equal_the_loop(engine, x, make):
    module = make()
    equal_the_loop(engine, module, losses_of(module, lambda m: m(x)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_training", [True, False])
def test_the_fast_path_of_an_encoder_in_eval_mode_is_not_mixed_up(engine, x, is_training):
    module = encoder()
    engine.attach(module, trained(module))
    module.eval()
    with torch.no_grad():  # as in validation: nested tensors, no call of the attention
        module(x, src_key_padding_mask=PADDING)
    engine.drop()
    module.train(is_training)
    losses = losses_of(module, lambda m: m(x, src_key_padding_mask=PADDING))
    equal_the_loop(engine, module, losses)


@pytest.mark.parametrize(
    "names",
    [["out_proj.weight"], ["in_proj_bias"], ["in_proj_weight", "out_proj.bias"], ["bias_v"]],
)
def test_frozen_parts_cost_nothing_and_change_nothing(engine, x, names):
    layer = attention_layer(dropout=0.3, add_bias_kv=True)
    for name, param in layer.named_parameters():
        param.requires_grad_(name in names)
    equal_the_loop(engine, layer, losses_of(layer, lambda m: m(x, x, x)[0]))


def test_a_frozen_attention_passes_gradients_on(engine, x):
    module = MaskFromData()
    module.attention.requires_grad_(False)
    equal_the_loop(engine, module, losses_of(module, lambda m: m(x)))


def test_differences_at_two_points_equal_the_loop(engine, x):
    module, step = MaskFromData(), 1e-4
    losses = losses_of(module, lambda m: m(x))
    here = one_by_one(losses, trained(module))
    engine.attach(module, trained(module))
    engine.backward(losses().mean(), may_fold=False)
    first = engine.take(1.0, {})
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param), alpha=step)
    expected = here - one_by_one(losses, trained(module))
    engine.backward(losses().mean(), may_fold=False)
    gradients = first.combine(1.0, [(-1.0, engine.take(1.0, {}))])
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=1e-9, atol=0)
    total = gradients.weighted_sum(torch.ones(RECORDS, dtype=torch.float64))
    torch.testing.assert_close(total, expected.sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("needs_weights", [False, True])
def test_hessian_vector_products_with_masks_and_dropout_equal_the_loop(engine, x, needs_weights):
    layer = attention_layer(dropout=0.3, add_bias_kv=True)
    options = {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": needs_weights}
    losses = losses_of(layer, lambda m: m(x, torch.sin(x), x, **options)[0])
    params = trained(layer)
    u = torch.randn(sum(param.numel() for param in params), dtype=torch.float64)
    rows = []
    for i in range(RECORDS):
        with sdpa_kernel(SDPBackend.MATH):
            parts = torch.autograd.grad(losses()[i], params, create_graph=True)
            gradient = torch.cat([part.flatten() for part in parts])
            again = torch.autograd.grad(gradient @ u, params, materialize_grads=True)
        rows.append(gradient.detach() - 2 * torch.cat([part.flatten() for part in again]))
    expected = torch.stack(rows)
    engine.attach(layer, params)
    gradients = engine.along(lambda: losses().mean(), u, (1.0, -2.0))
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=1e-9, atol=1e-12)
    total = gradients.weighted_sum(torch.ones(RECORDS, dtype=torch.float64))
    torch.testing.assert_close(total, expected.sum(0), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_half_precision_is_run_again_in_half_precision(engine, x, whole, needs_weights):
    """By autocast, or of the whole model."""
    layer = attention_layer()
    masks = {"attn_mask": CAUSAL, "need_weights": needs_weights}
    losses = losses_of(layer, lambda m: m(x, x, x, **masks)[0])
    expected = one_by_one(losses, trained(layer))
    layer, kind = layer.to(torch.bfloat16 if whole else torch.float32), torch.bfloat16
    layer.dropout = 1e-9  # draws random numbers
    x = x.to(kind if whole else torch.float32)
    engine.attach(layer, trained(layer))
    with torch.autocast("cpu", kind, enabled=not whole):
        loss = losses().mean()
    engine.backward(loss)
    gradients = engine.take(1.0, {})
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=0.05, atol=0)
    total = gradients.weighted_sum(torch.ones(RECORDS))
    assert total.dtype == torch.float32
    assert (total - expected.sum(0)).norm() <= 0.05 * expected.sum(0).norm()


@pytest.fixture
def refuses(engine, x) -> Callable[..., None]:
    """That a run of a model is refused, at the latest by the backward pass."""

    def check(module: nn.Module, run: Callable[[nn.Module], Tensor], kind: Any, match: str) -> None:
        engine.attach(module, trained(module))
        loss = losses_of(module, run)().mean()
        with pytest.raises(kind, match=match):
            engine.backward(loss)

    return check


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


def test_records_in_the_second_dimension_are_refused_with_the_cure(engine):
    module = nn.TransformerEncoderLayer(WIDTH, HEADS, 8)
    with pytest.raises(UnsupportedModelError, match=r"self_attn.*batch_first=True"):
        engine.attach(module, trained(module))


def test_without_rules_the_layer_is_refused():
    module = nn.Sequential(attention_layer())
    with pytest.raises(UnsupportedModelError, match=r"0 \(MultiheadAttention\) hides its records"):
        Functional().attach(module, trained(module))


class OwnAttention(nn.MultiheadAttention):
    """Another forward pass than the one that is known."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_forward_pass_of_its_own_is_refused(engine):
    module = nn.Sequential(OwnAttention(WIDTH, HEADS, batch_first=True))
    with pytest.raises(UnsupportedModelError, match=r"0 \(OwnAttention\) hides its records"):
        engine.attach(module, trained(module))


def test_an_own_parameter_on_the_layer_is_refused(engine):
    layer = attention_layer()
    layer.gate = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedModelError, match=r"parameters that its type does not.*gate"):
        engine.attach(layer, trained(layer))


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


def test_a_hook_that_draws_random_numbers_is_an_error_not_a_wrong_gradient(engine, x):
    layer = attention_layer(dropout=0.3)
    engine.attach(layer, trained(layer))
    layer.register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    loss = losses_of(layer, lambda m: m(x, x, x)[0])().mean()
    with pytest.raises(UnsupportedModelError, match="run once more"):
        engine.backward(loss)


class Transformer(L.LightningModule):
    """An ordinary module of three tokens a record, with the same dropout in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True), 1
        )
        self.embed, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        torch.manual_seed(self.global_step)
        hidden = self.encoder(self.embed(x.view(len(x), 3, 2))).mean(1)
        return nn.functional.cross_entropy(self.head(hidden), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_without_noise_and_clipping_a_transformer_trains_as_ever(blobs, make_trainer):
    results = []
    for is_private in (False, True):
        torch.manual_seed(0)
        model = Transformer()
        privacy = DifferentialPrivacy(
            target_delta=1e-5, noise_multiplier=0.0, max_grad_norm=1e6, sampling=FullBatch()
        )
        callbacks = [privacy] if is_private else []
        make_trainer(max_epochs=4, callbacks=callbacks).fit(model, DataLoader(blobs, 240))
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert privacy.report().mechanism["gradient engine"] == "bookkeeping"
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


def test_a_transformer_trains_privately(blobs: TensorDataset, make_trainer):
    torch.manual_seed(0)
    model = Transformer()
    privacy = DifferentialPrivacy(target_delta=1e-5, target_epsilon=4.0, max_grad_norm=1.0)
    trainer = make_trainer(max_epochs=3, callbacks=[privacy], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(blobs, 24))
    assert privacy.report().mechanism["gradient engine"] == "bookkeeping"
    assert 0 < float(trainer.callback_metrics["privacy/epsilon"]) <= 4.0
    assert trainer.global_step == 15
