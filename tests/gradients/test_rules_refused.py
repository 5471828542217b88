"""Layers that the book-keeping engine does not cover, and ones that it must not mistake."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.bookkeeping import Bookkeeping
from lightning_dp.gradients.opacus_hooks import OpacusHooks

RECORDS = 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, RECORDS)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, RECORDS)),
    ],
)
@pytest.mark.parametrize("kind", [Bookkeeping, OpacusHooks])
def test_a_parametrized_layer_is_refused(kind, make, oracle):
    """Its weight is made by a module without records; its rows must not pass for them."""
    module = nn.Sequential(nn.Linear(6, 6), make())
    with pytest.raises(UnsupportedModelError, match="parametrized"):
        kind().attach(module, oracle.trained(module))


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


def test_a_layer_called_without_a_tensor_is_refused(layer_engine, oracle):
    module = nn.ModuleList([Constant(), nn.Linear(6, 3)])
    layer_engine.attach(module, oracle.trained(module))
    loss = oracle.mean_loss(module[1](torch.randn(oracle.records, 6) * module[0]()))
    with pytest.raises(UnsupportedModelError, match="something else than tensors"):
        layer_engine.backward(loss)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Embedding(7, 4, max_norm=1.0), "1 .Embedding. has max_norm set"),
        (nn.Embedding(7, 4, sparse=True), "1 .Embedding. has sparse set"),
        (nn.Embedding(7, 4, scale_grad_by_freq=True), "1 .Embedding. has scale_grad_by_freq set"),
        (nn.LSTM(4, 3), "1 .LSTM. hides its records"),
        (nn.BatchNorm1d(4), "1 .BatchNorm1d. has buffers"),
    ],
)
def test_layers_that_are_not_covered_are_refused_with_name_and_cure(
    layer_engine, layer, message, oracle
):
    module = nn.Sequential(nn.Linear(6, 4), layer)
    with pytest.raises(UnsupportedModelError, match=f"{message}.*Use engine='hooks'"):
        layer_engine.attach(module, oracle.trained(module))


class ForAllRecords(nn.Module):
    """A layer without a rule, called with the records and once for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(-torch.ones(1, 6))


def test_gradients_of_a_call_without_records_are_not_added_to_those_of_records(
    layer_engine, oracle
):
    module = ForAllRecords()
    layer_engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match="more rows than there are records"):
        oracle.run(layer_engine, module, torch.randn(oracle.records, 6))


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


@pytest.mark.parametrize(
    "call",
    [lambda watched, x: watched(Named())(x, by=2.0), lambda watched, x: watched(Pair())(x)[0]],
)
def test_a_layer_with_more_than_tensors_is_refused_when_it_is_seen(layer_engine, call, oracle):
    def watched(module: nn.Module) -> nn.Module:
        layer_engine.attach(module, oracle.trained(module))
        return module

    loss = oracle.mean_loss(call(watched, torch.ones(RECORDS, 6)))
    with pytest.raises(UnsupportedModelError, match=r"something else than tensors.*by position"):
        layer_engine.backward(loss)


def test_a_layer_that_draws_random_numbers_is_refused(layer_engine, oracle):
    class Noisy(Own):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.scale)

    module = Noisy()
    layer_engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"Noisy cannot be run record by record"):
        layer_engine.backward(oracle.mean_loss(module(torch.ones(oracle.records, 6))))
