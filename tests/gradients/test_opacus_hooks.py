"""Opacus' hooks: right for tensors in any order in memory, or a refusal that names the layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks

RECORDS = 5


class Permuted(nn.Module):
    """A network on what comes in with its dimensions in another order."""

    def __init__(self, net: nn.Module, order: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.order = net, order

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.permute(self.order))


def images(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.Flatten(),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "channels last": (
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda: images(2, 8, 8).to(memory_format=torch.channels_last),
    ),
    "input in channels last": (
        convolutions,
        lambda: images(2, 8, 8).to(memory_format=torch.channels_last),
    ),
    "channels at the end": (
        lambda: Permuted(convolutions(), (0, 3, 1, 2)),
        lambda: images(8, 8, 2),
    ),
    "height and width": (lambda: Permuted(convolutions(), (0, 1, 3, 2)), lambda: images(2, 6, 8)),
    "every other pixel": (convolutions, lambda: images(2, 16, 16)[:, :, ::2, ::2]),
    "one channel for all": (convolutions, lambda: images(1, 8, 8).expand(-1, 2, -1, -1)),
    "dilated": (
        lambda: nn.Conv2d(2, 3, 3, dilation=2, padding="same"),
        lambda: images(2, 8, 8).to(memory_format=torch.channels_last),
    ),
    "1d": (lambda: Permuted(nn.Conv1d(3, 4, 3, padding=1), (0, 2, 1)), lambda: images(7, 3)),
    "3d": (
        lambda: nn.Conv3d(2, 3, 2, padding=1, stride=2),
        lambda: images(2, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    ),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
        lambda: images(2, 4, 4).to(memory_format=torch.channels_last),
    ),
    "linear": (lambda: Permuted(nn.Linear(4, 3), (0, 2, 1)), lambda: images(4, 6)),
    "layer norm": (lambda: Permuted(nn.LayerNorm(4), (0, 2, 1)), lambda: images(4, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_the_order_in_memory(engine, name, oracle):
    torch.manual_seed(0)
    make, batch = CASES[name]
    module, batch = make(), batch()
    expected = oracle.one_by_one(module, batch)
    engine.attach(module, oracle.trained(module))
    gradients = oracle.run(engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=1e-5, atol=0)
    wanted = oracle.clipped(expected, 0.1)
    assert (bounded_sum(gradients, 0.1).value.double() - wanted).norm() <= 1e-5 * wanted.norm()


def with_a_parameter() -> nn.Module:
    layer = nn.Linear(6, 4)
    layer.gain = nn.Parameter(torch.ones(4))
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.utils.weight_norm(nn.Linear(6, 4)), "parameters that its type does not"),
        (lambda: nn.utils.weight_norm(nn.Conv1d(6, 4, 1)), "parameters that its type does not"),
        (with_a_parameter, r"parameters that its type does not: \['gain'\]"),
        (lambda: nn.Conv2d(2, 4, 3, padding_mode="circular", padding=1), "padding_mode='circular'"),
    ],
)
def test_layers_that_opacus_takes_for_others_are_refused_at_once(hooks, layer, reason, oracle):
    module = nn.Sequential(nn.Linear(6, 6), layer())
    with pytest.raises(UnsupportedModelError, match=rf"1 \(\w+\) .*{reason}"):
        hooks.attach(module, oracle.trained(module))


class Called(nn.Module):
    """A layer and the way in which it is called."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.call = nn.Linear(6, 6), layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, self.first(x))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, *, power: int = 1) -> Tensor:
        return x * self.gain**power


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nn.GRUCell(6, 4), lambda cell, x: cell(x, x.new_zeros(len(x), 4))),
        (nn.Bilinear(6, 6, 3), lambda layer, x: layer(x, x)),
        (Named(), lambda layer, x: layer(x, power=2)),
        (nn.Linear(6, 3), lambda layer, x: layer(input=x)),
    ],
)
def test_calls_of_which_opacus_sees_a_part_are_refused(hooks, layer, call, oracle):
    module = Called(layer, call)
    hooks.attach(module, oracle.trained(module))
    with pytest.raises(
        UnsupportedModelError, match=r"layer \(\w+\) .*something else than one tensor"
    ):
        oracle.run(hooks, module, oracle.features())


