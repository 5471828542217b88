"""Models and calls that an engine of the whole batch refuses, by name, in words and with the cure."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import EngineChoice, RecordPasses, UnsupportedModelError
from lightning_dp.gradients.ghost import GhostClipping
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks
from tests.gradients.models import Copies, net, weight

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing", "ignore:.*weight_norm"
)

SCALE = net(lambda m, x: x * m.scale, scale=weight(6))


def with_a_buffer() -> nn.Module:
    layer = SCALE()
    layer.register_buffer("mean", torch.zeros(6))
    return layer


@pytest.mark.parametrize("kind", [LayerCalls, GhostClipping])
def test_layers_without_a_rule_are_refused_by_their_path(kind, oracle, anatomy):
    for layer in (
        *(SCALE(), nn.PReLU(), nn.EmbeddingBag(7, 4), nn.GRUCell(2, 4), nn.LSTM(4, 3)),
        *(type("Own", (nn.LSTM,), {})(4, 3), nn.MultiheadAttention(4, 2), DPLSTM(4, 3)),
        *(DPMultiheadAttention(4, 2), SequenceBias(4)),
    ):
        module = nn.Sequential(nn.Linear(6, 4), nn.Sequential(layer))
        before = anatomy(module)
        message = r"1\.0 \(\w+\): no rule is known of its type"
        with pytest.raises(UnsupportedModelError, match=message):
            kind(module, oracle.trained(module))
        assert anatomy(module) == before
        module[1].requires_grad_(False)  # what is frozen needs no rule
        kind(module, oracle.trained(module))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Embedding(7, 4, max_norm=1.0), r"has max_norm set.*at 'auto'"),
        (nn.Embedding(7, 4, scale_grad_by_freq=True), "has scale_grad_by_freq set"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), "is parametrized"),
        (nn.utils.parametrizations.orthogonal(nn.Linear(6, 5)), "is parametrized"),
        (nn.utils.weight_norm(nn.Linear(6, 4)), "parameters that its type does not.*weight_g"),
    ],
)
def test_options_that_change_what_a_layer_is_are_refused(layer, message, oracle):
    module = nn.Sequential(nn.Linear(6, 6), layer)
    with pytest.raises(UnsupportedModelError, match=rf"1 \(\w+\) .*{message}"):
        LayerCalls(module, oracle.trained(module))


class Standardised(nn.Conv2d):
    def _conv_forward(self, inputs, weight, bias):
        return super()._conv_forward(inputs, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Louder(nn.InstanceNorm2d):
    def _apply_instance_norm(self, inputs):
        return 2 * super()._apply_instance_norm(inputs)


def quieter() -> nn.Module:
    layer = nn.Conv1d(3, 3, 3)
    whole = layer._conv_forward
    layer._conv_forward = lambda *args: whole(*args) / 2
    return layer


@pytest.mark.parametrize("kind", [LayerCalls, GhostClipping])
@pytest.mark.parametrize(
    "make", [lambda: Standardised(3, 3, 3), lambda: Louder(3, affine=True), quieter]
)
def test_a_method_of_ones_own_that_a_forward_pass_comes_to_has_no_rule(make, kind, oracle):
    module = nn.Sequential(nn.Conv2d(3, 3, 3), make())
    with pytest.raises(UnsupportedModelError, match=r"1 \(\w+\): no rule is known"):
        kind(module, oracle.trained(module))


def test_a_forward_pass_of_one_layer_alone_has_no_rule(oracle):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    module[1].forward = torch.compile(module[1].forward, backend="eager")
    LayerCalls(module, oracle.trained(module))

    module[1].forward = lambda x: nn.functional.linear(x, module[1].weight * 2)

    with pytest.raises(UnsupportedModelError, match=r"1 \(Linear\): no rule is known"):
        LayerCalls(module, oracle.trained(module))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LSTM(4, 3), "DPLSTM"),
        (lambda: nn.GRU(4, 3), "GRU class"),
        (lambda: nn.MultiheadAttention(4, 2), "DPMultiheadAttention"),
        (lambda: DPMultiheadAttention(4, 2), "records second"),
        (lambda: nn.BatchNorm1d(4), "GroupNorm"),
        (with_a_buffer, "buffers"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 5)), "buffers"),
    ],
)
def test_what_opacus_refuses_is_refused_and_the_model_left_as_it_was(
    make, message, oracle, anatomy
):
    module = nn.Sequential(nn.Linear(6, 4), make())
    before = anatomy(module)
    with pytest.raises(UnsupportedModelError, match=f"Opacus has no .*{message}"):
        OpacusHooks(module, oracle.trained(module))
    assert anatomy(module) == before


def test_hooks_refuse_packed_sequences_where_there_is_a_gradient(oracle):
    module = DPLSTM(6, 3, batch_first=True)
    packed = pack_padded_sequence(torch.randn(2, 3, 6), [1, 3], True, enforce_sorted=False)
    engine = OpacusHooks(module, oracle.trained(module))
    with engine.watching():
        with torch.no_grad():
            module(packed)
        with pytest.raises(UnsupportedModelError, match="packed"):
            module(input=packed)


def applied(layer: Callable[[], nn.Module], call: Callable[..., Tensor]) -> nn.Module:
    """A layer behind another, and the way in which it is called."""
    return net(lambda m, x: call(m.layer, m.first(x)), first=lambda: nn.Linear(6, 6), layer=layer)()


LINEAR = lambda: nn.Linear(6, 3)  # noqa: E731
PARTS = {  # of which Opacus' rules see a part, or mistake one
    "a name": (LINEAR, lambda layer, x: layer(input=x)),
    "outside too": (LINEAR, lambda layer, x: layer(x) + 0.1 * x @ layer.weight.t()),
    "more": (
        lambda: nn.utils.weight_norm(nn.Linear(6, 4)), lambda layer, x: layer(x)),
    "around": (
        lambda: nn.Conv1d(2, 3, 3, padding_mode="circular", padding=1),
        lambda layer, x: layer(x.view(-1, 2, 3)).flatten(1)),
}  # fmt: skip


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = weight(6)(), nn.Identity()
        self.calls, self.shapes = 0, list[tuple[int, ...]]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.inner.latest = self.calls + 1, x.detach()
        self.shapes.append(tuple(x.shape))
        return x * self.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_layers_that_run_again_keep_is_of_the_forward_pass(oracle, dtype):
    module, batch = nn.Sequential(Counting(), nn.Tanh()).to(dtype), oracle.features().to(dtype)
    found = oracle.run(OpacusHooks(module, oracle.trained(module)), module, batch)
    expected = oracle.one_by_one(module, batch).norm(dim=1)
    torch.testing.assert_close(found.norms().double(), expected, rtol=2e-2, atol=0)
    assert module[0].calls == 1
    assert module[0].shapes == [tuple(batch.shape)]
    torch.testing.assert_close(module[0].inner.latest, batch, rtol=0, atol=0)


class Annealed(nn.Module):
    """Each call is another function, by what the calls before it have left."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = weight(6)(), nn.Identity()
        self.register_buffer("total", torch.ones(()))
        self.begin()

    def begin(self) -> None:
        self.calls, self.inner.heat, self.total = 1, 1.0, torch.ones_like(self.total)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.calls * self.inner.heat * self.total * x * self.scale)
        self.calls, self.inner.heat, self.total = self.calls + 1, 3.0, self.total + 1
        return y


