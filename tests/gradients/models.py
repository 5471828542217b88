"""Small models in the words that people use, with batch and loss, and the engines that take them."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_dp.gradients.fix import FixedNorm

__all__ = ["EXAMPLES", "Batch", "Example", "Net", "net"]

Batch = dict[str, Any]
CLASSES = 3

ALONE = "records one_by_one"
ALL = f"{ALONE} layers ghost hooks"
HOOKED = f"{ALONE} hooks"
# torch differentiates cdist twice from 2.15 on.
TWICE = "one_by_one" if torch.__version__ >= (2, 15) else ""
LAYERS = f"{ALONE} layers ghost"
PRODUCTS = "records layers one_by_one"
Words = namedtuple("Words", ["text", "label"])


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Net(nn.Module):
    """A module of parts, and a function that runs it."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def net(function: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], Net]:
    """Make a module whenever it is called."""
    return lambda: Net(function, **{name: make() for name, make in parts.items()})


def labels(n: int) -> Tensor:
    return torch.randint(CLASSES, (n,))


def features(n: int) -> Batch:
    return {"x": torch.randn(n, 6), "y": labels(n)}


def tokens(n: int) -> Batch:
    return {"x": torch.randint(7, (n, 5)), "y": labels(n)}


def images(n: int, *size: int) -> Batch:
    return {"x": torch.randn(n, 2, *(size or (8, 8))), "y": labels(n)}


def sequences(n: int) -> Batch:
    return {"x": torch.randn(n, 5, 6), "y": labels(n)}


def masked_sequences(n: int) -> Batch:
    """Some positions are none, never the first."""
    valid = torch.rand(n, 5) > 0.4
    valid[:, 0] = True
    return {**sequences(n), "valid": valid}


def named(n: int) -> Batch:
    return {**features(n), "name": ["ab"[i % 2] for i in range(n)]}


def scores(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


@dataclass(frozen=True)
class Example:
    """A model with its batch.

    Args:
        make: the model.
        batch: of n records; each part has a row for each.
        loss: of the model and a packed batch, the mean over its records.
        by: the engines that are right about it; the others must refuse it.
        pack: makes what ``training_step`` takes.
        products: the engines among them that find its second derivatives.
        mixes: a whole batch of it is something else than its records.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch] = features
    loss: Callable[[nn.Module, Any], Tensor] = scores
    by: str = ALONE
    pack: Callable[[Batch], Any] = lambda batch: batch
    products: str = PRODUCTS
    mixes: bool = False


def linear(into: int = 6, out: int = 6, **options: Any) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(into, out, **options)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) / 2)


head, words = linear(out=CLASSES), lambda: nn.Embedding(7, 6)


def of(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def on_images(make: Callable[[], nn.Module], *size: int, by: str = ALL) -> Example:
    """An example of a layer that gives three channels or more."""
    forward = net(lambda m, x: m.layer(x).tanh().flatten(2).mean(2)[:, :CLASSES], layer=make)
    return Example(forward, lambda n: images(n, *size), by=by)


def of_hidden(function: Callable[[Net, Tensor], Tensor], batch: Any = features, by: str = ALONE,
              products: str = PRODUCTS, mixes: bool = False, **parts: Any) -> Example:  # fmt: skip
    """An example with a linear body, whose output a function takes to a head."""
    return Example(
        net(lambda m, x: m.head(function(m, x)), body=linear(), head=head, **parts),
        batch,
        by=by,
        products=products,
        mixes=mixes,
    )


MLP = of(linear(), nn.Tanh, head)


def frozen(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = of(linear(), nn.Tanh, linear(), nn.Tanh, head)()
        module.get_parameter(name).requires_grad_(False)
        return module

    return make


def with_constants() -> nn.Module:
    """A normalisation with the statistics of an earlier training."""
    norm = nn.BatchNorm2d(3, eps=1e-2)
    norm(3 * torch.randn(7, 3, 5, 5) + torch.arange(3.0).view(3, 1, 1))
    return nn.Sequential(nn.Conv2d(2, 3, 3), FixedNorm(norm))


def frozen_batch_norm() -> nn.Module:
    norm = nn.BatchNorm2d(3).requires_grad_(False)
    norm(3 * torch.randn(7, 3, 5, 5))
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm.eval())


def folded_attention(m: Net, x: Tensor) -> Tensor:
    """Each record's attention sees two sequences, as channels that are folded into rows."""
    y = m.body(torch.cat([x, x.flip(1)]))
    return m.attention(y, y, y)[0].unflatten(0, (2, -1)).sum(0).mean(1)


def of_constants(m: Net, x: Tensor) -> Tensor:
    """A layer of a constant meets records twice; of another one after a parameter is added in place."""
    given = torch.arange(12.0, dtype=x.dtype).view(2, 6)
    made, changed = m.place(given), m.place(given[:1])
    changed += m.shift
    y = m.body(x) + made[:1] + changed
    return (y.unsqueeze(1) * m.norm(given[1]) + made).tanh().mean(1) * made.mean()


def tied_table(m: Net, x: Tensor) -> Tensor:
    return m.out(torch.tanh(m.body(m.words(x))).mean(1))


def tied_embedding() -> nn.Module:
    module = net(tied_table, words=words, body=linear(), out=linear(6, 7, bias=False))()
    module.out.weight = module.words.weight
    return module


def shared_by_three() -> nn.Module:
    module = of(linear(), nn.Tanh, linear(), nn.Tanh, linear(), head)()
    module[2].weight = module[4].weight = module[0].weight
    module[4].bias = module[0].bias
    return module


def tied_norm() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), head())
    module[1].bias = module[1].weight
    return module


