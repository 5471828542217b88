"""Models for tables, graphs, sets and series, in plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.case import Batch, Case, classify

__all__ = ["CASES"]

CLASSES, NODES, FEATURES = 5, 6, 8


class FTTransformer(nn.Module):
    """Features as tokens (arXiv:2106.11959): a weight and a bias for each, and a class token."""

    def __init__(self, width: int, dropout: float, numbers: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers, width))
        self.bias = nn.Parameter(torch.randn(numbers + 2, width))
        self.token = nn.Parameter(torch.randn(width))
        self.register_buffer("offsets", torch.tensor([0, 7]))
        self.categories = nn.Embedding(7 + 5, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, CLASSES)

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        x = numbers.unsqueeze(-1) * self.weight
        x = torch.cat([x, self.categories(kinds + self.offsets)], 1) + self.bias
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        return self.head(self.body(x)[:, 0])


class DenseGraph(nn.Module):
    """Graph convolutions over an adjacency matrix a graph."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.epsilon = nn.Parameter(torch.zeros(()))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.first(edges @ x))
        x = self.drop(F.relu(self.second(edges @ x + (1 + self.epsilon) * x)))
        return self.head(x.mean(1))


class Attention(nn.Module):
    """Graph attention: a vector that weighs pairs of nodes."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(width, 1) / 8) for _ in range(2))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.embed(x)
        scores = F.leaky_relu(h @ self.source + (h @ self.target).transpose(1, 2), 0.2)
        weights = scores.masked_fill(edges == 0, -1e9).softmax(-1)
        return self.head(F.elu(self.drop(weights) @ h).mean(1))


class FoldedGraph(nn.Module):
    """Nodes of all graphs in one long table, messages along edges, a mean for each graph."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        n = len(x)
        start = torch.arange(n).view(n, 1, 1) * NODES
        source, target = (edges + start).transpose(0, 1).reshape(2, -1)
        h = F.relu(self.first(x.reshape(n * NODES, FEATURES)))
        message = self.second(h)[source]
        h = self.norm(h.index_add(0, target, message))
        return self.head(self.drop(h).view(n, NODES, -1).mean(1))


class DeepSets(nn.Module):
    """Elements of a set folded into rows, then summed, with a mask."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.each(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.head((h * (x[..., :1] > 0)).sum(1))


class PatchSeries(nn.Module):
    """PatchTST: channels folded into rows, reversible normalisation with parameters."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.patch, self.place = nn.Linear(4, width), nn.Parameter(torch.randn(1, 6, width) / 8)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(6 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-3
        x = (x - mean) / deviation * self.scale + self.shift
        rows = x.transpose(1, 2).reshape(-1, 24).unfold(-1, 4, 4)
        h = self.body(self.patch(rows) + self.place).flatten(1)
        y = self.head(h).view(len(x), 3, 4).transpose(1, 2)
        return (y - self.shift) / self.scale * deviation + mean


class Recurrent(nn.Module):
    """An LSTM and a GRU with trained first states."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, width, 2, batch_first=True, dropout=dropout)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.state = nn.Parameter(torch.randn(2, 1, width))
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.state.expand(-1, len(x), -1).contiguous()
        h, _ = self.lstm(x, (first, torch.zeros_like(first)))
        return self.head(self.gru(h)[0].mean(1))


class Tagger(nn.Module):
    """A linear chain over scores: transitions are used in the loss alone."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 4))
        self.start, self.step = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))

    def loss(self, x: Tensor, tags: Tensor) -> Tensor:
        scores = self.score(x)
        path = scores.gather(2, tags.unsqueeze(2)).sum((1, 2)) + self.start[tags[:, 0]]
        path = path + self.step[tags[:, :-1], tags[:, 1:]].sum(1)
        forward = self.start + scores[:, 0]
        for t in range(1, x.shape[1]):
            forward = torch.logsumexp(forward.unsqueeze(2) + self.step, 1) + scores[:, t]
        return (torch.logsumexp(forward, 1) - path).mean()


class Recommender(nn.Module):
    """Matrix factorisation with biases, an embedding table a side, and a global mean."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, width), nn.Embedding(30, width)
        self.bias, self.mean = nn.Embedding(30, 1), nn.Parameter(torch.zeros(1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        found = (self.users(user) * self.items(item)).sum(-1)
        return found + self.bias(item).squeeze(-1) + self.mean


class Bags(nn.Module):
    """EmbeddingBag of rows of words."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(40, width, mode="mean"), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


class BagsWithOffsets(Bags):
    """The same words in one long row, as the manual of torch does it."""

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.arange(0, x.numel(), x.shape[1])
        return self.head(self.words(x.flatten(), offsets))


def _table(n: int) -> Batch:
    kinds = torch.stack([torch.randint(7, (n,)), torch.randint(5, (n,))], 1)
    return {"numbers": torch.randn(n, 4), "kinds": kinds, "y": torch.randint(CLASSES, (n,))}


def _graphs(n: int) -> Batch:
    edges = (torch.rand(n, NODES, NODES) < 0.4).float() + torch.eye(NODES)
    x = torch.randn(n, NODES, FEATURES)
    pairs = torch.randint(NODES, (n, 2, 9))
    return {"x": x, "edges": edges, "pairs": pairs, "y": torch.randint(CLASSES, (n,))}


def _sets(n: int) -> Batch:
    tags = torch.randint(4, (n, NODES))
    return {"x": torch.randn(n, NODES, FEATURES), "y": torch.randint(CLASSES, (n,)), "tags": tags}


def _series(n: int) -> Batch:
    return {"x": torch.randn(n, 24, 3), "y": torch.randn(n, 4, 3)}


def _ratings(n: int) -> Batch:
    ids = {"user": torch.randint(20, (n,)), "item": torch.randint(30, (n,))}
    return {**ids, "stars": torch.randn(n)}


def _words(n: int) -> Batch:
    return {"x": torch.randint(40, (n, NODES)), "y": torch.randint(CLASSES, (n,))}


def _of_table(net: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch["numbers"], batch["kinds"]), batch["y"])


def _of_graphs(net: Any, batch: Batch, edges: str) -> Tensor:
    return F.cross_entropy(net(batch["x"], batch[edges]), batch["y"])


def _case(name: str, make: Any, records: Any, loss: Any = classify, n: int = 4) -> Case:
    return Case(name, "torch", make, records, loss, n)


CASES = (
    _case("FT-Transformer", FTTransformer, _table, _of_table),
    _case("FT-Transformer, n = T", FTTransformer, _table, _of_table, 7),
    _case("GNN, dense", DenseGraph, _graphs, partial(_of_graphs, edges="edges")),
    _case("GNN, dense, n = nodes", DenseGraph, _graphs, partial(_of_graphs, edges="edges"), NODES),
    _case("GNN, attention", Attention, _graphs, partial(_of_graphs, edges="edges")),
    _case("GNN, folded nodes", FoldedGraph, _graphs, partial(_of_graphs, edges="pairs")),
    _case("deep sets, folded", DeepSets, _sets),
    _case("PatchTST", PatchSeries, _series, lambda net, b: F.mse_loss(net(b["x"]), b["y"])),
    _case("LSTM and GRU, trained states", Recurrent, _sets),
    _case("tagger with a linear chain", Tagger, _sets, lambda net, b: net.loss(b["x"], b["tags"])),
    _case("matrix factorisation", Recommender, _ratings,
          lambda net, b: F.mse_loss(net(b["user"], b["item"]), b["stars"])),
    _case("EmbeddingBag", Bags, _words),
    _case("EmbeddingBag with offsets", BagsWithOffsets, _words),
)  # fmt: skip
