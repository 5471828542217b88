"""A model for every layer type and every way to use a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp._norms import FixedNorm
from lightning_dp.gradients import (
    bilinear,
    convolution,
    matrices,
    parameter_sum,
)
from lightning_dp.gradients.bookkeeping import Bookkeeping

RECORDS = 5


class Positions(nn.Module):
    """A learned position embedding beside a token embedding, as in small transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6, padding_idx=0)
        self.place = nn.Parameter(torch.randn(7, 6))
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.tokens(x) + self.place))


class Attention(nn.Module):
    """Plain attention made of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(self.gate) * x + y


class Gated(nn.Module):
    """A layer of the user's own that is called with two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(6, 6), Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.linear(x), torch.tanh(x))


class Standardised(nn.Module):
    """A buffer, and no parameters but those of a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 6))
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


class OwnLinear(nn.Linear):
    """Has the forward pass of nn.Linear."""


class OtherLinear(nn.Linear):
    """Does something else with the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.square().T + self.bias


def images(*size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(RECORDS, *size)


def net(*layers: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Sequential(*(copy.deepcopy(layer) for layer in layers), nn.Flatten())
        with torch.no_grad():
            for param in module.parameters():
                param.normal_(std=0.5)  # seeded now, not when this file was imported
        return module

    return make


def conv(kind: type[nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return nn.Sequential(kind(*args, **options), nn.Tanh(), nn.Flatten())

    return make


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (net(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), images(6)),
    "linear_without_bias": (net(nn.Linear(6, 4, bias=False), nn.Tanh()), images(6)),
    "linear_on_short_sequences": (net(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4)), images(2, 6)),
    "linear_on_long_sequences": (net(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4)), images(30, 6)),
    "linear_on_two_dimensions": (net(nn.Linear(6, 4), nn.Tanh()), images(3, 2, 6)),
    "conv1d": (conv(nn.Conv1d, 2, 4, 3, stride=2, padding=1), images(2, 9)),
    "conv2d": (conv(nn.Conv2d, 2, 4, (3, 2), stride=(2, 1), padding=(0, 1)), images(2, 8, 7)),
    "conv3d": (conv(nn.Conv3d, 2, 3, 2, padding=1), images(2, 4, 3, 5)),
    "conv_dilated_in_groups": (
        conv(nn.Conv2d, 4, 6, 3, dilation=2, groups=2, padding=2), images(4, 8, 8),
    ),
    "conv_depthwise": (conv(nn.Conv2d, 4, 4, 3, groups=4, bias=False), images(4, 6, 6)),
    "conv_on_small_maps": (lambda: SmallMaps(), images(2, 4, 4)),
    "conv_on_small_maps_twice": (lambda: Again(), images(48, 3, 3)),
    "conv_same": (conv(nn.Conv2d, 2, 3, (2, 3), padding="same"), images(2, 5, 5)),
    "conv_valid": (conv(nn.Conv2d, 2, 3, 3, padding="valid"), images(2, 5, 5)),
    "conv_circular": (conv(nn.Conv1d, 2, 3, 3, padding=2, padding_mode="circular"), images(2, 7)),
    "conv_reflect": (conv(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect"), images(2, 5, 5)),
    "embedding": (net(nn.Embedding(7, 4), nn.Tanh()), lambda: torch.randint(7, (RECORDS, 9))),
    "embedding_padded": (
        net(nn.Embedding(7, 4, padding_idx=2), nn.Tanh()), lambda: torch.randint(7, (RECORDS, 9)),
    ),
    "embedding_tied_to_linear": (lambda: TableAndLayer(), lambda: torch.randint(7, (RECORDS, 40))),
    "embedding_of_one": (net(nn.Embedding(7, 4), nn.Tanh()), lambda: torch.randint(7, (RECORDS,))),
    "layer_norm": (net(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh()), images(3, 6)),
    "layer_norm_of_images": (net(nn.LayerNorm((2, 4, 3)), nn.Tanh()), images(2, 4, 3)),
    "layer_norm_without_bias": (net(nn.LayerNorm(6, bias=False), nn.Tanh()), images(6)),
    "group_norm": (net(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), images(2, 5, 5)),
    "instance_norm1d": (net(nn.InstanceNorm1d(3, affine=True), nn.Tanh()), images(3, 8)),
    "instance_norm2d": (net(nn.InstanceNorm2d(3, affine=True), nn.Tanh()), images(3, 4, 4)),
    "instance_norm3d": (net(nn.InstanceNorm3d(3, affine=True), nn.Tanh()), images(3, 2, 4, 3)),
    "rms_norm": (net(nn.Linear(6, 8), nn.RMSNorm(8), nn.Tanh()), images(3, 6)),
    "fixed_norm": (lambda: with_constants(), images(2, 5, 5)),
    "attention": (net(nn.Linear(6, 6), Attention(), Attention()), images(4, 6)),
    "multihead_on_one_tensor": (lambda: Heads(need_weights=True), images(4, 6)),
    "multihead_on_two_tensors": (lambda: Heads(memory=torch.sin), images(4, 6)),
    "multihead_on_three_tensors": (
        lambda: Heads(memory=torch.sin, value=torch.cos, need_weights=True), images(4, 6),
    ),
    "multihead_with_other_widths": (
        lambda: Heads(memory=lambda x: x[..., :4], kdim=4, vdim=4), images(4, 6),
    ),
    "multihead_with_added_keys": (
        lambda: Heads(add_bias_kv=True, add_zero_attn=True, padded=True), images(4, 6),
    ),
    "multihead_without_bias": (lambda: Heads(bias=False, padded=True), images(4, 6)),
    "transformer_encoder": (
        lambda: nn.Sequential(*(encoder_layer(norm_first=first) for first in (True, False))),
        images(4, 6),
    ),
    "transformer_decoder": (lambda: Decoder(), images(4, 6)),
    "lstm": (lambda: Recurrent(DPLSTM(6, 3, batch_first=True)), images(4, 6)),
    "gru_on_many_steps": (lambda: Recurrent(DPGRU(6, 2, bidirectional=True)), images(10, 6)),
    "multihead_of_opacus": (
        lambda: Recurrent(DPMultiheadAttention(6, 2, add_bias_kv=True)), images(4, 6),
    ),
    "positions_as_a_parameter": (net(Positions()), lambda: torch.randint(9, (RECORDS, 7))),
    "prelu": (net(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 2)), images(6)),
    "in_place_relu": (net(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), images(6)),
    "buffer_beside_layers": (net(Standardised(), nn.Tanh(), nn.Linear(4, 3)), images(6)),
    "two_tensors": (lambda: Gated(), images(6)),
    "subclass": (net(OwnLinear(6, 4), nn.Tanh(), OtherLinear(4, 3)), images(6)),
    "called_twice": (lambda: Twice(), images(6)),
    "called_twice_on_sequences": (lambda: Twice(), images(3, 6)),
    "one_gradient_for_two": (lambda: Both(), images(6)),
}  # fmt: skip


def with_constants() -> nn.Module:
    """A normalisation with the statistics of an earlier training."""
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(4, eps=1e-2)
    norm(3 * torch.randn(7, 4, 5, 5) + torch.arange(4.0).view(4, 1, 1))
    return net(nn.Conv2d(2, 4, 3), FixedNorm(norm), nn.Tanh())()


class Heads(nn.Module):
    """nn.MultiheadAttention, called twice."""

    def __init__(
        self,
        memory: Callable[[Tensor], Tensor] | None = None,
        value: Callable[[Tensor], Tensor] | None = None,
        padded: bool = False,
        need_weights: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)
        self.memory, self.value, self.padded = memory, value, padded
        self.options = {"need_weights": need_weights}
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.5)

    def attend(self, x: Tensor) -> Tensor:
        key = x if self.memory is None else self.memory(x)
        value = key if self.value is None else self.value(x)
        padding = (x[..., 0] > 0.3) & (torch.arange(4) > 0) if self.padded else None
        return self.attention(x, key, value, key_padding_mask=padding, **self.options)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(torch.tanh(self.attend(x)) + x).flatten(1)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(
        6, 2, dim_feedforward=7, **{"dropout": 0.0, "batch_first": True, **options}
    )


class Decoder(nn.Module):
    """Attention to itself, up to each position, and to something else, longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(
            6, 2, dim_feedforward=7, dropout=0.0, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        return self.layer(x[:, :3], torch.sin(x), tgt_mask=causal, tgt_is_causal=True)


class Recurrent(nn.Module):
    """A layer of Opacus on top of a linear one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(6, 6), layer

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        x = x if self.layer.batch_first else x.transpose(0, 1)
        three = [x] * (3 if isinstance(self.layer, DPMultiheadAttention) else 1)
        output = self.layer(*three)[0]
        return (output if self.layer.batch_first else output.transpose(0, 1)).flatten(1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(torch.tanh(self.norm(self.layer(x))))).flatten(1)


class TableAndLayer(nn.Module):
    """Of the table all rows are kept, of the layer its input and what came back."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 6), nn.Linear(6, 7)
        self.layer.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.table(x)).mean(1))


class SmallMaps(nn.Sequential):
    """Wide convolutions, with nothing symmetric about them."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(2, 40, (1, 2)), nn.Tanh()),
            *(nn.Conv2d(40, 36, (3, 2), padding=(1, 0)), nn.Tanh()),
            *(nn.Conv2d(36, 64, 2, dilation=(2, 1), stride=(1, 2)), nn.Tanh(), nn.Flatten()),
        )


