"""Queries answered from a chunk, against one record at a time; randomness, rows, and traces."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.boundary import Query, Term
from lightning_dp.functional import flatten
from lightning_dp.gradients import (
    RawGradientGuard,
    RecordPasses,
    Replay,
    UnsupportedModelError,
)
from lightning_dp.gradients.passes import at_point, passes_of
from lightning_dp.gradients.snapshot import RandomState
from tests.gradients.models import Copies, Example
from tests.gradients.test_contract import clipped, rows

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

RECORDS = 6
X = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 1, 0, 2])


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


HERE = flatten(list(make_net().parameters()))
D = len(HERE)


def vector(seed: int, size: float = 0.3) -> Tensor:
    return size * torch.randn(D, generator=torch.Generator().manual_seed(seed))


def loss_of(net: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: F.cross_entropy(net(batch[0]), batch[1])


def chunk_of(net: nn.Module, x: Tensor = X, y: Tensor = Y, **more: Any) -> Replay:
    return Replay(loss_of(net), (x, y), len(x), **more)


# -- the oracle -------------------------------------------------------------------------------


@cache
def derivatives(point: Tensor | None, direction: Tensor | None) -> Tensor:
    """(n, d): h(x) of each record, by plain autograd in float64."""
    net, along = make_net().double(), None if direction is None else direction.double()
    with at_point(list(net.parameters()), (HERE if point is None else point).double()):
        return rows(Example(make_net), net, {"x": X.double(), "y": Y}, along)


def parts(query: Query) -> Tensor:
    """Return each record's part, before it is clipped."""
    whole = sum(each.weight * derivatives(each.point, each.direction) for each in query.terms)
    return whole if query.coordinates is None else whole[:, query.coordinates]


POINT, OTHER, U, W = vector(2) + HERE, vector(3) + HERE, vector(4, 1.0), vector(5, 1.0)
GRADIENTS = {
    "here": (Term(),),
    "here, weighted": (Term(-0.7),),
    "there": (Term(point=POINT),),
    "a difference": (Term(), Term(-1.0, POINT)),
    "a weight of zero": (Term(0.0), Term(2.0, POINT)),
    "two points, neither here": (Term(1.5, OTHER), Term(-0.5, POINT)),
    "three points": (Term(), Term(-0.4, POINT), Term(0.2, OTHER)),
    "the same point twice": (Term(), Term(0.5, POINT), Term(0.25, POINT)),
}
PRODUCTS = {
    "along here": (Term(direction=U),),
    "along there": (Term(-0.5, POINT, U),),
    "gradient and product": (Term(0.3), Term(2.0, direction=U)),
    "two directions": (Term(), Term(0.5, direction=U), Term(-1.0, direction=W)),
    "a difference and a product": (Term(), Term(-1.0, POINT), Term(1.0, POINT, U)),
}
QUERIES = {**GRADIENTS, **PRODUCTS}
COORDINATES = torch.tensor([0, 1, 5, 13, D - 1])


def passes(module: nn.Module, engine: str = "auto") -> RecordPasses:
    return RecordPasses(module, list(module.parameters()), engine)


@pytest.mark.parametrize("name", QUERIES)
def test_an_answer_is_that_of_a_loop_over_records(name):
    terms, engines = QUERIES[name], ("auto", "records", "hooks")
    for engine in engines if name in GRADIENTS else engines[:2]:  # "hooks" has no products
        net = make_net()
        mine = passes(net, engine)
        for keep in (None, COORDINATES):
            norms = parts(Query(terms, 1.0, 0.0, keep)).norm(dim=1)
            for clip_norm in (
                float(norms.sort().values[2]),
                math.inf,
            ):  # some records are clipped, and none
                query = Query(terms, clip_norm, 0.0, keep)
                found = mine.answer(query, chunk_of(net))
                assert found.clip_norm == clip_norm
                close_to(found, query)


def close_to(found: Any, query: Query) -> None:
    torch.testing.assert_close(
        found.value.double(), clipped(parts(query), query.clip_norm), rtol=2e-4, atol=2e-6
    )


