"""Parameters as people use them in plain PyTorch: anywhere, in any way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from zoo.case import Batch, Case, classify, images

__all__ = ["CASES"]

CLASSES, LENGTH, WORDS, FEATURES = 5, 6, 40, 8


class DropPath(nn.Module):
    """Stochastic depth: whole records skip a branch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.p or not self.training:
            return x
        keep = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class Block(nn.Module):
    """Attention and an MLP with layer scale and stochastic depth."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=p, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(p), nn.Linear(2 * width, width)
        )
        self.gamma = nn.Parameter(0.1 * torch.ones(2, width))
        self.path = DropPath(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        x = x + self.path(self.gamma[0] * self.attention(h, h, h, need_weights=False)[0])
        return x + self.path(self.gamma[1] * self.mlp(self.between(x)))


class VisionTransformer(nn.Module):
    """Class token, position table, blocks, all in one module with dropout below."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.zeros(1, 5, width))
        self.drop = nn.Dropout(p)
        self.body = nn.Sequential(Block(width, p), Block(width, p))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.body(self.drop(x)))[:, 0])


class Biased(nn.Module):
    """Attention with a table of biases for relative places, read through a constant index."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros(2 * LENGTH - 1, 4))
        places = torch.arange(LENGTH)
        self.register_buffer("index", places.view(-1, 1) - places + LENGTH - 1)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(length, length, 4).permute(2, 0, 1)
        scores = (q @ k.transpose(-2, -1)) / (width // 4) ** 0.5 + bias.unsqueeze(0)
        found = self.drop(scores.softmax(-1)) @ v
        return self.out(found.transpose(1, 2).reshape(n, length, width))


class Words(nn.Module):
    """Word and place embeddings, a body, a head; the head may be the transposed embedding."""

    def __init__(self, width: int, p: float, body: Any = Block, tie: str = "") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.body, self.tie = body(width, p), tie
        if not tie:
            self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.words(x) + self.places(torch.arange(x.shape[1])))
        if self.tie == "t":
            return h @ self.words.weight.t()
        return F.linear(h, self.words.weight) if self.tie else self.head(h)


class Prompted(nn.Module):
    """Soft prompts of a ParameterList of the parent, one for each layer."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.prompts = nn.ParameterList([torch.randn(2, width) for _ in range(2)])
        self.layers = nn.ModuleList([Block(width, p) for _ in range(2)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for prompt, layer in zip(self.prompts, self.layers, strict=True):
            h = layer(torch.cat([prompt.unsqueeze(0).repeat(len(h), 1, 1), h], 1))[:, 2:]
        return self.head(h.mean(1))


class Queries(nn.Module):
    """DETR: the weight of an embedding is what a decoder asks with."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.embed, self.queries = nn.Linear(FEATURES, width), nn.Embedding(3, width)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 2 * width, p, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.queries.weight.unsqueeze(0).expand(len(x), -1, -1)
        return self.head(self.decoder(asked, self.embed(x))).mean(1)


class Pooled(nn.Module):
    """A query that pools by attention, and a gate that begins closed."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.embed, self.query = nn.Linear(FEATURES, width), nn.Parameter(torch.randn(width))
        self.body, self.gate = nn.Linear(width, width), nn.Parameter(torch.zeros(()))
        self.head, self.drop = nn.Linear(width, CLASSES), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.gate * self.drop(torch.tanh(self.body(h)))
        weights = torch.softmax(h @ self.query, 1)
        return self.head(torch.einsum("nt,ntd->nd", weights, h))


class Rezero(nn.Module):
    """Gates of scalars in a list, applied by the parent."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.alpha = nn.Parameter(torch.zeros(3))
        self.drop, self.head = nn.Dropout(p), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).mean(1)
        for index, layer in enumerate(self.layers):
            h = h + self.alpha[index] * self.drop(F.gelu(layer(h)))
        return self.head(h)


class Cosine(nn.Module):
    """Prototypes on the sphere; the temperature is used in the loss."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES * LENGTH, width), nn.Dropout(p))
        self.prototypes = nn.Parameter(torch.randn(CLASSES, width))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.body(x), dim=-1) @ F.normalize(self.prototypes, dim=-1).t()


class Distances(Cosine):
    """Distances to prototypes."""

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.body(x), self.prototypes)


