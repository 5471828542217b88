"""Records with several rows, in the Trainer: graphs with their nodes in one tensor, bags of words."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_dp import FullBatch, rows_of_records
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
        self.turned = turned
        self.words = nn.EmbeddingBag(9, 4, mode="mean")
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        n, owners = len(batch["y"]), batch["owners"]
        with rows_of_records(n - 1 - owners if self.turned else owners, n):
            nodes = self.layers(batch["x"])
        pooled = nodes.new_zeros(n, 4).index_add(0, owners, nodes)
        words = self.words(batch["words"], batch["offsets"])
        return cross_entropy(self.head(torch.cat([pooled, words], 1)), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fitted(make_trainer: Any, model: Nodes, **options: Any) -> tuple[Nodes, DifferentialPrivacy]:
    privacy = DifferentialPrivacy(
        noise_multiplier=1e-6, max_grad_norm=0.3, target_delta=1e-5, seed=0, **options
    )
    loader = DataLoader(samples(), batch_size=RECORDS, collate_fn=collate)  # type: ignore[arg-type]
    make_trainer(callbacks=[privacy], max_epochs=3).fit(model, loader)
    return model, privacy


def test_a_fit_equals_each_record_alone(make_trainer):
    slow, _ = fitted(make_trainer, Nodes(), engine="one_by_one", sampling=FullBatch())
    fast, privacy = fitted(make_trainer, Nodes(), sampling=FullBatch())
    report = str(privacy.report())
    assert "bookkeeping" in report
    assert "since a record has several rows" in report
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_owners_that_are_not_those_of_the_rows_are_refused(make_trainer):
    with pytest.raises(MisconfigurationException, match="names other owners than the rows have"):
        fitted(make_trainer, Nodes(turned=True), sampling=FullBatch())


def test_spot_checks_without_the_probe_exchange_no_rows(make_trainer):
    """Exchanged starts of bags would give the words of one record to another."""
    _, privacy = fitted(make_trainer, Nodes(), isolation_probe=False, sampling=FullBatch())
    assert "opted out" in str(privacy.report())
