"""Networks of many fields of work, as people write them in plain PyTorch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.case import Batch, Case, classify, images

__all__ = ["CASES"]

CLASSES, FEATURES = 5, 8


def _mlp(*sizes: int, dropout: float = 0.0, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer), act(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


class EulerSteps(nn.Module):
    """A neural ODE: the same network at every step of time."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.speed, self.drop = _mlp(width + 1, width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for time in torch.linspace(0, 1, 6):
            h = h + self.speed(torch.cat([h, time.expand(len(h), 1)], 1)) / 6
        return self.head(self.drop(h))


class Physics(nn.Module):
    """A solution of the heat equation: derivatives by the points, a value at one of them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body, self.diffusivity = _mlp(2, width, width, 1), nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor, z: Tensor) -> Tensor:
        points = x[:, :2].clone().requires_grad_()
        u = self.body(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        residual = slope[:, 1] - self.diffusivity * bend[:, 0]
        return residual.square().mean() + F.mse_loss(u[:, 0], z)


class Critic(nn.Module):
    """Scores with a penalty on the norm of their gradient (arXiv:1704.00028)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = _mlp(FEATURES, width, width, 1)

    def loss(self, x: Tensor, other: Tensor) -> Tensor:
        between = ((x + other) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(self.body(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.body(other).mean() - self.body(x).mean() + 10 * penalty


class OwnWeights(nn.Module):
    """A network that makes the weights of another from half of each record."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.maker = _mlp(4, width, 4 * width + width, dropout=dropout)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(x[:, :4])
        weight, bias = made[:, : 4 * self.head.in_features], made[:, 4 * self.head.in_features :]
        h = torch.bmm(weight.view(len(x), -1, 4), x[:, 4:].unsqueeze(2)).squeeze(2) + bias
        return self.head(F.relu(h))


class DynamicConvolution(nn.Module):
    """Kernels mixed for each picture (arXiv:1912.03458), applied as groups of one picture."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, width, 3, 2, 1), nn.Linear(width, 3)
        self.kernels = nn.Parameter(torch.randn(3, width, width, 3, 3) / 16)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        n, width, *size = h.shape
        weights = self.gate(h.mean((2, 3))).softmax(1)
        kernels = torch.einsum("nk,koihw->noihw", weights, self.kernels).flatten(0, 1)
        found = F.conv2d(h.reshape(1, n * width, *size), kernels, padding=1, groups=n)
        return self.head(self.drop(F.relu(found.view(n, width, *size)).mean((2, 3))))


class Routed(nn.Module):
    """Each record goes to the one expert that a gate chose."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList([_mlp(FEATURES, width, CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        found = x.new_zeros(len(x), CLASSES)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if len(rows):
                found[rows] = weights[rows].unsqueeze(1) * expert(x[rows])
        return found


class Generator(nn.Module):
    """A generator that is trained to please a frozen critic."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = _mlp(FEATURES, width, width, dropout=dropout)
        self.critic = _mlp(width, width, 1, act=nn.LeakyReLU).requires_grad_(False)

    def loss(self, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.body(x))).mean()


class Variational(nn.Module):
    """An auto-encoder whose code is drawn; the draws come with the records."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.encoder = _mlp(FEATURES, width, 8, dropout=dropout)
        self.decoder = _mlp(4, width, FEATURES, dropout=dropout)

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        found = self.decoder(mean + (0.5 * log_variance).exp() * noise)
        prior = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return ((found - x).square().sum(1) + prior).mean()


class Flow(nn.Module):
    """RealNVP (arXiv:1605.08803): couplings by a mask, likelihood by determinants."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_mlp(FEATURES, width, 2 * FEATURES) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(3, FEATURES))
        self.register_buffer("mask", (torch.arange(FEATURES) % 2).float())

    def loss(self, x: Tensor) -> Tensor:
        log_volume, mask = x.new_zeros(len(x)), self.mask
        for part, scale in zip(self.parts, self.scale, strict=True):
            s, t = part(x * mask).chunk(2, 1)
            s = torch.tanh(s) * scale * (1 - mask)
            x = x * mask + (1 - mask) * (x * s.exp() + t)
            log_volume, mask = log_volume + s.sum(1), 1 - mask
        normal = torch.distributions.Normal(0.0, 1.0)
        return -(normal.log_prob(x).sum(1) + log_volume).mean()


class Splines(nn.Module):
    """A layer of splines on every edge (arXiv:2404.19756): hats on a grid, and a linear part."""

    def __init__(self, inner: int, outer: int, knots: int = 6) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(outer, inner) / inner**0.5)
        self.splines = nn.Parameter(torch.randn(outer, inner, knots) / 8)
        self.register_buffer("grid", torch.linspace(-2, 2, knots))

    def forward(self, x: Tensor) -> Tensor:
        hats = F.relu(1 - (x.unsqueeze(-1) - self.grid).abs() / (self.grid[1] - self.grid[0]))
        return F.linear(F.silu(x), self.base) + torch.einsum("nik,oik->no", hats, self.splines)


class Capsules(nn.Module):
    """Routing by agreement (arXiv:1710.09829): a weight for each pair of capsules."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.weight = nn.Parameter(torch.randn(width, CLASSES, 4, 6) / 4)
        self.drop = nn.Dropout(dropout)

    @staticmethod
    def _squash(x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return x * square / (1 + square) / (square + 1e-6).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        below = self._squash(self.drop(self.stem(x)).flatten(2))
        votes = torch.einsum("nip,icpq->nicq", below, self.weight)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            above = self._squash((logits.softmax(2).unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * above.unsqueeze(1)).sum(-1)
        return 10 * above.norm(dim=-1)


class Tied(nn.Module):
    """An auto-encoder whose transposed weights decode."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, 4)
        self.middle, self.last = (nn.Parameter(torch.zeros(n)) for n in (width, FEATURES))
        self.drop = nn.Dropout(dropout)

    def loss(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(self.drop(x))))
        h = torch.tanh(h @ self.second.weight + self.middle)
        return F.mse_loss(F.linear(h, self.first.weight.t(), self.last), x)


class Complex(nn.Module):
    """Layers of complex numbers, with a gate by their length."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width, dtype=torch.cfloat)
        self.second = nn.Linear(width, CLASSES, dtype=torch.cfloat)
        self.bias, self.drop = nn.Parameter(torch.zeros(width)), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(torch.fft.fft(x))
        h = h * torch.sigmoid(h.abs() + self.bias)
        return self.drop(self.second(h).abs())


class SmallUNet(nn.Module):
    """Down, up, and a skip between."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        norm = lambda: nn.GroupNorm(4, width)  # noqa: E731
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), norm(), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), norm())
        self.up, self.drop = nn.ConvTranspose2d(width, width, 2, 2), nn.Dropout2d(dropout)
        self.head = nn.Conv2d(2 * width, 3, 1)

    def loss(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        up = self.up(self.drop(F.relu(self.down(skip), inplace=True)))
        return F.mse_loss(self.head(torch.cat([skip, up], 1)), x.flip(-1))


class Sampler(nn.Module):
    """A network that tells where to sample the picture (arXiv:1506.02025)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(3, width, 8, 8), nn.ReLU(), nn.Flatten())
        self.angles = nn.Linear(4 * width, 6)
        self.stem, self.drop = nn.Conv2d(3, width, 4, 4), nn.Dropout(dropout)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.angles(self.where(x)).view(-1, 2, 3) / 8 + torch.eye(2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        seen = F.grid_sample(x, grid, align_corners=False)
        return self.head(self.drop(F.relu(self.stem(seen)).mean((2, 3))))


class QLearning(nn.Module):
    """Values of actions; a frozen copy gives the targets."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = _mlp(FEATURES, width, CLASSES)
        self.target = copy.deepcopy(self.body).requires_grad_(False)

    def loss(self, x: Tensor, other: Tensor, y: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad():
            best = self.body(other).argmax(1, keepdim=True)
            goal = z + 0.9 * self.target(other).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(self.body(x).gather(1, y.unsqueeze(1)).squeeze(1), goal)


class Policy(nn.Module):
    """A clipped ratio of probabilities (arXiv:1707.06347), an entropy, a value."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body, self.log_std = _mlp(FEATURES, width, 2), nn.Parameter(torch.zeros(1))

    def loss(self, x: Tensor, action: Tensor, z: Tensor) -> Tensor:
        mean, value = self.body(x).unbind(1)
        policy = torch.distributions.Normal(mean, self.log_std.exp())
        ratio = (policy.log_prob(action) + 1.2).exp()
        gain = torch.minimum(ratio * z, ratio.clamp(0.8, 1.2) * z)
        return (-gain + 0.5 * (value - z).square() - 0.01 * policy.entropy()).mean()


class FixedPoint(nn.Module):
    """A point that a layer does not move (arXiv:1909.01377), found without gradient."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.body = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        u, h = self.embed(x), torch.zeros(1)
        with torch.no_grad():
            for _ in range(8):
                h = torch.tanh(u + self.body(h.expand_as(u))) / 2
        return self.head(self.drop(torch.tanh(u + self.body(h))))


class Sign(torch.autograd.Function):
    """The sign of a number, with the gradient of the number itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1)


class Binary(nn.Module):
    """Weights and activations of one bit."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.scale, self.drop = nn.Parameter(torch.ones(width)), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, Sign.apply(self.first.weight), self.first.bias) * self.scale
        return self.head(self.drop(Sign.apply(h)))


class Codes(nn.Module):
    """Nearest codes (arXiv:1711.00937), passed straight through."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(FEATURES, width, 4), _mlp(4, width, FEATURES)
        self.codes = nn.Embedding(7, 4)

    def loss(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        code = self.codes(torch.cdist(h, self.codes.weight).argmin(1))
        kept = F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())
        return F.mse_loss(self.decoder(h + (code - h).detach()), x) + kept


class Radiance(nn.Module):
    """Points along a ray (arXiv:2003.08934), folded into rows and composed in order."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = _mlp(12, width, width, 4, act=nn.ReLU)

    def loss(self, x: Tensor) -> Tensor:
        steps = torch.linspace(0, 1, 8).view(1, 8, 1)
        points = (x[:, None, :3] + steps * x[:, None, 3:6]).flatten(0, 1)
        waves = torch.cat([f(k * points) for f in (torch.sin, torch.cos) for k in (1, 2)], 1)
        density, colour = self.body(waves).view(len(x), 8, 4).split([1, 3], 2)
        alpha = 1 - torch.exp(-F.softplus(density))
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)[:, :-1]
        return F.mse_loss((alpha * clear * colour.sigmoid()).sum(1), x[:, :3].sigmoid())


class Exits(nn.Module):
    """A head at every depth; losses of all are summed."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(width, CLASSES) for _ in range(3)])
        self.drop = nn.Dropout(dropout)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h, losses = self.embed(x), []
        for layer, head in zip(self.layers, self.heads, strict=True):
            h = h + self.drop(F.gelu(layer(h)))
            losses.append(F.cross_entropy(head(h), y, label_smoothing=0.1))
        return torch.stack(losses).sum()


def _rows(n: int) -> Batch:
    return {
        **{"x": torch.randn(n, FEATURES), "other": torch.randn(n, FEATURES)},
        **{"noise": torch.randn(n, 4), "z": torch.randn(n), "action": torch.randn(n)},
        "y": torch.randint(CLASSES, (n,)),
    }


def _pictures(n: int) -> Batch:
    return images(n, size=16)


def _loss(*names: str) -> Callable[[Any, Batch], Tensor]:
    """Return the network's own loss of these fields."""
    return lambda net, batch: net.loss(*(batch[k] for k in names))


def _splines(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(Splines(FEATURES, width), nn.Dropout(dropout), Splines(width, CLASSES))


def _case(name: str, make: Any, loss: Any = classify, records: Any = _rows) -> Case:
    return Case(name, "torch", make, records, loss)


CASES = (
    _case("neural ODE", EulerSteps),
    _case("physics-informed", Physics, _loss("x", "z")),
    _case("critic with gradient penalty", Critic, _loss("x", "other")),
    _case("hyper-network of each record", OwnWeights),
    _case("dynamic convolution", DynamicConvolution, records=_pictures),
    _case("routed experts, top 1", Routed),
    _case("GAN, generator", Generator, _loss("x")),
    _case("variational auto-encoder", Variational, _loss("x", "noise")),
    _case("RealNVP", Flow, _loss("x")),
    _case("Kolmogorov-Arnold", _splines),
    _case("capsules", Capsules, records=_pictures),
    _case("auto-encoder, tied", Tied, _loss("x")),
    _case("complex layers", Complex),
    _case("U-Net", SmallUNet, _loss("x"), _pictures),
    _case("spatial transformer", Sampler, records=_pictures),
    _case("Q-learning", QLearning, _loss("x", "other", "y", "z")),
    _case("policy gradient", Policy, _loss("x", "action", "z")),
    _case("deep equilibrium", FixedPoint),
    _case("binary weights", Binary),
    _case("VQ-VAE, own", Codes, _loss("x")),
    _case("radiance field", Radiance, _loss("x")),
    _case("several exits", Exits, _loss("x", "y")),
)
