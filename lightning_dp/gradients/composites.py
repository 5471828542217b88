"""Functions of torch that hold parameters and samples at once, made of simpler ones or run whole.

Recurrent layers are one loop over time for all samples, of which all steps are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.gradients.record_calls import CallRecorder, is_sample, outside, rows
from lightning_dp.gradients.rules import FunctionLayer, linear

__all__ = ["COMPOSITES"]


# -- attention, and losses of classes -------------------------------------------------------------


def _attention(
    recorder: CallRecorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Call fused attention on all samples, as on any batch.

    Dimensions are (heads, T, width) or (b, heads, T, width) for one sample.
    """
    n, dims = recorder.n, query.dim()
    if dims not in (3, 4) or key.dim() != dims or value.dim() != dims:
        return NotImplemented
    if any(x.requires_grad and not is_sample(x) for x in (query, key, value)):
        return NotImplemented
    if attn_mask is not None and (attn_mask.requires_grad or is_sample(attn_mask)):
        if not is_sample(attn_mask) or attn_mask.dim() not in (2, dims):
            return NotImplemented
    elif attn_mask is not None and attn_mask.dim() == 4 and len(attn_mask) > 1:
        return NotImplemented
    with outside():

        def batch(x: Tensor) -> Tensor:
            x = rows(x) if is_sample(x) else x.expand(n, *x.shape)
            return x if dims == 3 else x.flatten(0, 1)

        query, key, value = batch(query), batch(key), batch(value)
        each = len(query) // n
        if attn_mask is not None and is_sample(attn_mask):
            attn_mask = rows(attn_mask)
            if attn_mask.dim() == 3:  # (n, L, S), the same for all heads
                attn_mask = attn_mask.unsqueeze(1)
                attn_mask = attn_mask.repeat_interleave(each, 0) if dims == 4 else attn_mask
            elif dims == 4:
                attn_mask = attn_mask.expand(n, each, *attn_mask.shape[2:]).flatten(0, 1)
        with sdpa_kernel(SDPBackend.MATH) if recorder.along else nullcontext():
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        out = out if dims == 3 else out.view(n, each, *out.shape[1:])
    return recorder.sample(out)


