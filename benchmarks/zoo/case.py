"""One row of the table of models: a network, records for it, and a loss as users write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

__all__ = [
    "Batch",
    "Case",
    "Records",
    "Training",
    "classify",
    "images",
    "model_loss",
    "row",
    "stir",
    "tokens",
    "two_towers",
]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and the way it is trained.

    Args:
        name: of the row.
        library: whose model it is, as it is imported; "torch" for models written in place.
        make: of a width, and of the probability of dropout and stochastic depth.
        records: of a number n, a batch whose tensors have n rows.
        loss: of the network and a batch; the mean over its records.
        n: how many records the batch has for the error.
        refused: a part of the message, if no engine can take its records apart.
        timed: the width at which time and memory are measured, and the number of records.
    """

    name: str
    library: str
    make: Callable[[int, float], nn.Module]
    records: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    n: int = 4
    refused: str = ""
    timed: tuple[int, int] = (64, 128)

    def training(self, *, width: int = 32, dropout: float = 0.0) -> Training:
        """Return the model under its training step, with parameters that all matter."""
        torch.manual_seed(0)
        module = Training(self.make(width, dropout), self.loss)
        stir(module)
        return module.train()

    def batch(self, n: int | None = None) -> Batch:
        """Return records, the same ones each time."""
        torch.manual_seed(1)
        return self.records(self.n if n is None else n)


class Training(L.LightningModule):
    """The training step around a network."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Batch], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Records(Dataset[Batch]):
    """The records of a batch, one by one."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: each[index] for name, each in self.batch.items()}


def row(batch: Batch, index: int) -> Batch:
    """Return the batch of one record."""
    return {name: each[index : index + 1] for name, each in batch.items()}


@torch.no_grad()
def stir(module: nn.Module, scale: float = 0.05) -> None:
    """Move trained parameters a little: many start at zero, where others have no gradient."""
    for param in module.parameters():
        if param.requires_grad:
            param += scale * torch.randn_like(param)


def classify(net: Any, batch: Batch) -> Tensor:
    """Cross-entropy of what a network makes of ``x``."""
    return F.cross_entropy(net(batch["x"]), batch["y"])


def model_loss(net: Any, batch: Batch) -> Tensor:
    """The loss that the model computes by itself when it is given labels."""
    return net(**batch).loss


def images(n: int, size: int = 32, channels: int = 3, classes: int = 5) -> Batch:
    """Return pictures and their classes."""
    return {"x": torch.randn(n, channels, size, size), "y": torch.randint(classes, (n,))}


def tokens(length: int, words: int = 64, **more: Sequence[int]) -> Callable[[int], Batch]:
    """Return a maker of token ids; ``more`` names label fields, by the shape of one record's."""

    def make(n: int) -> Batch:
        ids = {"input_ids": torch.randint(3, words, (n, length))}
        return {**ids, **{name: torch.randint(3, words, (n, *s)) for name, s in more.items()}}

    return make


def two_towers(width: int) -> dict[str, int]:
    """Return the sizes of an encoder and a decoder of two layers, as ``transformers`` names them."""
    sizes = {"layers": 2, "ffn_dim": 2 * width, "attention_heads": 4}
    return {f"{part}_{k}": v for part in ("encoder", "decoder") for k, v in sizes.items()}
