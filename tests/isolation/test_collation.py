"""Collate functions that mix samples are seen."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset, default_collate

from lightning_dp.isolation.collation import check_collate_fn
from tests.isolation.samples import SAMPLE, SOURCE


def outcome(collate, sample=SAMPLE):
    return check_collate_fn(collate, sample, 16).outcome


# -- what mixes samples ---------------------------------------------------------------------


def mixup(samples, p=0.5):
    x, y = default_collate(samples)
    if random.random() < p:
        share = np.random.beta(0.4, 0.4)
        x = share * x + (1 - share) * x.roll(1, 0)
    return x, y


def rare_mixup(samples):
    return mixup(samples, 0.2)


class Wrapped:
    """MixUp, wrapped as the manual of torchvision does it."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, samples):
        return self.transform(*default_collate(samples))


def cutmix(x, y):
    if torch.rand(()) < 0.5:
        x, x[..., 1:3] = x.clone(), x.flip(0)[..., 1:3]
    return x, y


def normalised(samples):
    x, y = default_collate(samples)
    return (x - x.mean(0)) / (x.std(0) + 1e-3), y


def scaled_by_the_largest(samples):
    x, y = default_collate(samples)
    return x / x.abs().max().clamp(min=2), y


def shuffled_labels(samples):
    x, y = default_collate(samples)
    return x, y[torch.randperm(len(y))]


def sorts_one_part(samples):
    x, y = default_collate(samples)
    return x[x[:, 0].argsort()], y


def truncated(samples):
    shortest = min(len(x) for x, _ in samples)
    return torch.stack([x[:shortest] for x, _ in samples]), torch.tensor([y for _, y in samples])


def packed(samples):
    return torch.stack([x for x, _ in samples]).view(len(samples) // 2, -1)


def packed_into_blocks(samples):
    tokens = torch.cat([x for x, _ in samples])
    return tokens[: len(tokens) // 5 * 5].view(-1, 5)


def negatives(samples):
    x, y = default_collate(samples)
    return x, x.roll(1, 0), y


def random_negatives(samples):
    return [(x, random.choice(samples)[0], y) for x, y in samples]


def imputed(samples):
    x, y = default_collate(samples)
    return torch.where(x.isnan(), x.nanmean(0), x), y


def replaces_missing_samples(samples):
    good = [s for s in samples if not s[0].isnan().any()]
    return default_collate((good * len(samples))[: len(samples)])


def vocabulary(samples):
    known = sorted({int(y) for _, y in samples})
    return default_collate([(x, known.index(int(y))) for x, y in samples])


def class_weights(samples):
    x, y = default_collate(samples)
    return x, y, torch.bincount(y, minlength=8)[y] / 4


def statistic(samples):
    x, y = default_collate(samples)
    return {"x": x, "y": y, "mean": x.mean()}


def number_of_tokens(samples):
    x = pad_sequence([x for x, _ in samples], batch_first=True)
    return {"x": x, "ntokens": sum(len(x) for x, _ in samples)}


def relative_positions(samples):
    x = pad_sequence([x for x, _ in samples], batch_first=True)
    return x, torch.linspace(0, 1, x.shape[1]).expand(x.shape)


def scaled_if_bright(samples):
    x, y = default_collate(samples)
    return (x / 255 if x.max() > 1 else x), y


def equal_labels(samples):
    x, y = default_collate(samples)
    return x, y[:, None] == y[None]


def divided_by_their_number(samples):
    x, y = default_collate(samples)
    return x / len(samples), y


class RunningMean:
    def __init__(self):
        self.mean = 0.0

    def __call__(self, samples):
        x, y = default_collate(samples)
        x, self.mean = x - self.mean, 0.9 * self.mean + 0.1 * x.mean(0)
        return x, y


class Earlier:
    def __init__(self):
        self.seen = collections.deque(maxlen=8)

    def method(self, samples):
        new = [((x + self.seen[-1]) / 2 if self.seen else x, y) for x, y in samples]
        self.seen.extend(x for x, _ in samples)
        return default_collate(new)


def closure():
    seen = {}

    def collate(samples):
        return default_collate(
            [(x, seen.setdefault(round(float(x[0]), 3), len(seen))) for x, _ in samples]
        )

    return collate


def own_generator():
    generator = np.random.default_rng(3)

    def collate(samples):
        x, y = default_collate(samples)
        return (x + x.flip(0) if generator.random() < 0.3 else x), y

    return collate


def with_other_rows(source):
    def collate(samples):
        return default_collate(
            [(x, source[random.randrange(len(source))][0], y) for x, y in samples]
        )

    return collate


class Reads:
    def __init__(self):
        self.inner = {"source": Subset(SOURCE, range(20))}

    def __call__(self, samples):
        return default_collate([*samples[:-1], self.inner["source"][random.randrange(20)]])


MIXED = [
    mixup, rare_mixup, Wrapped(cutmix), normalised, scaled_by_the_largest, shuffled_labels,
    sorts_one_part, truncated, packed, packed_into_blocks, negatives, random_negatives, imputed,
    replaces_missing_samples, vocabulary, class_weights, statistic, number_of_tokens,
    relative_positions, scaled_if_bright, equal_labels, divided_by_their_number, RunningMean(),
    Earlier().method, closure(), own_generator(), SOURCE.collate, with_other_rows(SOURCE), Reads(),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MIXED)))
def test_what_mixes_samples_is_seen(number):
    assert outcome(MIXED[number]) == "mixed"
