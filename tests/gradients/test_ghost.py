"""Two backward passes: the bound holds whatever the second one finds, and nothing is kept."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import UnsupportedModelError, ghost
from lightning_dp.gradients.ghost import GhostClipping
from lightning_dp.gradients.layer_calls import LayerCalls
from tests.gradients.models import EXAMPLES
from tests.gradients.test_contract_options import check

ODD = 37  # nothing else has this width
C = 0.1


class Changed(nn.Module):
    """Its output gradient is another one in each further backward pass."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)
        self.change, self.passes = change, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        self.passes = 0
        x.register_hook(self._hook)
        return self.two(torch.tanh(x))

    def _hook(self, gradient: Tensor) -> Tensor | None:
        self.passes += 1
        return None if self.passes == 1 else self.change(gradient)


def made(module: nn.Module, kind: Any = GhostClipping) -> Any:
    return kind(module, list(module.parameters()))


@pytest.mark.parametrize(
    ("change", "share"),
    [(partial(torch.mul, 100.0), 1.0), (partial(torch.mul, math.nan), 0.0)],
    ids=["longer", "not finite"],
)
def test_no_record_is_longer_than_its_bound_when_the_second_pass_differs(change, share, oracle):
    torch.manual_seed(0)
    net, batch = Changed(change), torch.randn(1, 6)
    expected = oracle.clipped(oracle.one_by_one(net, batch), C)
    net = Changed(change)
    torch.manual_seed(0)
    net.load_state_dict(Changed(change).state_dict())

    total = bounded_sum(oracle.run(made(net), net, batch), C).value.double()

    assert net.passes == 2 and total.norm() <= C * (1 + 1e-6)
    first = net.one.weight.numel() + net.one.bias.numel()
    torch.testing.assert_close(total[:first], share * expected[:first], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(total[first:], expected[first:], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("kind", "kept"), [(GhostClipping, False), (LayerCalls, True)])
def test_output_gradients_are_not_kept_between_the_passes(kind, kept, oracle):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    engine, came = made(net, kind), list[StorageWeakRef]()
    with engine.watching():
        hidden = net[0](oracle.features())
        loss = oracle.mean_loss(net[2](net[1](hidden)))
    hidden.register_hook(lambda gradient: came.append(StorageWeakRef(gradient.untyped_storage())))

    engine.backward(loss)

    assert len(came) == 1 and came[0].expired() is not kept


def held() -> int:
    """The tensors in Python's hands that have the odd width and are no parameters."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) is Tensor)
    return sum(each.shape[-1:] == (ODD,) for each in tensors)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "kept"), [(GhostClipping, False), (LayerCalls, True)])
def test_a_checkpoint_drops_the_inputs_of_its_layers(kind, kept, oracle):
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, ODD), nn.Tanh(), nn.Linear(ODD, 3))
    engine = made(net, kind)
    before = held()  # what other tests of this process left

    with engine.watching():
        output = checkpoint(net[1:], net[0](oracle.features()), use_reentrant=False)

    assert (held() > before) is kept
    engine.backward(oracle.mean_loss(output))
    assert engine.take(1.0).count == oracle.records


@pytest.mark.parametrize("name", ["cnn", "transformer block", "tied embedding"])
def test_slices_of_one_record_give_the_same(name, monkeypatch):
    monkeypatch.setattr(ghost, "_SLICE", 1)
    check(EXAMPLES[name], ("ghost",))


def test_sums_are_asked_for_once_and_entries_before(oracle, mlp):
    torch.manual_seed(0)
    module, batch = mlp(), oracle.features()
    rows = oracle.one_by_one(module, batch)
    found = oracle.run(made(module), module, batch)
    places = torch.arange(rows.shape[1])[::3]

    for _ in range(2):
        entries = found.restrict(places).entries().double()
        torch.testing.assert_close(entries, rows[:, places], rtol=1e-4, atol=1e-7)
    twice = found.combine(2.0, ()).weighted_sum(torch.ones(len(batch))).double()
    total = found.weighted_sum(torch.ones(len(batch))).double()

    torch.testing.assert_close(total, rows.sum(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(twice, 2 * total, rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="may be called once"):
        found.weighted_sum(torch.ones(len(batch)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"combined": True}, "several points"), ({"keep_graph": True}, "goes back once more")],
)
def test_what_needs_more_than_norms_is_refused(arguments, message, oracle, mlp):
    module = mlp()
    engine = made(module)
    with pytest.raises(UnsupportedModelError, match=message), engine.watching():
        engine.backward(oracle.mean_loss(module(oracle.features())), **arguments)


def test_a_graph_that_is_gone_after_one_pass_is_refused(oracle):
    class Once(torch.autograd.Function):
        """Frees what it saved by itself."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.passes = 0
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            ctx.passes += 1
            if ctx.passes > 1:
                raise RuntimeError("5 secrets")
            return gradient

    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    engine = made(net)
    with engine.watching():
        engine.backward(oracle.mean_loss(net[1](Once.apply(net[0](oracle.features())))))
    with pytest.raises(UnsupportedModelError, match=r"second time.*engine='layers'") as caught:
        engine.take(1.0).weighted_sum(torch.ones(oracle.records))
    assert "secrets" not in str(caught.value)
