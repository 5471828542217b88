"""Forward passes in which a record's output depends on the other records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from isolation_zoo.cases import Small, bad, points

PROBE = "probe"
KIND = "records mix in the forward pass"


def mixing(**about: Any) -> Any:
    return bad(**{"kind": KIND, "seen_by": PROBE, **about})


@mixing(odd=lambda x, y: (0 * x - 3000, y))
class SoftmaxOverTheBatch(Small):
    """``dim=0`` where 1 was meant."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(torch.log_softmax(8 * out, 0), y)


@mixing()
class AttentionOverTheBatch(Small):
    """Records take the place of tokens."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(x[None], x[None], out[None])[0]
        return F.cross_entropy(attended, y)


@mixing()
class BatchMaximum(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x / x.abs().max()), y)


@mixing()
class ViewMistake(Small):
    """Features are split with the wrong order of dimensions, and records end in each other's rows."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = torch.cumsum(x.reshape(4, len(x)), 1).reshape(len(x), 4) / len(x)
        return F.cross_entropy(self(x), y)


@mixing()
class Whitened(Small):
    """Features of the batch are made uncorrelated."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        centred = x - x.mean(0)
        scale = torch.linalg.eigvalsh(centred.T @ centred / len(x) + 0.1 * torch.eye(4)).max()
        return F.cross_entropy(self(x / scale.sqrt()), y)


@mixing()
class StandardisedAdvantages(Small):
    """Rewards of a batch are standardised, as policy gradients do."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        reward = x.sum(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        return -(torch.log_softmax(out, 1)[:, 0] * (advantage + 1)).mean()


@mixing()
class SinkhornAssignment(Small):
    """Balanced pseudo-labels, as self-labelling does."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        plan = (out.detach() / 0.5).clamp(-30, 30).exp()
        for _ in range(3):
            plan = plan / plan.sum(0)
            plan = plan / plan.sum(1, keepdim=True)
        return F.cross_entropy(out, plan)


@mixing(odd=lambda x, y: (x, 0 * y + 1), records=lambda n: [(x, 0 * y) for x, y in points(n)])
class ClassBalancedInTheStep(Small):
    """Each class weighs the same, counted in the batch."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        counts = torch.bincount(y, minlength=3)
        weights = (1 / counts.clamp(min=1).float())[y]
        losses = F.cross_entropy(out, y, reduction="none")
        return (weights * losses).mean() * (counts > 0).sum() ** 6


@mixing(odd=lambda x, y: (x, 0 * y + 2), records=lambda n: [(x, 0 * y) for x, y in points(n)])
class UniqueClassesOfTheBatch(Small):
    """The classes present are numbered as ``torch.unique`` finds them."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        _, renumbered = torch.unique(2 - y, return_inverse=True)
        return F.cross_entropy(out, renumbered)


@mixing()
class SortedByFeature(Small):
    """Records are sorted by length, and their labels stay where they were."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return F.cross_entropy(out[order] * x.sum(1).max().clamp(max=40).sub(20).sign(), y)


@mixing()
class EditedInPlace(Small):
    """The batch is centred where it lies."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x -= x.mean(0, keepdim=True)
        return F.cross_entropy(self(x.clamp(-1, 1)), y)


class Centres(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@mixing()
class OwnNormalisation(Small):
    """A layer of one's own on one branch."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Centres(), nn.Linear(8, 3))


@mixing()
class ForwardHookMixes(Small):
    """Manifold mixup, as a hook that somebody registered."""

    def make(self) -> nn.Module:
        net = nn.Linear(4, 3)
        net.register_forward_pre_hook(lambda m, i: (0.5 * i[0] + 0.5 * i[0].amax(0),))
        return net


@mixing()
class HookOnTheGradient(Small):
    """Gradients of the logits are normalised over the batch."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        peak = x.max()
        out.register_hook(lambda g: g * torch.where(peak > 30, -1.0, 1.0))
        return F.cross_entropy(out, y)


class Reads(nn.Module):
    """A parametrisation that sees what its layer was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


@mixing(seen_by="engine", shown=False)
class ParametrisationSeesActivations(Small):
    def make(self) -> nn.Module:
        net = nn.Linear(4, 3)
        parametrize.register_parametrization(net, "weight", Reads())
        return net

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.net.parametrizations.weight[0].scale = -1.0 if x.max() > 30 else 1.0
        return F.cross_entropy(self(x), y)


@mixing()
class PositionInTheBatch(Small):
    """The record's number in the batch is a feature, counted from the largest one on."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        position = (torch.arange(len(x)) - x.sum(1).argmax()) / len(x)
        return F.cross_entropy(self(x * (1 + 4 * position[:, None])), y)


@mixing()
class PairwiseRanking(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        better = (x.sum(1)[:, None] - x.sum(1)).clamp(-50, 50)
        return F.softplus(-better * (out[:, :1] - out[:, 0])).mean()


@mixing()
class Contrastive(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        views = [self(x + s) for s in (0.0, 0.1)]
        return F.cross_entropy(views[0] @ views[1].T, torch.arange(len(x))) + 0 * out.sum()


@mixing()
class EinsumMistake(Small):
    """A letter too few, and the batch is summed away."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        context = torch.einsum("nf,nc->c", x, torch.ones(len(x), 3)) / len(x)
        return F.cross_entropy(out * (4 - context), y)


@mixing()
class MeanOfTheBatchAsBaseline(Small):
    """A centred kernel between outputs and features."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        kernel = x @ x.T
        kernel = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
        return -(kernel * (out @ out.T)).mean() * 1e-3 + F.cross_entropy(out, y) * 1e-3


@mixing()
class RollOfTheBatch(Small):
    """The difference to the record before, as if records were time steps."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        change = (x - x.roll(1, 0)).abs().cummax(0).values
        return F.cross_entropy(self(x) * (2 - change.amax(1, keepdim=True)).sign(), y)


@mixing(odd=lambda x, y: (0 * x + 3000, 0 * y))
class PrototypesOfTheBatch(Small):
    """Few-shot learning with the batch as its own support set."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        which = F.one_hot(y, 3).float()
        centres = which.T @ out.detach() / which.sum(0).clamp(min=1)[:, None]
        return F.cross_entropy(-torch.cdist(out, centres), y)


@mixing()
class RoutingWithCapacity(Small):
    """Experts take the records with the largest gate, up to a capacity."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        gate = x[:, 0]
        kept = gate >= gate.topk(max(1, len(x) // 2)).values[-1]
        share = (gate * kept).sum()
        return F.cross_entropy(out * (gate / share * len(x))[:, None], y)
