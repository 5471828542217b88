"""The book-keeping engine against one record at a time in float64, layer by layer."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_dp.clipping import bounded_sum
from lightning_dp.gradients import (
    Bookkeeping,
    Functional,
    OpacusHooks,
    UncoveredParameterError,
    UnsupportedModelError,
    bookkeeping,
)
from lightning_dp.gradients.graph import survey
from lightning_dp.gradients.layers import RULES, Call, ParameterGradients, base
from lightning_dp.gradients.layers.convolution import Convolution
from lightning_dp.gradients.layers.embedding import Lookup
from lightning_dp.gradients.layers.linear import OuterProduct

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


@pytest.fixture(params=[Bookkeeping, Functional])
def engine(request: pytest.FixtureRequest) -> Iterator[Bookkeeping]:
    engine = request.param()
    yield engine
    engine.detach()


def loss_of(output: Tensor) -> Tensor:
    """A mean over records of something smooth that differs between them."""
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return (torch.tanh(output) - target).square().sum(1).mean()


def params_of(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def one_by_one(module: nn.Module, batch: Tensor) -> Tensor:
    """(n, d): plain autograd in float64, one record's own term of the loss at a time."""
    module = copy.deepcopy(module).double()
    batch = batch.double() if batch.is_floating_point() else batch
    rows = []
    for i in range(len(batch)):
        output = module(batch[i : i + 1])
        targets = torch.linspace(-1, 1, output.numel() * len(batch), dtype=torch.float64)
        target = targets.view(len(batch), -1)[i]
        loss = (torch.tanh(output) - target).square().sum()
        parts = torch.autograd.grad(loss, params_of(module))
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(rows)


def watched(engine: Bookkeeping, module: nn.Module, batch: Tensor, *, may_fold: bool = True) -> Any:
    engine.backward(loss_of(module(batch)), may_fold=may_fold)
    return engine.take(1.0, {})