def bias_on_the_head() -> nn.Module:
    """The head of a masked language model lists its decoder's bias."""
    module = net(lambda m, x: m.decoder(torch.tanh(m.dense(x))), dense=linear(), decoder=head)()
    module.bias = module.decoder.bias
    return module


def block(m: Net, x: Tensor) -> Tensor:
    x = m.words(x)
    q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (x + m.mlp(x)).mean(1)


class Swin(nn.Module):
    """Attention with a table of biases for relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.table = nn.Linear(6, 18), head(), weight(9)()
        places = torch.arange(5)
        self.register_buffer("places", places[:, None] - places + 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        shares = q @ k.transpose(1, 2) / math.sqrt(6) + self.table[self.places]
        return self.out((shares.tril().softmax(-1) @ v).mean(1))


def class_token(m: Net, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), m.body(x)], 1) + m.places
    return (x + m.scale * m.mlp(m.norm(x)))[:, 0]


def standardised(m: Net, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(m.conv.weight, dim=(1, 2, 3), keepdim=True)
    return F.conv2d(x, (m.conv.weight - mean) / (var + 1e-5).sqrt(), m.conv.bias)


def in_place(m: Net, x: Tensor) -> Tensor:
    y = m.body(x)
    y += 1.0
    y.mul_(0.5)
    y[:, 0] = 0.0
    return F.relu_(y)


def written(m: Net, x: Tensor) -> Tensor:
    hidden = torch.zeros(len(x), 6, dtype=x.dtype)
    hidden[:, :3] = m.body(x)[:, :3]
    hidden[:, 3] = m.token[3]
    return hidden


def by_mask(m: Net, x: Tensor) -> Tensor:
    """The first of three experts that each position chooses."""
    h, out = m.body(x), torch.zeros_like(x)
    chosen = m.router(x).argmax(-1)
    for i, expert in enumerate(m.experts):
        out[chosen == i] = expert(h[chosen == i]) * m.gain[i]
    return out.mean(1)


def by_index(m: Net, x: Tensor) -> Tensor:
    h = m.body(x).reshape(-1, 6)
    out, chosen = h.new_zeros(h.shape), m.router(x).argmax(-1).flatten()
    for i, expert in enumerate(m.experts):
        places = (chosen == i).nonzero(as_tuple=True)[0]
        out = out.index_add(0, places, expert(h[places]) * m.gain[i])
    return out.view_as(x).mean(1)


def in_groups(m: Net, x: Tensor) -> Tensor:
    chosen = m.router(x).argmax(-1).flatten()
    order = chosen.argsort(stable=True)
    groups = m.body(x).reshape(-1, 6)[order].split(chosen.bincount(minlength=3).tolist())
    out = torch.cat([expert(group) for expert, group in zip(m.experts, groups, strict=True)])
    return out[order.argsort()].view_as(x).mean(1)


def routed(function: Any) -> Example:
    experts = lambda: nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])  # noqa: E731
    parts = {"experts": experts, "gain": weight(3, 6), "router": linear(6, 3)}
    return of_hidden(function, sequences, **parts)


def branches(m: Net, x: Tensor) -> Tensor:
    return m.body(x) if x[0, 0] > 0 else torch.sin(x) * m.gain


def by_item(m: Net, x: Tensor) -> Tensor:
    return m.body(x) * (2.0 if x.abs().max().item() > 1.5 else 1.0)


def in_turn(m: Net, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(m.body(row)) * m.gain for row in x])


def over_valid(module: nn.Module, batch: Batch) -> Tensor:
    hidden = module(batch["x"]).square().sum(2)
    return ((hidden * batch["valid"]).sum(1) / batch["valid"].sum(1)).mean()


def of_selected(module: nn.Module, batch: Batch) -> Tensor:
    """Each record's mean over the positions that it has, record by record."""
    pairs = zip(module(batch["x"]).square().sum(2), batch["valid"], strict=True)
    return torch.stack([each.masked_select(valid).mean() for each, valid in pairs]).mean()


