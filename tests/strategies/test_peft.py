"""Adapters that the library peft puts into an unchanged network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from tests.zoo import clipped, gradient_rows, private

peft = pytest.importorskip("peft", reason="adapters of the library peft")

CLIP_NORM = 0.1


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def adapted(targets: list[str], *, wrapped: bool = True) -> Any:
    """The network with LoRA, in peft's wrapper or injected; B is not zero, so A has a gradient."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=targets, modules_to_save=["head"] if wrapped else None
    )
    make = peft.get_peft_model if wrapped else lambda net, c: peft.inject_adapter_in_model(c, net)
    net = make(Tokens().double(), config).double()
    for name, param in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    return net


@pytest.fixture
def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(12) % 3)


def clipped_mean(net: Any, data: TensorDataset) -> dict[str, Tensor]:
    """One record at a time, over what is trainable."""
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    mean = clipped(gradient_rows(net, *data.tensors), CLIP_NORM) / len(data)
    parts = mean.split([p.numel() for p in trained.values()])
    return {name: part.view_as(trained[name]) for name, part in zip(trained, parts, strict=True)}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    ("targets", "count"),
    # Of attention, peft adds a product of adapters to its weights, outside of any layer of theirs.
    [(["linear1", "linear2"], 8), (["self_attn"], 8)],
)
def test_a_step_moves_the_adapters_by_the_clipped_mean_and_nothing_else(
    wrapped, targets, count, tokens, classifier, fit
):
    net = adapted(targets, wrapped=wrapped)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    expected = clipped_mean(net, tokens)
    assert sum("lora" in name for name in expected) == count
    privacy = private(noise_multiplier=0.0, max_grad_norm=CLIP_NORM, sampling=FullBatch())

    model = classifier(net, lambda params: SGD(params, lr=1.0))
    fit(model, privacy, DataLoader(tokens, 6), max_steps=1)

    for name, param in net.named_parameters():
        moved = before[name] - param.detach()
        torch.testing.assert_close(moved, expected.get(name, torch.zeros_like(moved)))