class Uncertain(nn.Module):
    """Two tasks, weighed by trained variances in the loss (arXiv:1705.07115)."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES * LENGTH, width), nn.Dropout(p))
        self.number, self.kind = nn.Linear(width, 1), nn.Linear(width, CLASSES)
        self.log_sigma = nn.Parameter(torch.zeros(2))

    def loss(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        h = self.body(x)
        errors = torch.stack(
            [F.mse_loss(self.number(h)[:, 0], z), F.cross_entropy(self.kind(h), y)]
        )
        return (errors * torch.exp(-self.log_sigma) + self.log_sigma).sum()


class Gaussian(nn.Module):
    """A trained variance of every output, in a likelihood."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Flatten(), nn.Linear(FEATURES * LENGTH, width), nn.ReLU(), nn.Linear(width, 1)),
        )
        self.log_sigma = nn.Parameter(torch.zeros(1))

    def loss(self, x: Tensor, z: Tensor) -> Tensor:
        variance = (2 * self.log_sigma).exp().expand(len(x), 1)
        return F.gaussian_nll_loss(self.body(x), z.unsqueeze(1), variance)


class Penalised(nn.Module):
    """A penalty on weights in the loss."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES * LENGTH, width)
        self.head = nn.Linear(width, CLASSES)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(self.head(F.relu(self.body(x.flatten(1)))), y)
        return found + 1e-2 * self.body.weight.square().sum()


class Experts(nn.Module):
    """Experts whose weights are one tensor, mixed by a gate."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.inner = nn.Parameter(torch.randn(3, FEATURES, width) / 8)
        self.bias = nn.Parameter(torch.zeros(3, width))
        self.outer = nn.Parameter(torch.randn(3, width, CLASSES) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(torch.einsum("ntf,efw->netw", x, self.inner) + self.bias.view(1, 3, 1, -1))
        y = torch.einsum("netw,ewc->netc", h, self.outer)
        return (y * self.gate(x).softmax(-1).transpose(1, 2).unsqueeze(-1)).sum((1, 2))


class Fourier(nn.Module):
    """A spectral layer with complex weights (arXiv:2010.08895), and trained frequencies."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(FEATURES, width // 2))
        self.weight = nn.Parameter(torch.randn(width, width, 3, dtype=torch.cfloat) / 8)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        phase = x @ self.frequencies
        h = torch.cat([phase.sin(), phase.cos()], -1).transpose(1, 2)
        modes = torch.einsum("nit,iot->not", torch.fft.rfft(h)[..., :3], self.weight)
        return self.head(torch.fft.irfft(modes, n=LENGTH).mean(-1))


class Hyper(nn.Module):
    """A network that makes the weight of another, from a trained code."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(4))
        self.maker = nn.Linear(4, FEATURES * width)
        self.head = nn.Linear(width, CLASSES)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(self.code).view(self.width, FEATURES)
        return self.head(F.relu(F.linear(x, weight)).mean(1))


class Activations(nn.Module):
    """Activations with parameters, a bias a position, a mask in the module."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.body, self.act = nn.Linear(FEATURES, width), nn.PReLU(width)
        self.beta, self.place = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(LENGTH, 1))
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)))
        self.mix = nn.Parameter(torch.zeros(LENGTH, LENGTH))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.body(x).transpose(1, 2)).transpose(1, 2)
        h = h * torch.sigmoid(self.beta * h) + self.place
        return self.head(((self.mix * self.mask) @ h).sum(1))


class InPlace(nn.Module):
    """Activations and sums in place, on what a parameter has just made."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(FEATURES, width), nn.ReLU(inplace=True)
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.drop, self.head = nn.Dropout(p), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        result = self.drop(self.scale * h)
        result += h
        return self.head(self.act(result + self.shift).mean(1))


def _normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[int, float], nn.Module]:
    """Return a maker of a small convolutional network with wrapped layers."""

    def make(width: int, p: float) -> nn.Module:
        return nn.Sequential(
            *(wrap(nn.Conv2d(3, width, 3, padding=1)), nn.ReLU(), nn.Dropout2d(p)),
            *(wrap(nn.Conv2d(width, width, 3, stride=2)), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), wrap(nn.Linear(4 * width, CLASSES))),
        )

    return make


