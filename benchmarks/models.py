"""The models that the benchmarks run, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "SMALL", "Model"]


class Attention(nn.Module):
    """Self-attention, made of linear layers."""

    def __init__(self, width: int, heads: int, is_causal: bool = False) -> None:
        super().__init__()
        self._heads, self._is_causal = heads, is_causal
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            f(x).view(n, length, self._heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self._is_causal)
        return self.out(attended.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int = 4, is_causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, is_causal))
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


class Patches(nn.Module):
    """ViT-S: twelve blocks of width 384 with six heads, over patches of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 4, 4)
        self.blocks = nn.Sequential(*(Block(384, heads=6) for _ in range(12)))
        self.head = nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Decoder(nn.Module):
    """GPT-2 with four of its twelve blocks, over 64 tokens, without transformers: 67M weights."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, 12, is_causal=True) for _ in range(4)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(x) + self.places(torch.arange(x.shape[1])))[:, -1])


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one on its last step."""

    def __init__(self, lstm: nn.Module, width: int) -> None:
        super().__init__()
        self.lstm, self.head = lstm, nn.Linear(width, 10)

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


def opacus_lstm() -> nn.Module:
    """One layer of width 128, made of linear layers with or without privacy."""
    return Recurrent(DPLSTM(32, 128, batch_first=True), 128)


def torch_lstm() -> nn.Module:
    return Recurrent(nn.LSTM(32, 256, 2, batch_first=True), 256)


def resnet18() -> nn.Module:
    """ResNet-18 as it is used on CIFAR-10, with GroupNorm: 11.2M weights."""
    stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()),
        *(part for a, b, s in stages for part in (Residual(a, b, s), Residual(b, b, 1))),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
    )


class Logits(nn.Module):
    """The logits of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    nothing_drawn = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_layer=layers, num_labels=10, pad_token_id=50256, **nothing_drawn)
    return GPT2ForSequenceClassification(config)


def gpt2_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return Logits(
        get_peft_model(gpt2(12), LoraConfig(task_type="SEQ_CLS", target_modules=["c_attn"]))
    )


@dataclass(frozen=True)
class Model:
    """A network, its batch size, and random records for it; a data set has several batches.

    A benchmark of steps lets so many go by as the first ones, and takes the median of those after them.
    """

    make: Callable[[], nn.Module]
    batch_size: int
    records: Callable[[int], Tensor]
    batches: int = 20
    first: int = 60
    steps: int = 15


def _images(*size: int) -> Callable[[int], Tensor]:
    return lambda n: torch.rand(n, *size)


def _tokens(n: int) -> Tensor:
    return torch.randint(1000, (n, 64))


def _sequences(n: int) -> Tensor:
    return torch.randn(n, 50, 32)


_large = partial(Model, first=8, steps=5)

SMALL = {
    "logistic regression": Model(logistic, 256, _images(1, 28, 28)),
    "MLP": Model(mlp, 256, _images(1, 28, 28)),
    "CNN": Model(cnn, 256, _images(1, 28, 28)),
    "transformer": Model(Transformer, 64, _tokens, steps=5),
    "ResNet": Model(resnet, 64, _images(3, 32, 32), steps=5),
    "LSTM": Model(opacus_lstm, 64, _sequences),
}
MODELS = {
    **SMALL,
    "nn.LSTM": Model(torch_lstm, 64, _sequences),
    "ResNet-18": _large(resnet18, 16, _images(3, 32, 32)),
    "decoder": _large(Decoder, 8, _tokens),
    "ViT-S": _large(Patches, 8, _images(3, 32, 32)),
    "GPT-2, 4 layers": _large(lambda: Logits(gpt2(4)), 8, _tokens),
    "GPT-2, LoRA": _large(gpt2_lora, 8, _tokens),
}
