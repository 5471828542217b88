"""Samples that are collated, and a data set with methods that collate them."""

from __future__ import annotations

import random

import torch
from torch.utils.data import TensorDataset, default_collate

SAMPLE = torch.zeros(5), 1
IMAGE = torch.zeros(3, 4, 4), 1


class Source(TensorDataset):
    """With a method that makes batches with other rows of it."""

    def collate(self, samples):
        return default_collate([(x, self[random.randrange(len(self))][0], y) for x, y in samples])

    def harmless(self, samples):
        x, y = default_collate(samples)
        return x / self.tensors[0].shape[1], y, torch.full((len(samples),), len(self))


SOURCE = Source(torch.randn(30, 5), torch.zeros(30))