@pytest.mark.parametrize("calls", [1, 2])
def test_layers_that_run_again_begin_with_what_their_call_began_with(oracle, calls):
    """Those that hold shards."""
    layer, batch = Annealed(), oracle.features()
    module = nn.Sequential(*[layer, nn.Tanh()] * calls)

    def alone(module: nn.Module, x: Tensor) -> Tensor:
        module[0].begin()
        return module(x)

    expected = oracle.one_by_one(module, batch, alone)
    engine = LayerCalls(module, oracle.trained(module), units=True)
    found = oracle.run(engine, module, batch)
    torch.testing.assert_close(found.norms(), expected.norm(dim=1), rtol=1e-4, atol=1e-7)
    total = found.weighted_sum(torch.ones(oracle.records))
    torch.testing.assert_close(total.double(), expected.sum(0), rtol=1e-4, atol=1e-5)
    assert layer.calls == 1 + calls


def test_the_second_direction_of_opacus_layers_is_no_other_order(oracle):
    torch.manual_seed(0)
    module = DPLSTM(6, 3, bidirectional=True, batch_first=True)
    batch = torch.randn(oracle.records, 4, 6)

    def run(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch)[0]

    engine = OpacusHooks(module, oracle.trained(module))
    with engine.watching():
        loss = oracle.mean_loss(run(module, batch))
    engine.backward(loss)
    expected = oracle.one_by_one(module, batch, run).norm(dim=1)
    torch.testing.assert_close(engine.take(1.0).norms().double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", PARTS)
def test_calls_that_opacus_mistakes_are_refused(name, oracle):
    torch.manual_seed(0)
    module = applied(*PARTS[name])
    with pytest.raises(UnsupportedModelError, match=r"layer|mean of Opacus"):
        oracle.run(OpacusHooks(module, oracle.trained(module)), module, oracle.features())


WITHOUT_RECORDS = (
    (LINEAR, lambda layer, x: layer(x[0])),
    (LINEAR, lambda layer, x: torch.stack([layer(each) for each in x])),
    (lambda: nn.Conv2d(2, 3, 1), lambda layer, x: layer(x[:2, :, None])),
    (lambda: nn.Conv1d(5, 3, 1), lambda layer, x: layer(x)),
    (lambda: nn.LayerNorm(6), lambda layer, x: layer(x[0])),
    (lambda: nn.RMSNorm(6), lambda layer, x: layer(x[0])),
    (lambda: nn.InstanceNorm1d(5, affine=True), lambda layer, x: layer(x)),
)


@pytest.mark.parametrize("kind", [OpacusHooks, LayerCalls])
def test_a_layer_called_without_records_is_refused_in_words(kind, oracle):
    for layer, call in WITHOUT_RECORDS:
        module = applied(layer, call)
        engine = kind(module, oracle.trained(module))
        message = r"layer \(\w+\) was called with .* records"
        with pytest.raises(UnsupportedModelError, match=message):
            oracle.run(engine, module, oracle.features())


PAST_THE_HOOKS = {
    "function": (lambda m, x: m[2](torch.tanh(F.linear(x, m[0].weight))), r"\['0.weight'\]"),
    "time": (lambda m, x: m[2](m[0](x).repeat(2, 1)).view(len(x), -1), "first dimension"),
}


@pytest.mark.parametrize("kind", [LayerCalls, OpacusHooks])
@pytest.mark.parametrize("name", PAST_THE_HOOKS)
def test_what_goes_past_the_hooks_of_layers_is_refused_by_name(kind, name, oracle):
    forward, message = PAST_THE_HOOKS[name]
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    engine = kind(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=message), engine.watching():
        loss = oracle.mean_loss(forward(module, oracle.features()))
        engine.backward(loss)
        engine.take(1.0)


class RuleForAll(Copies):
    """Its rule for vmap gets all records at once; so does its backward pass."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()

    @staticmethod
    def vmap(info, dims, x):
        return RuleForAll.apply(x), dims[0]


def in_8_bits(tensor):
    unit = tensor.abs().amax().clamp(min=1e-9) / 127
    return (tensor / unit).round() * unit


def kept_in_8_bits(module, x):
    with saved_tensors_hooks(in_8_bits, lambda tensor: tensor):
        hidden = module[0](x).tanh()
    return module[2](hidden)


def hook_on_a_node(module, x):
    hidden = module[0](x).tanh()
    hidden.grad_fn.register_prehook(lambda gradients: tuple(each.sign() for each in gradients))
    return module[2](hidden)


ALL_AT_ONCE = {
    "rule": (lambda m, x: m[2](RuleForAll.apply(m[0](x))), "its own rule for torch.vmap"),
    "saved": (kept_in_8_bits, "saved_tensors_hooks"),
    "node": (hook_on_a_node, "grad_fn"),
}


@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_code_that_sees_all_records_in_the_backward_pass_is_left_to_single_records(name, oracle):
    forward, message = ALL_AT_ONCE[name]
    module, choice = (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        EngineChoice("records"),
    )

    with RecordPasses(module, oracle.trained(module), choice) as passes:
        target = torch.zeros(3)
        passes.run(
            lambda b: oracle.mean_loss(forward(module, b), target),
            oracle.features(),
            oracle.records,
        )

    assert choice.description.startswith("one_by_one")
    assert message in choice.description


def test_forward_and_backward_passes_are_paired_by_the_graph(oracle, mlp):
    module, batch = mlp(), oracle.features()
    engine = LayerCalls(module, oracle.trained(module))
    expected = oracle.clipped(oracle.one_by_one(module, batch), 0.1)
    with engine.watching():
        module(oracle.features())  # not part of the loss
        loss = oracle.mean_loss(module(batch))
        module(oracle.features())
    engine.backward(loss)
    total = bounded_sum(engine.take(1.0), 0.1).value.double()
    assert (total - expected).norm() / expected.norm() <= 1e-5


def test_a_record_that_is_not_finite_is_no_wrong_mean(oracle, mlp):
    module, batch = mlp(), oracle.features()
    hooks = OpacusHooks(module, oracle.trained(module))
    for value in (float("nan"), float("inf"), 1e30):
        batch[1] = value
        assert oracle.run(hooks, module, batch).count == oracle.records
