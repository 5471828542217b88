"""Grids of layer options: the cases of Opacus' tests of gradients per sample, as users call the layers.

The options are those of ``opacus/tests/grad_samples``, where Hypothesis draws from them; here each
combination has an identifier, and a test takes all of them or a sample that is always the same.
Batches have records first, as they come from a loader; a model that wants them elsewhere turns them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

__all__ = ["EVERY", "GRIDS", "Case", "cases"]

Records: TypeAlias = Tensor | list[Tensor]
Refusals: TypeAlias = Mapping[str, str]

# A layer that is called with records in its second dimension, and does not say so.
SECOND = "records|rows"
HOOKS_SECOND = r"second dimension\. Use engine='bookkeeping'"
HOOKS_PACKED = r"packed sequences.*Use engine='bookkeeping'"
BAG = "EmbeddingBag|embedding_bag"
TRACED = "records in one dimension"  # without rules, functions on some of the rows are refused
EVERY = ("auto", "bookkeeping", "functional", "hooks")


@dataclass(frozen=True)
class Case:
    """One combination of options.

    Args:
        options: by name.
        make: the model.
        batch: its arguments, each with a row for each record.
        refused: by engine, the refusal that may come.
    """

    options: Mapping[str, Any]
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Records, ...]]
    refused: Refusals = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(f"{name}={_short(value)}" for name, value in self.options.items())


def _short(value: Any) -> str:
    return getattr(value, "__name__", str(value).replace(" ", ""))


class RecordsSecond(nn.Module):
    """A layer that sees (positions, records, ...)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Recurrent(nn.Module):
    """A recurrent layer, of which the outputs of all steps are used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.batch_first:
            return self.layer(x)[0]
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


class Packed(nn.Module):
    """A recurrent layer on sequences of several lengths; the outputs of each one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> list[Tensor]:
        first = self.layer.batch_first
        x = x if first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, first, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return [row[:length] for row, length in zip(padded, lengths, strict=True)]