@pytest.mark.parametrize("place", [1, 2])
def test_what_comes_out_of_a_layer_may_be_overwritten(engine, place, oracle):
    module = nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))
    module.insert(place, nn.ReLU(inplace=True))
    batch = oracle.features()
    expected = oracle.one_by_one(module, batch)
    engine.attach(module, oracle.trained(module))
    wanted = oracle.clipped(expected, 0.1)
    found = bounded_sum(oracle.run(engine, module, batch), 0.1).value.double()
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


class OutsideToo(nn.Module):
    """Uses a weight in its layer and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).tanh() @ self.net.weight.t()


def double(layer: nn.Module, args: object, output: Tensor) -> Tensor:
    return 2 * output


def hooked() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.register_forward_hook(double)
    return layer


def test_a_users_hook_on_a_layer_is_seen(hooks, oracle):
    module, batch = hooked(), oracle.features()
    expected = oracle.one_by_one(module, batch)
    hooks.attach(module, oracle.trained(module))
    found = oracle.run(hooks, module, batch).norms()
    torch.testing.assert_close(found, expected.norm(dim=1), rtol=1e-5, atol=0)


class BesideItsLayer(nn.Module):
    """Adds a little of the same weight by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0.1 * x @ self.net.weight.t()


@pytest.mark.parametrize("make", [OutsideToo, BesideItsLayer])
def test_gradients_whose_mean_is_not_the_ordinary_gradient_are_refused(hooks, make, oracle):
    torch.manual_seed(0)
    module = make()
    hooks.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"a part only .* parameters \['net\.weight'\]"):
        oracle.run(hooks, module, oracle.features())


def test_a_record_that_is_not_finite_is_no_wrong_sum(hooks, oracle, mlp):
    module, batch = mlp(), oracle.features()
    hooks.attach(module, oracle.trained(module))
    for value in (float("nan"), float("inf"), 1e30):
        batch[1] = value
        assert oracle.run(hooks, module, batch).count == oracle.records


class Odd(nn.Module):
    """Cannot be run for one record."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * float(x.detach().abs().sum() > 0)


def test_whatever_is_raised_while_a_gradient_is_worked_out_names_the_layer(hooks, oracle):
    module = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), Odd()))
    hooks.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"^1\.1\b.*\bOdd\b"):
        oracle.run(hooks, module, oracle.features())


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nn.Linear(6, 3), lambda layer, x: layer(x[0])),
        (nn.Linear(6, 3), lambda layer, x: torch.stack([layer(each) for each in x])),
        (nn.Conv2d(2, 3, 1), lambda layer, x: layer(x[:2, :, None])),
        (nn.Conv1d(5, 3, 1), lambda layer, x: layer(x)),
        (nn.LayerNorm(6), lambda layer, x: layer(x[0])),
        (nn.RMSNorm(6), lambda layer, x: layer(x[0])),
        (nn.InstanceNorm1d(5, affine=True), lambda layer, x: layer(x)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("engine", [OpacusHooks, LayerCalls], ids=["hooks", "rules"])
def test_a_layer_called_without_records_is_refused_in_words(engine, layer, call, oracle):
    module, engine = Called(layer, call), engine()
    engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"layer \(\w+\) was called with .* records"):
        oracle.run(engine, module, oracle.features())


def test_attention_without_records_is_refused_in_words(oracle):
    module, engine = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), LayerCalls()
    engine.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"2 dimensions.*records, positions"):
        oracle.run(engine, module, oracle.features())
    engine.detach()
