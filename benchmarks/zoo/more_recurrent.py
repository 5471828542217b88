"""Sequences and graphs as people write them: recurrent layers, joined graphs, sets, words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from zoo.case import Batch, Case, classify

__all__ = ["CASES"]

CLASSES, LENGTH, WORDS, FEATURES = 5, 6, 40, 8


class Recurrent(nn.Module):
    """A recurrent layer of torch under a linear head, on the mean of all steps."""

    def __init__(self, width: int, dropout: float, kind: Any = nn.LSTM, **more: Any) -> None:
        super().__init__()
        rate = dropout if more.get("num_layers", 1) > 1 else 0.0
        self.body = kind(FEATURES, width, batch_first=True, dropout=rate, **more)
        self.head = nn.Linear(more.get("proj_size", width), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0].mean(1))


class LastStates(nn.Module):
    """The last states of both directions of an LSTM are classified."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.LSTM(FEATURES, width, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (states, _) = self.body(x)
        return self.head(self.drop(torch.cat([states[0], states[1]], -1)))


class Packed(nn.Module):
    """A GRU over sequences of several lengths, in any order."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.GRU(FEATURES, width, 2, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.body(rows)[0], batch_first=True)
        return self.head(self.drop(h.sum(1) / lengths.unsqueeze(1)))


class Cells(nn.Module):
    """An LSTM cell in a loop, that starts from trained states."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.cell, self.drop = nn.LSTMCell(FEATURES, width), nn.Dropout(dropout)
        self.state = nn.Parameter(torch.randn(2, width) / 8)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, c = (s.expand(len(x), -1) for s in self.state)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.head(self.drop(h))


