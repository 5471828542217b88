"""A device that has no float64, as Apple's: it trains, and no record is longer than its bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from device import DEVICE, IS_PRETENDED, without_float64
from models import CASES, UNCHECKED
from torch import Tensor, nn

from lightning_dp import Checks
from lightning_dp.boundary import bounded_sum
from lightning_dp.functional import has_float64
from lightning_dp.gradients.engines import EngineChoice

FAST = ("layers", "records", "rough smoothing", "count")
SLOW = ("ghost", "hooks", "one by one", "attention", "cubic", "diff2")


pytestmark = pytest.mark.skipif(
    not IS_PRETENDED and has_float64(DEVICE), reason="This device has float64."
)


@pytest.fixture(autouse=True)
def no_float64() -> Iterator[None]:
    has_float64.cache_clear()
    with without_float64() if IS_PRETENDED else nullcontext():
        yield
    has_float64.cache_clear()


def test_the_device_refuses_float64() -> None:
    assert not has_float64(DEVICE)
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, device=DEVICE).double()


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_fit_equals_that_on_the_cpu(case: str, fit: Callable[..., Any]) -> None:
    there, here = fit(DEVICE, **CASES[case]), fit("cpu", **CASES[case], **UNCHECKED)
    assert there.privacy.steps == here.privacy.steps == 3
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=1e-5)


def test_releases_of_many_entries_are_followed(fit: Callable[..., Any]) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 700), nn.Linear(700, 700), nn.Linear(700, 3))

    checks = {"checks": Checks(dry_run=False, comparisons=False)}
    found = fit(DEVICE, net=wide, noise_multiplier=1.0, count_clipped=True, **checks)
    assert found.privacy.steps == 3


# Scales of a record and of its loss: ordinary, tiny by huge (either way round), tiny, huge.
SCALES = [(1.0, 1.0), (1e-22, 1e18), (1e18, 1e-22), (1e-22, 1e-3), (1e19, 1e19)]


def network(kind: str) -> tuple[nn.Module, Tensor]:
    """A network without biases, whose gradients would hide what the weights add, and one record."""
    torch.manual_seed(0)
    if kind == "linear":
        net = nn.Sequential(nn.Linear(300, 4, bias=False), nn.Linear(4, 3, bias=False))
        return net.to(DEVICE), torch.randn(1, 300, device=DEVICE)
    if kind == "sequence":
        net = nn.Sequential(nn.Linear(5, 40, bias=False), nn.Linear(40, 3, bias=False))
        return net.to(DEVICE), torch.randn(1, 2, 5, device=DEVICE)
    net = nn.Sequential(nn.Conv2d(9, 90, 3, bias=False), nn.Flatten(), nn.Linear(360, 3))
    return net.to(DEVICE), torch.randn(1, 9, 4, 4, device=DEVICE)


@pytest.mark.parametrize("clip_norm", [1.0, 1e-7])
@pytest.mark.parametrize("kind", ["linear", "sequence", "convolution"])
def test_no_record_is_longer_than_its_bound(kind: str, clip_norm: float) -> None:
    for size, weight in SCALES:
        net, x = network(kind)
        params = list(net.parameters())[:1]
        net.requires_grad_(False)
        params[0].requires_grad_(True)
        engine = EngineChoice("layers").make(net, params)
        with engine.watching():
            loss = (net(x * size) * weight).sum()
        engine.backward(loss, keep_graph=True)
        total = bounded_sum(engine.take(1.0), clip_norm).value.cpu().double()
        assert total.norm() <= clip_norm * (1 + 1e-5)
        raw = torch.autograd.grad(loss, params)[0].flatten().cpu().double()
        if raw.norm() < 1e30:
            wanted = raw * min(1.0, clip_norm / float(raw.norm()))
            torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5 * clip_norm)
        else:
            assert not total.any()
