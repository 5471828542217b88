"""The part of a graph that is seen: every use of a parameter outside its layer is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients import UncoveredParameterError, UnsupportedModelError
from lightning_dp.gradients.graph import survey
from lightning_dp.gradients.layer_calls import LayerCalls


@pytest.fixture
def parts(oracle) -> Iterator[tuple[LayerCalls, dict[str, nn.Module]]]:
    """Layers that are watched by their hooks alone."""
    torch.manual_seed(0)
    layers = {"one": nn.Linear(6, 6, bias=False), "two": nn.Linear(6, 7, bias=False)}
    net = nn.ModuleDict({"lookup": nn.Embedding(7, 6), **layers})
    engine = LayerCalls(net, oracle.trained(net))
    with engine.watching():
        yield engine, dict(net)


def refuses(engine: LayerCalls, loss: Tensor, *names: str) -> None:
    with pytest.raises(UncoveredParameterError) as caught:
        engine.backward(loss)
    assert str(list(names)) in str(caught.value)
    engine.drop()


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_uses_outside_of_layers_are_refused_by_name(parts, oracle):
    """Hooks alone would miss half of the gradient of a table that projects the output too."""
    engine, net = parts
    lookup, one, two = net.values()
    hidden = one(lookup(torch.randint(7, (oracle.records,))))
    refuses(engine, oracle.mean_loss(F.linear(hidden, lookup.weight)), "lookup.weight")
    loss = oracle.mean_loss(one(torch.randn(oracle.records, 6)))
    refuses(engine, loss + one.weight.square().sum(), "one.weight")
    hidden = one(torch.randn(oracle.records, 6))
    refuses(engine, oracle.mean_loss(F.linear(hidden, two.weight)), "two.weight")
    with torch.autocast("cpu", torch.bfloat16):  # which keeps one copy of the weight
        hidden = one(lookup(torch.randint(7, (oracle.records,))))
        loss = oracle.mean_loss(F.linear(hidden, one.weight))
    refuses(engine, loss, "one.weight")


def test_an_overwritten_input_is_refused(parts, oracle):
    engine, net = parts
    one, two = net["one"], net["two"]
    x = torch.randn(oracle.records, 6)
    y = one(x)
    loss = oracle.mean_loss(two(y))
    x.mul_(2.0)
    with pytest.raises(UnsupportedModelError, match=r"overwritten.*in place"):
        engine.backward(loss)


def test_rows_in_another_order_between_layers_are_refused(parts, oracle):
    engine, net = parts
    hidden = net["one"](torch.randn(oracle.records, 6)).flip(0)
    with pytest.raises(UnsupportedModelError, match="another order"):
        engine.backward(oracle.mean_loss(net["two"](hidden)))


def test_gradients_of_stride_zero_are_read_right(parts, oracle):
    """The gradient of a sum is one number, expanded."""
    (engine, net), x = parts, torch.randn(oracle.records, 6)
    engine.backward(net["one"](x).sum(1).mean())
    norms = engine.take(1.0).norms()
    torch.testing.assert_close(norms, x.double().norm(dim=1) * 6**0.5, rtol=1e-6, atol=0)


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
        assert survey(loss.grad_fn, ()).uses[id(w)] == count


def test_hooks_that_change_an_output_belong_to_the_model(oracle):
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), torch.randn(oracle.records, 6)
    module[0].register_forward_hook(lambda m, i, o: 3 * o)
    module[0].register_forward_pre_hook(lambda m, i: (2 * i[0],))
    expected = oracle.one_by_one(module, batch)
    gradients = oracle.run(LayerCalls(module, oracle.trained(module)), module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)