def penalised(module: nn.Module, batch: Batch) -> Tensor:
    return scores(module, batch) + 0.1 * sum(p.square().sum() for p in module.parameters())


def of_positions(module: nn.Module, batch: Batch) -> Tensor:
    """Several targets, of which one is ignored."""
    found, y = module(batch["x"]), batch["y"]
    targets = torch.stack([y, torch.full_like(y, -100), y], 1)
    return F.cross_entropy(torch.stack([found, 2 * found, -found], 2), targets)


def in_steps(m: Net, x: Tensor) -> Tensor:
    state = m.body(x[:, 0]), x[:, 0]
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    return state[0]


def uncertain(m: Net, batch: Batch) -> Tensor:
    """Two tasks, weighted by learnt variances."""
    found = m(batch["x"])
    losses = F.cross_entropy(found, batch["y"]), F.mse_loss(found[:, 0], batch["x"][:, 0])
    return sum(torch.exp(-s) * loss + s for s, loss in zip(m.logs, losses, strict=True))


def clip_like(m: Net, batch: Batch) -> Tensor:
    """Scores over fixed classes with a learnt temperature, in the loss."""
    found = F.normalize(m.body(batch["x"]), dim=-1) @ F.normalize(m.classes, dim=-1).t()
    return F.cross_entropy(found * m.scale.exp(), batch["y"])


def filtered(m: Net, x: Tensor) -> Tensor:
    """Complex products with parameters on either side, and with a real one."""
    y = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.filter) * m.gain, n=6)
    return y + m.body(x)


def of_words(module: nn.Module, batch: Batch) -> Tensor:
    """Texts choose what is done."""
    signs = torch.tensor([1.0 if each == "a" else -1.0 for each in batch["name"]])
    return F.cross_entropy(module(batch["x"] * signs.to(batch["x"])[:, None]), batch["y"])