def _old_weight_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(layer)


def _orthogonal(width: int, p: float) -> nn.Module:
    layer = parametrizations.orthogonal(nn.Linear(FEATURES * LENGTH, width))
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), nn.Dropout(p), nn.Linear(width, CLASSES))


class Sequence(nn.Module):
    """Any body over a sequence of features, averaged."""

    def __init__(self, width: int, p: float, body: Callable[[int, float], nn.Module]) -> None:
        super().__init__()
        self.embed, self.body = nn.Linear(FEATURES, width), body(width, p)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).mean(1))


def _rows(n: int) -> Batch:
    return {"x": torch.randn(n, LENGTH, FEATURES), "y": torch.randint(CLASSES, (n,)),
            "z": torch.randn(n)}  # fmt: skip


def _sentences(n: int) -> Batch:
    return {"x": torch.randint(WORDS, (n, LENGTH))}


def _next(net: Any, batch: Batch) -> Tensor:
    scores = net(batch["x"])[:, :-1]
    return F.cross_entropy(scores.transpose(1, 2), batch["x"][:, 1:])


def _scaled(net: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch["x"]) * net.log_scale.exp(), batch["y"])


def _own(net: Any, batch: Batch) -> Tensor:
    return net.loss(batch["x"], batch["y"])


def _case(name: str, make: Any, loss: Any = classify, records: Any = _rows, n: int = 4) -> Case:
    return Case(name, "torch", make, records, loss, n)


_SMALL = partial(images, size=16)

CASES = (
    _case("ViT: class token, places, layer scale", VisionTransformer, records=_SMALL),
    _case("ViT, n = T", VisionTransformer, records=_SMALL, n=5),
    _case("relative position bias", partial(Sequence, body=Biased)),
    _case("relative position bias, n = T", partial(Sequence, body=Biased), n=LENGTH),
    _case("position embedding of arange", Words, _next, _sentences),
    _case("tied by weight.t()", partial(Words, tie="t"), _next, _sentences),
    _case("tied by F.linear", partial(Words, tie="linear"), _next, _sentences),
    _case("prompts in a ParameterList", Prompted),
    _case("DETR queries", Queries),
    _case("pooling by a query, a gate", Pooled),
    _case("ReZero", Rezero),
    _case("temperature in the loss", Cosine, _scaled),
    _case("distances to prototypes", Distances, _scaled),
    _case("log sigma of two tasks in the loss", Uncertain,
          lambda net, b: net.loss(b["x"], b["y"], b["z"])),
    _case("log sigma of a likelihood", Gaussian, lambda net, b: net.loss(b["x"], b["z"])),
    _case("penalty on weights in the loss", Penalised, _own),
    _case("experts in one tensor", Experts),
    _case("experts, n = T", Experts, n=LENGTH),
    _case("complex weights, frequencies", Fourier),
    _case("hyper-network", Hyper),
    _case("in place, after a scale", InPlace),
    _case("PReLU, Swish, mixing of places", Activations),
    _case("weight norm", _normed(parametrizations.weight_norm), records=_SMALL),
    _case("weight norm, old", _normed(_old_weight_norm), records=_SMALL),
    _case("spectral norm", _normed(parametrizations.spectral_norm), records=_SMALL),
    _case("orthogonal", _orthogonal),
)  # fmt: skip
