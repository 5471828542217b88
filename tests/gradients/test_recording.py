"""The part of a graph that is seen: every use of a parameter outside its layer is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dp.gradients import UncoveredParameterError, UnsupportedModelError
from lightning_dp.gradients.bookkeeping import Bookkeeping
from lightning_dp.gradients.graph import in_order, survey


@dataclass
class Watched:
    engine: Bookkeeping
    net: nn.ModuleDict

    def refuses(self, loss: Tensor, *names: str) -> None:
        with pytest.raises(UncoveredParameterError) as caught:
            self.engine.backward(loss)
        assert str(list(names)) in str(caught.value)
        self.engine.drop()


def three_layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "lookup": nn.Embedding(7, 6),
            "one": nn.Linear(6, 6, bias=False),
            "two": nn.Linear(6, 7, bias=False),
        }
    )


@pytest.fixture
def parts(oracle) -> Iterator[Watched]:
    """Layers that are watched by their hooks alone."""
    engine, net = Bookkeeping(), three_layers()
    engine.attach(net, oracle.trained(net))
    yield Watched(engine, net)
    engine.detach()


def test_a_weight_used_again_outside_its_layer_is_refused(parts, oracle):
    """The embedding is also the output projection: hooks alone would miss half of its gradient."""
    lookup = parts.net["lookup"]
    hidden = parts.net["one"](lookup(torch.randint(7, (oracle.records,))))
    parts.refuses(oracle.mean_loss(F.linear(hidden, lookup.weight)), "lookup.weight")


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_the_same_is_refused_where_autocast_keeps_one_copy_of_the_weight(parts, oracle):
    lookup, one = parts.net["lookup"], parts.net["one"]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = one(lookup(torch.randint(7, (oracle.records,))))
        loss = oracle.mean_loss(F.linear(hidden, one.weight))
    parts.refuses(loss, "one.weight")


def test_a_penalty_on_the_weights_is_refused(parts, oracle):
    loss = oracle.mean_loss(parts.net["one"](torch.randn(oracle.records, 6)))
    parts.refuses(loss + parts.net["one"].weight.square().sum(), "one.weight")


def test_a_layer_that_is_not_called_is_refused(parts, oracle):
    x = parts.net["one"](torch.randn(oracle.records, 6))
    parts.refuses(oracle.mean_loss(F.linear(x, parts.net["two"].weight)), "two.weight")


def tied(net: nn.ModuleDict, x: Tensor) -> Tensor:
    return F.linear(net["one"](net["lookup"](x)), net["lookup"].weight)


def two_is_not_called(net: nn.ModuleDict, x: Tensor) -> Tensor:
    return F.linear(net["one"](net["lookup"](x)), net["two"].weight)


def residual(net: nn.ModuleDict, x: Tensor) -> Tensor:
    y = net["one"](net["lookup"](x))
    return y + torch.tanh(y) * y + net["one"](y)


def added_up(net: nn.ModuleDict, x: Tensor) -> Tensor:
    """The gradient of a sum is one number, expanded."""
    return net["one"](net["lookup"](x)).sum(1, keepdim=True)


@pytest.mark.parametrize("forward", [tied, two_is_not_called, residual, added_up])
def test_all_of_it_trains_where_functions_are_followed(layer_engine, forward, oracle):
    x = torch.randint(7, (oracle.records,), generator=torch.Generator().manual_seed(0))
    assert oracle.is_equal(layer_engine, three_layers(), x, forward)


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_one_copy_of_a_weight_under_autocast_is_followed(layer_engine, oracle):
    net, x = three_layers(), torch.randint(7, (oracle.records,))
    layer_engine.attach(net, oracle.trained(net))
    with layer_engine.following(x, len(x)), torch.autocast("cpu", torch.bfloat16):
        hidden = net["one"](net["lookup"](x))
        loss = oracle.mean_loss(F.linear(hidden, net["one"].weight))
    grads = torch.autograd.grad(
        loss, oracle.trained(net), retain_graph=True, materialize_grads=True
    )
    plain = torch.cat([each.flatten() for each in grads])
    layer_engine.backward(loss)
    total = layer_engine.take(1.0, {}).weighted_sum(torch.full((len(x),), 1 / len(x)))
    assert (total - plain).norm() <= 2e-2 * plain.norm()


def test_branches_and_residuals_are_no_second_use(parts, oracle):
    one, x = parts.net["one"], torch.randn(oracle.records, 6)
    y = one(x)
    parts.engine.backward(oracle.mean_loss(y + torch.tanh(y) * y + one(y)))
    assert parts.engine.take(1.0, {}).count == oracle.records


def test_an_overwritten_input_is_refused(parts, oracle):
    one, two = parts.net["one"], parts.net["two"]
    x = torch.randn(oracle.records, 6)
    y = one(x)
    loss = oracle.mean_loss(two(y))
    x.mul_(2.0)
    with pytest.raises(UnsupportedModelError, match=r"overwritten.*in place"):
        parts.engine.backward(loss)


def test_gradients_of_stride_zero_are_read_right(parts, oracle):
    """The gradient of a sum is one number, expanded."""
    one, x = parts.net["one"], torch.randn(oracle.records, 6)
    parts.engine.backward(one(x).sum(1).mean())
    norms = parts.engine.take(1.0, {}).norms()
    torch.testing.assert_close(norms, x.double().norm(dim=1) * 6**0.5, rtol=1e-6, atol=0)


class Scaled(nn.Module):
    """A layer of the user's own, without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.tanh(self.scale)


def scaled_before(net: nn.Sequential, x: Tensor) -> Tensor:
    return net(x * net[1].scale)


def scaled_after(net: nn.Sequential, x: Tensor) -> Tensor:
    return net(x) * net[1].scale


@pytest.mark.parametrize("forward", [scaled_before, scaled_after])
def test_a_parameter_of_an_own_layer_used_outside_is_refused_or_followed(
    layer_engine, forward, oracle
):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 6), Scaled()), torch.randn(oracle.records, 6)
    assert oracle.is_equal(layer_engine, net, x, forward)
    with pytest.raises(UncoveredParameterError, match=r"'1.scale'"):
        layer_engine.backward(oracle.mean_loss(forward(net, x)))  # functions were not followed


def test_uses_are_counted_where_a_parameter_meets_something_else():
    w, x = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3, requires_grad=True)
    for loss, count in [
        ((x @ w.t()).sum(), 1),
        ((x @ w.t().contiguous().double().float()).sum(), 1),
        ((x @ w + x @ w).sum(), 2),
        ((x @ (w + w)).sum(), 1),
        (w.square().sum(), 1),
        ((x @ w).sum() + w.norm(), 2),
        (x.sum(), 0),
    ]:
        assert survey(in_order(loss.grad_fn), ()).uses[id(w)] == count


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_activation_checkpoints(layer_engine, oracle):
    torch.manual_seed(0)
    module, batch = Checkpointed(), torch.randn(oracle.records, 6)
    expected = oracle.one_by_one(module, batch)
    layer_engine.attach(module, oracle.trained(module))
    gradients = oracle.run(layer_engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)


def test_hooks_that_change_an_output_belong_to_the_model(layer_engine, oracle):
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), torch.randn(oracle.records, 6)
    module[0].register_forward_hook(lambda m, i, o: 3 * o)
    module[0].register_forward_pre_hook(lambda m, i: (2 * i[0],))
    expected = oracle.one_by_one(module, batch)
    layer_engine.attach(module, oracle.trained(module))
    gradients = oracle.run(layer_engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)