def kinds() -> dict[str, Example]:
    """Losses of one small network, and containers of its batch."""
    losses: dict[str, Any] = {
        "label smoothing": lambda s, y, x: F.cross_entropy(s, y, label_smoothing=0.1),
        "soft targets": lambda s, y, x: F.cross_entropy(s, x[:, :CLASSES].softmax(1)),
        "nll": lambda s, y, x: F.nll_loss(s.log_softmax(1), y),
        "sums": lambda s, y, x: F.cross_entropy(s, y, reduction="sum") / len(y),
        "focal": lambda s, y, x: F.cross_entropy(s, y, reduction="none").square().mean(),
        "hinge": lambda s, y, x: (1 - s.gather(1, y[:, None])).relu().mean(),
        "gathered": lambda s, y, x: -s.log_softmax(1).gather(1, y[:, None]).mean(),
        "distilled": lambda s, y, x: F.mse_loss(s, s.detach() * 0.5),
    }
    found = {
        f"loss: {name}": Example(
            MLP,
            loss=lambda m, b, of=of: of(m(b["x"]), b["y"], b["x"]),
            by=ALL,
            # A derivative of zero that is none to torch: "ZeroTensors are immutable".
            products=PRODUCTS.replace("layers ", "") if name == "distilled" else PRODUCTS,
        )
        for name, of in losses.items()
    }
    packs: dict[str, tuple[Any, Any]] = {
        "dataclass": (lambda b: Pair(b["x"], b["y"]), lambda b: (b.x, b.y)),
        "list": (lambda b: [b["x"], b["y"]], lambda b: b),
        "named tuple": (lambda b: Words(b["x"], b["y"]), lambda b: (b.text, b.label)),
        "nested": (lambda b: {"in": {"x": [b["x"]]}, "y": (b["y"],)}, _unnested),
        "constant": (lambda b: {**b, "k": 2.0}, lambda b: (b["x"] * b["k"], b["y"])),
    }
    for name, (pack, unpack) in packs.items():
        loss = lambda m, b, of=unpack: F.cross_entropy(m(of(b)[0]), of(b)[1])  # noqa: E731
        found[f"batch: {name}"] = Example(MLP, loss=loss, pack=pack, by=ALL)
    return found


