"""Layers that the book-keeping engine does not cover, and ones that it must not mistake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor, nn

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.ghost import GhostClipping
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks

RECORDS = 5


@pytest.fixture
def lean() -> Iterator[LayerCalls]:
    """The engine that knows of layers alone."""
    engine = LayerCalls()
    yield engine
    engine.detach()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, RECORDS)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, RECORDS)),
    ],
)
@pytest.mark.parametrize("kind", [LayerCalls, OpacusHooks])
def test_a_parametrized_layer_is_refused(kind, make, oracle):
    """Its weight is made by a module without records; its rows must not pass for them."""
    module = nn.Sequential(nn.Linear(6, 6), make())
    with pytest.raises(UnsupportedModelError, match="parametrized"):
        kind().attach(module, oracle.trained(module))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_layer_with_more_parameters_than_its_type_is_refused(oracle):
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)))
    with pytest.raises(UnsupportedModelError, match=r"parameters that its type does not.*weight_g"):
        LayerCalls().attach(module, oracle.trained(module))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Embedding(7, 4, max_norm=1.0), "1 .Embedding. has max_norm set"),
        (nn.Embedding(7, 4, scale_grad_by_freq=True), "1 .Embedding. has scale_grad_by_freq set"),
    ],
)
def test_layers_that_are_not_covered_are_refused_with_name_and_cure(lean, layer, message, oracle):
    module = nn.Sequential(nn.Linear(6, 4), layer)
    with pytest.raises(UnsupportedModelError, match=f"{message}.*Leave the engine at 'auto'"):
        lean.attach(module, oracle.trained(module))


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


class Wrapped(nn.LSTM):
    """A layer that others are built on."""


@pytest.mark.parametrize(
    "make",
    [
        *(Own, Named, Pair, nn.PReLU, lambda: nn.EmbeddingBag(7, 4), lambda: nn.GRUCell(2, 4)),
        *(lambda: nn.LSTM(4, 3), lambda: Wrapped(4, 3), lambda: nn.MultiheadAttention(4, 2)),
        *(lambda: DPLSTM(4, 3), lambda: DPMultiheadAttention(4, 2), lambda: SequenceBias(4)),
    ],
)
@pytest.mark.parametrize("kind", [LayerCalls, GhostClipping])
def test_layers_without_a_rule_are_refused_by_their_path(kind, make, oracle):
    module = nn.Sequential(nn.Linear(6, 4), nn.Sequential(make()))
    with pytest.raises(UnsupportedModelError, match=r"1\.0 \(\w+\): no rule is known of its type"):
        kind().attach(module, oracle.trained(module))


def test_what_is_frozen_needs_no_rule(oracle):
    module = nn.Sequential(nn.Linear(6, 4), nn.PReLU().requires_grad_(False))
    engine = LayerCalls()
    engine.attach(module, oracle.trained(module))
    assert oracle.run(engine, module, oracle.features()).count == RECORDS
