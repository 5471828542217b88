"""Losses of torch.nn, as functions of output, features and label: all of them train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, ordinary


def onehot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).float()


LOSSES = {
    "cross_entropy": lambda o, x, y: nn.CrossEntropyLoss()(o, y),
    "label_smoothing": lambda o, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(o, y),
    "soft_labels": lambda o, x, y: nn.CrossEntropyLoss()(o, onehot(y) * 0.9 + 0.1 / 3),
    "nll": lambda o, x, y: nn.NLLLoss()(o.log_softmax(1), y),
    "mse": lambda o, x, y: nn.MSELoss()(o, onehot(y)),
    "l1": lambda o, x, y: nn.L1Loss()(o, onehot(y)),
    "smooth_l1": lambda o, x, y: nn.SmoothL1Loss(beta=0.3)(o, onehot(y)),
    "huber": lambda o, x, y: nn.HuberLoss(delta=0.7)(o, onehot(y)),
    "bce": lambda o, x, y: nn.BCELoss()(o.sigmoid(), onehot(y)),
    "bce_with_logits": lambda o, x, y: nn.BCEWithLogitsLoss()(o, onehot(y)),
    "positive_weights": lambda o, x, y: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3]))(
        o, onehot(y)
    ),
    "kl_divergence": lambda o, x, y: nn.KLDivLoss(reduction="batchmean")(
        o.log_softmax(1), onehot(y) * 0.9 + 0.1 / 3
    ),
    "poisson": lambda o, x, y: nn.PoissonNLLLoss()(o[:, 0], y.float()),
    "gaussian": lambda o, x, y: nn.GaussianNLLLoss()(o[:, 0], x.sum(1), F.softplus(o[:, 1])),
    "hinge_embedding": lambda o, x, y: nn.HingeEmbeddingLoss()(o[:, 0], 1 - 2.0 * (y > 0)),
    "margin_ranking": lambda o, x, y: nn.MarginRankingLoss(0.5)(o[:, 0], o[:, 1], 1 - 2.0 * (y > 0)),
    "cosine_embedding": lambda o, x, y: nn.CosineEmbeddingLoss()(o, x[:, :3], 1 - 2.0 * (y > 0)),
    "multi_margin": lambda o, x, y: nn.MultiMarginLoss()(o, y),
    "multilabel_margin": lambda o, x, y: nn.MultiLabelMarginLoss()(
        o, torch.stack([y, -torch.ones_like(y), -torch.ones_like(y)], 1)
    ),
    "multilabel_soft_margin": lambda o, x, y: nn.MultiLabelSoftMarginLoss()(o, onehot(y)),
    "soft_margin": lambda o, x, y: nn.SoftMarginLoss()(o, 2 * onehot(y) - 1),
    "triplet_in_a_record": lambda o, x, y: nn.TripletMarginLoss()(o, x[:, :3], x[:, 1:]),
    "quantile": lambda o, x, y: torch.maximum(
        0.9 * (x.sum(1) - o[:, 0]), -0.1 * (x.sum(1) - o[:, 0])
    ).mean(),
    "log_cosh": lambda o, x, y: (o[:, 0] - x.sum(1)).cosh().log().mean(),
    "focal": lambda o, x, y: (
        (1 - torch.exp(-F.cross_entropy(o, y, reduction="none"))) ** 2
        * F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "ordinal": lambda o, x, y: F.binary_cross_entropy_with_logits(
        o[:, :2], (y[:, None] > torch.arange(2)).float()
    ),
    "hazard": lambda o, x, y: (o[:, 0].exp() * x.sum(1) - (y > 0) * o[:, 0]).mean(),
    "clamped_per_record": lambda o, x, y: F.cross_entropy(o, y, reduction="none").clamp(max=2).mean(),
    "weights_of_records": lambda o, x, y: (
        x[:, 0] * F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "weights_of_classes_per_record": lambda o, x, y: (
        torch.tensor([1.0, 2.0, 3.0])[y] * F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "sum_over_the_number": lambda o, x, y: (
        F.cross_entropy(o, y, reduction="sum") / len(y)
    ),
    "margin_of_logits": lambda o, x, y: (
        F.relu(1 + o - o.gather(1, y[:, None])).sum(1).mean() + 1e-3 * o.square().sum(1).mean()
    ),
    "penalty_of_weights_apart": lambda o, x, y: F.cross_entropy(o, y) + 0.0,
    "entropy_per_record": lambda o, x, y: (
        F.cross_entropy(o, y) + 0.1 * (o.softmax(1) * o.log_softmax(1)).sum(1).mean()
    ),
    "evidential": lambda o, x, y: (
        onehot(y) * (torch.digamma((F.softplus(o) + 1).sum(1, True)) - torch.digamma(F.softplus(o) + 1))
    ).sum(1).mean(),
    "rank_within_a_record": lambda o, x, y: F.cross_entropy(
        o / o.detach().std(1, keepdim=True).clamp(min=0.1), y
    ),
    "nan_to_num_per_record": lambda o, x, y: torch.nan_to_num(
        F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "root_per_record": lambda o, x, y: (o - onehot(y)).square().sum(1).add(1e-6).sqrt().mean(),
    "inverse_temperature": lambda o, x, y: F.cross_entropy(o / 0.5, y) * 3.0 - 0.1,
    "mean_of_dimensions_in_turn": lambda o, x, y: (o - onehot(y)).abs().mean(1).mean(0),
}  # fmt: skip


class WithLoss(Small):
    """A linear layer with one of the losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[self.name](out, x, y)


def enter_losses() -> None:
    for name in LOSSES:

        def make(name: str = name) -> Small:
            return WithLoss(name)

        make.__name__ = f"loss_{name}"
        ordinary(make)


enter_losses()