def _in_projections(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return what torch does, for self-attention on one sequence without its copy."""
    if q is k and k is v and q.shape[1] == 1:
        return F.linear(q, w, b).chunk(3, -1)
    found: tuple[Tensor, ...] = vars(F)["_in_projection_packed"](q, k, v, w, b)
    return found


# The code of torch, which calls linear layers and fused attention, without the first look of whether
# somebody sees its calls: it would hand itself over again.
_torch_multi_head_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {
        **vars(F),
        "has_torch_function": lambda _: False,
        "_in_projection_packed": _in_projections,
    },
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _multi_head_attention(recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    """Call ``F.multi_head_attention_forward`` so that the recorder sees what it is made of."""
    with recorder:
        return _torch_multi_head_attention(*args, **kwargs)


def _negative_log(
    func: Callable[..., Tensor],
    recorder: CallRecorder,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Call a loss of classes on all samples, and take each one's mean over its own targets."""
    are_samples = is_sample(input) and is_sample(target)
    is_constant = weight is None or not (weight.requires_grad or is_sample(weight))
    if not (are_samples and is_constant and size_average is None and reduce is None):
        return NotImplemented
    shape = torch.Size() if input.dim() == 1 else input.shape[:1] + input.shape[2:]
    with outside():
        x, t = rows(input), rows(target)
        if input.dim() > 1:
            x, t = x.flatten(0, 1), t.flatten(0, 1)
        total = func(x, t, weight, ignore_index=ignore_index, reduction="none", **options)
        if reduction == "none":
            return recorder.sample(total.view(recorder.n, *shape))
        has_several = shape.numel() != 1
        if has_several:
            total = total.view(recorder.n, -1).sum(1)
        if reduction == "sum":
            return recorder.sample(total)
        if t.is_floating_point():  # shares of classes
            return recorder.sample(total / max(1, shape.numel()))
        counts = counted = t != ignore_index
        if weight is not None:
            counts = weight.take(t.masked_fill(~counted, 0)).masked_fill(~counted, 0.0)
        if has_several:
            counts = counts.view(recorder.n, -1).sum(1)
        return recorder.sample(total / counts)


def _embedding_bag(
    recorder: CallRecorder,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Add up the rows of bags of one length, input (b, L), or of one bag, as a lookup and a sum."""
    is_changed = max_norm is not None or scale_grad_by_freq or mode == "max"
    has_one = input.dim() == 1 and offsets is not None and offsets.shape == (1,)
    if is_changed or include_last_offset or not (has_one or (input.dim() == 2 and offsets is None)):
        return NotImplemented
    with recorder:
        if has_one:
            input, shares = input.unsqueeze(0), per_sample_weights
            per_sample_weights = None if shares is None else shares.unsqueeze(0)
        found, count = F.embedding(input, weight), None
        if padding_idx is not None:
            is_padding = input == padding_idx % len(weight)
            found = found.masked_fill(is_padding.unsqueeze(2), 0.0)
            count = (~is_padding).sum(1, keepdim=True).clamp(min=1)
        if per_sample_weights is not None:
            found = found * per_sample_weights.unsqueeze(2)
        if mode == "sum":
            return found.sum(1)
        return found.mean(1) if count is None else found.sum(1) / count


# -- recurrent layers ------------------------------------------------------------------------------

# The hidden state, shape (B, width), and that of the cell in an LSTM.
State: TypeAlias = tuple[Tensor, ...]
# (input product, hidden product, state before) -> state after.
Step: TypeAlias = Callable[[Tensor, Tensor, State], State]


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, 1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    width = h.shape[1] // 3
    r, z = (x[:, : 2 * width] + h[:, : 2 * width]).sigmoid().chunk(2, 1)
    new = (x[:, 2 * width :] + r * h[:, 2 * width :]).tanh()
    return (new + z * (state[0] - new),)


def _rnn_tanh(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).tanh(),)


def _rnn_relu(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).relu(),)


def _cell(
    step: Step,
    recorder: CallRecorder,
    x: Tensor,
    state: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Call one step, x (b, features), of a model that has the loop over time itself."""
    before = tuple(state) if isinstance(state, list | tuple) else (state,)
    with recorder:
        after = step(F.linear(x, w_ih, b_ih), F.linear(before[0], w_hh, b_hh), before)
    return after if len(after) > 1 else after[0]


@dataclass(frozen=True)
class _Layer:
    """One direction of one recurrent layer."""

    recorder: CallRecorder
    step: Step
    inputs: FunctionLayer  # what the inputs of all steps are multiplied with
    hidden: FunctionLayer
    projection: FunctionLayer | None  # of what an LSTM gives out
    values: Sequence[Sequence[Tensor | None]]  # weights and biases of the three, cut off
    reverse: bool

    def __call__(
        self, x: Tensor, state: State, goes_on: Sequence[Tensor] | None
    ) -> tuple[Tensor, State]:
        """Return the outputs of all steps (B, T, width), and the last state, for x (B, T, features).

        ``goes_on`` marks the sequences that have each step, shape (B, 1).
        """
        is_first = not x.requires_grad
        inputs, hidden, projection = self.values
        products = F.linear(x, *inputs)  # type: ignore[arg-type]
        if is_first and _has_trained(self.inputs):
            products = products.requires_grad_()
        self._record(self.inputs, x, products, is_first=is_first)
        # The gradient of both products is the same, but in a GRU.
        is_own = self.step is _gru or not products.requires_grad
        tap = self._tap(self.hidden, products.shape, products) if is_own else None
        end = self._tap(self.projection, (*x.shape[:2], state[0].shape[1]), products)
        xs, taps, ends = (() if each is None else each.unbind(1) for each in (products, tap, end))
        before, cells, after = list[Tensor](), list[Tensor](), list[Tensor]()
        order = slice(None, None, -1 if self.reverse else 1)
        for t in range(len(xs))[order]:
            h = F.linear(state[0], *hidden)  # type: ignore[arg-type]
            new = self.step(xs[t], h + taps[t] if taps else h, state)
            before.append(state[0])
            if projection:
                cells.append(new[0])
                out = F.linear(new[0], *projection)  # type: ignore[arg-type]
                new = (out + ends[t] if ends else out, *new[1:])
            if goes_on is not None:
                new = tuple(torch.where(goes_on[t], *each) for each in zip(new, state, strict=True))
            state = new
            after.append(state[0])
        own = products if tap is None else tap
        self._record(self.hidden, before[order], own, is_first=is_first or tap is not None)
        self._record(self.projection, cells[order], end, is_first=True)
        return torch.stack(after[order], 1), state

    def _tap(
        self, layer: FunctionLayer | None, shape: Sequence[int], like: Tensor
    ) -> Tensor | None:
        """Return zeros that are added to a product of trained parameters, to get its gradient."""
        if not _has_trained(layer):
            return None
        return like.new_zeros(shape, requires_grad=True)

    def _record(
        self,
        layer: FunctionLayer | None,
        v: Tensor | Sequence[Tensor],
        out: Tensor | None,
        *,
        is_first: bool,
    ) -> None:
        if layer is not None and _has_trained(layer):
            assert out is not None
            n, v = self.recorder.n, v if isinstance(v, Tensor) else torch.stack(list(v), 1)
            v, shape = v.reshape(n, -1, v.shape[-1]), (n, -1, out.shape[-1])
            self.recorder.record(linear, layer, v, get_gradient_edge(out), shape, is_first=is_first)


def _has_trained(layer: FunctionLayer | None) -> bool:
    parts = () if layer is None else (layer.weight, layer.bias)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in parts)


def _layers_of(
    recorder: CallRecorder,
    step: Step,
    weights: Sequence[Tensor],
    count: int,
    *,
    has_biases: bool,
    ways: int,
) -> list[_Layer]:
    """Return all directions of all layers, in the order of their weights."""
    each, found = len(weights) // count, list[_Layer]()
    for place in range(count):
        own = list(weights[place * each : (place + 1) * each])
        biases = own[2:4] if has_biases else [None, None]
        inputs, hidden = map(FunctionLayer, own[:2], biases)
        projection = FunctionLayer(own[-1]) if each % 2 else None
        values = [
            () if x is None else [p if p is None else recorder.alias(p) for p in (x.weight, x.bias)]
            for x in (inputs, hidden, projection)
        ]
        reverse = bool(place % ways)
        found.append(_Layer(recorder, step, inputs, hidden, projection, values, reverse))
    return found


def _recurrent(step: Step, recorder: CallRecorder, *args: Any) -> Any:
    """Call a recurrent function of torch for all samples."""
    batch_sizes, batch_first = None, False
    if isinstance(args[3], list | tuple):
        data, batch_sizes, given, weights, has_biases, count, dropout, training, both_ways = args
    else:
        data, given, weights, has_biases, count, dropout, training, both_ways, batch_first = args
    if any(map(is_sample, weights)):
        return NotImplemented
    states = [_rows(recorder, each) for each in ([given] if isinstance(given, Tensor) else given)]
    if batch_sizes is None:
        x, has_steps = _rows(recorder, data), None
    else:
        x, has_steps = _unpacked(recorder, data, batch_sizes)
    ways = 2 if both_ways else 1
    every = _layers_of(recorder, step, weights, count * ways, has_biases=has_biases, ways=ways)
    with outside():
        x = x if batch_first or batch_sizes is not None else x.transpose(1, 2)
        n, b, length = x.shape[:3]
        x, goes_on = x.flatten(0, 1), None
        if has_steps is not None and not bool(has_steps.all()):
            goes_on = has_steps.expand(n, b, length).reshape(-1, length, 1).to(x.device).unbind(1)
        last = list[State]()
        for number in range(count):
            found = list[Tensor]()
            for place in range(number * ways, (number + 1) * ways):
                first = tuple(state[:, place].flatten(0, 1) for state in states)
                out, end = every[place](x, first, goes_on)
                found.append(out)
                last.append(end)
            x = found[0] if ways == 1 else torch.cat(found, 2)
            if training and dropout and number < count - 1:
                # Time first, as torch draws.
                x = F.dropout(x.transpose(0, 1).contiguous(), dropout).transpose(0, 1)
        x = x.unflatten(0, (n, b))  # type: ignore[no-untyped-call]
        final = [
            recorder.sample(torch.stack(each, 1).unflatten(0, (n, b)).transpose(1, 2))  # type: ignore[no-untyped-call]
            for each in zip(*last, strict=True)
        ]
        if batch_sizes is None:
            return recorder.sample(x if batch_first else x.transpose(1, 2)), *final
    return _packed_again(recorder, x, data, batch_sizes), *final


# -- packed sequences -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """The facts about a tensor of packed sequences, or of its batch sizes.

    Args:
        padded: the number of steps before packing, to which sequences are padded again: lengths of
            other samples have no say in it.
        lengths: of the sequence of each sample, where steps behind its end are kept and marked by a
            batch size of 0; None where torch's own layout is kept, which is the same for all samples.
    """

    padded: int
    lengths: Sequence[int] | None = None

    def is_told_by(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Return whether a function would see the steps behind the end."""
        name = func.__name__
        if self.lengths is None:
            return False
        if name == "__get__":
            return getattr(getattr(func, "__self__", None), "__name__", "") not in _ATTRIBUTES
        if name == "size":  # of features; of batch sizes, pad_packed_sequence asks how far to pad
            return args[1:] != (-1,) and args[0].is_floating_point()
        # The first batch size is 1.
        is_first = name == "__getitem__" and type(args[1]) is int and args[1] == 0
        return not (is_first or name in _RECURRENT or name in _QUESTIONS)


_ATTRIBUTES = frozenset(("dtype", "device", "is_cuda"))
_QUESTIONS = frozenset(("dim", "is_floating_point", "is_complex", "__hash__"))


def _pack(recorder: CallRecorder, input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """Pack sequences: one of each sample with its own length, or several with the same for all."""
    input = input if batch_first else input.transpose(0, 1)
    b, padded = input.shape[:2]
    if is_sample(lengths):
        of_each = rows(lengths).tolist()
        if b == 1 and len({each[0] for each in of_each}) > 1:
            return _pack_own(recorder, input, [int(each[0]) for each in of_each])
        recorder.split_by([tuple(each) for each in of_each])
        lengths = rows(lengths)[0]
    places = torch.arange(b * padded).view(b, padded)
    with outside():
        index, batch_sizes = torch._VF._pack_padded_sequence(places, lengths.cpu(), True)
    recorder.packed[batch_sizes] = Packed(padded)
    return input.flatten(0, 1)[index.to(input.device)], batch_sizes


def _pack_own(recorder: CallRecorder, input: Tensor, lengths: Sequence[int]) -> Any:
    x, known = _rows(recorder, input).squeeze(1), Packed(input.shape[1], lengths)
    if not all(0 < each <= known.padded for each in lengths):
        raise ValueError("A packed sequence is empty, or longer than its tensor.")
    with outside():
        goes_on = torch.arange(known.padded) < torch.tensor(lengths).unsqueeze(1)
        shape = (*goes_on.shape, *[1] * (x.dim() - 2))
        x = x.masked_fill(~goes_on.view(shape).to(x.device), 0)
    found = recorder.sample(x), recorder.sample(goes_on.long())
    for each in found:
        recorder.packed[each] = known
    return found


def _pad(
    recorder: CallRecorder,
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> Any:
    """Undo :func:`_pack`."""
    known = recorder.packed.get(batch_sizes)  # type: ignore[no-untyped-call]
    x, goes_on = _unpacked(recorder, data, batch_sizes)
    with outside():
        more = max(total_length, 0 if known is None else known.padded) - x.shape[2]
        shape = (*goes_on.shape, *[1] * (x.dim() - 3))
        x = x.masked_fill(~goes_on.view(shape).to(x.device), padding_value)
        x = F.pad(x, [0, 0] * (x.dim() - 3) + [0, more], value=padding_value)
        x = x if batch_first else x.transpose(1, 2)
    lengths = goes_on.sum(2)
    if is_sample(batch_sizes):
        return recorder.sample(x), recorder.sample(lengths)
    return recorder.sample(x), lengths[0]


def _unpacked(recorder: CallRecorder, data: Tensor, batch_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences, shape (n, b, T, ...), and which steps they have, (n, b, T) or (1, b, T)."""
    x = _rows(recorder, data)
    with outside():
        if is_sample(batch_sizes):
            return x.unsqueeze(1), rows(batch_sizes).bool().unsqueeze(1)
        goes_on = torch.arange(int(batch_sizes[0])) < batch_sizes.unsqueeze(1)
        whole = x.new_zeros(len(x), *goes_on.shape, *x.shape[2:])
        whole[:, goes_on] = x
    return whole.transpose(1, 2), goes_on.t().unsqueeze(0)


def _rows(recorder: CallRecorder, x: Tensor) -> Tensor:
    """Return the values of all samples: a copy for each of what comes from parameters."""
    if not is_sample(x) and x.requires_grad and torch.is_grad_enabled():
        x = recorder.own(x)
    return rows(x) if is_sample(x) else x.expand(recorder.n, *x.shape)


def _packed_again(recorder: CallRecorder, x: Tensor, data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Undo :func:`_unpacked`."""
    with outside():
        if not is_sample(batch_sizes):
            goes_on = torch.arange(x.shape[1]) < batch_sizes.unsqueeze(1)
            return recorder.sample(x.transpose(1, 2)[:, goes_on])
        found = recorder.sample(x.squeeze(1))
    recorder.packed[found] = recorder.packed[batch_sizes]
    return found


_RECURRENT: Mapping[str, Callable[..., Any]] = {
    "lstm": partial(_recurrent, _lstm),
    "gru": partial(_recurrent, _gru),
    "rnn_tanh": partial(_recurrent, _rnn_tanh),
    "rnn_relu": partial(_recurrent, _rnn_relu),
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
}

COMPOSITES: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head_attention,
    "cross_entropy": partial(_negative_log, F.cross_entropy),
    "nll_loss": partial(_negative_log, F.nll_loss),
    "embedding_bag": _embedding_bag,
    "lstm_cell": partial(_cell, _lstm),
    "gru_cell": partial(_cell, _gru),
    "rnn_tanh_cell": partial(_cell, _rnn_tanh),
    "rnn_relu_cell": partial(_cell, _rnn_relu),
    **_RECURRENT,
}
"""By the name of a function of torch."""