def clipped(rows: Tensor, clip_norm: float) -> Tensor:
    return (rows * (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


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


# -- values --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("memory")
def test_norms_and_clipped_sums_equal_the_loop(engine, model_and_batch):
    module, batch = model_and_batch
    expected = one_by_one(module, batch)
    engine.attach(module, params_of(module))

    gradients = watched(engine, module, batch)

    assert gradients.count == RECORDS
    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-6, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("weights", [(1.0, -1.0), (1.0, -0.3), (0.0, 2.0)])
def test_combinations_at_two_points_equal_the_loop(engine, model_and_batch, weights):
    module, batch = model_and_batch
    other = moved(module, 0.1)
    expected = weights[0] * one_by_one(module, batch) + weights[1] * one_by_one(other, batch)
    engine.attach(module, params_of(module))
    here = watched(engine, module, batch, may_fold=False)
    at(module, other)
    there = watched(engine, module, batch, may_fold=False)

    gradients = here.combine(weights[0], [(weights[1], there)])

    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-5, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_a_record_that_is_not_finite_contributes_nothing(engine, model_and_batch, poison):
    module, batch = model_and_batch
    if not batch.is_floating_point():
        pytest.skip("tokens are finite")
    batch[2] = float(poison)
    expected = one_by_one(module, batch)
    if torch.isfinite(expected[2]).all():
        pytest.skip("the layer swallows it")
    finite = expected[torch.arange(RECORDS) != 2]
    engine.attach(module, params_of(module))

    clip_norm = float(finite.norm(dim=1).median())
    total = bounded_sum(watched(engine, module, batch), clip_norm).value.double()

    wanted = clipped(finite, clip_norm)
    assert (total - wanted).norm() <= 2e-6 * wanted.norm()


def test_an_empty_sum_is_zero(engine):
    module = nn.Linear(6, 3)
    engine.attach(module, params_of(module))
    gradients = watched(engine, module, torch.full((RECORDS, 6), float("nan")))
    assert torch.equal(bounded_sum(gradients, 1.0).value, torch.zeros(21))


def test_every_rule_is_tested():
    tested = {type(part) for make, _ in CASES.values() for part in make().modules()}
    assert set(RULES) <= tested


# -- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [1, 3, 40])
def test_differences_of_close_points_keep_their_digits(positions):
    """At ‖x - x'‖/‖x‖ = 1e-4, against float64 from the same inputs. The square of each gradient
    minus twice their product, in float32, has no correct digit there."""
    generator = torch.Generator().manual_seed(0)
    v, u = (torch.randn(4, positions, size, generator=generator) for size in (50, 30))
    v2, u2 = (part * (1 + 1e-4 * torch.randn(part.shape, generator=generator)) for part in (v, u))
    form = OuterProduct()
    here, there = (
        ParameterGradients([Call(form, *pair)], torch.Size((30, 50))) for pair in ((v, u), (v2, u2))
    )

    both = here.combine(1.0, [(-1.0, there)])

    rows = form.rows(v.double(), u.double()) - form.rows(v2.double(), u2.double())
    exact = rows.flatten(1).norm(dim=1).square()
    error = ((both.squared_norms() - exact) / exact).abs().max()
    assert error <= 1e-5
    sums = both.weighted_sum(torch.ones(4, dtype=torch.float64)).double()
    assert (sums - rows.sum(0).flatten()).norm() <= 1e-5 * rows.sum(0).norm()

    naive = [form.rows(v, u).flatten(1), form.rows(v2, u2).flatten(1)]
    three_terms = (
        naive[0].square().sum(1) + naive[1].square().sum(1) - 2 * (naive[0] * naive[1]).sum(1)
    )
    assert ((three_terms - exact) / exact).abs().max() > 1e-3


@pytest.mark.parametrize("size", [4, 12])
def test_differences_of_convolutions_keep_their_digits(size):
    """On small maps from inner products, on larger ones from the rows."""
    generator = torch.Generator().manual_seed(0)
    shape = (64, 48, 3, 3)
    v = torch.randn(4, 48, size, size, generator=generator)
    u = torch.randn(4, 64, size, size, generator=generator)
    v2, u2 = (part * (1 + 1e-4 * torch.randn(part.shape, generator=generator)) for part in (v, u))
    form = Convolution(shape, (1, 1), (1, 1), (1, 1), 1)
    here, there = (
        ParameterGradients([Call(form, *pair)], torch.Size(shape)) for pair in ((v, u), (v2, u2))
    )
    both = here.combine(1.0, [(-1.0, there)])
    rows = form.rows(v.double(), u.double()) - form.rows(v2.double(), u2.double())
    exact = rows.flatten(1).norm(dim=1).square()
    torch.testing.assert_close(both.squared_norms(), exact, rtol=1e-5, atol=0)


def test_convolutions_on_small_maps_make_no_row_for_their_norms():
    form = Convolution((64, 48, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    for size, has_short_way in [(4, True), (12, False)]:
        v, u = torch.randn(2, 48, size, size), torch.randn(2, 64, size, size)
        found = form.squared_norms([Call(form, v, u)], may_keep=True)
        assert (found is not None) == has_short_way


@pytest.mark.parametrize("moved", [0, 2, 12])
def test_differences_of_lookups_hold_whichever_rows_they_look_up(moved):
    """Equal rows must not be subtracted as squares; other rows must not be mixed up."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randint(5, (4, 12), generator=generator)
    u = torch.randn(4, 12, 3, generator=generator)
    v2, u2 = v.clone(), u * (1 + 1e-4 * torch.randn(u.shape, generator=generator))
    v2[:, :moved] = (v2[:, :moved] + 1) % 5
    form = Lookup(5)
    here, there = (
        ParameterGradients([Call(form, *pair)], torch.Size((5, 3))) for pair in ((v, u), (v2, u2))
    )
    both = here.combine(1.0, [(-1.0, there)])
    rows = form.rows(v, u.double()) - form.rows(v2, u2.double())
    exact = rows.flatten(1).norm(dim=1).square()
    torch.testing.assert_close(both.squared_norms(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        both.weighted_sum(torch.ones(4)).double(), rows.sum(0).flatten(), rtol=1e-3, atol=1e-6
    )


def test_norms_of_wide_layers_are_not_too_small():
    """float32 row norms are 4e-4 too small at 10 million entries."""
    v, u = torch.full((2, 1, 3_000_000), 0.1), torch.full((2, 1, 3), 0.1)
    gradients = ParameterGradients([Call(OuterProduct(), v, u)], torch.Size((3, 3_000_000)))
    exact = float(v[0].double().norm() * u[0].double().norm()) ** 2
    assert gradients.squared_norms().tolist() == pytest.approx([exact] * 2, rel=1e-6)


def kept_bytes(engine: Bookkeeping) -> int:
    tensors = [part for each in engine._found.values() for c in each.calls for part in (c.v, c.u)]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_of_layers_with_large_maps_only_gradients_are_kept():
    """Unless they are going to be subtracted from those at a point nearby."""
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    engine, x = Bookkeeping(), torch.randn(16, 4, 20, 20)
    engine.attach(net, params_of(net))
    rows = 4 * 16 * sum(param.numel() for param in net.parameters())
    engine.backward(loss_of(net(x)))
    assert kept_bytes(engine) <= 1.2 * rows < x.nbytes  # in memory for somewhat larger batches
    engine.backward(loss_of(net(x)), may_fold=False)
    assert kept_bytes(engine) > 4 * x.nbytes
    engine.detach()


def test_memory_does_not_grow_with_the_sizes_of_batches(engine):
    """Poisson batches differ in size; what is kept is for the largest one."""
    torch.manual_seed(0)
    module = nn.Linear(16, 16)
    engine.attach(module, params_of(module))
    for size in [5, 9, 3, 7, 8, 9, 2]:
        gradients = watched(engine, module, torch.randn(size, 40, 16))
        expected = sum(
            call.form.rows(call.v, call.u).sum(0) for call in gradients._gradients[0].calls
        )
        gradients.norms()
        total = gradients.weighted_sum(torch.ones(size, dtype=torch.float64))
        torch.testing.assert_close(total[:256].view(16, 16), expected * size)
    kept = [tensor for free in engine._memory._free.values() for tensor in free]
    assert [len(tensor) for tensor in kept] in ([], [10])


def test_bfloat16_is_summed_in_float32(engine):
    torch.manual_seed(0)
    module, batch = (make() for make in CASES["conv1d"])
    expected = one_by_one(module, batch)
    engine.attach(module, params_of(module))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(module(batch))
    engine.backward(loss)
    gradients = engine.take(1.0, {})
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=0.05, atol=0)
    assert bounded_sum(gradients, 1.0).value.dtype == torch.float32


# -- what is seen of the graph -------------------------------------------------------------------


@dataclass
class Watched:
    engine: Bookkeeping
    net: nn.ModuleDict

    def refuses(self, loss: Tensor, *names: str) -> None:
        with pytest.raises(UncoveredParameterError) as caught:
            self.engine.backward(loss)
        assert str(list(names)) in str(caught.value)
        self.engine.drop()


@pytest.fixture
def parts(engine) -> Watched:
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {
            "lookup": nn.Embedding(7, 6),
            "one": nn.Linear(6, 6, bias=False),
            "two": nn.Linear(6, 7, bias=False),
        }
    )
    engine.attach(net, params_of(net))
    return Watched(engine, net)


def test_a_weight_used_again_outside_its_layer_is_refused(parts):
    """The embedding is also the output projection: hooks alone would miss half of its gradient."""
    lookup = parts.net["lookup"]
    hidden = parts.net["one"](lookup(torch.randint(7, (RECORDS,))))
    parts.refuses(loss_of(F.linear(hidden, lookup.weight)), "lookup.weight")


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_the_same_is_refused_where_autocast_keeps_one_copy_of_the_weight(parts):
    lookup, one = parts.net["lookup"], parts.net["one"]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = one(lookup(torch.randint(7, (RECORDS,))))
        loss = loss_of(F.linear(hidden, one.weight))
    parts.refuses(loss, "one.weight")


def test_a_penalty_on_the_weights_is_refused(parts):
    loss = loss_of(parts.net["one"](torch.randn(RECORDS, 6)))
    parts.refuses(loss + parts.net["one"].weight.square().sum(), "one.weight")


def test_a_layer_that_is_not_called_is_refused(parts):
    x = parts.net["one"](torch.randn(RECORDS, 6))
    parts.refuses(loss_of(F.linear(x, parts.net["two"].weight)), "two.weight")


def test_branches_and_residuals_are_no_second_use(parts):
    one, x = parts.net["one"], torch.randn(RECORDS, 6)
    y = one(x)
    parts.engine.backward(loss_of(y + torch.tanh(y) * y + one(y)))
    assert parts.engine.take(1.0, {}).count == RECORDS


def test_an_overwritten_input_is_refused(parts):
    one, two = parts.net["one"], parts.net["two"]
    x = torch.randn(RECORDS, 6)
    y = one(x)
    loss = loss_of(two(y))
    x.mul_(2.0)
    with pytest.raises(UnsupportedModelError, match=r"overwritten.*in place"):
        parts.engine.backward(loss)


def test_gradients_of_stride_zero_are_read_right(parts):
    """The gradient of a sum is one number, expanded."""
    one, x = parts.net["one"], torch.randn(RECORDS, 6)
    parts.engine.backward(one(x).sum(1).mean())
    norms = parts.engine.take(1.0, {}).norms()
    torch.testing.assert_close(norms, x.double().norm(dim=1) * 6**0.5, rtol=1e-6, atol=0)


class Scaled(nn.Module):
    """A layer of the user's own, without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.tanh(self.scale)


@pytest.mark.parametrize("before", [True, False])
def test_a_parameter_of_an_own_layer_used_outside_is_refused(engine, before):
    net = nn.Sequential(nn.Linear(6, 6), Scaled())
    engine.attach(net, params_of(net))
    x = torch.randn(RECORDS, 6)
    engine.backward(loss_of(net(x)))
    engine.take(1.0, {})
    x = x * net[1].scale if before else x
    y = net(x) if before else net(x) * net[1].scale
    with pytest.raises(UncoveredParameterError, match=r"'1.scale'"):
        engine.backward(loss_of(y))


def test_uses_are_counted_where_a_parameter_meets_something_else():
    w, x = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3, requires_grad=True)
    for loss, count in [
        ((x @ w.t()).sum(), 1),
        ((x @ w.t().contiguous().double().float()).sum(), 1),
        ((x @ w + x @ w).sum(), 2),
        ((x @ (w + w)).sum(), 1),
        (w.square().sum(), 1),
        ((x @ w).sum() + w.norm(), 2),
        (x.sum(), 0),
    ]:
        assert survey(loss.grad_fn, ()).uses[id(w)] == count


# -- other ways to run ---------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_activation_checkpoints(engine):
    torch.manual_seed(0)
    module, batch = Checkpointed(), torch.randn(RECORDS, 6)
    expected = one_by_one(module, batch)
    engine.attach(module, params_of(module))
    gradients = watched(engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)


def test_hooks_that_change_an_output_belong_to_the_model(engine):
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), torch.randn(RECORDS, 6)
    module[0].register_forward_hook(lambda m, i, o: 3 * o)
    module[0].register_forward_pre_hook(lambda m, i: (2 * i[0],))
    expected = one_by_one(module, batch)
    engine.attach(module, params_of(module))
    gradients = watched(engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, RECORDS)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, RECORDS)),
    ],
)
@pytest.mark.parametrize("kind", [Bookkeeping, OpacusHooks])
def test_a_parametrized_layer_is_refused(kind, make):
    """Its weight is made by a module without records; its rows must not pass for them."""
    module = nn.Sequential(nn.Linear(6, 6), make())
    with pytest.raises(UnsupportedModelError, match="parametrized"):
        kind().attach(module, params_of(module))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_layer_with_more_parameters_than_its_type_is_refused():
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)))
    with pytest.raises(UnsupportedModelError, match=r"parameters that its type does not.*weight_g"):
        Bookkeeping().attach(module, params_of(module))


