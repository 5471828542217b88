"""Layers that the book-keeping engine does not cover, and ones that it must not mistake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.bookkeeping import Bookkeeping
from lightning_dp.gradients.opacus_hooks import OpacusHooks
from tests.gradients.little_models import Called

RECORDS = 5


@pytest.fixture
def lean() -> Iterator[Bookkeeping]:
    """The engine that knows of layers alone."""
    engine = Bookkeeping()
    yield engine
    engine.detach()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, RECORDS)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, RECORDS)),
    ],
)
def test_a_parametrized_layer_is_refused(make, oracle):
    """Its weight is made by a module without records; its rows must not pass for them."""
    module = nn.Sequential(nn.Linear(6, 6), make())
    with pytest.raises(UnsupportedModelError, match="parametrized"):
        Bookkeeping().attach(module, oracle.trained(module))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_layer_with_more_parameters_than_its_type_is_refused(oracle):
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)))
    with pytest.raises(UnsupportedModelError, match=r"parameters that its type does not.*weight_g"):
        Bookkeeping().attach(module, oracle.trained(module))


class Constant(nn.Module):
    """Called without any tensor: its output has no records."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(RECORDS, 6))

    def forward(self) -> Tensor:
        return self.value * 2


def times_a_row(module: nn.ModuleList, x: Tensor) -> Tensor:
    return module[1](x * module[0]()[:1])


def test_a_layer_called_without_a_tensor(layer_engine, lean, oracle):
    """Its output has no records, though it has as many rows."""
    torch.manual_seed(0)
    module = nn.ModuleList([Constant(), nn.Linear(6, 3)])
    assert oracle.is_equal(layer_engine, module, oracle.features(), times_a_row)
    layer_engine.detach()
    with pytest.raises(UnsupportedModelError, match="own parameters"):
        lean.attach(module, oracle.trained(module))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Embedding(7, 4, max_norm=1.0), "1 .Embedding. has max_norm set"),
        (nn.Embedding(7, 4, scale_grad_by_freq=True), "1 .Embedding. has scale_grad_by_freq set"),
        (nn.LSTM(4, 3), "1 .LSTM. hides its records"),
    ],
)
def test_layers_that_are_not_covered_are_refused_with_name_and_cure(lean, layer, message, oracle):
    module = nn.Sequential(nn.Linear(6, 4), layer)
    cure = "lightning_dp.fix" if isinstance(layer, nn.LSTM) else "Use engine='hooks'"
    with pytest.raises(UnsupportedModelError, match=f"{message}.*{cure}"):
        lean.attach(module, oracle.trained(module))


def test_a_parameter_with_a_row_for_each_place_in_the_batch_is_refused(layer_engine, oracle):
    """A record's gradient would depend on how many records come before it."""

    class ByPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(RECORDS, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.rows

    module = ByPlace()
    layer_engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"rows in mul\(\).*record by record"):
        oracle.run(layer_engine, module, oracle.features())


class ForAllRecords(nn.Module):
    """A layer without a rule, called with the records and once for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(-x.new_ones(1, 6))


def test_a_call_without_records_belongs_to_every_record(layer_engine, oracle):
    torch.manual_seed(0)
    assert oracle.is_equal(layer_engine, ForAllRecords(), oracle.features())


class Own(nn.Module):
    """The start of a layer of the user's own, without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))


class Named(Own):
    def forward(self, x: Tensor, *, by: float) -> Tensor:
        return x * self.scale * by


class Pair(Own):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, x


class Noisy(Own):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale)


OWN = {
    "by name": (Named, lambda net, x: net(x, by=2.0)),
    "two outputs": (Pair, lambda net, x: net(x)[0]),
}


@pytest.mark.parametrize("name", OWN)
def test_layers_of_the_users_own_are_followed(layer_engine, lean, name, oracle):
    make, forward = OWN[name]
    torch.manual_seed(0)
    module = make()
    assert oracle.is_equal(layer_engine, module, oracle.features(), forward)
    layer_engine.detach()
    with pytest.raises(UnsupportedModelError, match=r"own parameters .*no rule is known"):
        lean.attach(module, oracle.trained(module))


def test_random_numbers_after_a_layer_are_those_of_the_pass(layer_engine, oracle):
    """Half of the entries are gone: where an entry is left, its gradient is twice the input."""
    torch.manual_seed(0)
    module, x = Noisy(), torch.ones(oracle.records, 6)
    layer_engine.attach(module, oracle.trained(module))
    with layer_engine.following(x, len(x)):
        output = module(x)
    layer_engine.backward(output.sum(1).mean())
    norms = layer_engine.take(1.0, {}).norms()
    torch.testing.assert_close(norms, output.detach().double().norm(dim=1))


def test_batch_norm_is_refused_where_functions_are_followed(layer_engine, oracle):
    module, x = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), oracle.features()
    layer_engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"1\.bias, 1\.weight in batch_norm.*record by"):
        oracle.run(layer_engine, module, x)


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nn.Linear(6, 3), lambda layer, x: layer(x[0])),
        (nn.Linear(6, 3), lambda layer, x: torch.stack([layer(each) for each in x])),
        (nn.Conv2d(2, 3, 1), lambda layer, x: layer(x[:2, :, None])),
        (nn.Conv1d(5, 3, 1), lambda layer, x: layer(x)),
        (nn.LayerNorm(6), lambda layer, x: layer(x[0])),
        (nn.RMSNorm(6), lambda layer, x: layer(x[0])),
        (nn.InstanceNorm1d(5, affine=True), lambda layer, x: layer(x)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("engine", [OpacusHooks, Bookkeeping], ids=["hooks", "rules"])
def test_a_layer_called_without_records_is_refused_in_words(engine, layer, call, oracle):
    module, engine = Called(layer, call), engine()
    engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"layer \(\w+\) was called with .* records"):
        oracle.run(engine, module, oracle.features())


def test_attention_without_records_is_refused_in_words(oracle):
    module, engine = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), Bookkeeping()
    engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"2 dimensions.*records, positions"):
        oracle.run(engine, module, oracle.features())
    engine.detach()
