"""Losses of a little model in the words that people use: each a mean over the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gradients.little_models import Batch, Little, N, features, head, linear, net

__all__ = ["LOSSES", "uncertain"]


MODEL = net(lambda m, x: m.head(torch.tanh(m.body(x))), body=linear(), head=head)


def of(loss: Any, batch: Any = features) -> Little:
    """A loss of the scores of one small network."""
    return Little(MODEL, batch, lambda m, b: loss(m(b["x"]), b))


def weighted() -> Batch:
    return {
        **features(),
        "weight": torch.tensor([0.5, 1.0, 3.0]),
        "soft": torch.rand(N, 4).softmax(1),
    }


def ragged() -> Batch:
    valid = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    return {"x": torch.randn(N, 5, 6), "valid": valid, "y": torch.randint(4, (N, 5))}


def over_valid(scores: Tensor, b: Batch) -> Tensor:
    losses = F.cross_entropy(scores.transpose(1, 2), b["y"], reduction="none")
    return ((losses * b["valid"]).sum(1) / b["valid"].sum(1)).mean()


def focal(scores: Tensor, b: Batch) -> Tensor:
    losses = F.cross_entropy(scores, b["y"], reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def binary(scores: Tensor, b: Batch) -> Tensor:
    targets = F.one_hot(b["y"], 4).to(scores.dtype)
    return F.binary_cross_entropy_with_logits(
        scores, targets, pos_weight=scores.new_full((4,), 2.0)
    )


def auxiliary(scores: Tensor, b: Batch) -> Tensor:
    losses = {"main": F.cross_entropy(scores, b["y"]), "norm": scores.square().sum(1).mean()}
    return losses["main"] + 0.1 * losses["norm"]


LOSSES: Mapping[str, Little] = {
    "weights_of_records": of(
        lambda s, b: (F.cross_entropy(s, b["y"], reduction="none") * b["weight"]).mean(), weighted
    ),
    "soft_targets": of(lambda s, b: F.cross_entropy(s, b["soft"]), weighted),
    "label_smoothing": of(lambda s, b: F.cross_entropy(s, b["y"], label_smoothing=0.1)),
    "divergence": of(
        lambda s, b: F.kl_div(s.log_softmax(1), b["soft"], reduction="batchmean"), weighted
    ),
    "binary": of(binary),
    "focal": of(focal),
    "huber": of(lambda s, b: F.smooth_l1_loss(s, b["x"][:, :4])),
    "margin": of(lambda s, b: F.multi_margin_loss(s, b["y"])),
    "gaussian": of(
        lambda s, b: F.gaussian_nll_loss(s[:, 0], b["x"][:, 0], F.softplus(s[:, 1]) + 0.1)
    ),
    "valid_positions": of(over_valid, ragged),
    "auxiliary": of(auxiliary),
    "list_of_losses": of(lambda s, b: sum(F.cross_entropy(s * t, b["y"]) for t in (0.5, 1, 2)) / 3),
    "loop_over_records": of(
        lambda s, b: torch.stack(
            [F.cross_entropy(o, y) for o, y in zip(s, b["y"], strict=True)]
        ).mean()
    ),
    "criterion": of(lambda s, b: nn.CrossEntropyLoss()(s, b["y"])),
    "gathered": of(lambda s, b: -s.log_softmax(1).gather(1, b["y"][:, None]).mean()),
    "float64": of(lambda s, b: F.cross_entropy(s.double(), b["y"])),
    "distilled": of(lambda s, b: F.mse_loss(s, s.detach() * 0.5)),
    "two_runs": Little(
        MODEL,
        features,
        lambda m, b: (
            0.5 * (F.cross_entropy(m(b["x"]), b["y"]) + F.cross_entropy(m(b["x"] * 0.9), b["y"]))
        ),
    ),
}


def uncertain(m: nn.Module, batch: Batch) -> Tensor:
    """Two tasks, weighted by learnt variances."""
    scores = m(batch["x"])
    losses = F.cross_entropy(scores, batch["y"]), F.mse_loss(scores[:, 0], batch["x"][:, 0])
    return sum(torch.exp(-s) * loss + s for s, loss in zip(m.logs, losses, strict=True))
