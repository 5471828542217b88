"""Book-keeping as its paper has it, for the layers of the benchmarks: a peer that needs no package.

Bu, Wang, Zha and Karypis, Differentially Private Optimization on Large Model at Small Cost (2023,
arXiv:2210.00038), algorithm 1 with the mixed norms of its section 3: one backward pass that stops at the
layers' outputs; for each layer the ghost norm where 2T² is at most the size of its weight, else the norm
of the gradients per record; then the clipped sum from what was kept. No more checks than the paper's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Grads = list[tuple[nn.Parameter, Tensor]]


class FastDP:
    """Hooks on a model, which give the sum of the clipped gradients of its records."""

    def __init__(self, net: nn.Module, clip_norm: float) -> None:
        self._calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._clip_norm = clip_norm
        self._layers = [m for m in net.modules() if [*m.parameters(recurse=False)]]
        for layer in self._layers:
            if type(layer) not in _KINDS:
                raise TypeError(f"{type(layer).__name__} is none of the paper's layers")
            layer.register_forward_hook(lambda m, x, y: self._calls.append((m, x[0].detach(), y)))

    def backward(self, losses: Tensor) -> Grads:
        """Return each parameter with its clipped sum, from the losses of the records."""
        calls, self._calls = self._calls, []
        if len({layer for layer, *_ in calls}) < len(calls):
            raise TypeError("a layer is called twice")
        backs = torch.autograd.grad(losses.sum(), [y for *_, y in calls])
        kept = []
        squares = torch.zeros(len(losses), device=losses.device)
        for (layer, x, _), back in zip(calls, backs, strict=True):
            sums, square = _KINDS[type(layer)](layer, x, back)
            kept.append(sums)
            squares += square
        factors = (self._clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        return [pair for sums in kept for pair in sums(factors)]


Sums = Callable[[Tensor], Grads]


def _matrix(
    weight: nn.Parameter, bias: nn.Parameter | None, a: Tensor, b: Tensor
) -> tuple[Sums, Tensor]:
    """For a weight that multiplies (n, T, in) and gets (n, T, out) back."""
    if a.shape[1] == 1:
        square = a.square().sum((1, 2)) * b.square().sum((1, 2))
    elif 2 * a.shape[1] ** 2 <= weight.numel():
        square = ((a @ a.transpose(1, 2)) * (b @ b.transpose(1, 2))).sum((1, 2))
    else:
        square = (b.transpose(1, 2) @ a).square().sum((1, 2))
    own = b.sum(1)
    if bias is not None:
        square = square + own.square().sum(1)

    def sums(factors: Tensor) -> Grads:
        scaled = (b * factors.view(-1, 1, 1)).flatten(0, 1)
        found: Grads = [(weight, (scaled.T @ a.flatten(0, 1)).view_as(weight))]
        return found if bias is None else [*found, (bias, factors @ own)]

    return sums, square


def _linear(layer: nn.Linear, x: Tensor, back: Tensor) -> tuple[Sums, Tensor]:
    a, b = (each.reshape(len(x), -1, each.shape[-1]) for each in (x, back))
    return _matrix(layer.weight, layer.bias, a, b)


def _convolution(layer: nn.Conv2d, x: Tensor, back: Tensor) -> tuple[Sums, Tensor]:
    options = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    a, b = (e.transpose(1, 2) for e in (F.unfold(x, *options), back.flatten(2)))
    return _matrix(layer.weight, layer.bias, a, b)


def _embedding(layer: nn.Embedding, x: Tensor, back: Tensor) -> tuple[Sums, Tensor]:
    same = (x.unsqueeze(1) == x.unsqueeze(2)).float()
    square = (same * (back @ back.transpose(1, 2))).sum((1, 2))

    def sums(factors: Tensor) -> Grads:
        scaled = (back * factors.view(-1, 1, 1)).flatten(0, 1)
        return [(layer.weight, torch.zeros_like(layer.weight).index_add_(0, x.flatten(), scaled))]

    return sums, square


def _norm(layer: nn.LayerNorm | nn.GroupNorm, x: Tensor, back: Tensor) -> tuple[Sums, Tensor]:
    if isinstance(layer, nn.LayerNorm):
        v, over = F.layer_norm(x, layer.normalized_shape, eps=layer.eps), (1,)
    else:
        v, over = F.group_norm(x, layer.num_groups, eps=layer.eps), (2, 3)
    rows = [(v * back).sum(over), back.sum(over)] if x.dim() > 2 else [v * back, back]
    square = rows[0].square().sum(1) + rows[1].square().sum(1)
    return lambda factors: [
        (layer.weight, factors @ rows[0]),
        (layer.bias, factors @ rows[1]),
    ], square


_KINDS: dict[type[nn.Module], Callable[..., tuple[Sums, Tensor]]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _norm,
    nn.GroupNorm: _norm,
}