class SelfAttention(nn.Module):
    """Attention from three inputs that stand side by side in the last dimension."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*x.transpose(0, 1).unbind(-1))[0].transpose(0, 1)


class Bags(nn.Module):
    """A bag of any number of words for each record, one after the other, with offsets."""

    def __init__(self, layer: nn.EmbeddingBag) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, bags: list[Tensor]) -> Tensor:
        ends = torch.tensor([len(bag) for bag in bags]).cumsum(0)
        return self.layer(torch.cat(bags), torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]]))


def _expanded(channels: int) -> int:
    return 2 * channels


def _shrunk(channels: int) -> int:
    return max(1, channels // 2)


def _product(**options: Sequence[Any]) -> Iterator[dict[str, Any]]:
    return (
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    )


def _convolution(
    kind: Callable[..., nn.Module], sizes: Mapping[str, Sequence[int]], **options: Sequence[Any]
) -> Iterator[Case]:
    for chosen in _product(N=(1, 4), C=(1, 3, 32), **sizes, out=(_expanded, _shrunk), **options):
        rest = {name: chosen[name] for name in options}
        inputs, outputs, groups = chosen["C"], chosen["out"](chosen["C"]), chosen["groups"]
        same = rest.get("padding") == "same" and rest["stride"] != 1
        if same or inputs % groups or outputs % groups:
            continue
        shape = (chosen["N"], inputs, *(chosen[name] for name in sizes))
        yield Case(
            chosen,
            lambda inputs=inputs, outputs=outputs, rest=rest: kind(inputs, outputs, **rest),
            lambda shape=shape: (torch.randn(shape),),
        )


def _conv1d() -> Iterator[Case]:
    return _convolution(
        nn.Conv1d,
        {"W": (6, 9)},
        kernel_size=(2, 3),
        stride=(1, 2),
        padding=(0, 1, 2),
        groups=(1, 2, 3, 4, 8),
    )


def _conv2d() -> Iterator[Case]:
    return _convolution(
        nn.Conv2d,
        {"H": (11, 16), "W": (13,)},
        kernel_size=(2, 3, 4),
        stride=(1, 2),
        padding=(0, 2, "same", "valid"),
        dilation=(1, 2, 3),
        groups=(1, 2, 3, 16),
    )


def _conv2d_of_columns() -> Iterator[Case]:
    """Kernel and dilation differ between the dimensions, of which one has a single entry."""
    for options in _product(N=(1, 3), dilation=((1, 1), (2, 1), (3, 1)), bias=(False, True)):
        rest = {"dilation": options["dilation"], "bias": options["bias"]}
        yield Case(
            options,
            lambda rest=rest: nn.Conv2d(1, 1, (3, 1), **rest),
            lambda n=options["N"]: (torch.randn(n, 1, 8, 1),),
        )


def _conv3d() -> Iterator[Case]:
    return _convolution(
        nn.Conv3d,
        {"D": (3, 6), "H": (7,), "W": (8,)},
        kernel_size=(2, 3, (1, 2, 3)),
        stride=(1, 2, (1, 2, 3)),
        padding=(0, 2, (1, 2, 3), "same", "valid"),
        dilation=(1, (1, 2, 2)),
        groups=(1, 2, 3, 16),
    )


def _linear() -> Iterator[Case]:
    for options in _product(
        N=(1, 4), Z=(1, 3), H=(None, 2), W=(10, 17), bias=(True, False), batch_first=(True, False)
    ):
        shape = [options[name] for name in "NZHW" if options[name] is not None]
        is_first, width = options["batch_first"], shape[-1]
        if not is_first and options["N"] == options["Z"]:
            continue  # the same either way

        def make(width=width, bias=options["bias"], is_first=is_first) -> nn.Module:
            layer = nn.Linear(width, width + 2, bias=bias)
            return layer if is_first else RecordsSecond(layer)

        refused = {} if is_first else dict.fromkeys(EVERY, SECOND)
        yield Case(options, make, lambda shape=shape: (torch.randn(shape),), refused)


def _embedding() -> Iterator[Case]:
    for options in _product(
        V=(2, 32), D=(10, 17), shape=((9,), (20, 5), (20, 12, 3), (20, 5, 4, 2))
    ):
        v, d, shape = options.values()
        yield Case(
            options,
            lambda v=v, d=d: nn.Embedding(v, d),
            lambda v=v, shape=shape: (torch.randint(v, shape),),
        )


def _embedding_bag() -> Iterator[Case]:
    for options in _product(N=(4, 8), V=(10, 32), D=(10, 17), mode=("sum", "mean", "max")):
        n, v, d, mode = options.values()
        yield Case(
            options,
            lambda v=v, d=d, mode=mode: nn.EmbeddingBag(v, d, mode=mode),
            lambda v=v, n=n: (torch.randint(v, (n, 5)),),
            {"hooks": BAG},
        )


def _embedding_bag_with_offsets() -> Iterator[Case]:
    for options in _product(N=(4, 8), V=(10, 32), D=(10, 17), mode=("sum", "mean")):
        n, v, d, mode = options.values()
        yield Case(
            options,
            lambda v=v, d=d, mode=mode: Bags(nn.EmbeddingBag(v, d, mode=mode)),
            lambda n=n, v=v: ([torch.randperm(v)[: 1 + i % 5] for i in range(n)],),
            dict.fromkeys(EVERY, BAG),
        )


def _group_norm() -> Iterator[Case]:
    for options in _product(N=(1, 32), C=(16,), size=((10,), (8, 10)), num_groups=(1, 4, 16)):
        n, c, size, groups = options.values()
        yield Case(
            options,
            lambda groups=groups, c=c: nn.GroupNorm(groups, c),
            lambda shape=(n, c, *size): (torch.randn(shape),),
        )


def _instance_norm() -> Iterator[Case]:
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    for options in _product(kind=kinds, N=(1, 4), C=(1, 3), H=(4, 8), W=(5, 10)):
        kind, n, c, height, width = options.values()
        shape = (n, c, *(2, height, width)[2 - kinds.index(kind) :])
        yield Case(
            options,
            lambda kind=kind, c=c: kind(c, affine=True, track_running_stats=False),
            lambda shape=shape: (torch.randn(shape),),
        )


def _norm_over_last(kind: Callable[..., nn.Module]) -> Iterator[Case]:
    for options in _product(
        N=(1, 4), Z=(1, 3), H=(1, 2), W=(5, 10), input_dim=(2, 3, 4), over=(1, 2, 3)
    ):
        n, z, h, w, dimensions, over = options.values()
        shape = {2: (n, w), 3: (n, z, w), 4: (n, z, h, w)}[dimensions]
        if over < dimensions:
            yield Case(
                options,
                lambda shape=shape, over=over: kind(shape[-over:], elementwise_affine=True),
                lambda shape=shape: (torch.randn(shape),),
            )


def _layer_norm() -> Iterator[Case]:
    return _norm_over_last(nn.LayerNorm)


def _rms_norm() -> Iterator[Case]:
    return _norm_over_last(nn.RMSNorm)


def _sequence_bias() -> Iterator[Case]:
    for options in _product(N=(1, 4), T=(10, 20), D=(4, 8), batch_first=(True, False)):
        n, t, d, is_first = options.values()

        def make(d=d, is_first=is_first) -> nn.Module:
            layer = SequenceBias(d, is_first)
            return layer if is_first else RecordsSecond(layer)

        refused = {"hooks": "layer alone"}
        yield Case(options, make, lambda n=n, t=t, d=d: (torch.randn(n, t, d),), refused)


_OPTIONS_OF_ATTENTION = ("bias", "add_bias_kv", "add_zero_attn")


def _attention() -> Iterator[Case]:
    both = (True, False)
    for options in _product(
        N=(1, 4), T=(16,), P=(1, 2), bias=both, add_bias_kv=both, add_zero_attn=both, kdim=both
    ):
        flags = {name: options[name] for name in _OPTIONS_OF_ATTENTION}
        flags |= {"kdim": 4, "vdim": 4} if options["kdim"] else {}

        def make(heads=options["P"], flags=flags) -> nn.Module:
            return SelfAttention(DPMultiheadAttention(4, heads, **flags))

        refused = {"hooks": HOOKS_SECOND}
        if options["add_bias_kv"]:
            refused["functional"] = TRACED
        shape = (options["N"], options["T"], 4, 3)
        yield Case(options, make, lambda shape=shape: (torch.randn(shape),), refused)


def _recurrent() -> Iterator[Case]:
    both = (True, False)
    for options in _product(
        kind=(DPRNN, DPGRU, DPLSTM),
        N=(1, 3),
        T=(1, 3),
        num_layers=(1, 2),
        bias=both,
        batch_first=both,
        bidirectional=both,
        packed=(False, True),
    ):
        kind, n, t, *_, packed = options.values()
        flags = {
            name: options[name] for name in ("num_layers", "bias", "batch_first", "bidirectional")
        }

        def make(kind=kind, flags=flags, packed=packed) -> nn.Module:
            layer = kind(4, 8, **flags)
            return Packed(layer) if packed else Recurrent(layer)

        lengths = [max(1, t - i) for i in range(n)][::-1]

        def batch(n=n, t=t, packed=packed, lengths=tuple(lengths)) -> tuple[Tensor, ...]:
            x = torch.randn(n, t, 4)
            return (x, torch.tensor(lengths)) if packed else (x,)

        refused = {"hooks": HOOKS_PACKED, "functional": TRACED} if packed else {}
        yield Case(options, make, batch, refused)


GRIDS: Mapping[str, Callable[[], Iterator[Case]]] = {
    "conv1d": _conv1d,
    "conv2d": _conv2d,
    "conv2d_of_columns": _conv2d_of_columns,
    "conv3d": _conv3d,
    "linear": _linear,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "embedding_bag_with_offsets": _embedding_bag_with_offsets,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "sequence_bias": _sequence_bias,
    "attention": _attention,
    "recurrent": _recurrent,
}


def cases(kind: str, most: int) -> list[Case]:
    """Return all combinations of a grid, or a sample of them that is always the same."""
    found = list(GRIDS[kind]())
    return found if len(found) <= most else random.Random(kind).sample(found, most)
