"""A parameter in several places: each use counts once, whichever modules list it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Head(nn.Module):
    """The head of a masked language model: the bias of the decoder is on the head as well."""

    def __init__(self, *, has_gain: bool = False) -> None:
        super().__init__()
        self.dense, self.decoder = nn.Linear(6, 6), nn.Linear(6, 4)
        self.bias = self.decoder.bias
        self.gain = nn.Parameter(torch.linspace(0.5, 2, 4)) if has_gain else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.decoder(torch.tanh(self.dense(x)))
        return y if self.gain is None else y * self.gain


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = self.twin = nn.Parameter(torch.linspace(0.5, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain) + self.twin


def under_another_name() -> nn.Module:
    net = nn.Linear(6, 4)
    net.also = net.weight
    return net


def shared_by_three() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[4].weight = net[0].weight
    net[4].bias = net[0].bias
    return net


def registered_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer, nn.LayerNorm(6)))


def tied_norm() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    net[1].bias = net[1].weight
    return net


MODELS = {
    "on a module and its child": Head,
    "beside an own parameter": lambda: Head(has_gain=True),
    "in a model": lambda: nn.Sequential(nn.Linear(6, 6), Head()),
    "two names": TwoNames,
    "another name": under_another_name,
    "three layers": shared_by_three,
    "one layer twice": registered_twice,
    "weight and bias": tied_norm,
}


HOOKS_REFUSE = {*MODELS} - {"another name", "three layers", "one layer twice"}


@pytest.mark.parametrize("name", MODELS)
def test_every_use_of_a_shared_parameter_counts_once(engine, name, oracle):
    torch.manual_seed(0)
    module, batch = MODELS[name](), oracle.features()
    if engine.name == "hooks" and name in HOOKS_REFUSE:
        engine.attach(module, oracle.trained(module))
        with pytest.raises(UnsupportedModelError, match=r"cannot be computed|not the ordinary"):
            oracle.run(engine, module, batch)
        return
    expected = oracle.one_by_one(module, batch)
    engine.attach(module, oracle.trained(module))
    gradients = oracle.run(engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=1e-5, atol=0)
    wanted = oracle.clipped(expected, 0.1)
    assert (bounded_sum(gradients, 0.1).value.double() - wanted).norm() <= 1e-5 * wanted.norm()


class UsedByBoth(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def test_a_shared_parameter_that_the_outer_module_uses_itself(layer_engine, oracle):
    torch.manual_seed(0)
    module = UsedByBoth()
    layer_engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match="bias"):
        oracle.run(layer_engine, module, oracle.features())


def with_weights(scale: float, module: nn.Module, x: Tensor) -> Tensor:
    weights = {name: scale * param for name, param in module.named_parameters()}
    return functional_call(module, weights, (x,))


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_layer_called_with_other_weights_than_its_own(layer_engine, scale, oracle):
    """A gradient with respect to them is not one with respect to the layer's own."""
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), oracle.features()
    layer_engine.attach(module, oracle.trained(module))
    loss = oracle.mean_loss(with_weights(scale, module, batch))
    with pytest.raises(UnsupportedModelError, match=r"[02] \(Linear\) was called with other param"):
        layer_engine.backward(loss)


def test_a_slow_copy_of_the_weights_may_be_run_in_their_place(layer_engine, oracle):
    """Its output is a target: the loss does not depend on it."""
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), oracle.features()
    layer_engine.attach(module, oracle.trained(module))
    weights = {name: 0.5 * param for name, param in module.named_parameters()}
    target = functional_call(module, weights, (batch,)).detach()
    layer_engine.backward((module(batch) - target).square().sum(1).mean())
    assert layer_engine.take(1.0, {}).count == oracle.records
