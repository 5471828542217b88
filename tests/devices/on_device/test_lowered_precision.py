"""Clipped sums to the digits of float32, of a model that computes in TF32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device import DEVICE
from torch import Tensor, nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients.batches import SampleBatch
from lightning_dp.gradients.engines import EngineChoice


@pytest.fixture(autouse=True)
def lowered(same_digits_as_on_the_cpu: None) -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision("highest")


class Times(nn.Module):
    """One layer, whose output gradients are the numbers that stand behind its input."""

    def __init__(self, layer: nn.Module, gradients: Tensor) -> None:
        super().__init__()
        self.layer, self.gradients = layer, gradients

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return (self.layer(x) * self.gradients[places]).flatten(1).sum(1)


def almost_nothing(kind: str) -> tuple[Times, Tensor]:
    """A layer and records whose terms cancel, but for a hundredth of them."""
    torch.manual_seed(0)
    if kind == "linear":
        layer: nn.Module = nn.Linear(256, 256, bias=False)
        x = torch.randn(3, 1, 256) + 0.01 * torch.randn(3, 4, 256)
        u = torch.randn(3, 4, 256)
        u -= u.mean(1, keepdim=True)
    else:
        layer = nn.Conv2d(64, 64, 3, bias=False)
        x = torch.randn(3, 64, 1, 1) + 0.01 * torch.randn(3, 64, 5, 5)
        u = torch.randn(3, 64, 3, 3)
        u -= u.mean((2, 3), keepdim=True)
    return Times(layer, u.to(DEVICE)).to(DEVICE), x.to(DEVICE)


def exact(net: Times, x: Tensor, clip_norm: float) -> Tensor:
    """The clipped sum, record by record in float64 on the host."""
    here, gradients = net.layer.cpu().double(), net.gradients.cpu().double()
    (weight,) = here.parameters()
    total = torch.zeros(weight.numel(), dtype=torch.float64)
    for record, u in zip(x.cpu().double(), gradients, strict=True):
        loss = (here(record.unsqueeze(0)) * u).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        total += gradient.flatten() * min(1.0, clip_norm / float(gradient.norm()))
    return total


@pytest.mark.parametrize("engine", ["layers", "ghost", "records"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_clipped_sums_are_those_of_float64(kind: str, engine: str) -> None:
    net, x = almost_nothing(kind)
    attached = EngineChoice(engine).make(net, list(net.parameters()))
    places = torch.arange(len(x), device=x.device)
    loss = attached.run(lambda batch: net(*batch).mean(), SampleBatch((x, places), len(x)))
    attached.backward(loss)
    found = bounded_sum(attached.take(1.0), 0.5).value.cpu().double()
    wanted = exact(net, x, 0.5)
    error = float((found - wanted).norm() / wanted.norm())
    # The margin for rounding, 2.4e-6 of the terms' squared length, clips records whose terms cancel like
    # this by a tenth more at most; of their norms TF32 leaves nothing.
    assert error < 0.2 and found.norm() <= (1 + 2e-3) * wanted.norm(), error