class Constant(nn.Module):
    """Called without any tensor: its output has no records."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(RECORDS, 6))

    def forward(self) -> Tensor:
        return self.value * 2


def test_a_layer_called_without_a_tensor_is_refused(engine):
    module = nn.ModuleList([Constant(), nn.Linear(6, 3)])
    engine.attach(module, params_of(module))
    loss = loss_of(module[1](torch.randn(RECORDS, 6) * module[0]()))
    with pytest.raises(UnsupportedModelError, match="something else than tensors"):
        engine.backward(loss)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Embedding(7, 4, max_norm=1.0), "1 .Embedding. has max_norm set"),
        (nn.Embedding(7, 4, sparse=True), "1 .Embedding. has sparse set"),
        (nn.Embedding(7, 4, scale_grad_by_freq=True), "1 .Embedding. has scale_grad_by_freq set"),
        (nn.LSTM(4, 3), "1 .LSTM. hides its records"),
        (nn.MultiheadAttention(4, 2), "1 .MultiheadAttention. hides its records"),
        (nn.BatchNorm1d(4), "1 .BatchNorm1d. has buffers"),
    ],
)
def test_layers_that_are_not_covered_are_refused_with_name_and_cure(engine, layer, message):
    module = nn.Sequential(nn.Linear(6, 4), layer)
    with pytest.raises(UnsupportedModelError, match=f"{message}.*Use engine='hooks'"):
        engine.attach(module, params_of(module))


def test_a_compiled_part_is_refused(engine):
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    module[1].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="1 is compiled"):
        engine.attach(module, params_of(module))


class Named(Scaled):
    def forward(self, x: Tensor, *, by: float) -> Tensor:
        return x * self.scale * by


class Pair(Scaled):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, x


@pytest.mark.parametrize("call", [lambda x: Named()(x, by=2.0), lambda x: Pair()(x)[0]])
def test_a_layer_with_more_than_tensors_is_refused_when_it_is_seen(engine, call, monkeypatch):
    made: list[nn.Module] = []

    def remember(self: Scaled) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(6))
        engine.attach(self, params_of(self))
        made.append(self)

    monkeypatch.setattr(Scaled, "__init__", remember)
    loss = loss_of(call(torch.ones(RECORDS, 6)))
    with pytest.raises(UnsupportedModelError, match=r"something else than tensors.*by position"):
        engine.backward(loss)


def test_a_layer_that_draws_random_numbers_is_refused(engine):
    class Noisy(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.scale)

    module = Noisy()
    engine.attach(module, params_of(module))
    with pytest.raises(UnsupportedModelError, match=r"Noisy cannot be run record by record"):
        engine.backward(loss_of(module(torch.ones(RECORDS, 6))))


# -- Hessian-vector products ---------------------------------------------------------------------


def products_one_by_one(module: nn.Module, batch: Tensor, direction: Tensor) -> Tensor:
    """(n, d): H_i u by two plain backward passes in float64, one record at a time."""
    module = copy.deepcopy(module).double()
    batch = batch.double() if batch.is_floating_point() else batch
    rows = []
    for i in range(len(batch)):
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            output = module(batch[i : i + 1])
            targets = torch.linspace(-1, 1, output.numel() * len(batch), dtype=torch.float64)
            loss = (torch.tanh(output) - targets.view(len(batch), -1)[i]).square().sum()
            parts = torch.autograd.grad(loss, params_of(module), create_graph=True)
            slope = torch.cat([part.reshape(-1) for part in parts]) @ direction.double()
            again = torch.autograd.grad(slope, params_of(module), materialize_grads=True)
        rows.append(torch.cat([part.reshape(-1) for part in again]))
    return torch.stack(rows)


def along(
    engine: Bookkeeping, module: nn.Module, batch: Tensor, u: Tensor, weights: tuple[float, float]
) -> Any:
    return engine.along(lambda: loss_of(module(batch)), u, weights)


def direction_for(module: nn.Module) -> Tensor:
    """Random; without a part for padding, which has no gradient and still moves the output."""
    generator = torch.Generator().manual_seed(5)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for param in other.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
        for part in other.modules():
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                part.weight[part.padding_idx] = 0
    return torch.cat([param.detach().reshape(-1) for param in params_of(other)])


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.0, 1.0), (-0.5, 2.0)])
def test_hessian_vector_products_equal_the_loop(engine, model_and_batch, weights):
    module, batch = model_and_batch
    u = direction_for(module)
    products = products_one_by_one(module, batch, u)
    expected = weights[0] * one_by_one(module, batch) + weights[1] * products
    engine.attach(module, params_of(module))

    gradients = along(engine, module, batch, u, weights)

    assert gradients.count == RECORDS
    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-5, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("keep", [1, 7, None])
def test_restricted_gradients_and_products_are_columns_of_the_loop(engine, model_and_batch, keep):
    module, batch = model_and_batch
    u = direction_for(module)
    expected = one_by_one(module, batch) + products_one_by_one(module, batch, u)
    places = torch.arange(expected.shape[1])
    places = places[-keep:] if keep == 1 else places[3 :: keep or 1][:-1]
    engine.attach(module, params_of(module))

    gradients = along(engine, module, batch, u, (1.0, 1.0)).restrict(places)

    size = float(expected.norm(dim=1).max())
    norms = expected[:, places].norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=0, atol=2e-5 * size)
    total = gradients.weighted_sum(torch.ones(RECORDS)).double()
    assert (total - expected[:, places].sum(0)).norm() <= 2e-5 * size
    only = watched(engine, module, batch).restrict(places).weighted_sum(torch.ones(RECORDS))
    wanted = one_by_one(module, batch)[:, places].sum(0)
    assert (only.double() - wanted).norm() <= 2e-5 * size


def test_a_pass_along_a_direction_leaves_the_model_and_the_next_batch_as_they_were(
    engine, model_and_batch
):
    module, batch = model_and_batch
    before = dict(module.named_parameters())
    engine.attach(module, params_of(module))
    first = watched(engine, module, batch).weighted_sum(torch.ones(RECORDS))

    along(engine, module, batch, direction_for(module), (1.0, 1.0))

    after = dict(module.named_parameters())
    assert all(after[name] is param and param.grad is None for name, param in before.items())
    again = watched(engine, module, batch).weighted_sum(torch.ones(RECORDS))
    assert torch.equal(first, again)


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_a_record_whose_product_is_not_finite_contributes_nothing(engine, poison):
    torch.manual_seed(0)
    module, batch = CASES["linear"][0](), torch.randn(RECORDS, 6)
    batch[2] = float(poison)
    u = direction_for(module)
    engine.attach(module, params_of(module))
    total = bounded_sum(along(engine, module, batch, u, (1.0, 1.0)), 0.1).value.double()
    expected = one_by_one(module, batch) + products_one_by_one(module, batch, u)
    wanted = clipped(expected[torch.arange(RECORDS) != 2], 0.1)
    assert (total - wanted).norm() <= 2e-5 * wanted.norm()


class Tied(nn.Module):
    """One table at both ends, and a layer under checkpoint() between."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.middle = nn.Linear(6, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: torch.tanh(self.middle(t)), self.tokens(x), use_reentrant=False)
        return self.out(y).flatten(1)


