"""Activation checkpoints, in all places, beside one record at a time without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_early_stop,
)

from lightning_dp.boundary import Query, Term
from lightning_dp.gradients import (
    RecordPasses,
    Replay,
    UnsupportedModelError,
)
from lightning_dp.gradients.snapshot import RandomState

WIDTH = 6


class Plain(nn.Module):
    """A model of blocks; how they are called is for its subclasses to say."""

    def __init__(self, call: Callable[..., Any] = lambda f, *args: f(*args)) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


class Residual(Plain):
    """Gradients meet in front of a checkpoint and behind it."""

    def body(self, x: Tensor) -> Tensor:
        start = x
        for block in self.blocks:
            x = x + self.call(block, x) * torch.sigmoid(start)
        return x + self.call(self.blocks[0], start)


class Nested(Plain):
    def body(self, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            y = self.call(self.blocks[0], self.blocks[1](x))
            return x + self.call(self.blocks[2], y)

        return self.call(outer, torch.tanh(self.call(outer, x)))


class SeveralTensors(Plain):
    """Tuples, arguments that are no tensors, and outputs that nobody uses."""

    def body(self, x: Tensor) -> Tensor:
        def part(x: Tensor, scale: float, y: Tensor, none: None) -> tuple[Tensor, Tensor, Tensor]:
            both = self.blocks[0](x) * scale + self.blocks[1](y)
            return both, self.blocks[2](y), x.detach() * 2

        one, _unused, _ = self.call(part, x, 0.5, torch.sin(x), None)
        two, three, _ = self.call(part, one, 2.0, x, None)
        return two + three


class Frozen(Plain):
    """The part in the checkpoint has no trained parameters, or some."""

    def __init__(self, call: Callable[..., Any] = lambda f, *args: f(*args)) -> None:
        super().__init__(call)
        self.blocks[0].requires_grad_(False)
        self.blocks[1][1].requires_grad_(False)


class Twice(Plain):
    """A layer inside of a checkpoint and outside of it."""

    def body(self, x: Tensor) -> Tensor:
        return self.call(self.blocks[0], self.blocks[0](x)) + self.blocks[1](x)


class First(Plain):
    """Nothing is trained in front of the checkpoint; the input is made to have a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return self.head(self.call(self.blocks[0], self.call(self.blocks[1], x)))


