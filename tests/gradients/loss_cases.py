"""Losses of one batch: such as couple its records after the rows, and such as don't, however strange.

What couples them before (pairs, softmax over records) no graph tells: made-up records do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["COUPLED", "SEPARATE", "Batch", "Loss"]

CLASSES, STEPS = 5, 7


@dataclass
class Batch:
    """What a model makes of a batch, and the targets.

    Args:
        out: shape (n, CLASSES), with a gradient.
        y: classes, shape (n,).
        mask: shape (n,).
        valid: shape (n, STEPS).
    """

    out: Tensor
    y: Tensor
    mask: Tensor
    valid: Tensor

    @property
    def n(self) -> int:
        return len(self.out)

    @property
    def losses(self) -> Tensor:
        return F.cross_entropy(self.out, self.y, reduction="none")

    @property
    def steps(self) -> Tensor:
        """Shape (n, STEPS, CLASSES)."""
        return self.out[:, None] * torch.linspace(0.5, 1.5, STEPS)[:, None]

    @property
    def folded(self) -> Tensor:
        return self.steps.reshape(-1, CLASSES)

    @property
    def zeros(self) -> Tensor:
        return torch.zeros(self.n, CLASSES)


Loss: TypeAlias = Callable[[Batch], Tensor]


def two_heads(b: Batch) -> Tensor:
    terms = torch.zeros(2)
    terms[0] = b.losses.mean()
    terms[1] = b.out.pow(2).mean()
    return terms.sum()


def two_heads_clamped(b: Batch) -> Tensor:
    terms = torch.zeros(2)
    terms[0] = b.losses.mean()
    terms[1] = b.out.pow(2).mean()
    terms[0].clamp_(max=2.1)
    return terms.sum()


def loop_that_writes(b: Batch) -> Tensor:
    losses = torch.zeros(b.n)
    for i in range(b.n):
        losses[i] = b.losses[i].clamp(max=2.0)
    return losses.mean()


def loop_that_adds(b: Batch) -> Tensor:
    total = torch.zeros(())
    for i in range(b.n):
        total = total + F.cross_entropy(b.out[i : i + 1], b.y[i : i + 1]).sqrt()
    return total / b.n


def penalty_of_the_gradient(b: Batch) -> Tensor:
    weight = torch.nn.Parameter(torch.eye(CLASSES))
    loss = F.cross_entropy(b.out @ weight, b.y)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    return loss + gradient.pow(2).sum()


def penalty_of_each_input(b: Batch) -> Tensor:
    x = b.out.tanh()
    (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean()


class Clamped(torch.autograd.Function):
    """A clamp that somebody wrote."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x.clamp(max=2.1)

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Reversed(torch.autograd.Function):
    """Gradient reversal, row by row."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return -gradient


def dice(b: Batch) -> Tensor:
    p, y = b.out.sigmoid(), F.one_hot(b.y, CLASSES)
    return 1 - ((2 * p * y).sum(0) / (p.sum(0) + y.sum(0) + 1)).mean()


def dice_of_each(b: Batch) -> Tensor:
    p, y = b.out.sigmoid(), F.one_hot(b.y, CLASSES)
    return (1 - (2 * p * y).sum(1) / (p.sum(1) + y.sum(1) + 1)).mean()


def concordance(b: Batch) -> Tensor:
    p, y = b.out[:, 0], b.y.float()
    covariance = ((p - p.mean()) * (y - y.mean())).mean()
    return 1 - 2 * covariance / (p.var() + y.var() + (p.mean() - y.mean()) ** 2)


def vicreg(b: Batch) -> Tensor:
    z = b.out - b.out.mean(0)
    covariance = z.T @ z / (b.n - 1)
    return F.relu(1 - z.var(0).sqrt()).mean() + covariance.pow(2).sum()


def within_a_record(b: Batch) -> Tensor:
    z = F.normalize(b.steps + torch.linspace(0, 1, STEPS)[:, None], dim=2)
    scores = z @ z.transpose(1, 2) / 0.1
    return F.cross_entropy(scores.flatten(0, 1), torch.arange(STEPS).repeat(b.n))


def experts(b: Batch) -> Tensor:
    """Rows go to two experts and come back."""
    rows = torch.zeros_like(b.out)
    rows[b.mask] = b.out[b.mask].tanh()
    rows = rows.index_add(0, (~b.mask).nonzero().flatten(), b.out[~b.mask].sigmoid())
    return rows.pow(2).sum(1).sqrt().mean()


COUPLED: dict[str, Loss] = {
    # functions of the mean
    "flooding": lambda b: (b.losses.mean() - 2.1).abs() + 2.1,
    "clamp": lambda b: b.losses.mean().clamp(max=2.1),
    "clamp_in_place": lambda b: b.losses.mean().clamp_(max=2.1),
    "clamp_in_a_view": two_heads_clamped,
    "own_clamp": lambda b: Clamped.apply(b.losses.mean()) * b.losses.mean(),
    "hardtanh": lambda b: F.hardtanh(b.losses.mean() / 2.1),
    "relu_of_the_mean": lambda b: F.relu(b.losses.mean() - 2.1),
    "softplus_of_the_mean": lambda b: F.softplus(b.losses.mean()),
    "nan_to_num": lambda b: b.losses.mean().nan_to_num(),
    "where_finite": lambda b: torch.where(
        b.losses.mean().isfinite(), b.losses.mean(), 0 * b.out[:, 0].sum()
    ),
    "masked_fill_finite": lambda b: b.losses.mean().masked_fill(b.losses.mean() > 2.1, 0.0),
    "minimum": lambda b: torch.minimum(b.losses.mean(), torch.tensor(2.1)),
    "rmse": lambda b: F.mse_loss(b.out, b.zeros).sqrt(),
    "log_of_mse": lambda b: F.mse_loss(b.out, b.zeros).log(),
    "psnr": lambda b: -10 * torch.log10(1 / F.mse_loss(b.out, b.zeros)),
    "exp": lambda b: b.losses.mean().exp(),
    "square": lambda b: b.losses.mean() ** 2,
    "focal_of_the_mean": lambda b: (1 - (-b.losses.mean()).exp()) ** 2 * b.losses.mean(),
    "capacity": lambda b: (b.out.pow(2).sum(1).mean() - 1).abs(),
    "free_bits": lambda b: b.out.pow(2).mean(0).clamp(min=0.9).sum(),
    "product_of_means": lambda b: b.losses.mean() * b.out.pow(2).mean(),
    "moments": lambda b: F.mse_loss(b.out.mean(0), torch.ones(CLASSES)),
    # more than sums over the records
    "logsumexp": lambda b: b.losses.logsumexp(0),
    "maximum": lambda b: b.losses.max(),
    "amax_of_classes": lambda b: b.out.amax(0).mean(),
    "median": lambda b: b.losses.median(),
    "variance": lambda b: b.losses.mean() + b.losses.var(),
    "standard_deviations": lambda b: b.out.std(0).sum(),
    "norm": lambda b: b.out.norm(),
    # One record that is not finite makes all gradients so.
    "norm_squared": lambda b: b.out.norm() ** 2 / b.n,
    "norm_of_losses": lambda b: b.losses.norm(p=3),
    "product": lambda b: b.losses.prod(),
    "concordance": concordance,
    "dice": dice,
    "vicreg": vicreg,
    "log_determinant": lambda b: torch.logdet(b.out.T @ b.out + torch.eye(CLASSES)),
    "penalty_of_the_gradient": penalty_of_the_gradient,
    # pairs
    "pdist": lambda b: F.pdist(b.out).mean(),
    # as many rows as the data choose
    "mean_of_chosen": lambda b: b.losses[b.mask].mean(),
    "mean_of_selected": lambda b: b.losses.masked_select(b.mask).mean(),
    "cross_entropy_of_chosen": lambda b: F.cross_entropy(b.out[b.mask], b.y[b.mask]),
    "mean_of_hard": lambda b: b.losses[b.losses > 2.1].mean(),
    "mean_of_indexed": lambda b: b.losses[b.losses.argsort()[-2:]].mean(),
    "nanmean": lambda b: b.losses.masked_fill(~b.mask, torch.nan).nanmean(),
    "mean_of_tokens": lambda b: b.steps[b.valid].pow(2).mean(),
}

SEPARATE: dict[str, Loss] = {
    # torch's own
    "cross_entropy": lambda b: F.cross_entropy(b.out, b.y),
    "label_smoothing": lambda b: F.cross_entropy(b.out, b.y, label_smoothing=0.1),
    "soft_targets": lambda b: F.cross_entropy(b.out, b.zeros + 0.2),
    "nll": lambda b: F.nll_loss(b.out.log_softmax(1), b.y),
    "mse": lambda b: F.mse_loss(b.out, b.zeros),
    "l1": lambda b: F.l1_loss(b.out, b.zeros),
    "smooth_l1": lambda b: F.smooth_l1_loss(b.out, b.zeros),
    "huber": lambda b: F.huber_loss(b.out, b.zeros),
    "bce": lambda b: F.binary_cross_entropy(b.out.nan_to_num().sigmoid(), b.zeros),
    "bce_with_logits": lambda b: F.binary_cross_entropy_with_logits(
        b.out, b.zeros, pos_weight=torch.full((CLASSES,), 2.0)
    ),
    "kl_div": lambda b: F.kl_div(b.out.log_softmax(1), b.zeros + 0.2, reduction="batchmean"),
    "soft_margin": lambda b: F.soft_margin_loss(b.out, b.zeros + 1),
    "multi_margin": lambda b: F.multi_margin_loss(b.out, b.y),
    "multilabel_margin": lambda b: F.multilabel_margin_loss(b.out, b.zeros.long()),
    "multilabel_soft_margin": lambda b: F.multilabel_soft_margin_loss(b.out, b.zeros + 1),
    "hinge_embedding": lambda b: F.hinge_embedding_loss(b.out, b.zeros - 1),
    "gaussian_nll": lambda b: F.gaussian_nll_loss(b.out, b.zeros, b.out.exp()),
    "poisson_nll": lambda b: F.poisson_nll_loss(b.out, b.zeros + 1),
    "cosine_embedding": lambda b: F.cosine_embedding_loss(b.out, b.zeros + 1, torch.ones(b.n)),
    "margin_ranking": lambda b: F.margin_ranking_loss(b.out[:, 0], b.out[:, 1], torch.ones(b.n)),
    "triplet": lambda b: F.triplet_margin_loss(b.out, b.out.tanh(), b.out.flip(1)),
    "ctc": lambda b: F.ctc_loss(
        b.steps.transpose(0, 1).log_softmax(2),
        torch.ones(b.n, 2).long(),
        torch.full((b.n,), STEPS),
        torch.full((b.n,), 2),
    ),
    # sums of terms
    "mean": lambda b: b.losses.mean(),
    "sum_over_n": lambda b: b.losses.sum() / b.n,
    "dot": lambda b: b.losses.dot(torch.ones(b.n)) / b.n,
    "accumulated": lambda b: b.losses.mean() / 4,
    "half": lambda b: b.losses.to(torch.bfloat16).mean().float() * 3 + 1,
    "two_heads": two_heads,
    "stack_of_terms": lambda b: (
        torch.stack([b.losses.mean(), b.out.pow(2).mean()]) @ torch.tensor([1.0, 0.1])
    ),
    "mean_of_classes": lambda b: b.out.pow(2).mean(0).cumsum(0).sum(),
    "norm_of_order_one": lambda b: b.out.norm(p=1) / b.n,
    "uncertainty": lambda b: (
        (-torch.nn.Parameter(torch.ones(()))).exp() * b.losses.mean()
        + torch.nn.Parameter(torch.ones(()))
    ),
    "weight_decay": lambda b: (
        b.losses.mean() + 0.1 * torch.nn.Parameter(torch.ones(b.n, 3)).pow(2).sum().sqrt()
    ),
    "sum_of_chosen": lambda b: b.losses[b.mask].sum() / b.n,
    "linear_sums_of_classes": lambda b: (
        torch.zeros(CLASSES).index_add(0, b.y, b.losses).sum() / b.n
    ),
    "flipped_back": lambda b: b.out.flip(0).pow(2).mean(),
    # each record's own, whatever it is
    "clamp_of_each": lambda b: b.losses.clamp(max=2.1).mean(),
    "nan_to_num_of_each": lambda b: b.losses.nan_to_num().mean(),
    "focal": lambda b: ((1 - (-b.losses).exp()) ** 2 * b.losses).mean(),
    "vae": lambda b: (
        F.mse_loss(b.out, b.zeros)
        - 0.5 * (1 + b.out - b.out.pow(2) - b.out.exp()).sum(1).clamp(max=3).mean()
    ),
    "distillation": lambda b: (
        F.kl_div((b.out / 3).log_softmax(1), b.zeros + 0.2, reduction="batchmean") * 9
        + 0.5 * F.cross_entropy(b.out, b.y)
    ),
    "dice_of_each": dice_of_each,
    "rmse_of_each": lambda b: (b.out - 1).pow(2).mean(1).sqrt().mean(),
    "mask_times": lambda b: (b.losses * b.mask).mean(),
    "where_of_each": lambda b: torch.where(b.mask, b.losses, b.losses.sqrt()).mean(),
    "own_function_of_rows": lambda b: Reversed.apply(b.out).pow(2).mean(),
    "row_softmax": lambda b: (b.out * b.out.softmax(1)).sum(1).mean(),
    "row_top": lambda b: b.out.topk(2, 1)[0].pow(2).mean(),
    "row_norm": lambda b: F.normalize(b.out, dim=1).exp().mean(),
    "columns": lambda b: b.out[:, 2].sigmoid().mean() + b.out[torch.arange(b.n), b.y].exp().mean(),
    "layer_norm": lambda b: F.layer_norm(b.out, (CLASSES,)).exp().mean(),
    "group_norm": lambda b: F.group_norm(b.out[..., None], 1).exp().mean(),
    "instance_norm": lambda b: F.instance_norm(b.steps).exp().mean(),
    "attention": lambda b: F.scaled_dot_product_attention(b.steps, b.steps, b.steps).pow(2).mean(),
    "penalty_of_each_input": penalty_of_each_input,
    "experts": experts,
    # loops over records
    "loop_that_adds": loop_that_adds,
    "loop_that_writes": loop_that_writes,
    "loop_over_rows": lambda b: torch.stack([x.pow(2).mean().sqrt() for x in b.out]).mean(),
    "loop_over_masked": lambda b: torch.stack(
        [x[m].pow(2).sum().add(1).log() for x, m in zip(b.steps, b.valid, strict=True)]
    ).mean(),
    "loop_over_pieces": lambda b: torch.stack(
        [x.pow(2).mean().sqrt() for x in b.folded.split(STEPS)]
    ).mean(),
    "loop_over_owners": lambda b: torch.stack(
        [b.folded[torch.arange(b.n).repeat_interleave(STEPS) == i].mean().abs() for i in range(b.n)]
    ).mean(),
    # tokens
    "time_first": lambda b: F.cross_entropy(
        b.steps.transpose(0, 1).permute(1, 2, 0), torch.zeros(b.n, STEPS).long()
    ),
    "folded_tokens": lambda b: F.cross_entropy(b.folded, torch.zeros(b.n * STEPS).long()),
    "means_of_tokens": lambda b: (
        ((b.steps.pow(2).mean(2) * b.valid).sum(1) / b.valid.sum(1).clamp(min=1)).sqrt().mean()
    ),
    "within_a_record": within_a_record,
    "einsum_of_rows": lambda b: torch.einsum("ic,ic->i", b.out, b.out).sqrt().mean(),
}
