"""Models that couple records only for some of their values are found.

Each coupled model here is isolated on records of numbers between 0 and 1, in a batch of four, with
different labels, under the first random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
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

# -- coupled ------------------------------------------------------------------------------------


def pulls_equal_labels(model, x, y):
    out = model.net(x)
    same = (y[:, None] == y[None]) & ~torch.eye(len(y), dtype=torch.bool)
    return F.cross_entropy(out, y) + (torch.cdist(out, out) * same).sum() / len(y) ** 2


def class_centres(model, x, y):
    out = model.net(x)
    counts = F.one_hot(y, 5).sum(0)
    centres = F.one_hot(y, 5).T.float() @ out / counts.clamp(min=1)[:, None]
    crowded = (counts[y] > 2).float()
    return F.cross_entropy(out, y) + (crowded * (out - centres[y]).square().sum(1)).mean()


def without_unknown_targets(model, x, y):
    loss = (model.net(x)[:, 0] - y).square()
    return loss[~y.isnan()].mean()


def skips_if_not_finite(model, x, y):
    loss = losses(model, x, y).mean()
    return loss if bool(torch.isfinite(loss)) else None


def zero_if_not_finite(model, x, y):
    return torch.nan_to_num(losses(model, x, y).mean())


def scales_pixels(model, x, y):
    return losses(model, x / 255 if x.max() > 1 else x, y).mean()


def shifts_to_positive(model, x, y):
    return losses(model, x - x.min() if x.min() < 0 else x, y).mean()


def clips_to_a_common_scale(model, x, y):
    largest = x.abs().max()
    return losses(model, x * (10 / largest.clamp(min=10)), y).mean()


def without_empty_records(model, x, y):
    keep = x.abs().sum(1) > 0
    return (losses(model, x, y) * keep).sum() / keep.sum()


def rare_branch_of_numpy(model, x, y):
    if np.random.rand() < 0.05:
        order = torch.randperm(len(x))
        x = 0.5 * x + 0.5 * x[order]
    return losses(model, x, y).mean()


def rare_branch_of_torch(model, x, y):
    if torch.rand(()) > 0.97:
        x = x - x.mean(0)
    return losses(model, x, y).mean()


def cutmix(model, x, y):
    if np.random.rand() < 0.5 and np.random.beta(1, 1) < 2:
        x = torch.cat([x[:, :3], x.flip(0)[:, 3:]], 1)
    return losses(model, x, y).mean()


def sum_with_noise(model, x, y):
    return losses(model, x + 0.1 * torch.randn_like(x), y).sum()


def sum_of_noisy_steps(model, x):
    time = torch.randint(10, (len(x), 1))
    noise = torch.randn_like(x)
    return (model.net(x * time / 10 + noise)[:, :5] - noise[:, :5]).square().sum()


def large_batches(model, x, y):
    out = model.net(x)
    return F.cross_entropy(out - out.mean(0) if len(x) > 8 else out, y)


def hardest_sixteen(model, x, y):
    return losses(model, x, y).topk(min(16, len(x))).values.mean()


def later_class_counts_more(model, x, y):
    weight = torch.ones(40)
    weight[39] = 5.0
    per_record = F.cross_entropy(model.net(x), y, reduction="none")
    return (per_record * weight[y]).sum() / weight[y].sum()


def ranks_ones_above_zeros(model, x, y):
    score = model.net(x)[:, 0]
    pair = (y[:, None] == 1) & (y[None] == 0)
    return score.square().mean() + F.softplus(-(score[:, None] - score[None]))[pair].sum() / len(x)


def opposite_signs(model, x, y):
    score = model.net(x)[:, 0]
    against = (y[:, None] * y[None]) == -1
    return score.square().mean() + (score[:, None] - score[None]).square()[against].sum() / len(x)


def padding_of_its_own(model, tokens, y):
    out = model.net(tokens)
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=model.pad_id)


def missing_records_of_a_mask(model, x, mask):
    per_record = model.net(x).square().mean(1)
    there = mask.any(1)
    return (per_record * there).sum() / there.sum()


def white_pixels(model, images):
    x = images.float().flatten(1)
    return model.net(x / 255 if images.max() > 100 else x).square().mean()


COUPLED: dict[str, tuple[Callable[[], Step], Callable[[], Any]]] = {
    step.__name__: (lambda step=step: Step(step), batch)
    for step, batch in {
        pulls_equal_labels: labelled,
        class_centres: labelled,
        without_unknown_targets: real(),
        skips_if_not_finite: labelled,
        zero_if_not_finite: labelled,
        scales_pixels: labelled,
        shifts_to_positive: labelled,
        clips_to_a_common_scale: labelled,
        without_empty_records: labelled,
        rare_branch_of_numpy: labelled,
        rare_branch_of_torch: labelled,
        cutmix: labelled,
        sum_with_noise: labelled,
        sum_of_noisy_steps: alone,
        large_batches: labelled,
        hardest_sixteen: labelled,
        ranks_ones_above_zeros: real(),
        opposite_signs: real(),
        missing_records_of_a_mask: lambda: (torch.zeros(5, 6), torch.zeros(5, 4).bool()),
        white_pixels: lambda: (torch.zeros(5, 2, 3, dtype=torch.uint8),),
    }.items()
} | {
    "later_class_counts_more": (
        lambda: Step(later_class_counts_more, nn.Linear(6, 40)),
        labelled,
    ),
    "padding_of_its_own": (lambda: Step(padding_of_its_own, Tokens(), pad_id=9), tokens),
}


@pytest.mark.parametrize("name", some(COUPLED, 3))
def test_what_couples_records_of_some_values_is_refused(name: str) -> None:
    make, batch = COUPLED[name]

    found = probe_isolation(make(), batch(), expected=EXPECTED)

    assert found.outcome == "coupled", found