class Again(nn.Module):
    """A convolution of its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(48, 48, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x))).mean((2, 3))


class Both(nn.Module):
    """Two layers that are handed one and the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


def made(name: str) -> tuple[nn.Module, Tensor]:
    """The model of a case and its batch, the same at each call."""
    torch.manual_seed(0)
    make, batch = CASES[name]
    return make(), batch()


@pytest.fixture(params=CASES)
def layer_case(request: pytest.FixtureRequest, layer_engine: Bookkeeping) -> str:
    name: str = request.param
    if layer_engine.name == "functional" and name.startswith(("multi", "transformer")):
        pytest.skip("torch.func does not see the records of attention layers")
    return name


@pytest.fixture
def model_and_batch(layer_case: str) -> tuple[nn.Module, Tensor]:
    return made(layer_case)


@pytest.fixture(scope="session")
def slow() -> Callable[[Callable[..., Tensor], str], Tensor]:
    """An oracle's answer for a case, worked out once for all engines and tests."""
    return cache(lambda oracle, name: oracle(*made(name)))


@pytest.fixture(params=["whole", "sliced"])
def memory(
    request: pytest.FixtureRequest, layer_engine: Bookkeeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of all records at once, or in slices as if they were too large."""
    if request.param == "sliced":
        if layer_engine.name == "functional":
            pytest.skip("makes all rows at once")
        monkeypatch.setattr(parameter_sum, "_KEEP_BYTES", 0)
        for module in (bilinear, parameter_sum):
            monkeypatch.setattr(module, "SLICE_BYTES", 200)
        for module in (matrices, convolution):
            monkeypatch.setattr(module, "PRODUCTS", 10)
        monkeypatch.setattr(matrices, "_CACHED_BYTES", 100)
        monkeypatch.setattr(convolution, "_PATCHES_PER_CHANNEL", 0)  # convolutions, not products
    monkeypatch.setattr(convolution, "_ENTRIES", 200)


@pytest.fixture
def layer_models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]]:
    return CASES
