"""Batches, collate functions and data sets of many forms: all of them train."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Record, Records, Rows, Small, ordinary, points
from isolation_zoo.ordinary_sequences import MaskedMean
from isolation_zoo.records import padded


@ordinary(records=lambda n: [({"in": {"x": x, "again": [x, x]}, "y": y},) for x, y in points(n)])
class NestedDictionaries(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch[0]
        return F.cross_entropy(self(batch["in"]["x"]) + self(batch["in"]["again"][1]), batch["y"])


@ordinary(
    records=lambda n: [{"x": x, "y": y, "id": f"img{i}.png"} for i, (x, y) in enumerate(points(n))]
)
class StringsInTheBatch(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert all(each.endswith(".png") for each in batch["id"])
        return F.cross_entropy(self(batch["x"]), batch["y"])


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@ordinary(records=lambda n: [Pair(x, y) for x, y in points(n)])
class NamedTuples(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch.x), batch.y)


@dataclass
class Sample:
    x: Tensor
    y: Tensor


def as_sample(rows: list[Any]) -> Sample:
    x, y = zip(*rows, strict=True)
    return Sample(torch.stack(x), torch.stack(y))


@ordinary(collate=as_sample)
class DataClasses(Small):
    """A batch is an object."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch.x), batch.y)


def padded_to_the_longest(rows: list[Any]) -> Any:
    x, y = zip(*rows, strict=True)
    lengths = torch.tensor([int((each != 0).sum()) for each in x])
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), lengths, torch.stack(y)


@ordinary(records=padded, collate=padded_to_the_longest)
class LengthsInTheBatch(MaskedMean):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths, y = batch
        real = (torch.arange(x.shape[1]) < lengths[:, None])[:, :, None]
        h = torch.tanh(self.net["body"](self.net["embedding"](x))) * real
        return F.cross_entropy(self.net["head"](h.sum(1) / lengths.clamp(min=1)[:, None]), y)


class Augmented(Rows):
    """Random numbers in ``__getitem__``."""

    def __getitem__(self, index: int) -> Record:
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(4) + random.gauss(0, 0.01) + np.random.randn() * 0.01, y


@ordinary(data=Augmented)
class AugmentedInTheDataSet(Small):
    pass


class Counting(Rows):
    """A cache and a counter in the data set."""

    def __init__(self, records: Records) -> None:
        super().__init__(records)
        self.cache: dict[int, Record] = {}
        self.calls = 0

    def __getitem__(self, index: int) -> Record:
        self.calls += 1
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


@ordinary(data=Counting)
class CachedInTheDataSet(Small):
    pass


@ordinary(
    records=lambda n: [
        (x, x.sum() if i % 5 else x.sum() * math.nan) for i, (x, _) in enumerate(points(n))
    ]
)
class MissingTargetsPerRecord(Small):
    """A missing target counts as zero loss; the denominator stays that of all records."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        known = ~torch.isnan(y)
        return ((out[:, 0] - torch.where(known, y, 0.0)).square() * known).mean()