@pytest.mark.parametrize("engine", ["auto", "hooks"])
@pytest.mark.parametrize("name", ["here", "here, weighted", "three points", "there"])
def test_gradients_that_are_known_are_not_computed_again(name, engine):
    net, runs = make_net(), []
    mine = passes(net, engine)
    first = mine.run(loss_of(net), (X, Y), RECORDS, combined=True)
    forward = lambda batch: runs.append(0) or loss_of(net)(batch)  # noqa: E731
    query = Query(GRADIENTS[name], 0.2, 0.0)

    again = Replay(forward, (X, Y), RECORDS, RandomState(torch.device("cpu")))
    found = mine.answer(query, again, first=first)

    assert len(runs) == sum(each.point is not None for each in passes_of(query))
    close_to(found, query)


@pytest.mark.parametrize("name", ["here", "a difference", "gradient and product"])
def test_a_record_that_is_not_finite_contributes_zero(name):
    net, x = make_net(), X.clone()
    query, mine = Query(QUERIES[name], 0.2, 0.0), passes(net)
    others = [i for i in range(RECORDS) if i != 2]
    expected = mine.answer(query, chunk_of(net, X[others], Y[others]))
    for bad in (math.nan, math.inf):
        x[2] = bad
        found = mine.answer(query, chunk_of(net, x))
        torch.testing.assert_close(found.value, expected.value)


# -- randomness -------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout, of which the masks are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.masks = make_net(), []

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.ones(len(x), 3), 0.5)
        self.masks.append(hidden)
        return self.net[2](self.net[0](x) * hidden)


@pytest.mark.parametrize("name", ["three points", "a difference and a product"])
def test_all_passes_draw_the_same_numbers_and_the_next_chunk_others(name):
    net = Noisy()
    mine, query = passes(net), Query(QUERIES[name], 1.0, 0.0)
    chunk = chunk_of(net)

    mine.answer(query, chunk)
    after = torch.get_rng_state()
    mine.answer(query, chunk)

    count = len(passes_of(query))
    assert len(net.masks) == 2 * count
    for masks in (net.masks[:count], net.masks[count:]):
        assert all(torch.equal(each, masks[0]) for each in masks)
    assert not torch.equal(net.masks[0], net.masks[-1])
    assert not torch.equal(after, torch.get_rng_state())


def test_a_chunk_run_before_is_run_with_its_first_randomness_and_leaves_the_states():
    net = Noisy()
    mine, chunk = passes(net), chunk_of(net, randomness=RandomState(torch.device("cpu")))
    first = mine.run(chunk.forward, chunk.batch, chunk.size, combined=True)
    torch.rand(7)
    before = torch.get_rng_state()

    mine.answer(Query(QUERIES["three points"], 1.0, 0.0), chunk, first=first)
    mine.answer(Query(QUERIES["there"], 1.0, 0.0), chunk)

    assert len(net.masks) == 4
    assert all(torch.equal(each, net.masks[0]) for each in net.masks)
    assert torch.equal(before, torch.get_rng_state())


# -- what is no answer ------------------------------------------------------------------------


def test_a_chunk_without_records_runs_nothing():
    net, ran = make_net(), []
    mine = passes(net)
    stand_in = mine.run(loss_of(net), (X[:1], Y[:1]), 1)
    chunk = Replay(lambda _: ran.append(0), (X, Y), 0)

    for terms in (QUERIES["here"], QUERIES["three points"]):
        assert mine.answer(Query(terms, 1.0, 0.0), chunk) is None
    assert mine.answer(Query(QUERIES["here"], 1.0, 0.0), chunk, first=stand_in) is None
    assert not ran


@pytest.mark.parametrize("engine", ["auto", "hooks"])
@pytest.mark.parametrize("name", ["here", "there", "along here"])
def test_a_pass_without_a_loss_is_no_answer_and_leaves_nothing_for_the_next(name, engine):
    if engine == "hooks" and name == "along here":
        pytest.skip("has no products")
    net = make_net()
    mine, query = passes(net, engine), Query(QUERIES[name], 0.2, 0.0)
    nothing = [lambda _: None, lambda b: loss_of(net)(b).detach(), lambda _: {"loss": None}]
    for forward in nothing:
        assert mine.answer(query, Replay(forward, (X, Y), RECORDS)) is None

    found = mine.answer(query, chunk_of(net))
    close_to(found, query)


