"""Layer by layer: norms and clipped sums of the book-keeping engine against one record at a time."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.clipping import bounded_sum
from lightning_dp.gradients import bookkeeping
from lightning_dp.gradients.layers import RULES, base

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
    "embedding_of_one": (net(nn.Embedding(7, 4), nn.Tanh()), lambda: torch.randint(7, (RECORDS,))),
    "layer_norm": (net(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh()), images(3, 6)),
    "layer_norm_of_images": (net(nn.LayerNorm((2, 4, 3)), nn.Tanh()), images(2, 4, 3)),
    "layer_norm_without_bias": (net(nn.LayerNorm(6, bias=False), nn.Tanh()), images(6)),
    "group_norm": (net(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), images(2, 5, 5)),
    "instance_norm1d": (net(nn.InstanceNorm1d(3, affine=True), nn.Tanh()), images(3, 8)),
    "instance_norm2d": (net(nn.InstanceNorm2d(3, affine=True), nn.Tanh()), images(3, 4, 4)),
    "instance_norm3d": (net(nn.InstanceNorm3d(3, affine=True), nn.Tanh()), images(3, 2, 4, 3)),
    "rms_norm": (net(nn.Linear(6, 8), nn.RMSNorm(8), nn.Tanh()), images(3, 6)),
    "attention": (net(nn.Linear(6, 6), Attention(), Attention()), images(4, 6)),
    "positions_as_a_parameter": (net(Positions()), lambda: torch.randint(9, (RECORDS, 7))),
    "prelu": (net(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 2)), images(6)),
    "in_place_relu": (net(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), images(6)),
    "two_tensors": (lambda: Gated(), images(6)),
    "subclass": (net(OwnLinear(6, 4), nn.Tanh(), OtherLinear(4, 3)), images(6)),
    "called_twice": (lambda: Twice(), images(6)),
    "called_twice_on_sequences": (lambda: Twice(), images(3, 6)),
    "one_gradient_for_two": (lambda: Both(), images(6)),
}  # fmt: skip


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(torch.tanh(self.norm(self.layer(x))))).flatten(1)


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


@pytest.fixture(params=CASES)
def model_and_batch(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, batch = CASES[request.param]
    return make(), batch()


@pytest.fixture(params=["whole", "sliced"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all records at once, or in slices as if they were too large."""
    if request.param == "sliced":
        monkeypatch.setattr(bookkeeping, "_KEEP_BYTES", 0)
        monkeypatch.setattr(base, "_SLICE_BYTES", 200)
        for name in ("linear", "embedding", "convolution"):
            module = importlib.import_module(f"lightning_dp.gradients.layers.{name}")
            monkeypatch.setattr(module, "PRODUCTS", 10)


def moved(module: nn.Module, by: float) -> nn.Module:
    """The same model at a nearby point."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=by)
    return other


def at(module: nn.Module, other: nn.Module) -> dict[str, Tensor]:
    kept = {name: param.detach().clone() for name, param in module.named_parameters()}
    module.load_state_dict(other.state_dict())
    return kept


@pytest.mark.usefixtures("memory")
def test_norms_and_clipped_sums_equal_the_loop(layer_engine, model_and_batch, oracle):
    module, batch = model_and_batch
    expected = oracle.one_by_one(module, batch)
    layer_engine.attach(module, oracle.trained(module))

    gradients = oracle.run(layer_engine, module, batch)

    assert gradients.count == oracle.records
    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-6, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = oracle.clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("weights", [(1.0, -1.0), (1.0, -0.3), (0.0, 2.0)])
def test_combinations_at_two_points_equal_the_loop(layer_engine, model_and_batch, weights, oracle):
    module, batch = model_and_batch
    other = moved(module, 0.1)
    rows, other_rows = (oracle.one_by_one(each, batch) for each in (module, other))
    expected = weights[0] * rows + weights[1] * other_rows
    layer_engine.attach(module, oracle.trained(module))
    here = oracle.run(layer_engine, module, batch, may_fold=False)
    at(module, other)
    there = oracle.run(layer_engine, module, batch, may_fold=False)

    gradients = here.combine(weights[0], [(weights[1], there)])

    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-5, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = oracle.clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_a_record_that_is_not_finite_contributes_nothing(
    layer_engine, model_and_batch, poison, oracle
):
    module, batch = model_and_batch
    if not batch.is_floating_point():
        pytest.skip("tokens are finite")
    batch[2] = float(poison)
    expected = oracle.one_by_one(module, batch)
    if torch.isfinite(expected[2]).all():
        pytest.skip("the layer swallows it")
    finite = expected[torch.arange(oracle.records) != 2]
    layer_engine.attach(module, oracle.trained(module))

    clip_norm = float(finite.norm(dim=1).median())
    total = bounded_sum(oracle.run(layer_engine, module, batch), clip_norm).value.double()

    wanted = oracle.clipped(finite, clip_norm)
    assert (total - wanted).norm() <= 2e-6 * wanted.norm()


def test_an_empty_sum_is_zero(layer_engine, oracle):
    module = nn.Linear(6, 3)
    layer_engine.attach(module, oracle.trained(module))
    gradients = oracle.run(layer_engine, module, torch.full((oracle.records, 6), float("nan")))
    assert torch.equal(bounded_sum(gradients, 1.0).value, torch.zeros(21))


def test_every_rule_is_tested():
    tested = {type(part) for make, _ in CASES.values() for part in make().modules()}
    assert set(RULES) <= tested


def test_bfloat16_is_summed_in_float32(layer_engine, oracle):
    torch.manual_seed(0)
    module, batch = (make() for make in CASES["conv1d"])
    expected = oracle.one_by_one(module, batch)
    layer_engine.attach(module, oracle.trained(module))
    with torch.autocast("cpu", torch.bfloat16):
        loss = oracle.mean_loss(module(batch))
    layer_engine.backward(loss)
    gradients = layer_engine.take(1.0, {})
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=0.05, atol=0)
    assert bounded_sum(gradients, 1.0).value.dtype == torch.float32