def _joined(x: Tensor, pairs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes of all graphs in one matrix, its edges, and whose each node is."""
    n, most = x.shape[:2]
    owners = torch.arange(n).repeat_interleave(counts)
    nodes = x[torch.arange(most) < counts.unsqueeze(1)]
    first = (counts.cumsum(0) - counts).view(n, 1, 1)
    edges = (pairs % counts.view(n, 1, 1) + first).transpose(0, 1).reshape(2, -1)
    return nodes, edges, owners


class JoinedSums(nn.Module):
    """Messages along edges (arXiv:1810.00826), a sum over the nodes of each graph."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.epsilon, self.drop = nn.Parameter(torch.zeros(1)), nn.Dropout(dropout)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, pairs: Tensor, counts: Tensor) -> Tensor:
        nodes, (source, target), owners = _joined(x, pairs, counts)
        h = F.relu(self.first(nodes))
        h = self.second(((1 + self.epsilon) * h).index_add(0, target, h[source]))
        sums = h.new_zeros(len(x), h.shape[1]).index_add(0, owners, self.drop(F.relu(h)))
        return self.head(sums)


class JoinedAttention(nn.Module):
    """A softmax over the edges that reach a node (arXiv:1710.10903), by scattered sums."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.score = nn.Parameter(torch.randn(2 * width) / 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, pairs: Tensor, counts: Tensor) -> Tensor:
        nodes, (source, target), owners = _joined(x, pairs, counts)
        h = self.embed(nodes)
        scores = F.leaky_relu(torch.cat([h[source], h[target]], 1) @ self.score, 0.2)
        top = scores.new_full((len(h),), -1e9).scatter_reduce(0, target, scores.detach(), "amax")
        weights = torch.exp(scores - top[target])
        sums = weights.new_zeros(len(h)).index_add(0, target, weights)
        messages = (weights / sums[target]).unsqueeze(1) * h[source]
        h = self.drop(F.elu(torch.zeros_like(h).index_add(0, target, messages) + h))
        total = h.new_zeros(len(x), h.shape[1]).index_add(0, owners, h)
        return self.head(total / counts.unsqueeze(1))


class Translator(nn.Module):
    """torch's encoder and decoder with padding of the source and a causal mask."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.body = nn.Transformer(width, 4, 1, 1, 2 * width, dropout, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        embed = lambda ids: self.words(ids) + self.places.weight[: ids.shape[1]]  # noqa: E731
        padding = torch.arange(x.shape[1]) >= lengths.unsqueeze(1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        found = self.body(
            embed(x), embed(target), tgt_mask=mask, src_key_padding_mask=padding.float() * -1e9,
            memory_key_padding_mask=padding.float() * -1e9,
        )  # fmt: skip
        return self.head(found)


class SetTransformer(nn.Module):
    """Attention over sets (arXiv:1810.00825), pooled by trained seeds; elements may lack."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(2 * width, CLASSES)
        self.each = nn.MultiheadAttention(width, 4, dropout=dropout, batch_first=True)
        self.pool = nn.MultiheadAttention(width, 4, dropout=dropout, batch_first=True)
        self.seeds = nn.Parameter(torch.randn(1, 2, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        lacking = torch.arange(x.shape[1]) >= counts.unsqueeze(1)
        h = self.embed(x)
        h = h + self.each(h, h, h, key_padding_mask=lacking)[0]
        seeds = self.seeds.repeat(len(x), 1, 1)
        return self.head(self.pool(seeds, h, h, key_padding_mask=lacking)[0].flatten(1))


class DiagonalStates(nn.Module):
    """S4D (arXiv:2206.11893): complex poles, a convolution by Fourier transforms."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.decay = nn.Parameter(torch.zeros(width, 4))
        self.turn = nn.Parameter(torch.arange(4.0).repeat(width, 1))
        self.mix = nn.Parameter(torch.randn(width, 4, dtype=torch.cfloat) / 4)
        self.skip, self.drop = nn.Parameter(torch.ones(width)), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u = self.embed(x).transpose(1, 2)
        poles = torch.complex(-self.decay.exp(), self.turn)
        powers = torch.exp(poles.unsqueeze(-1) * torch.arange(length) / length)
        kernel = torch.einsum("wk,wkt->wt", self.mix, powers).real
        spectrum = torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        y = torch.fft.irfft(spectrum, 2 * length)[..., :length] + self.skip.unsqueeze(-1) * u
        return self.head(self.drop(F.gelu(y)).mean(-1))


class Dilated(nn.Module):
    """WaveNet (arXiv:1609.03499): causal convolutions with gates, and sums of skips."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv1d(FEATURES, width, 1)
        self.gated = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=d) for d in (1, 2)])
        self.after = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(2)])
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.transpose(1, 2))
        skips = torch.zeros_like(h)
        for gated, after in zip(self.gated, self.after, strict=True):
            value, gate = gated(F.pad(h, (gated.dilation[0], 0))).chunk(2, 1)
            found = after(torch.tanh(value) * torch.sigmoid(gate))
            h, skips = h + found, skips + found
        return self.head(self.drop(F.relu(skips)).mean(-1))


class Adaptive(nn.Module):
    """Words in clusters: each cluster sees the rows of its words."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, width), nn.Dropout(dropout)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(width, WORDS, [10, 20], div_value=2.0)

    def loss(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.words(x[:, :-1])))
        return self.head(h.flatten(0, 1), x[:, 1:].flatten()).loss


class Aligned(nn.Module):
    """Convolutions and a GRU under the loss that sums alignments out (CTC)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(FEATURES, width, 3, padding=1)
        self.body = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(2 * width, CLASSES)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        h = F.relu(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        scores = self.head(self.drop(self.body(h)[0])).log_softmax(-1).transpose(0, 1)
        steps = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(scores, target, steps, torch.full((len(x),), target.shape[1]))


class Checkpointed(nn.Module):
    """Layers that are run again in the backward pass."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        make = partial(nn.TransformerEncoderLayer, width, 4, 2 * width, dropout, batch_first=True)
        self.embed, self.layers = nn.Linear(FEATURES, width), nn.ModuleList([make(), make()])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return self.head(h.mean(1))


def _rows(n: int) -> Batch:
    counts = torch.randint(2, LENGTH + 1, (n,))
    return {
        **{"x": torch.randn(n, LENGTH, FEATURES), "y": torch.randint(CLASSES, (n,))},
        **{"lengths": counts.index_fill(0, torch.tensor([0]), LENGTH), "counts": counts},
        **{"pairs": torch.randint(60, (n, 2, 9)), "target": torch.randint(1, CLASSES, (n, 2))},
    }


def _sentences(n: int) -> Batch:
    lengths = torch.randint(2, LENGTH + 1, (n,))
    ids = {"x": torch.randint(WORDS, (n, LENGTH)), "target": torch.randint(WORDS, (n, 5))}
    return {**ids, "lengths": lengths}


def _given(*names: str) -> Callable[[Any, Batch], Tensor]:
    """Return the cross-entropy of a network that is given these fields."""
    return lambda net, batch: F.cross_entropy(net(*(batch[k] for k in names)), batch["y"])


def _loss(*names: str) -> Callable[[Any, Batch], Tensor]:
    """Return the network's own loss of these fields."""
    return lambda net, batch: net.loss(*(batch[k] for k in names))


def _translate(net: Any, batch: Batch) -> Tensor:
    words = batch["target"]
    scores = net(batch["x"], words[:, :-1], batch["lengths"])
    return F.cross_entropy(scores.transpose(1, 2), words[:, 1:])


def _case(name: str, make: Any, loss: Any = classify, records: Any = _rows) -> Case:
    return Case(name, "torch", make, records, loss)


_GRAPH = ("x", "pairs", "counts")

CASES = (
    _case("LSTM with dropout", partial(Recurrent, num_layers=2)),
    _case("LSTM, bidirectional", LastStates),
    _case("LSTM with projections", partial(Recurrent, proj_size=12)),
    _case("GRU, packed", Packed, _given("x", "lengths")),
    _case("RNN with ReLU", partial(Recurrent, kind=nn.RNN, nonlinearity="relu")),
    _case("LSTM cells", Cells),
    _case("joined graphs, sums", JoinedSums, _given(*_GRAPH)),
    _case("joined graphs, attention", JoinedAttention, _given(*_GRAPH)),
    _case("nn.Transformer, masked", Translator, _translate, _sentences),
    _case("set transformer, masked", SetTransformer, _given("x", "counts")),
    _case("S4D", DiagonalStates),
    _case("WaveNet", Dilated),
    _case("adaptive softmax", Adaptive, _loss("x"), _sentences),
    _case("convolutions, GRU, CTC", Aligned, _loss("x", "target")),
    _case("activation checkpoints", Checkpointed),
)
