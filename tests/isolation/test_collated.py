"""Batches in which a record has several rows: made by the user's collate_fn, and probed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_dp import rows_of_records
from lightning_dp.isolation.collated import CollatedPool, collated_pools, has_folded_rows
from lightning_dp.isolation.collation import check_collate_fn
from lightning_dp.isolation.probe import probe_isolation
from lightning_dp.isolation.samples import SampleMaker

Sample = tuple[Tensor, Any]


def graphs(samples: list[tuple[Tensor, Tensor, int]]) -> dict[str, Tensor]:
    """Collate as PyTorch Geometric does: all nodes in one tensor, edges between their places."""
    counts = torch.tensor([len(nodes) for nodes, _, _ in samples])
    starts = counts.cumsum(0) - counts
    edges = [each + start for (_, each, _), start in zip(samples, starts, strict=True)]
    return {
        "x": torch.cat([nodes for nodes, _, _ in samples]),
        "edges": torch.cat(edges, 1),
        "owners": torch.arange(len(samples)).repeat_interleave(counts),
        "y": torch.tensor([label for _, _, label in samples]),
    }


GRAPH = torch.randn(4, 5), torch.tensor([[0, 1, 2], [1, 2, 3]]), 1


def bags(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    tokens = [each for each, _ in samples]
    offsets = torch.tensor([0, *(len(each) for each in tokens[:-1])]).cumsum(0)
    return torch.cat(tokens), offsets, torch.tensor([label for _, label in samples])


BAG = torch.tensor([1, 4, 2]), 1


def padded(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([each for each, _ in samples], batch_first=True)
    return tokens, torch.tensor([label for _, label in samples])


def zipped(samples: list[Any]) -> tuple[Any, ...]:
    """Collate as torchvision's detection models want it: a tuple of images, one of targets."""
    return tuple(zip(*samples, strict=True))


IMAGE = torch.rand(3, 6, 5), {"label": torch.tensor(1), "boxes": torch.rand(2, 4)}


def listed(samples: list[Sample]) -> tuple[list[Tensor], Tensor]:
    """Sequences of several lengths, which the model pads."""
    return [each for each, _ in samples], torch.tensor([label for _, label in samples])


SEQUENCE = torch.rand(7, 5), 1


class Graphs(LightningModule):
    """Messages along edges, a sum over the nodes of a graph."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.first, self.second, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def owners(self, owners: Tensor, n: int) -> Tensor:
        if self.fault == "turned":
            return n - 1 - owners
        if self.fault == "sorted by place":  # frames first, then records
            return torch.arange(len(owners)) % n
        return owners

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        n, (source, target) = len(batch["y"]), batch["edges"]
        with rows_of_records(self.owners(batch["owners"], n), n):
            hidden = torch.tanh(self.first(batch["x"]))
            hidden = hidden.index_add(0, target, hidden[source])
            if self.fault == "mean over nodes":
                hidden = hidden - hidden.mean(0)
            hidden = torch.tanh(self.second(hidden))
        pooled = hidden.new_zeros(n, 6).index_add(0, batch["owners"], hidden)
        return cross_entropy(self.head(pooled), batch["y"])


class Bags(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.EmbeddingBag(20, 6), nn.Linear(6, 2)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, offsets, labels = batch
        return cross_entropy(self.head(self.words(tokens, offsets)), labels)


class Images(LightningModule):
    is_centred = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        features = self.convolution(torch.stack(images)).relu().mean((2, 3))
        if self.is_centred:
            features = features - features.detach().mean(0)
        loss = cross_entropy(self.head(features), torch.stack([each["label"] for each in targets]))
        boxes = torch.stack([each["boxes"] for each in targets]).flatten(1)
        return loss + (self.head(features) - boxes).square().mean()


class Centred(Images):
    is_centred = True


class Sequences(LightningModule):
    is_masked = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        counts = torch.tensor([len(each) for each in x])
        hidden = self.first(nn.utils.rnn.pad_sequence(x, batch_first=True)).tanh()
        if self.is_masked:
            mask = torch.arange(hidden.shape[1]) < counts[:, None]
            hidden = hidden * mask[..., None] * (hidden.shape[1] / counts[:, None, None])
        return cross_entropy(self.head(hidden.mean(1)), labels)


class Padded(Sequences):
    is_masked = False


def probed(module: LightningModule, collate: Any, sample: Any) -> Any:
    pools = list(collated_pools(lambda: collate, sample))
    return probe_isolation(module, collate([sample] * 4), pools=pools)


@pytest.mark.parametrize(
    ("collate", "sample", "expected"),
    [
        *((graphs, GRAPH, True), (bags, BAG, True), (padded, BAG, False)),
        *((zipped, IMAGE, True), (listed, SEQUENCE, True), (listed, ("a text", 1), False)),
    ],
)
def test_a_collate_fn_shows_whether_rows_are_records(collate, sample, expected):
    assert has_folded_rows(lambda: collate, sample) is expected


def test_what_cannot_be_collated_is_taken_for_the_usual():
    assert not has_folded_rows(lambda: lambda samples: 1 / 0, BAG)


@pytest.mark.parametrize(("collate", "sample"), [(graphs, GRAPH), (bags, BAG)])
def test_places_that_grow_with_the_records_before_mix_no_samples(collate, sample):
    assert check_collate_fn(collate, sample).outcome == "apart"


def test_samples_have_several_lengths():
    pool = CollatedPool(lambda: bags, SampleMaker(BAG, 2), frozenset({3}))
    tokens, offsets, _ = pool.take([0, 1, 2])
    assert offsets.tolist() == [0, 9, 13] and len(tokens) == 16
    assert (
        pool.take([2, 1, 0])[0].tolist()
        == torch.cat([tokens[13:], tokens[9:13], tokens[:9]]).tolist()
    )


@pytest.mark.parametrize(
    ("module", "collate", "sample"),
    [
        *((Graphs(), graphs, GRAPH), (Bags(), bags, BAG)),
        *((Images(), zipped, IMAGE), (Sequences(), listed, SEQUENCE)),
    ],
)
def test_models_that_keep_rows_apart_are_isolated(module, collate, sample):
    found = probed(module, collate, sample)
    assert found.outcome == "isolated", found
    said = str(found)
    assert "rows of a batch are not records" in said or "each record runs alone" in said


@pytest.mark.parametrize("fault", ["turned", "sorted by place", "mean over nodes"])
def test_rows_of_another_record_are_found(fault):
    found = probed(Graphs(fault), graphs, GRAPH)
    assert found.outcome == "coupled", found
    assert "rows_of_records() names other owners" in found.reason


@pytest.mark.parametrize(
    ("module", "collate", "sample"),
    [(Centred(), zipped, IMAGE), (Padded(), listed, SEQUENCE)],
)
def test_models_that_mix_records_in_lists_are_found(module, collate, sample):
    assert probed(module, collate, sample).outcome == "coupled"


def test_samples_that_are_all_alike_show_nothing():
    """Exchanging samples says nothing where their contents cannot be made up."""

    class Kept:
        pass

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        return bags([BAG for _ in samples])

    found = probed(Bags(), collate, (Kept(),))
    assert found.outcome == "not probed" and "cannot be made up" in found.reason