def test_products_of_shared_and_recomputed_layers_equal_the_loop(engine):
    torch.manual_seed(0)
    module, batch = Tied(), torch.randint(9, (RECORDS, 4))
    u = direction_for(module)
    expected = products_one_by_one(module, batch, u)
    engine.attach(module, params_of(module))
    total = along(engine, module, batch, u, (0.0, 1.0)).weighted_sum(torch.ones(RECORDS))
    assert (total.double() - expected.sum(0)).norm() <= 2e-5 * expected.sum(0).norm()


def test_products_of_frozen_parts_are_those_of_the_trained_ones(engine):
    torch.manual_seed(0)
    module, batch = CASES["linear"][0](), torch.randn(RECORDS, 6)
    module[0].requires_grad_(False)
    u = direction_for(module)
    expected = products_one_by_one(module, batch, u)
    engine.attach(module, params_of(module))
    total = along(engine, module, batch, u, (0.0, 1.0)).weighted_sum(torch.ones(RECORDS))
    torch.testing.assert_close(total.double(), expected.sum(0), rtol=2e-5, atol=1e-6)


class Unrecorded(nn.Module):
    """Uses a weight outside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.layer.weight


def test_uses_outside_a_layer_are_found_along_a_direction_too(engine):
    module = Unrecorded()
    engine.attach(module, params_of(module))
    with pytest.raises(UncoveredParameterError, match=r"layer\.weight"):
        along(engine, module, torch.randn(RECORDS, 6), direction_for(module), (1.0, 1.0))


def test_engines_without_products_say_so():
    module, engine = nn.Linear(6, 3), OpacusHooks()
    engine.attach(module, params_of(module))
    assert not engine.has_products
    with pytest.raises(UnsupportedModelError, match="no Hessian-vector products"):
        engine.along(lambda: torch.zeros(()), torch.zeros(21), (1.0, 1.0))
    engine.detach()


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return NoForwardMode.apply(self.layer(x))


def test_an_operation_without_a_second_derivative_is_named_as_the_cause(engine):
    module = OwnFunction()
    engine.attach(module, params_of(module))
    with pytest.raises(UnsupportedModelError, match="second derivative"):
        along(engine, module, torch.randn(RECORDS, 6), direction_for(module), (1.0, 1.0))
    watched(engine, module, torch.randn(RECORDS, 6))  # and it still works
