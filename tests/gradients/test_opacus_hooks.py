"""Opacus' own gradients: those of a loop over records, or a refusal; nothing is left on the model."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_dp import PrivacyConfig
from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import EngineChoice, UnsupportedModelError
from tests.gradients.little_models import Called

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
    "channels at the end": (
        lambda: Permuted(convolutions(), (0, 3, 1, 2)),
        lambda: images(8, 8, 2),
    ),
    "one channel for all": (convolutions, lambda: images(1, 8, 8).expand(-1, 2, -1, -1)),
    "1d": (lambda: Permuted(nn.Conv1d(3, 4, 3, padding=1), (0, 2, 1)), lambda: images(7, 3)),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
        lambda: images(2, 4, 4).to(memory_format=torch.channels_last),
    ),
    "layer norm": (lambda: Permuted(nn.LayerNorm(4), (0, 2, 1)), lambda: images(4, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_the_order_in_memory(hooks, name, oracle):
    torch.manual_seed(0)
    make, batch = CASES[name]
    module, batch = make(), batch()
    expected = oracle.one_by_one(module, batch)
    hooks.attach(module, oracle.trained(module))
    gradients = oracle.run(hooks, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=1e-5, atol=0)
    wanted = oracle.clipped(expected, 0.1)
    assert (bounded_sum(gradients, 0.1).value.double() - wanted).norm() <= 1e-5 * wanted.norm()


def with_a_parameter(inner: nn.Module) -> nn.Module:
    inner.gain = nn.Parameter(torch.ones(6))
    return inner


def turned(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x[:, :2, None, None].expand(-1, -1, 4, 4))


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nn.Bilinear(6, 6, 3), lambda layer, x: layer(x, x)),
        (nn.GRUCell(6, 4), lambda layer, x: layer(x, x.new_zeros(len(x), 4))),
        (nn.Linear(6, 3), lambda layer, x: layer(input=x)),
        (nn.Linear(6, 3), lambda layer, x: 2 * x @ layer.weight.t() + layer(x)),
        (nn.Linear(6, 6), lambda layer, x: layer(x) + torch.cat([layer(x[1:]), x[:1]])),
        (nn.Linear(6, 3).eval(), lambda layer, x: layer(x)),
        (with_a_parameter(nn.Linear(6, 6)), lambda layer, x: layer(x) * layer.gain),
        (nn.Conv2d(2, 4, 3, padding_mode="circular", padding=1), turned),
    ],
)
def test_what_opacus_mistakes_is_refused_by_name_when_it_runs(hooks, layer, call, oracle, anatomy):
    torch.manual_seed(0)
    module = Called(layer, call)
    before = anatomy(module)
    hooks.attach(module, oracle.trained(module))
    with pytest.raises(UnsupportedModelError, match=r"layer|rows than there"):
        oracle.run(hooks, module, oracle.features())
    hooks.detach()
    assert anatomy(module) == before


def test_nothing_of_opacus_stands_on_the_model_between_the_passes(hooks, oracle, mlp, anatomy):
    module = mlp()
    before = anatomy(module)
    hooks.attach(module, oracle.trained(module))
    loss = oracle.mean_loss(module(oracle.features()))
    hooks.rest()
    assert anatomy(module) == before
    hooks.backward(loss)
    assert hooks.take(1.0, {}).count == oracle.records and anatomy(module) == before


def test_a_kept_graph_gives_the_same_gradients_again(hooks, oracle, mlp):
    module = mlp()
    hooks.attach(module, oracle.trained(module))
    loss, found = oracle.mean_loss(module(oracle.features())), []
    for keeps in (True, False):
        hooks.backward(loss, keep_graph=keeps)
        found.append(hooks.take(1.0, {}).norms())
    assert torch.equal(*found)


def test_the_name_functional_is_gone_and_configurations_with_it_still_load():
    config = PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0)
    earlier = replace(config)
    object.__setattr__(earlier, "engine", "functional")  # as an earlier version wrote it
    assert pickle.loads(pickle.dumps(earlier)).engine == "functional"
    for make in (EngineChoice, lambda name: replace(config, engine=name)):
        with pytest.raises(
            ValueError, match=r"functional' is no engine any more.*engine='records'"
        ):
            make("functional")


def test_a_record_that_is_not_finite_is_no_wrong_sum(hooks, oracle, mlp):
    module, batch = mlp(), oracle.features()
    hooks.attach(module, oracle.trained(module))
    for value in (float("nan"), float("inf"), 1e30):
        batch[1] = value
        assert oracle.run(hooks, module, batch).count == oracle.records


@pytest.mark.parametrize("seed", range(8))
def test_random_stacks_are_right_or_refused(hooks, seed, oracle):
    torch.manual_seed(seed)
    kinds = [
        lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
        lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.InstanceNorm2d(4, affine=True),
        lambda: nn.LayerNorm(4),
        lambda: nn.Linear(4, 4),
        lambda: nn.PReLU(4),
    ]
    places = torch.randint(len(kinds), (4,)).tolist()
    module = nn.Sequential(*(kinds[place]() for place in places), nn.Flatten(), nn.Linear(64, 2))
    assert oracle.is_equal(hooks, module, images(4, 4, 4))