def _unnested(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["in"]["x"][0], batch["y"][0]


EXAMPLES: Mapping[str, Example] = {
    "mlp": Example(MLP, by=ALL),
    "cnn": on_images(
        of(lambda: nn.Conv2d(2, 4, 3, padding=1), lambda: nn.GroupNorm(2, 4), nn.ReLU,
           lambda: nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False)), by=ALL,
    ),
    "conv transposed": on_images(lambda: nn.ConvTranspose2d(2, 4, 3), by=HOOKED),
    "conv on small maps": on_images(of(lambda: nn.Conv2d(2, 40, (1, 2)), nn.Tanh,
                                       lambda: nn.Conv2d(40, 36, (3, 2), padding=(1, 0))), 4, 4),
    "channels last": on_images(
        of(lambda: nn.Conv2d(2, 4, 3), lambda: nn.GroupNorm(2, 4),
           lambda: nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last))),
    "summed over space": Example(net(
        lambda m, x: m.norm(m.conv(x)).sum((2, 3)), conv=lambda: nn.Conv2d(2, 3, 3),
        norm=lambda: nn.GroupNorm(1, 3)), images, by=ALL),
    "standardised conv": Example(
        net(lambda m, x: standardised(m, x).mean((2, 3)), conv=lambda: nn.Conv2d(2, 3, 3)), images
    ),
    "instance norm": on_images(
        of(lambda: nn.Conv2d(2, 3, 3), lambda: nn.InstanceNorm2d(3, affine=True))),
    "fixed norm": on_images(with_constants, by=LAYERS),
    "frozen batch norm": on_images(frozen_batch_norm),
    "layer norm of images": on_images(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.LayerNorm((3, 6, 6)))),
    "norms": Example(of(linear(), lambda: nn.LayerNorm(6), nn.Tanh, lambda: nn.RMSNorm(6), head),
                     by=ALL),
    "positions": Example(net(lambda m, x: m.head(torch.tanh(m.body(x)).mean(1)), body=linear(),
                             head=head), sequences, by=ALL),
    "positions, masked": Example(MLP, masked_sequences, over_valid, by=ALL),
    "positions, selected": Example(MLP, masked_sequences, of_selected, ALL),
    "embedding": Example(net(lambda m, x: m.head(m.words(x).tanh().mean(1)), words=words,
                             head=head), tokens, by=ALL),
    "embedding, padded": Example(net(
        lambda m, x: m.head(m.words(x).tanh().mean(1)),
        words=lambda: nn.Embedding(7, 6, padding_idx=-2), head=head), tokens, by=LAYERS),
    "embedding of places": of_hidden(
        lambda m, x: torch.tanh(m.body(m.words(x) + m.places(torch.arange(5)))).mean(1), tokens,
        words=words, places=words),
    "class token": of_hidden(
        class_token, sequences, HOOKED, token=weight(1, 1, 6), places=weight(1, 6, 6), scale=weight(6),
        mlp=of(linear(), nn.GELU, linear()), norm=lambda: nn.LayerNorm(6)),
    "prompt": of_hidden(
        lambda m, x: torch.tanh(m.body(torch.cat(
            [m.prompt.weight.expand(len(x), -1, -1), m.words(x)], 1))).mean(1), tokens,
        words=words, prompt=lambda: nn.Embedding(2, 6)),
    "layers of constants": of_hidden(of_constants, by=HOOKED, place=linear(), shift=weight(6),
                                     norm=lambda: nn.LayerNorm(6)),
    "transformer block": Example(net(
        lambda m, x: m.head(block(m, x)), words=words, norm=lambda: nn.LayerNorm(6), head=head,
        qkv=linear(out=18), mlp=of(linear(), nn.GELU, linear())), tokens, by=ALL),
    "swin": Example(Swin, sequences),
    "multi-head attention": of_hidden(
        lambda m, x: m.attention(m.body(x), x, x)[0].mean(1), sequences,
        attention=lambda: nn.MultiheadAttention(6, 2, batch_first=True)),
    "attention of folded rows": of_hidden(
        folded_attention, sequences, attention=lambda: nn.MultiheadAttention(6, 2, batch_first=True)),
    "dp lstm": Example(net(lambda m, x: m.head(m.lstm(x)[0][:, -1]), head=head,
                           lstm=lambda: DPLSTM(6, 6, batch_first=True)), sequences, by=HOOKED),
    "gru cell": of_hidden(lambda m, x: m.cell(x, m.body(x)), by=HOOKED, cell=lambda: nn.GRUCell(6, 6)),
    "lstm cell": of_hidden(in_steps, sequences, cell=lambda: nn.LSTMCell(6, 6)),
    "rnn cells": of_hidden(lambda m, x: m.relu(x, m.tanh(m.body(x))), tanh=lambda: nn.RNNCell(6, 6),
                           relu=lambda: nn.RNNCell(6, 6, bias=False, nonlinearity="relu")),
    "deep sets": of_hidden(lambda m, x: m.outer(m.body(x).relu().sum(1)).relu(), sequences, by=ALL,
                           outer=linear()),
    "tied embedding": Example(tied_embedding, tokens, by=ALL),
    "tied by transpose": Example(net(lambda m, x: m.body(m.words(x).mean(1)) @ m.words.weight.t(),
                                     words=words, body=linear()), tokens),
    "shared by three": Example(shared_by_three, by=ALL),
    "tied norm": Example(tied_norm, by=LAYERS),
    "bias on the head": Example(bias_on_the_head, by=ALL),
    "layer used twice": of_hidden(lambda m, x: torch.tanh(m.body(torch.tanh(m.body(x)))), by=ALL),
    "frozen bias": Example(frozen("0.bias"), by=ALL),
    "frozen weight": Example(frozen("2.weight"), by=ALL),
    "unused layer": of_hidden(lambda m, x: m.body(x), by=ALL, other=linear()),
    "own gain": Example(net(lambda m, x: m.head(m.gain(x)), head=head, gain=net(
        lambda g, x: x * g.weight + g.shift, weight=weight(6), shift=weight())),
        by=HOOKED),
    "raw parameters": of_hidden(
        lambda m, x: torch.tanh(x @ m.first + m.shift[0]) @ (m.a @ m.b), by=HOOKED, first=weight(6, 6),
        a=weight(6, 2), b=weight(2, 6), shift=weight(2, 6)),
    "parameter lists": of_hidden(
        lambda m, x: torch.tanh(x @ m.all[0] * m.of["gain"]) @ m.all[1],
        all=lambda: nn.ParameterList([weight(6, 6)() for _ in range(2)]),
        of=lambda: nn.ParameterDict({"gain": weight(6)()})),
    "weight outside its layer": of_hidden(lambda m, x: F.linear(x, m.body.weight) + m.body(x)),
    "weight norm": of_hidden(lambda m, x: m.normed(m.body(x)), by=HOOKED, products="one_by_one",
                             normed=lambda: parametrizations.weight_norm(nn.Linear(6, 6))),
    "orthogonal": of_hidden(lambda m, x: m.turned(m.body(x)),
                            turned=lambda: parametrizations.orthogonal(nn.Linear(6, 6))),
    "hypernetwork": of_hidden(lambda m, x: F.linear(x, m.maker(m.code).view(6, 6)), by=HOOKED,
                              maker=linear(3, 36), code=weight(3)),
    "cosine": of_hidden(lambda m, x: F.normalize(m.body(x)) @ F.normalize(m.more).T, by=HOOKED,
                        more=weight(6, 6)),
    "prototypes": of_hidden(lambda m, x: torch.cdist(m.body(x), m.centres), by=HOOKED,
                            products=TWICE, centres=weight(6, 6)),
    "einsum": of_hidden(lambda m, x: torch.einsum("ntd,dtc->nc", m.body(x), m.more), sequences, HOOKED,
                        more=weight(6, 5, 6)),
    "looked up": of_hidden(lambda m, x: m.body(m.table[x]).mean(1), tokens, HOOKED, table=weight(7, 6)),
    "complex": of_hidden(filtered, by=HOOKED, filter=weight(4, 2), gain=weight(4)),
    "complex weights": of_hidden(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(m.body(x)) * m.filter, n=6).to(x.dtype) * m.gain,
        by="records one_by_one", gain=weight(6),
        filter=lambda: nn.Parameter(torch.randn(4, dtype=torch.complex128))),
    "complex layer": of_hidden(
        lambda m, x: m.turn((m.body(x) + 1j * x).cdouble()).abs().to(x.dtype), by="records one_by_one",
        turn=lambda: nn.Linear(6, 6, dtype=torch.complex128)),
    "prelu": of_hidden(lambda m, x: m.act(m.body(x)), by=HOOKED, act=lambda: nn.PReLU(6)),
    "bilinear": of_hidden(lambda m, x: m.two(m.body(x), x), by=HOOKED, two=lambda: nn.Bilinear(6, 6, 6)),
    "in place": of_hidden(in_place, by=ALL),
    "in place, by a layer": Example(of(linear(), lambda: nn.ReLU(inplace=True), head), by=ALL),
    "written": of_hidden(written, token=weight(6)),
    "detached": of_hidden(lambda m, x: m.body(x).detach() + m.body(x).tanh(), by=ALL),
    "routed by mask": routed(by_mask),
    "routed by index": routed(by_index),
    "routed in groups": routed(in_groups),
    "branches": of_hidden(branches, mixes=True, gain=weight(6)),
    "by item": of_hidden(by_item, mixes=True),
    "in turn": of_hidden(in_turn, by=HOOKED, gain=weight(6)),
    "named": Example(MLP, named, of_words, by=ALL),
    "penalty": Example(MLP, loss=penalised),
    "several targets": Example(MLP, loss=of_positions, by=ALL),
    "uncertain": Example(net(lambda m, x: m.head(m.body(x)), body=linear(), head=head,
                             logs=weight(2)), loss=uncertain),
    "temperature": Example(net(None, body=linear(), classes=weight(CLASSES, 6), scale=weight()),
                           loss=clip_like),
    "checkpoint": of_hidden(
        lambda m, x: checkpoint(m.body, m.first(x), use_reentrant=False),
        by="one_by_one layers ghost hooks", first=linear()),
    **kinds(),
}  # fmt: skip


class Copies(torch.autograd.Function):
    """A function that returns what it is given; cases add a backward pass."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass
