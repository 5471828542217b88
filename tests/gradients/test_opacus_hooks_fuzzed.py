"""Opacus' hooks on random models: each record's gradient is right, or the model is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.opacus_hooks import OpacusHooks


class Layout(nn.Module):
    """Lays out what goes through in another order in memory; the values are the same."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        *others, place = [*range(1, x.dim())][self.order % (x.dim() - 1) :] or [1]
        del others
        return x.transpose(place, -1).contiguous().transpose(place, -1)


class Back(torch.autograd.Function):
    """An identity whose gradient comes back in another order in memory."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.transpose(1, -1).contiguous().transpose(1, -1)


class Turned(nn.Module):
    """The identity above; for one record it is left out, since torch's convolutions may crash on it."""

    def forward(self, x: Tensor) -> Tensor:
        return Back.apply(x) if len(x) > 1 else x  # type: ignore[no-any-return]


class Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.reshape(-1, *[1] * (x.dim() - 2))


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += x
        return y


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def layers(draw: random.Random, places: int) -> list[Callable[[], nn.Module]]:
    """What may stand at a place of a network of 4 channels and 4 entries along each other dimension."""
    groups = draw.choice([1, 2, 4])
    mode = draw.choice(["zeros", "zeros", "reflect"])
    dilation = draw.choice([1, 2])
    kind = CONVOLUTIONS[places]
    return [
        lambda: kind(
            4, 4, 3, padding=dilation, dilation=dilation, groups=groups, padding_mode=mode
        ),
        lambda: kind(4, 4, 1, bias=False),
        lambda: kind(4, 4, 3, padding="same"),
        lambda: TRANSPOSED[places](4, 4, 3, padding=1, groups=groups),
        lambda: nn.GroupNorm(2, 4),
        lambda: INSTANCE[places](4, affine=True),
        lambda: nn.LayerNorm([4] * draw.randint(1, places)),
        lambda: nn.RMSNorm(4, eps=1e-5),
        lambda: nn.Linear(4, 4),
        lambda: Scale(4),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.PReLU(4),
        lambda: Twice(kind(4, 4, 1)),
        lambda: Residual(kind(4, 4, 1)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: Layout(draw.randint(0, 2)),
        Turned,
    ]


def model(seed: int) -> tuple[nn.Module, Tensor]:
    draw, places = random.Random(seed), random.Random(-seed).randint(1, 3)
    torch.manual_seed(seed)
    parts = [draw.choice(layers(draw, places))() for _ in range(draw.randint(2, 5))]
    net = nn.Sequential(
        CONVOLUTIONS[places](4, 4, 1), *parts, nn.Flatten(), nn.Linear(4 ** (places + 1), 2)
    )
    for param in net.parameters():
        param.requires_grad_(draw.random() < 0.8)
    for part in net.modules():
        if draw.random() < 0.05:
            part.eval()
    batch = torch.randn(4, *[4] * (places + 1))
    if places == 2 and draw.random() < 0.5:
        net, batch = (each.to(memory_format=torch.channels_last) for each in (net, batch))
    return net, batch


def try_one(seed: int, oracle: object) -> bool:
    """Compare one model; True if the hooks take it."""
    net, batch = model(seed)
    trained = oracle.trained(net)  # type: ignore[attr-defined]
    if not trained:
        return False
    try:
        # In plain memory: torch's convolutions may crash on one record that is not.
        plainly = copy.deepcopy(net).to(memory_format=torch.contiguous_format)
        expected = oracle.one_by_one(plainly, batch.contiguous())  # type: ignore[attr-defined]
        plain = torch.autograd.grad(oracle.mean_loss(net(batch)), trained)  # type: ignore[attr-defined]
    except RuntimeError:  # overwritten in place what autograd needs
        return False
    ordinary = torch.cat([each.reshape(-1) for each in plain]).double()
    if (ordinary - expected.mean(0)).norm() > 1e-3 * ordinary.norm():
        return False  # torch itself is wrong here
    engine = OpacusHooks()
    try:
        engine.attach(net, trained)
        found = bounded_sum(oracle.run(engine, net, batch), 0.3).value.double()  # type: ignore[attr-defined]
    except UnsupportedModelError:
        return False
    finally:
        engine.detach()
    wanted = oracle.clipped(expected, 0.3)  # type: ignore[attr-defined]
    assert (found - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7, f"seed {seed}: {net}"
    return True


def test_random_models_are_right_or_refused(oracle):
    taken = [try_one(seed, oracle) for seed in range(12)]
    assert sum(taken) >= 3


@pytest.mark.slow
def test_many_random_models_are_right_or_refused(oracle):
    taken = [try_one(seed, oracle) for seed in range(12, 400)]
    assert sum(taken) >= 150
