"""Little models in the words that people use: how layers are called, and what they give."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPGRU, DPLSTM
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.gradients.little_models import (
    Batch,
    Little,
    N,
    Net,
    head,
    images,
    linear,
    net,
    weight,
)

__all__ = ["CALLS"]


class Gate(nn.Module):
    """A layer with a parameter and options, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, full: bool = False
    ) -> Any:
        gate = torch.sigmoid(self.gate) * scale
        y = x * gate if mask is None else (x * gate).masked_fill(mask, 0.0)
        return (y, gate) if full else y


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class ModelOutput(OrderedDict):
    """Attributes for its entries, as in transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


Pair = namedtuple("Pair", ["left", "right"])


class Returning(nn.Module):
    """A layer with a parameter whose output is not a tensor."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.gain, self.kind = nn.Parameter(torch.linspace(0.5, 2, 6)), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x * self.gain)


class Mixing(nn.Module):
    """A layer with a parameter that is called with a list or a dictionary of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.tensor([0.3, 0.7]))

    def forward(self, parts: list[Tensor] | dict[str, Tensor]) -> Tensor:
        parts = list(parts.values()) if isinstance(parts, dict) else parts
        return sum(w * part for w, part in zip(self.shares, parts, strict=True))


class WithProperty(nn.Module):
    """A layer that is made on demand and found by a property."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"body": nn.Linear(6, 6), "head": head()})

    @property
    def body(self) -> nn.Module:
        return self.parts["body"]

    def __getitem__(self, name: str) -> nn.Module:
        return self.parts[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["head"](torch.tanh(self.body(x))) + self["head"](x)


class Inherited(nn.Linear):
    """A linear layer whose forward pass is extended."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias.square()


class Direct(nn.Module):
    """Calls of ``forward``, its own and its layers'."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head.forward(torch.tanh(self.body.forward(x)))


class Bottom(nn.Module):
    """A module with a layer inside and a parameter beside it, which a parent has again."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.shift = nn.Sequential(*inside), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inside(x) + self.shift)


def packed(kind: Callable[..., nn.Module]) -> Callable[[], Net]:
    def forward(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
        sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        state = m.layer(sequence)[1]
        state = state[0] if isinstance(state, tuple) else state
        return m.head(state[-1].to(x.dtype))

    return net(forward, layer=lambda: kind(6, 6, batch_first=True), head=head)


def sequences() -> Batch:
    return {"x": torch.randn(N, 4, 6), "lengths": torch.tensor([2, 4, 1]), "y": torch.arange(N)}


def of_sequences(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"], batch["lengths"]), batch["y"])


def resting() -> nn.Module:
    module = Net(
        lambda m, x: m.head(m.body(x)),
        body=nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Tanh()),
        head=head(),
    )
    module.body.eval()
    return module


def in_place(m: Net, x: Tensor) -> Tensor:
    y = m.body(x)
    y += 1.0
    y.mul_(0.5)
    y[:, 0] = 0.0
    return m.head(F.relu_(y))


def in_bfloat16(m: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.body(x)
    return m.head(y.to(x.dtype))


def without_gradient(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.body(x)
    return m.head(target) + m.head(m.body(x))


def gated(m: Net, x: Tensor) -> Tensor:
    y, gate = m.gate(torch.tanh(m.body(x)), full=True, scale=2.0)
    return m.head(y + 0.1 * gate)


def siamese(m: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"]
    anchor, positive, negative = m(x), m(x * 0.5), m(-x)
    return F.triplet_margin_loss(anchor, positive, negative)


def with_experts(m: Net, x: Tensor) -> Tensor:
    shares = m.router(x).softmax(-1)
    return m.head(sum(shares[:, i : i + 1] * e(x) for i, e in enumerate(m.experts)))


def steps(m: Net, x: Tensor) -> Tensor:
    state = torch.zeros(len(x), 6, dtype=x.dtype)
    for part in (x, x.flip(1), -x):
        state = m.cell(part, state)
    return m.head(state)


def both_states(m: Net, x: Tensor) -> Tensor:
    """The hidden state is made of the cell's, in one call."""
    state = x, torch.zeros_like(x)
    for _ in range(2):
        state = m.cell(x, state)
    return m.head(state[0] + state[1])


def by_hand(m: Net, x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    for _ in range(3):
        state = torch.tanh(m.body(torch.tanh(x)) + m.recurrent(state))
    return m.head(state)


CALLS: Mapping[str, Little] = {
    "by_keyword": Little(
        net(lambda m, x: m.head(input=torch.tanh(m.body(input=x))), body=linear(), head=head)
    ),
    "none_and_options": Little(
        net(
            lambda m, x: m.head(m.gate(m.body(x), None, scale=2.0)),
            body=linear(),
            gate=Gate,
            head=head,
        )
    ),
    "mask_by_keyword": Little(
        net(lambda m, x: m.head(m.gate(m.body(x), mask=x > 0)), body=linear(), gate=Gate, head=head)
    ),
    "flag_and_tuple": Little(net(gated, body=linear(), gate=Gate, head=head)),
    "tuple_with_none": Little(
        net(lambda m, x: m.head(m.own(x)[0]), own=lambda: Returning(lambda y: (y, None)), head=head)
    ),
    "dictionary": Little(
        net(
            lambda m, x: m.head(m.own(x)["hidden"]),
            own=lambda: Returning(lambda y: {"hidden": y, "n": 1}),
            head=head,
        )
    ),
    "dataclass": Little(
        net(lambda m, x: m.head(m.own(x).hidden), own=lambda: Returning(Output), head=head)
    ),
    "model_output": Little(
        net(
            lambda m, x: m.head(m.own(x).hidden),
            own=lambda: Returning(lambda y: ModelOutput(hidden=y)),
            head=head,
        )
    ),
    "named_tuple": Little(
        net(
            lambda m, x: m.head(m.own(x).left + m.own(x).right),
            own=lambda: Returning(lambda y: Pair(y, y * 2)),
            head=head,
        )
    ),
    "two_tensors_out": Little(
        net(
            lambda m, x: m.head(torch.cat(m.own(x), 1)),
            own=lambda: Returning(lambda y: y.chunk(2, 1)),
            head=head,
        )
    ),
    "list_in": Little(
        net(lambda m, x: m.head(m.mix([x, m.body(x)])), mix=Mixing, body=linear(), head=head)
    ),
    "dictionary_in": Little(
        net(
            lambda m, x: m.head(m.mix({"a": x, "b": m.body(x)})),
            mix=Mixing,
            body=linear(),
            head=head,
        )
    ),
    "forward_of_layers": Little(Direct),
    "own_forward": Little(Direct, loss=lambda m, b: F.cross_entropy(m.forward(b["x"]), b["y"])),
    "weight_of_a_layer": Little(
        net(lambda m, x: m.head(F.linear(x, m.body.weight)), body=linear(bias=False), head=head)
    ),
    "layer_and_its_weight": Little(
        net(
            lambda m, x: m.head(m.body(x) + F.linear(x, m.body.weight, m.body.bias)),
            body=linear(),
            head=head,
        )
    ),
    "partial": Little(
        net(
            lambda m, x: m.head(functools.partial(F.linear, weight=m.weight)(x)),
            weight=weight(6, 6),
            head=head,
        )
    ),
    "partial_of_a_layer": Little(
        net(
            lambda m, x: functools.reduce(
                lambda y, f: f(y), [functools.partial(m.body), torch.tanh, m.head], x
            ),
            body=linear(),
            head=head,
        )
    ),
    "lambda": Little(
        net(lambda m, x: m.head((lambda y: y @ m.weight)(x)), weight=weight(6, 6), head=head)
    ),
    "parameter_dictionary": Little(
        net(
            lambda m, x: m.head(x * m.of["gain"] + m.of["shift"]),
            of=lambda: nn.ParameterDict({"gain": torch.ones(6), "shift": torch.zeros(6)}),
            head=head,
        )
    ),
    "parameter_list": Little(
        net(
            lambda m, x: m.head(functools.reduce(lambda y, w: torch.tanh(y @ w), m.all, x)),
            all=lambda: nn.ParameterList([weight(6, 6)() for _ in range(3)]),
            head=head,
        )
    ),
    "indexed_sequential": Little(
        net(
            lambda m, x: m.net[2:](m.net[1](m.net[0](x))),
            net=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), head()),
        )
    ),
    "property": Little(WithProperty),
    "getattr": Little(
        net(
            lambda m, x: m.head(
                functools.reduce(lambda y, i: torch.tanh(getattr(m, f"layer{i}")(y)), range(2), x)
            ),
            layer0=linear(),
            layer1=linear(),
            head=head,
        )
    ),
    "super_forward": Little(
        net(lambda m, x: m.head(m.body(x)), body=lambda: Inherited(6, 6), head=head)
    ),
    "in_place": Little(net(in_place, body=linear(), head=head)),
    "autocast": Little(net(in_bfloat16, body=linear(), head=head), tolerance=2e-2),
    "no_grad": Little(net(without_gradient, body=linear(), head=head)),
    "detached": Little(
        net(lambda m, x: m.head(m.body(x).detach()) + m.head(m.body(x)), body=linear(), head=head)
    ),
    "eval_mode": Little(resting),
    "packed_lstm": Little(packed(DPLSTM), sequences, of_sequences),
    "packed_gru": Little(packed(DPGRU), sequences, of_sequences),
    "siamese": Little(
        net(lambda m, x: m.head(m.body(x).relu()), body=linear(), head=head), loss=siamese
    ),
    "experts": Little(
        net(
            with_experts,
            router=lambda: nn.Linear(6, 2),
            experts=lambda: nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]),
            head=head,
        )
    ),
    "gru_cell": Little(net(steps, cell=lambda: nn.GRUCell(6, 6), head=head)),
    "lstm_cell": Little(net(both_states, cell=lambda: nn.LSTMCell(6, 6), head=head)),
    "rnn_by_hand": Little(net(by_hand, body=linear(), recurrent=linear(), head=head)),
    "bilinear": Little(net(lambda m, x: m.layer(x, x * 2), layer=lambda: nn.Bilinear(6, 6, 4))),
    "prelu": Little(
        net(
            lambda m, x: m.head(m.act(m.body(x))), body=linear(), act=lambda: nn.PReLU(6), head=head
        )
    ),
    "transposed_convolution": Little(
        net(lambda m, x: m.layer(x).flatten(2).mean(2), layer=lambda: nn.ConvTranspose2d(2, 4, 3)),
        images,
    ),
    "nested": Little(
        net(
            lambda m, x: m.head(m.outer(x) * m.gain),
            outer=lambda: Bottom(nn.Linear(6, 6), Bottom(nn.Linear(6, 6))),
            gain=weight(6),
            head=head,
        )
    ),
    "flattened": Little(
        net(
            lambda m, x: m.head(m.conv(x).flatten(1)[:, :6]),
            conv=lambda: nn.Conv2d(2, 3, 3),
            head=head,
        ),
        images,
    ),
    "channels_last": Little(
        net(
            lambda m, x: m.head(m.conv(x.to(memory_format=torch.channels_last)).flatten(1)[:, :6]),
            conv=lambda: nn.Conv2d(2, 3, 3),
            head=head,
        ),
        images,
    ),
}
