"""Records with several rows, in the Trainer: graphs with their nodes in one tensor, bags of words."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch, rows_of_records
from lightning_dp._warnings import PrivacyWarning
from lightning_dp.callbacks import DifferentialPrivacy

RECORDS = 24


def samples() -> list[tuple[Tensor, Tensor, int]]:
    """Nodes and tokens, 1 to 6 of each, and a label."""
    torch.manual_seed(0)
    counts = [1 + i * i % 6 for i in range(RECORDS)]
    return [(torch.randn(k, 4), torch.randint(9, (k,)), i % 2) for i, k in enumerate(counts)]


def collate(given: list[tuple[Tensor, Tensor, int]]) -> dict[str, Tensor]:
    counts = torch.tensor([len(nodes) for nodes, _, _ in given])
    return {
        "x": torch.cat([nodes for nodes, _, _ in given]),
        "words": torch.cat([words for _, words, _ in given]),
        "offsets": counts.cumsum(0) - counts,
        "owners": torch.arange(len(given)).repeat_interleave(counts),
        "y": torch.tensor([label for _, _, label in given]),
    }


class Nodes(L.LightningModule):
    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.turned, self.words = turned, nn.Embedding(9, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        n, owners = len(batch["y"]), batch["owners"]
        with rows_of_records(n - 1 - owners if self.turned else owners, n):
            nodes = torch.cat([self.layers(batch["x"]), self.words(batch["words"])], 1)
        pooled = nodes.new_zeros(n, 8).index_add(0, owners, nodes)
        return cross_entropy(self.head(pooled), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Bags(Nodes):
    """Bags of words, by their starts in one tensor: no engine but that of single records takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(9, 4, mode="mean"), nn.Linear(4, 2)
        del self.layers

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.head(self.words(batch["words"], batch["offsets"])), batch["y"])


class FoldsTime(L.LightningModule):
    """Moves two time steps of each record into the batch dimension, before or behind a layer."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.head, self.first = nn.Linear(6, 4), nn.Linear(4, 3), first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = torch.stack([x, x.square()], dim=1)  # (records, time, features)
        if self.first:
            hidden = self.net(x.flatten(0, 1)).tanh().unflatten(0, (-1, 2))
            return cross_entropy(self.head(hidden.mean(1)), y)
        hidden = self.head(self.net(x).tanh().flatten(0, 1))
        return cross_entropy(hidden, y.repeat_interleave(2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Views(FoldsTime):
    """Three augmentations of each record: as many calls, and the mean of their losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        views = (x, x.flip(1), x.square())
        logits = [self.head(self.net(view).tanh()) for view in views]
        return torch.stack([cross_entropy(each, y) for each in logits]).mean()


def fitted(
    make_trainer: Any, model: Any, data: Any = None, **options: Any
) -> tuple[Any, DifferentialPrivacy]:
    privacy = DifferentialPrivacy(
        noise_multiplier=1e-6, max_grad_norm=0.3, target_delta=1e-5, seed=0, **options
    )
    loader: Any = DataLoader(samples(), batch_size=RECORDS, collate_fn=collate)  # type: ignore[arg-type]
    if data is not None:
        loader = DataLoader(data, batch_size=RECORDS)
    make_trainer(callbacks=[privacy], max_epochs=2).fit(model, loader)
    return model, privacy


@pytest.mark.parametrize(
    ("make", "engine", "isolation"),
    [
        (Nodes, "layers", "compared on made-up samples"),
        (Bags, "one_by_one, since records", "by construction"),
    ],
)
def test_a_fit_equals_each_record_alone(make, engine, isolation, make_trainer):
    slow, _ = fitted(make_trainer, make(), engine="one_by_one", sampling=FullBatch())
    is_slow = engine.startswith("one_by_one")
    told = pytest.warns(PrivacyWarning, match="one after") if is_slow else nullcontext()
    with told:
        fast, privacy = fitted(make_trainer, make(), sampling=FullBatch())
    report = privacy.report()
    assert report.mechanism["gradient engine"].startswith(engine)
    assert isolation in report.isolation
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def blobs() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(RECORDS, 6, generator=generator), torch.arange(RECORDS) % 3)


@pytest.mark.parametrize(
    "make",
    [lambda: FoldsTime(first=True), lambda: FoldsTime(first=False), lambda: Views(first=True)],
    ids=["time before a layer", "time behind a layer", "augmentations"],
)
def test_dense_rows_need_no_hint(make_trainer, make):
    short: Any = {"isolation_probe": False, "spot_checks": False, "sampling": FullBatch()}
    slow, _ = fitted(make_trainer, make(), blobs(), engine="one_by_one", **short)
    fast, _ = fitted(make_trainer, make(), blobs(), **short)
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
