"""Modules for sequences and signals that keep records apart: all of them train."""

from __future__ import annotations

from typing import Any

import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, ordinary, points
from isolation_zoo.records import generator, padded, tokens


class Sequences(Small):
    """An embedding of 12 tokens, a net, a head."""

    classes = 3

    def make(self) -> nn.Module:
        return nn.ModuleDict({
            "embedding": nn.Embedding(12, 8), "body": self.body(), "head": nn.Linear(8, self.classes)
        })  # fmt: skip

    def body(self) -> nn.Module:
        return nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](F.relu(self.net["body"](self.net["embedding"](x))).mean(1))


@ordinary(records=tokens)
class BagOfWords(Sequences):
    pass


@ordinary(records=padded)
class MaskedMean(Sequences):
    """Zeros are padding; a record's mean is over its own tokens."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0)[:, :, None]
        h = torch.tanh(self.net["body"](self.net["embedding"](x))) * mask
        return self.net["head"](h.sum(1) / mask.sum(1).clamp(min=1))


@ordinary(records=padded)
class TransformerWithPaddingMask(Sequences):
    def body(self) -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = x == 0
        mask = mask & ~mask.all(1, keepdim=True)  # a record of padding alone sees itself
        h = self.net["body"](self.net["embedding"](x), src_key_padding_mask=mask)
        return self.net["head"](h.masked_fill(mask[:, :, None], 0).sum(1) / 6)


@ordinary(records=tokens)
class CausalLanguageModel(Sequences):
    classes = 12

    def body(self) -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        h = self.net["body"](self.net["embedding"](x[:, :-1]), src_mask=mask, is_causal=True)
        return F.cross_entropy(self.net["head"](h).transpose(1, 2), x[:, 1:])


@ordinary(records=tokens)
class MaskedLanguageModel(CausalLanguageModel):
    """Random masks; each record divides by its own number of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        hidden = torch.rand(x.shape) < 0.3
        out = self.net["head"](self.net["body"](self.net["embedding"](x.masked_fill(hidden, 0))))
        losses = F.cross_entropy(out.transpose(1, 2), x, reduction="none") * hidden
        return (losses.sum(1) / hidden.sum(1).clamp(min=1)).mean()


@ordinary(records=padded)
class NextTokenWithPadding(CausalLanguageModel):
    """Padding is left out by each record's own mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        out = self.net["head"](torch.tanh(self.net["embedding"](x[:, :-1])))
        real = (x[:, 1:] != 0).float()
        losses = F.cross_entropy(out.transpose(1, 2), x[:, 1:], reduction="none") * real
        extra = self.net["body"](self.net["embedding"](x)).square().mean()
        return (losses.sum(1) / real.sum(1).clamp(min=1)).mean() + 1e-3 * extra


@ordinary(records=tokens)
class LongShortTerm(Sequences):
    def body(self) -> nn.Module:
        return DPLSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](self.net["body"](self.net["embedding"](x))[0][:, -1])


@ordinary(
    records=lambda n: [
        (torch.rand(12, 5, generator=generator()), torch.tensor([1 + i % 3, 2]), torch.tensor(2))
        for i in range(n)
    ]
)
class Ctc(Small):
    """torch's mean divides each record by its own number of targets."""

    def make(self) -> nn.Module:
        return nn.Linear(5, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, lengths = batch
        log_probs = self(x).log_softmax(2).transpose(0, 1)
        steps = torch.full((len(x),), 12)
        return F.ctc_loss(log_probs, y, steps, lengths, zero_infinity=True)


@ordinary(records=lambda n: [(torch.rand(4, 20, generator=generator()), y) for _, y in points(n)])
class Signals(Small):
    """Convolutions over time."""

    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(4, 8, 3),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
