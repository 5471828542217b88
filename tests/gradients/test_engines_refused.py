"""Models and passes that an engine refuses, by name and with the cure."""

from __future__ import annotations

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class WithBuffer(nn.Module):
    """A trainable layer with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.weight


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.LSTM(4, 3), r"1 \(LSTM\).*opacus\.layers\.DPLSTM"),
        (nn.GRU(4, 3), r"1 \(GRU\).*DPGRU"),
        (nn.MultiheadAttention(4, 2), r"1 \(MultiheadAttention\).*DPMultiheadAttention"),
        (DPMultiheadAttention(4, 2), r"1 .*second dimension\. Use engine='bookkeeping'"),
        (DPMultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), r"add_bias_kv=False"),
        (nn.BatchNorm1d(4), r"1 \(BatchNorm1d\).*GroupNorm"),
        (nn.BatchNorm2d(4), r"1 \(BatchNorm2d\).*GroupNorm"),
        (WithBuffer(), r"1 \(WithBuffer\) .*the buffers \['mean'\].*module without param"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_mix_records_are_refused_with_their_name_and_the_cure(layer, message, oracle):
    module = nn.Sequential(nn.Linear(6, 4), layer)
    with pytest.raises(UnsupportedModelError, match=message):
        OpacusHooks().attach(module, oracle.trained(module))


def test_hooks_refuse_packed_sequences_where_there_is_a_gradient(hooks, oracle):
    module = DPLSTM(6, 3, batch_first=True)
    packed = pack_padded_sequence(torch.randn(2, 3, 6), [1, 3], True, enforce_sorted=False)
    hooks.attach(module, oracle.trained(module))
    with torch.no_grad():
        module(packed)
    with pytest.raises(UnsupportedModelError, match=r"packed.*Use engine='bookkeeping'"):
        module(input=packed)
    hooks.detach()
    module(packed)


def test_a_frozen_layer_of_an_unsupported_kind_is_allowed(engine, oracle):
    module = nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 3).requires_grad_(False))
    engine.attach(module, oracle.trained(module))


def test_forward_and_backward_passes_are_paired_by_the_graph(engine, oracle, mlp):
    module, batch = mlp(), oracle.features()
    engine.attach(module, oracle.trained(module))
    expected = oracle.clipped(oracle.one_by_one(module, batch), 0.1)
    with engine.following(batch, len(batch)):
        module(oracle.features())  # not part of the loss
        loss = oracle.mean_loss(module(batch))
        module(oracle.features())

    engine.backward(loss)

    total = bounded_sum(engine.take(1.0, {}), 0.1).value.double()
    assert (total - expected).norm() / expected.norm() <= 1e-5


class OutsideItsModule(nn.Module):
    """A parameter that is used while its owner's forward is not running."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def scores(self, x: Tensor) -> Tensor:
        return self.net(x) * self.temperature


def through_a_function(module: nn.Module, x: Tensor) -> Tensor:
    """F.linear(x, layer.weight) goes past the hooks of the layer."""
    return module[2](torch.tanh(nn.functional.linear(x, module[0].weight)))


def time_in_the_batch(module: nn.Module, x: Tensor) -> Tensor:
    """Folding time into the batch makes one record many rows."""
    return module[1](module[0](x).reshape(-1, 2)).view(len(x), -1)


PAST_THE_HOOKS = {
    "outside": (OutsideItsModule, OutsideItsModule.scores, "'temperature'"),
    "function": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        through_a_function,
        r"\['0.weight'\]",
    ),
    "folded": (
        lambda: nn.ModuleList([nn.Linear(6, 4), nn.Linear(2, 3)]),
        time_in_the_batch,
        "first dimension",
    ),
}


@pytest.mark.parametrize("kind", [LayerCalls, OpacusHooks])
@pytest.mark.parametrize("name", PAST_THE_HOOKS)
def test_what_goes_past_the_hooks_of_layers_is_refused_by_name(kind, name, oracle):
    make, forward, message = PAST_THE_HOOKS[name]
    module, engine = make(), kind()

    with pytest.raises(UnsupportedModelError, match=message):
        engine.attach(module, oracle.trained(module))
        loss = oracle.mean_loss(forward(module, oracle.features()))
        engine.take(1.0, oracle.back(engine, module, loss))
    engine.detach()


@pytest.mark.parametrize("name", PAST_THE_HOOKS)
def test_it_trains_where_functions_are_followed(layer_engine, name, oracle):
    make, forward, _ = PAST_THE_HOOKS[name]
    torch.manual_seed(0)
    assert oracle.is_equal(layer_engine, make(), oracle.features(), forward)


class NotCopyable(nn.Module):
    """Opacus copies a layer it has no rule for; this one cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.cached = self.gain * 2  # not a leaf, so deepcopy refuses

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize("kind", [LayerCalls, OpacusHooks])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), WithBuffer()),
        lambda: nn.Sequential(nn.Linear(6, 6), NotCopyable()),
    ],
    ids=["lstm", "buffer", "not_copyable"],
)
def test_an_attach_that_raises_leaves_the_model_as_it_was(kind, make, oracle, anatomy):
    module, engine = make(), kind()
    before = anatomy(module)

    with pytest.raises(UnsupportedModelError):
        engine.attach(module, oracle.trained(module))

    assert anatomy(module) == before
    engine.detach()
    assert anatomy(module) == before