def to_the_end(function: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint that is computed again as a whole, in the words that torch 2.6 knows too."""
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False)


KINDS = [Plain, Residual, Nested, SeveralTensors, Frozen, Twice, First]
CALLS = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "to the end": to_the_end,
}


def pair(kind: type[Plain], call: Any) -> tuple[Plain, Plain]:
    """A model without checkpoints, and the same one with them."""
    torch.manual_seed(0)
    plain, model = kind(), kind(CALLS[call])
    model.load_state_dict(plain.state_dict())
    return plain, model


def compare(oracle: Any, plain: nn.Module, model: nn.Module, engine: str = "layers") -> None:
    torch.manual_seed(1)
    batch = torch.randn(oracle.records, WIDTH)
    expected = oracle.one_by_one(plain, batch)
    with RecordPasses(model, oracle.trained(model), engine) as runs:
        found = runs.run(lambda b: oracle.mean_loss(model(b)), batch, len(batch))
    assert found is not None
    norms = found.norms()
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=3e-6, atol=0)
    clipped = found.weighted_sum((0.1 / norms).clamp(max=1).float())
    torch.testing.assert_close(clipped, oracle.clipped(expected, 0.1).float(), rtol=3e-5, atol=1e-7)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without_checkpoints(kind, oracle, anatomy):
    for call in CALLS:
        models = pair(kind, call)
        before = anatomy(models[1])
        compare(oracle, *models)
        compare(oracle, *models, "ghost")  # two backward passes
        assert anatomy(models[1]) == before


def test_sequences_and_wrappers(oracle):
    class Segments(Plain):
        def body(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)

    plain, _ = pair(Plain, "not reentrant")
    torch.manual_seed(0)
    compare(oracle, plain, Segments())
    wrapped = copy.deepcopy(plain)
    for number, block in enumerate(plain.blocks):
        wrapped.blocks[number] = checkpoint_wrapper(
            copy.deepcopy(block), CheckpointImpl.NO_REENTRANT
        )
    compare(oracle, plain, wrapped)


@pytest.mark.parametrize("call", CALLS)
def test_masks_and_two_points_are_those_without_checkpoints(call, oracle):
    """The same random numbers give the same gradients; those at two points are combined per record."""
    models, batch = pair(Residual, call), torch.randn(oracle.records, WIDTH)
    params = oracle.trained(models[0])
    point = torch.cat([param.detach().flatten() for param in params]) * 0.9
    query = Query((Term(), Term(-1.0, point)), 1.0, 0.0)
    state = RandomState.seeded(torch.device("cpu"), 3)
    masked, combined = [], []
    for model in models:
        replay = Replay(lambda x, net=model: oracle.mean_loss(net(x)), batch, len(batch))
        with RecordPasses(model, oracle.trained(model), "layers") as runs:
            combined.append(runs.gradients(query, replay).norms())
        for block in model.blocks:
            block.append(nn.Dropout(0.5))
        with RecordPasses(model, oracle.trained(model), "layers") as runs, state.again():
            masked.append(runs.run(replay.forward, batch, len(batch)).norms())
    torch.testing.assert_close(*masked, rtol=1e-6, atol=0)
    torch.testing.assert_close(*combined, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("call", CALLS)
def test_a_graph_that_is_kept_is_good_for_another_pass(call, oracle):
    plain, model = pair(Nested, call)
    batch = torch.randn(oracle.records, WIDTH)
    with RecordPasses(model, oracle.trained(model), "layers") as runs:
        loss = runs.forward(lambda b: oracle.mean_loss(model(b)), batch, len(batch))
        runs.backward(loss, keep_graph=True)
        norms = runs.take().norms()
        loss.backward()
        assert all(param.grad is None for param in model.parameters())
    torch.testing.assert_close(
        norms, oracle.one_by_one(plain, batch).norm(dim=1), rtol=3e-6, atol=0
    )


class UsedInside(Plain):
    """A parameter meets data inside of a checkpoint, and no layer is called."""

    def body(self, x: Tensor) -> Tensor:
        return self.call(lambda x: F.linear(x, self.blocks[0][1].weight) + self.blocks[0](x), x)


@pytest.mark.parametrize("call", CALLS)
def test_a_use_that_nobody_recorded_is_refused(call, oracle):
    _, model = pair(UsedInside, call)
    batch = torch.randn(oracle.records, WIDTH)
    with (
        RecordPasses(model, oracle.trained(model), "layers") as runs,
        pytest.raises(UnsupportedModelError, match=r"blocks\.0\.1\.weight"),
    ):
        runs.run(lambda b: oracle.mean_loss(model(b)), batch, len(batch))


class Backs(torch.autograd.Function):
    """Somebody's own checkpoint: it goes back into parameters from inside."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(x).backward(gradient)
        return None, x.grad


def test_a_checkpoint_of_somebody_elses_is_refused(oracle):
    plain, _ = pair(Plain, "not reentrant")
    model = Plain(Backs.apply)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.0\.weight.*inside"):
        compare(oracle, plain, model)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("engine", ["layers", "ghost", "one_by_one"])
def test_reentrant_ones_are_refused_with_the_cure(engine, oracle):
    torch.manual_seed(0)
    model = Plain(partial(checkpoint, use_reentrant=True))
    batch = torch.randn(1, WIDTH)
    with (
        RecordPasses(model, oracle.trained(model), engine) as runs,
        pytest.raises(UnsupportedModelError, match=r"reentrant.*use_reentrant=False"),
    ):
        runs.run(lambda b: model(b).square().mean(), batch, 1)
    assert all(param.grad is None for param in model.parameters())
