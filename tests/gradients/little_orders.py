"""Little models that choose rows, and put them into another order: experts, heads, loops, sorting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.gradients.little_models import Batch, Little, N, Net, head, linear, net, weight

__all__ = ["BY_PLACE", "ORDERS"]

SIZES = torch.tensor([1.0, 2.0, 4.0])  # records whose gradients differ


def rows() -> Batch:
    return {"x": torch.randn(N, 6) * SIZES[:, None], "y": torch.arange(N)}


def positions() -> Batch:
    return {"x": torch.randn(N, 5, 6) * SIZES[:, None, None], "y": torch.arange(N)}


def experts() -> nn.ModuleList:
    kinds = (nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), nn.Linear(6, 6))
    return nn.ModuleList(kinds)


def chosen(x: Tensor) -> Tensor:
    """The expert of each row."""
    return (x[..., 0] > 0).long() + (x[..., 1] > 0).long()


def pooled(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.mean(1)


def by_mask(m: Net, x: Tensor) -> Tensor:
    h, out = m.body(x), torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        mask = chosen(x) == i
        out[mask] = expert(h[mask]) * m.gain[i]
    return m.head(pooled(out))


def by_index(m: Net, x: Tensor) -> Tensor:
    h = m.body(x).reshape(-1, 6)
    out = h.new_zeros(h.shape)
    for i, expert in enumerate(m.experts):
        places = (chosen(x).flatten() == i).nonzero(as_tuple=True)[0]
        out = out.index_add(0, places, expert(h[places]) * m.gain[i])
    return m.head(pooled(out.view_as(x)))


def by_groups(m: Net, x: Tensor) -> Tensor:
    h = m.body(x).reshape(-1, 6)
    order = chosen(x).flatten().argsort(stable=True)
    groups = h[order].split(chosen(x).flatten().bincount(minlength=3).tolist())
    pairs = zip(m.experts, groups, strict=True)
    out = torch.cat([expert(group) * m.gain[0] for expert, group in pairs])
    return m.head(pooled(out[order.argsort()].view_as(x)))


def one_after_another(m: Net, x: Tensor) -> Tensor:
    pairs = zip(m.body(x), chosen(x).tolist(), strict=True)
    return torch.stack([m.head(m.experts[i](row) * m.gain[i]) for row, i in pairs])


def written_in_turn(m: Net, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape)
    for i, row in enumerate(m.body(x)):
        out[i] = m.experts[int(chosen(x)[i])](row)
    return m.head(out)


def twice(m: Net, x: Tensor) -> Tensor:
    """Two experts for each row, one after the other."""
    h, out = m.body(x), torch.zeros_like(x)
    best = x[..., :3].topk(2, -1)[1]
    for i, expert in enumerate(m.experts):
        for k in range(2):
            mask = best[..., k] == i
            out[mask] += expert(h[mask])
    return m.head(pooled(out))


ORDER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flipped": lambda h, x: h.flip(0),
    "rolled": lambda h, x: h.roll(1, 0),
    "sorted": lambda h, x: h[x[:, 0].argsort()],
    "selected": lambda h, x: h.index_select(0, x[:, 1].argsort(descending=True)),
    "gathered": lambda h, x: h.gather(0, x[:, :1].argsort(0).expand_as(h)),
    "written": lambda h, x: torch.zeros_like(h).index_copy(0, x[:, 0].argsort(), h),
    "sorted_and_back": lambda h, x: torch.tanh(h[x[:, 0].argsort()])[x[:, 0].argsort().argsort()],
}


def reordered(order: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    return lambda m, x: m.head(torch.tanh(order(m.body(x), x)))


def squares(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch["x"]).square().mean()  # labels would be in another order


def last_state(m: Net, x: Tensor) -> Tensor:
    hidden = m.layer(x)[1]
    return m.head(torch.cat(list(hidden), 0)[-1] if isinstance(hidden, tuple) else hidden[-1])


_PARTS = {"body": linear(), "experts": experts, "gain": weight(3, 6), "head": head}


def _routed(forward: Any, batch: Any) -> Little:
    return Little(net(forward, **_PARTS), batch)


ORDERS: Mapping[str, Little] = {
    "experts_by_mask": _routed(by_mask, rows),
    "experts_of_positions": _routed(by_mask, positions),
    "experts_by_index": _routed(by_index, positions),
    "experts_in_groups": _routed(by_groups, positions),
    "two_experts": _routed(twice, positions),
    **{
        f"{name}_between_layers": Little(
            net(reordered(order), body=linear(), head=head), rows, squares
        )
        for name, order in ORDER.items()
    },
    **{
        f"last_state_of_{kind.__name__}": Little(
            net(last_state, layer=lambda kind=kind: kind(6, 6, batch_first=True), head=head),
            positions,
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    },
}

LEFT_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "the_first_left_out": lambda h: h[1:],
    "the_first_alone": lambda h: h[0],
    "the_first_half": lambda h: h.chunk(2)[0],
    "every_other": lambda h: h[torch.arange(0, len(h), 2)],
    "every_other_by_mask": lambda h: h[torch.arange(len(h)) % 2 == 0],
    "narrowed": lambda h: h.narrow(0, 0, len(h) - 1),
}


def of_some(choice: Callable[[Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    return lambda m, x: m.head(m.gain[0] * choice(m.body(x)))


# One record less puts all that follow into other places, so each may be chosen, or not, by the others.
BY_PLACE: Mapping[str, Little] = {
    "records_in_turn": _routed(one_after_another, rows),
    "records_written_in_turn": _routed(written_in_turn, rows),
    **{
        name: Little(net(of_some(choice), **_PARTS), rows, squares)
        for name, choice in LEFT_OUT.items()
    },
}
