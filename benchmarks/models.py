"""The models that the benchmarks run, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Model"]


class Attention(nn.Module):
    """Self-attention with four heads, made of linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            f(x).view(n, length, 4, width // 4).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Four blocks of width 128 over 64 tokens; 10 classes."""

    def __init__(self, width: int = 128, tokens: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)).mean(1))


class Residual(nn.Module):
    """Two convolutions with GroupNorm and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.GroupNorm(8, out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, padding=1, bias=False), nn.GroupNorm(8, out)),
        )
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Recurrent(nn.Module):
    """An LSTM of width 128 over 50 steps, made of linear layers with or without privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = DPLSTM(32, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, 10),
    )


def cnn() -> nn.Module:
    """The network of examples/mnist_cnn.py."""
    return nn.Sequential(
        nn.ZeroPad2d(3),
        *(nn.Conv2d(1, 16, 8, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()),
        *(Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1), Residual(64, 96, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)),
    )


@dataclass(frozen=True)
class Model:
    """A network, its batch size, and random records for it; a data set has several batches."""

    make: Callable[[], nn.Module]
    batch_size: int
    records: Callable[[int], Tensor]
    batches: int = 20


def _images(*size: int) -> Callable[[int], Tensor]:
    return lambda n: torch.rand(n, *size)


MODELS = {
    "logistic regression": Model(logistic, 256, _images(1, 28, 28)),
    "MLP": Model(mlp, 256, _images(1, 28, 28)),
    "CNN": Model(cnn, 256, _images(1, 28, 28)),
    "transformer": Model(Transformer, 64, lambda n: torch.randint(1000, (n, 64))),
    "ResNet": Model(resnet, 64, _images(3, 32, 32)),
    "LSTM": Model(Recurrent, 64, lambda n: torch.randn(n, 50, 32)),
}
