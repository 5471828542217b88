"""Compiled models: trained parts run as written, frozen ones compiled, and the gradients are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.boundary import Query, Term
from lightning_dp.gradients import (
    RecordPasses,
    Replay,
    UnsupportedModelError,
)
from lightning_dp.gradients.module_hooks import as_written

RAN: list[str] = []


def graph(module: Any, inputs: Any) -> Callable[..., Any]:
    """A compiler that runs the graph as it is, and writes down that it ran."""

    def run(*tensors: Any) -> Any:
        RAN.append("graph")
        return module.forward(*tensors)

    return run


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled is left from other tests."""
    torch.compiler.reset()
    RAN.clear()
    yield
    torch.compiler.reset()


def tower(*, frozen: int = -1) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    if frozen >= 0:
        net[frozen].requires_grad_(False)
    return net


class Block(nn.Module):
    """A class of its own: torch compiles those of its own in place without any effect."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def wrapped(*, frozen: int = -1) -> nn.Module:
    return torch.compile(tower(frozen=frozen), backend=graph)


def in_place(*, frozen: int = -1) -> nn.Module:
    net = Block(tower(frozen=frozen))
    net.compile(backend=graph)
    return net


def wrapped_inside() -> nn.Module:
    net = tower()
    net[2] = torch.compile(net[2], backend=graph)
    return net


def in_place_inside() -> nn.Module:
    net = tower()
    net[2] = Block(net[2])
    net[2].compile(backend=graph)
    return net


class ByForward(nn.Module):
    """Its forward is compiled in the class, and so is a function that calls one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tower()

    @torch.compile(backend=graph)
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tower()

    def forward(self, x: Tensor) -> Tensor:
        return applied(self.net, x)


@torch.compile(backend=graph)
def applied(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


class Checkpointed(nn.Module):
    """The backward pass runs again exactly what ran in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = in_place(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(checkpoint(self.net, x, use_reentrant=False))


TRAINED = {
    "wrapped": wrapped,
    "in place": in_place,
    "a part wrapped": wrapped_inside,
    "a part in place": in_place_inside,
    "its forward": ByForward,
    "a function": ByFunction,
    "in a checkpoint": Checkpointed,
    "with a frozen part": lambda: wrapped(frozen=2),
}
NAMED = {"wrapped": "the model", "in place": "the model", "its forward": "the model"}
NAMED |= {"a part wrapped": "2"}


def check(net: nn.Module, engine: str, oracle: Any) -> str:
    """Compare with one record at a time of the model as it is written."""
    torch.manual_seed(1)
    batch = torch.randn(oracle.records, 6)
    with as_written():
        expected, y = oracle.one_by_one(net, batch), oracle.targets(net(batch).detach())
    with RecordPasses(net, oracle.trained(net), engine) as passes:
        found = passes.run(lambda b: oracle.mean_loss(net(b[0]), b[1]), [batch, y], len(y))
        description = passes.description
    total = oracle.clipped(expected, 0.1).to(torch.float32)
    factors = (0.1 / found.norms()).clamp(max=1)
    torch.testing.assert_close(found.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)
    torch.testing.assert_close(found.weighted_sum(factors.float()), total, rtol=2e-5, atol=1e-7)
    return description


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, "layers") for kind in TRAINED),
        *((kind, "hooks") for kind in ("in place", "a part wrapped")),
        *((kind, "records") for kind in ("wrapped", "a function", "with a frozen part")),
        pytest.param("in a checkpoint", "hooks", marks=pytest.mark.slow),
    ],
)
def test_trained_parts_run_as_written_and_the_description_names_them(kind, engine, oracle):
    net = TRAINED[kind]()
    description = check(net, engine, oracle)
    assert not RAN
    if kind in NAMED:
        assert f"{engine}; {NAMED[kind]}: compiled, and run as written" in description
    net(torch.randn(3, 6))
    assert RAN, "outside of private steps the model is compiled, as before"


class Backbone(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], *, compiled_head: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)  # a gradient goes through what is frozen
        self.backbone = make()
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(3, 2)
        if compiled_head:
            self.head = torch.compile(self.head, backend=graph)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.first(x)))


@pytest.mark.parametrize("make", [wrapped, in_place, ByForward])
@pytest.mark.parametrize("engine", ["layers", "hooks"])
def test_frozen_parts_stay_compiled(make, engine, oracle):
    assert check(Backbone(make), engine, oracle) == engine
    assert len(RAN) == 1


def test_products_with_hessians_see_no_compiled_part(oracle):
    net = Backbone(wrapped)
    params, record = oracle.trained(net), torch.randn(1, 6)
    along = torch.randn(sum(param.numel() for param in params))
    query = Query((Term(direction=along),), 1.0, 0.0)
    found = []
    for engine, n in (("layers", 2), ("one_by_one", 1)):
        with RecordPasses(net, params, engine) as passes:
            rows = record.expand(n, -1)
            answer = passes.gradients(
                query, Replay(lambda x: net(x).square().sum(1).mean(), rows, n)
            )
            assert answer is not None
            found.append(answer.weighted_sum(torch.full((n,), 1.0 / n)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert not RAN


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_is_refused_where_it_is_trained(how, oracle):
    net, batch = tower(), torch.randn(oracle.records, 6)
    scripted = torch.jit.script(net) if how == "script" else torch.jit.trace(net, batch)
    model = nn.Sequential(scripted, nn.Linear(3, 3))
    for engine in ("layers", "hooks"):
        with pytest.raises(UnsupportedModelError, match=r"0 is a module of TorchScript"):
            RecordPasses(model, oracle.trained(model), engine)
    for param in scripted.parameters():
        param.requires_grad_(False)
    assert check(model, "auto", oracle) == "layers"


def test_the_stance_of_the_compiler_is_left_as_it_was(oracle):
    net = Backbone(wrapped)
    with torch.compiler.set_stance("eager_on_recompile"):
        check(net, "auto", oracle)
        assert not RAN, "the user's own stance holds for frozen parts too"
        net(torch.randn(3, 6))
        assert not RAN
    net(torch.randn(3, 6))
    assert RAN


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_inductor(oracle):
    pytest.importorskip("torch._inductor")
    net = Backbone(tower)
    net.backbone = torch.compile(net.backbone)
    net.head = torch.compile(net.head)
    check(net, "auto", oracle)