@pytest.mark.parametrize("engine", ["auto", "records", "hooks"])
@pytest.mark.parametrize("name", ["here", "there", "a difference"])
def test_other_rows_than_records_are_an_error(name, engine):
    net = make_net()
    query = Query(QUERIES[name], 0.2, 0.0)
    mine = passes(net, engine)
    for size in (RECORDS - 1, RECORDS + 1):
        with pytest.raises(
            UnsupportedModelError, match=r"more or fewer rows|no entry for each record"
        ):
            mine.answer(query, Replay(loss_of(net), (X, Y), size))
    first = mine.run(loss_of(net), (X, Y), RECORDS)
    with pytest.raises(UnsupportedModelError):  # also where the query does not use them
        mine.answer(query, Replay(loss_of(net), (X, Y), RECORDS - 1), first=first)


# -- what is left -----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_nothing_is_left_on_the_module(engine):
    class Fault(Exception):
        pass

    def fails(_: Any) -> Tensor:
        net(X)
        raise Fault

    net = make_net()
    untouched, entered = copy.deepcopy(net), []

    def quietly(_: Any) -> Any:
        entered.append(0)
        return at_point(list(net.parameters()), flatten(list(net.parameters())))

    with RecordPasses(net, list(net.parameters()), engine, quietly=quietly) as mine:
        query = Query(GRADIENTS["three points"], 0.2, 0.0)
        mine.answer(query, chunk_of(net))
        assert len(entered) == 3  # once for each pass
        assert all(not part._forward_hooks for part in net.modules())  # between two passes
        with pytest.raises(Fault):
            mine.answer(Query(GRADIENTS["there"], 0.2, 0.0), Replay(fails, (X, Y), RECORDS))
        assert all(not part._forward_hooks for part in net.modules())
        assert all(param.grad is None for param in net.parameters())

    torch.testing.assert_close(net.state_dict(), untouched.state_dict(), rtol=0, atol=0)
    assert [set(vars(part)) for part in net.modules()] == [
        set(vars(part)) for part in untouched.modules()
    ]
    F.cross_entropy(net(X), Y).backward()  # raw gradients are the user's again
    assert all(param.grad is not None for param in net.parameters())


def test_the_guard_drops_raw_gradients_of_trained_parameters_until_it_is_removed():
    net = make_net()
    net[0].bias.requires_grad_(False)
    guard = RawGradientGuard(net.named_parameters())
    loss_of(net)((X, Y)).backward()
    assert all(param.grad is None for param in net.parameters())
    assert set(guard.touched()) == {"0.weight", "2.weight", "2.bias"}
    assert guard.touched() == {}
    guard.remove()
    loss_of(net)((X, Y)).backward()
    assert all(param.grad is not None for param in net.parameters() if param.requires_grad)


# -- how many others there are ----------------------------------------------------------------------


class Clamps(Copies):
    """A backward pass that is not linear."""

    generate_vmap_rule = True

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


OFTEN_ROUNDED = {  # loss of the outputs, a network
    "linear loss in float32": (lambda out: out.float().abs().sum(1).mean(), True),
    "loss in bfloat16": (lambda out: out.abs().sum(1).mean(), True),
    "clamped gradients": (lambda out: Clamps.apply(out).square().sum(1).mean(), False),
}


@pytest.mark.parametrize("case", list(OFTEN_ROUNDED))
@pytest.mark.parametrize("engine", ["auto", "ghost", "records"])
def test_the_number_of_records_moves_no_gradient(case, engine):
    loss, is_half = OFTEN_ROUNDED[case]
    net = make_net().to(torch.bfloat16 if is_half else torch.float32)
    x, found = X.to(net[0].weight.dtype), []
    with RecordPasses(net, list(net.parameters()), engine) as passes:
        for n in (2, 3, 129, 257):
            batch = (x[:1].expand(n, -1),)
            gradients = passes.run(lambda b: loss(net(b[0])), batch, n)
            found.append(gradients.weighted_sum(0.0 * gradients.norms() + 1.0) / n)

    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-5, atol=1e-7)
