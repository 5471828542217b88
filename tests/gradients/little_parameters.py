"""Little models in the words that people use: where parameters meet data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.gradients.little_models import (
    Batch,
    Little,
    N,
    Net,
    head,
    images,
    linear,
    net,
    tokens,
    weight,
)

__all__ = ["PARAMETERS"]


def embedding() -> nn.Embedding:
    return nn.Embedding(7, 6)


def sequences() -> Batch:
    return {"x": torch.randn(N, 5, 6), "y": torch.arange(N)}


class Attention(nn.Module):
    """Attention with a table of biases for relative positions, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), head()
        self.table = nn.Parameter(torch.randn(9))
        places = torch.arange(5)
        self.register_buffer("places", places[:, None] - places + 4)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(6) + self.table[self.places]
        shares = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return self.out((shares @ v).mean(1))


class Transformer(nn.Module):
    """A class token, a table of positions, layer scale and dropout below them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 6, 6))
        self.scale = nn.Parameter(torch.full((6,), 0.1))
        self.mlp = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.0), nn.Linear(6, 6))
        self.norm, self.head = nn.LayerNorm(6), head()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x + self.scale * self.mlp(self.norm(x))
        return self.head(x[:, 0])


class Standardised(nn.Conv2d):
    """A convolution with a standardised weight."""

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (var + 1e-5).sqrt(), self.bias)


class Normalised(nn.Module):
    """Own statistics from constant buffers, own gain and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("mean", torch.linspace(-1, 1, 6))
        self.register_buffer("std", torch.linspace(0.5, 2, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std * self.gain + self.shift


def masked(m: Net, x: Tensor) -> Tensor:
    hidden = torch.where(x[..., :1] > 0, m.token, x)
    return m.head(m.body(hidden).mean(1))


def written(m: Net, x: Tensor) -> Tensor:
    hidden = m.body(x).clone()
    hidden[:, 0] = m.token
    return m.head(hidden.mean(1))


def prompted(m: Net, x: Tensor) -> Tensor:
    prompt = m.prompt.weight.unsqueeze(0).expand(len(x), -1, -1)
    return m.head(torch.tanh(m.body(torch.cat([prompt, m.words(x)], 1))).mean(1))


def queried(m: Net, x: Tensor) -> Tensor:
    queries = m.queries.weight.repeat(len(x), 1, 1)
    return m.head(F.scaled_dot_product_attention(queries, m.body(x), x).mean(1))


def positions(shape: tuple[int, ...]) -> Any:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(
            torch.tanh(m.body(m.words(x) + m.places(torch.arange(5).view(shape)))).mean(1)
        )

    return net(forward, words=embedding, places=embedding, body=linear(), head=head)


def tied(m: Net, x: Tensor) -> Tensor:
    return m.body(m.words(x).mean(1)) @ m.words.weight.t()


def prototypes(m: Net, x: Tensor) -> Tensor:
    return -torch.cdist(m.body(x), m.centres)


def hypernetwork(m: Net, x: Tensor) -> Tensor:
    return m.head(F.linear(x, m.maker(m.code).view(6, 6)))


def attended(m: Net, x: Tensor) -> Tensor:
    return m.head(m.attention(x, x, x, need_weights=False)[0].mean(1))


def filtered(m: Net, x: Tensor) -> Tensor:
    """Complex products with parameters on either side, and with a real one."""
    factor = torch.view_as_complex(m.filter)
    y = torch.fft.irfft(torch.fft.rfft(x) * factor * m.gain, n=6)
    return m.head(y + (factor * torch.fft.rfft(y)).abs() @ m.mix)


def clip_like(m: nn.Module, batch: Batch) -> Tensor:
    """Scores over fixed classes with a learnt temperature, in the loss."""
    scores = F.normalize(m.body(batch["x"]), dim=-1) @ F.normalize(m.classes, dim=-1).t()
    return F.cross_entropy(scores * m.scale.exp(), batch["y"])


PARAMETERS: Mapping[str, Little] = {
    "attention_with_table": Little(Attention, sequences),
    "class_token_and_positions": Little(Transformer, sequences),
    "constant_buffers": Little(net(lambda m, x: m.head(m.norm(x)), norm=Normalised, head=head)),
    "mask_token": Little(net(masked, token=weight(6), body=linear(), head=head), sequences),
    "written_token": Little(net(written, token=weight(6), body=linear(), head=head), sequences),
    "prompt": Little(
        net(prompted, prompt=lambda: nn.Embedding(2, 6), words=embedding, body=linear(), head=head),
        tokens,
    ),
    "queries": Little(
        net(queried, queries=lambda: nn.Embedding(2, 6), body=linear(), head=head), sequences
    ),
    "positions_of_one_row": Little(positions((1, 5)), tokens),
    "positions_without_a_row": Little(positions((5,)), tokens),
    "tied_by_transpose": Little(net(tied, words=embedding, body=linear()), tokens),
    "prototypes": Little(net(prototypes, body=linear(), centres=weight(4, 6))),
    "hypernetwork": Little(
        net(hypernetwork, maker=lambda: nn.Linear(3, 36), code=weight(3), head=head)
    ),
    "multihead_attention": Little(
        net(attended, attention=lambda: nn.MultiheadAttention(6, 2, batch_first=True), head=head),
        sequences,
    ),
    "scalar_gate": Little(
        net(
            lambda m, x: m.head(x + m.gate.tanh() * m.body(x)),
            gate=lambda: nn.Parameter(torch.tensor(0.3)),
            body=linear(),
            head=head,
        )
    ),
    "matrix": Little(
        net(lambda m, x: m.head(torch.relu(x @ m.weight)), weight=weight(6, 6), head=head)
    ),
    "low_rank": Little(
        net(lambda m, x: m.head(x @ (m.a @ m.b)), a=weight(6, 2), b=weight(2, 6), head=head)
    ),
    "einsum": Little(
        net(lambda m, x: torch.einsum("ntd,dec->nc", x, m.weight), weight=weight(6, 5, 4)),
        sequences,
    ),
    "slice": Little(
        net(lambda m, x: m.head(x * m.weight[:1] + m.weight[1:]), weight=weight(2, 6), head=head)
    ),
    "indexed": Little(
        net(lambda m, x: m.head(m.table[x].mean(1)), table=weight(7, 6), head=head), tokens
    ),
    "functional_embedding": Little(
        net(lambda m, x: m.head(F.embedding(x, m.table).mean(1)), table=weight(7, 6), head=head),
        tokens,
    ),
    "functional_norm": Little(
        net(
            lambda m, x: m.head(F.layer_norm(x, (6,), m.gain, m.shift)),
            gain=weight(6),
            shift=weight(6),
            head=head,
        )
    ),
    "functional_convolution": Little(
        net(
            lambda m, x: F.conv2d(x, m.kernel, m.bias).mean((2, 3)),
            kernel=weight(4, 2, 3, 3),
            bias=weight(4),
        ),
        images,
    ),
    "standardised_convolution": Little(
        net(lambda m, x: m.conv(x).mean((2, 3)), conv=lambda: Standardised(2, 4, 3)), images
    ),
    "cosine": Little(
        net(
            lambda m, x: 4 * F.normalize(m.body(x)) @ F.normalize(m.weight).T,
            body=linear(),
            weight=weight(4, 6),
        )
    ),
    "weight_norm": Little(
        net(
            lambda m, x: m.head(m.body(x)),
            body=lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
            head=head,
        )
    ),
    "orthogonal": Little(
        net(
            lambda m, x: m.head(m.body(x)),
            body=lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
            head=head,
        )
    ),
    "spectral_norm_in_eval": Little(
        net(
            lambda m, x: m.head(m.body(x)),
            body=lambda: parametrizations.spectral_norm(nn.Linear(6, 6)).eval(),
            head=head,
        )
    ),
    "squeeze_and_excite": Little(
        net(
            lambda m, x: m.head(m.conv(x) * m.gate(x.mean((2, 3), keepdim=True)).sigmoid()).mean(
                (2, 3)
            ),
            conv=lambda: nn.Conv2d(2, 6, 3),
            gate=lambda: nn.Conv2d(2, 6, 1),
            head=lambda: nn.Conv2d(6, 4, 1),
        ),
        images,
    ),
    "channel_scale": Little(
        net(
            lambda m, x: m.conv(x * m.scale.view(1, -1, 1, 1)).mean((2, 3)),
            scale=weight(2),
            conv=lambda: nn.Conv2d(2, 4, 3),
        ),
        images,
    ),
    "concatenated": Little(
        net(
            lambda m, x: m.head(torch.cat([m.body(x), m.extra.expand(len(x), 2)], 1)[:, 2:]),
            body=linear(),
            extra=weight(2),
            head=head,
        )
    ),
    "added_twice": Little(
        net(
            lambda m, x: m.head(m.body(x + m.shift) + m.shift),
            body=linear(),
            shift=weight(6),
            head=head,
        )
    ),
    "complex_filter": Little(
        net(filtered, filter=weight(4, 2), gain=weight(4), mix=weight(4, 6), head=head)
    ),
    "temperature_in_the_loss": Little(
        net(
            None, body=linear(), classes=weight(4, 6), scale=lambda: nn.Parameter(torch.tensor(1.0))
        ),
        loss=clip_like,
    ),
}
