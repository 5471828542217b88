"""A model for every layer type and every way to use a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp._norms import FixedNorm
from lightning_dp.gradients import (
    bilinear,
    convolution,
    matrices,
    parameter_sum,
)

RECORDS = 5


class Attention(nn.Module):
    """Plain attention made of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))


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
    "in_place_relu": (net(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), images(6)),
    "buffer_beside_layers": (net(Standardised(), nn.Tanh(), nn.Linear(4, 3)), images(6)),
    "subclass": (net(OwnLinear(6, 4), nn.Tanh()), images(6)),
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
def layer_case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model_and_batch(layer_case: str) -> tuple[nn.Module, Tensor]:
    return made(layer_case)


@pytest.fixture(scope="session")
def slow() -> Callable[[Callable[..., Tensor], str], Tensor]:
    """An oracle's answer for a case, worked out once for all engines and tests."""
    return cache(lambda oracle, name: oracle(*made(name)))


@pytest.fixture(params=["whole", "sliced"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all records at once, or in slices as if they were too large."""
    if request.param == "sliced":
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
