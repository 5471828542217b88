"""Ordinary models pass on records of any values."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.isolation import probe_isolation
from tests.isolation.steps import (
    EXPECTED,
    Step,
    Tokens,
    alone,
    labelled,
    losses,
    real,
    some,
    tokens,
)


def of_output(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda model, x, y: loss(model.net(x), y)


def first_column(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda model, x, y: loss(model.net(x)[:, 0], y)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)


def vae(model, x):
    mean, log_variance = model.net.encoder(x).chunk(2, 1)
    z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    rebuilt = F.mse_loss(model.net.decoder(z), x, reduction="none").sum(1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return (rebuilt + divergence).mean()


def vae_of_distributions(model, x):
    mean, log_variance = model.net.encoder(x).chunk(2, 1)
    latent = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    rebuilt = F.mse_loss(model.net.decoder(latent.rsample()), x, reduction="none").sum(1)
    unit = torch.distributions.Normal(0.0, 1.0)
    return (rebuilt + torch.distributions.kl_divergence(latent, unit).sum(1)).mean()


def diffusion(model, x):
    time = torch.randint(0, 100, (len(x), 1))
    noise, kept = torch.randn_like(x), torch.cos(time / 100)
    return F.mse_loss(model.net(kept * x + (1 - kept**2).sqrt() * noise), noise)


def flow_matching(model, x):
    time, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return F.mse_loss(model.net(time * x + (1 - time) * noise), x - noise)


def noisy_inputs_of_numpy(model, x, y):
    noise = torch.from_numpy(np.random.normal(size=tuple(x.shape)).astype(np.float32))
    return F.cross_entropy(model.net(x + 0.1 * noise), y)


def flips_each_record(model, x, y):
    flipped = torch.rand(len(x), 1) < 0.5
    return F.cross_entropy(model.net(torch.where(flipped, x.flip(1), x)), y)


def flips_records_in_turn(model, x, y):
    x = torch.stack([row.flip(0) if np.random.rand() < 0.5 else row for row in x])
    return F.cross_entropy(model.net(x), y)


def gumbel(model, x, y):
    choice = F.gumbel_softmax(model.net(x), hard=True)
    return F.nll_loss((choice + 1e-3).log(), y)


def stochastic_depth(model, x, y):
    kept = (torch.rand(len(x), 1) < 0.8) / 0.8
    return F.cross_entropy(model.net(x) * kept, y)


def functional_dropout(model, x, y):
    return F.cross_entropy(F.dropout(model.net(x), 0.3), y)


def masked_mean(model, x, mask):
    out = model.net(x).square().mean(2)
    return ((out * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def known_targets_of_each(model, x, y):
    known = ~y.isnan()
    loss = (model.net(x) - y.nan_to_num()).square() * known
    return (loss.sum(1) / known.sum(1).clamp(min=1)).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from opacus.layers import DPLSTM

        self.lstm, self.head = DPLSTM(6, 8, batch_first=True), nn.Linear(8, 3)


def last_of_each(model, x, lengths):
    out, _ = model.net.lstm(x)
    last = out[torch.arange(len(x)), (lengths - 1).clamp(min=0)]
    return model.net.head(last).square().mean()


def padded_tokens(model, x, y):
    out = model.net(x)
    loss = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    real = x != 0
    return ((loss * real).sum(1) / real.sum(1).clamp(min=1)).mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)


def attends(model, x, y):
    hidden = model.net.layer(model.net.embedding(x), src_key_padding_mask=x == 11)
    return F.cross_entropy(model.net.head(hidden[:, 0]), y)


def triplet_within_a_record(model, a, p, n):
    return F.triplet_margin_loss(model.net(a), model.net(p), model.net(n))


def siamese(model, a, b, y):
    return F.cosine_embedding_loss(model.net(a), model.net(b), y)


def distillation(model, x, y):
    with torch.no_grad():
        teacher = model.teacher(x).softmax(1)
    out = model.net(x)
    soft = F.kl_div(out.log_softmax(1), teacher, reduction="batchmean")
    return F.cross_entropy(out, y) + soft


def multi_task(model, batch):
    out = model.net(batch["x"])
    return {
        "loss": F.cross_entropy(out[:, :3], batch["y"]) + F.mse_loss(out[:, 3], batch["z"]),
    }


def clipped_per_record(model, x, y):
    return losses(model, x, y).clamp(max=2.0).mean()


def focal(model, x, y):
    loss = losses(model, x, y)
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def weights_of_each_class(model, x, y):
    weight = torch.linspace(1, 5, 5)
    return (losses(model, x, y) * weight[y]).mean()


def checks_its_input(model, x, y):
    if not torch.isfinite(x).all():
        raise ValueError("input is not finite")
    return losses(model, x, y).mean()


def segmentation(model, x, y):
    return F.cross_entropy(model.net(x), y)


def dice_of_each(model, x, y):
    p = model.net(x)[:, 0].sigmoid()
    overlap = 2 * (p * y).flatten(1).sum(1) + 1
    return (1 - overlap / (p.flatten(1).sum(1) + y.flatten(1).sum(1) + 1)).mean()


def ctc(model, x, y, lengths, target_lengths):
    return F.ctc_loss(model.net(x).log_softmax(2).transpose(0, 1), y, lengths, target_lengths)


def image_of_bytes(model, images):
    return model.net(images.float().flatten(1) / 255).square().mean()


def binary(model, x, y):
    return F.binary_cross_entropy(model.net(x)[:, 0].sigmoid(), y.clamp(0, 1).nan_to_num())


def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(5, *shape, dtype=dtype)


def images() -> tuple[Tensor, Tensor]:
    return torch.zeros(5, 3, 6, 6), whole(6, 6)


ISOLATED: dict[str, tuple[Callable[[], Step], Callable[[], Any]]] = (
    {
        loss.__name__: (lambda loss=loss: Step(of_output(loss)), labelled)
        for loss in (F.cross_entropy, F.multi_margin_loss)
    }
    | {
        loss.__name__: (lambda loss=loss: Step(first_column(loss)), real())
        for loss in (
            F.mse_loss,
            F.l1_loss,
            F.smooth_l1_loss,
            F.huber_loss,
            F.soft_margin_loss,
            F.binary_cross_entropy_with_logits,
            F.poisson_nll_loss,
            F.hinge_embedding_loss,
        )
    }
    | {
        loss.__name__: (lambda loss=loss: Step(of_output(loss)), real(5))
        for loss in (F.multilabel_soft_margin_loss,)
    }
    | {
        step.__name__: (lambda step=step: Step(step), batch)
        for step, batch in {
            noisy_inputs_of_numpy: labelled,
            flips_each_record: labelled,
            flips_records_in_turn: labelled,
            gumbel: labelled,
            stochastic_depth: labelled,
            functional_dropout: labelled,
            clipped_per_record: labelled,
            focal: labelled,
            weights_of_each_class: labelled,
            checks_its_input: labelled,
            binary: real(),
            known_targets_of_each: real(5),
            masked_mean: lambda: (torch.zeros(5, 7, 6), whole(7, dtype=torch.bool)),
            triplet_within_a_record: lambda: (torch.zeros(5, 6),) * 3,
            siamese: lambda: (torch.zeros(5, 6), torch.zeros(5, 6), torch.zeros(5)),
            multi_task: lambda: UserDict(x=torch.zeros(5, 6), y=whole(), z=torch.zeros(5)),
            image_of_bytes: lambda: (whole(2, 3, dtype=torch.uint8),),
        }.items()
    }
    | {
        "nll_loss": (
            lambda: Step(lambda m, x, y: F.nll_loss(m.net(x).log_softmax(1), y)),
            labelled,
        ),
        "smoothed_labels": (
            lambda: Step(lambda m, x, y: F.cross_entropy(m.net(x), y, label_smoothing=0.1)),
            labelled,
        ),
        "dropout": (
            lambda: Step(
                of_output(F.cross_entropy),
                nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3)),
            ),
            labelled,
        ),
        "distillation": (
            lambda: Step(distillation, teacher=nn.Linear(6, 5).requires_grad_(False)),
            labelled,
        ),
        "gaussian_nll": (
            lambda: Step(
                lambda m, x, y: F.gaussian_nll_loss(m.net(x)[:, 0], y, m.net(x)[:, 1].exp())
            ),
            real(),
        ),
        "vae": (lambda: Step(vae, VAE()), alone),
        "vae_of_distributions": (lambda: Step(vae_of_distributions, VAE()), alone),
        "diffusion": (lambda: Step(diffusion, nn.Linear(6, 6)), alone),
        "flow_matching": (lambda: Step(flow_matching, nn.Linear(6, 6)), alone),
        "padded_tokens": (lambda: Step(padded_tokens, Tokens()), tokens),
        "last_of_each": (
            lambda: Step(last_of_each, Recurrent()),
            lambda: (torch.zeros(5, 9, 6), whole()),
        ),
        "attends": (lambda: Step(attends, Attention()), lambda: (whole(7), whole())),
        "segmentation": (
            lambda: Step(segmentation, nn.Conv2d(3, 4, 3, padding=1)),
            images,
        ),
        "dice_of_each": (lambda: Step(dice_of_each, nn.Conv2d(3, 1, 3, padding=1)), images),
        "groups": (
            lambda: Step(
                of_output(F.cross_entropy),
                nn.Sequential(
                    nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 5)
                ),
            ),
            lambda: (torch.zeros(5, 3, 6, 6), whole()),
        ),
        "ctc": (
            lambda: Step(ctc, nn.Linear(6, 5)),
            lambda: (torch.zeros(5, 9, 6), whole(3), whole(), whole()),
        ),
        "many_classes": (lambda: Step(of_output(F.cross_entropy), nn.Linear(6, 1000)), labelled),
    }
)


@pytest.mark.parametrize("name", some(ISOLATED, 5))
def test_ordinary_models_pass(name: str) -> None:
    make, batch = ISOLATED[name]

    found = probe_isolation(make(), batch(), expected=EXPECTED)

    assert found.outcome == "isolated", found
