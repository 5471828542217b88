"""Objectives that keep records apart: all of them train."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, ordinary
from isolation_zoo.ordinary_losses import onehot


@ordinary
class RDrop(Small):
    """Two passes with dropout are pulled together."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p, q = out.log_softmax(1), self(x).log_softmax(1)
        both = F.kl_div(p, q.exp(), reduction="none").sum(1) + F.kl_div(
            q, p.exp(), reduction="none"
        ).sum(1)
        return F.nll_loss(p, y) + F.nll_loss(q, y) + 0.5 * both.mean()


@ordinary
class ContrastsWithinARecord(Small):
    """InfoNCE among crops of one record."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        crops = torch.stack([self(x * m) for m in (1.0, 0.5, 1.5)], 1)
        likeness = F.normalize(crops, dim=2) @ F.normalize(crops, dim=2).transpose(1, 2)
        return F.cross_entropy(
            likeness.flatten(0, 1).view(len(x), 3, 3), torch.arange(3).expand(len(x), 3)
        )


class Auto(Small):
    """Encoder and decoder."""

    def make(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "in": nn.Linear(4, 6),
                "mu": nn.Linear(6, 2),
                "sd": nn.Linear(6, 2),
                "out": nn.Linear(2, 4),
            }
        )

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.net["in"](x))
        return self.net["mu"](h), self.net["sd"](h)


@ordinary
class Vae(Auto):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        mu, log_variance = self.encode(x)
        z = mu + torch.randn_like(mu) * (log_variance / 2).exp()
        rebuilt = (self.net["out"](z) - x).square().sum(1)
        kl = -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum(1)
        return (rebuilt + self.beta() * kl).mean()

    def beta(self) -> float:
        return 1.0


@ordinary(trainer={"max_epochs": 3})
class BetaVaeWithWarmUp(Vae):
    def beta(self) -> float:
        return min(4.0, 0.5 * self.global_step)


@ordinary
class Diffusion(Small):
    """Noise is predicted at a random time."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        t = torch.rand(len(x), 1, device=x.device)
        noise = torch.randn_like(x)
        noisy = (1 - t).sqrt() * x + t.sqrt() * noise
        return F.mse_loss(self(torch.cat([noisy, t], 1)), noise)


@ordinary
class DiffusionWithATable(Diffusion):
    """Discrete times, a table of noise levels in a buffer, weights by level."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10), 0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        t = torch.randint(10, (len(x),), device=x.device)
        kept = self.kept[t][:, None]
        noise = torch.randn_like(x)
        found = self(torch.cat([kept.sqrt() * x + (1 - kept).sqrt() * noise, t[:, None] / 10], 1))
        return ((found - noise).square().mean(1) / (1 - kept[:, 0])).mean()


@ordinary
class ArcFace(Small):
    """An angular margin at each record's own class."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.normalize(out, dim=1).clamp(-0.99, 0.99)
        margin = torch.cos(cosine.acos() + 0.2 * onehot(y))
        return F.cross_entropy(8 * margin, y)


@ordinary
class PolicyGradient(Small):
    """Rewards with a fixed baseline, entropy, clipped ratios."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=out)
        ratio = (policy.log_prob(y) - math.log(1 / 3)).exp()
        reward = x[:, 0] - 0.5
        best = torch.minimum(ratio * reward, ratio.clamp(0.8, 1.2) * reward)
        return -(best + 0.01 * policy.entropy()).mean()


@ordinary
class Preferences(Small):
    """Direct preference optimisation with a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = copy.deepcopy(self.net).requires_grad_(False).eval()

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            old = self.reference(x).log_softmax(1)
        gain = out.log_softmax(1) - old
        return -F.logsigmoid(0.5 * (gain[:, 0] - gain[:, 1])).mean()


@ordinary
class VectorQuantised(Small):
    """A fixed codebook, with a commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.eye(3))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        nearest = self.codes[torch.cdist(out, self.codes).argmin(1)]
        code = out + (nearest - out).detach()
        return F.cross_entropy(code, y) + 0.25 * F.mse_loss(out, nearest)


@ordinary
class AdversarialInputs(Small):
    """The fast gradient sign: each record is moved by its own gradient."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            twin = F.linear(x, self.net.weight.detach(), self.net.bias.detach())
            slope = torch.autograd.grad(F.cross_entropy(twin, y, reduction="sum"), x)[0]
        return F.cross_entropy(self((x + 0.05 * slope.sign()).detach()), y)
