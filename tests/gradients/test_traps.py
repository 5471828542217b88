"""Traps of records that run alone: one section for each.

The second one, leaves of a batch without records, is that of ``test_batches.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_dp.boundary import Query, Term
from lightning_dp.functional import flatten
from lightning_dp.gradients import RecordPasses, Replay, UnsupportedModelError, layer_calls
from lightning_dp.gradients.passes import at_point
from lightning_dp.isolation.check import Settings
from lightning_dp.isolation.dry_run import DryRun
from lightning_dp.isolation.replay import Pipeline, Runner
from lightning_dp.isolation.state import TwinState
from tests.gradients.models import Example, linear, net, weight
from tests.gradients.test_contract import N, alone, made, only, replay, rows, trained
from tests.gradients.test_contract_options import check

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

MLP = {"body": linear(), "head": linear(6, 3)}


def hidden(function: Callable[..., Tensor], **parts: Callable[[], Any]) -> Example:
    return Example(net(lambda m, x: m.head(function(m, m.body(x))), **MLP, **parts))


def run(passes: RecordPasses, chunk: Replay) -> Any:
    return passes.run(chunk.forward, chunk.batch, chunk.size)


check_right = partial(check, engines=("records",))


# -- 1: what outlives the step ----------------------------------------------------------------

STORE: list[Any] = []


class Watcher:
    """Some object that a model tells what it sees."""

    seen: Any = None


def in_closure() -> Callable[..., Tensor]:
    last = None

    def function(m: nn.Module, y: Tensor) -> Tensor:
        nonlocal last
        last = y
        return y

    return function


def keep(how: Callable[[nn.Module, Tensor], Any]) -> Example:
    """A model that keeps its hidden values, or something of them."""

    def function(m: nn.Module, y: Tensor) -> Tensor:
        how(m, y)
        return y

    return hidden(function, parts=lambda: nn.ModuleList([nn.Identity()]))


KEPT = {
    "attribute": keep(lambda m, y: setattr(m, "last", y)),
    "detached": keep(lambda m, y: setattr(m, "last", y.detach().mean())),
    "list": keep(lambda m, y: m.__dict__.setdefault("all", []).append(y.detach())),
    "part": keep(lambda m, y: setattr(m.parts[0], "last", y)),
    "buffer": keep(lambda m, y: m.register_buffer("last", y.detach())),
    "global": keep(lambda m, y: STORE.append(y)),
    "object": keep(lambda m, y: setattr(Watcher, "seen", y)),
    "closure": hidden(in_closure()),
    "part of a split": keep(lambda m, y: setattr(m, "last", y.chunk(2, 1)[0])),
}


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    STORE.clear()
    Watcher.seen = None


@pytest.mark.few(3)
@pytest.mark.parametrize("name", KEPT)
def test_tensors_of_records_that_are_kept_are_refused_and_records_run_one_by_one(name):
    example = KEPT[name]
    module, batch = made(example)
    chunk = replay(example, module, batch)
    with alone("records", module) as passes:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="leaves numbers of single records"):
                run(passes, chunk)
    module, batch = made(example)
    with RecordPasses(module, trained(module), "records") as passes:
        found = run(passes, replay(example, module, batch))
        assert passes.description.startswith("one_by_one, since records")
    expected = rows(example, *made(example)).norm(dim=1)
    torch.testing.assert_close(found.norms(), expected)


def test_a_batch_that_a_hook_keeps_is_refused():
    example = Example(net(lambda m, x: m.head(m.body(x)), **MLP))
    module, batch = made(example)
    module.body.register_forward_pre_hook(lambda m, args: STORE.append(args))
    with alone("records", module) as passes, pytest.raises(UnsupportedModelError, match="leaves"):
        run(passes, replay(example, module, batch))


def test_what_was_kept_is_not_read_at_the_next_step():
    def function(m: nn.Module, y: Tensor) -> Tensor:
        last, m.last = getattr(m, "last", None), y
        return y if last is None else y + last

    example = hidden(function)
    module, batch = made(example)
    with alone("records", module) as passes:
        for _ in range(3):  # also after a refusal that somebody caught
            with pytest.raises(UnsupportedModelError):
                run(passes, replay(example, module, batch))


def test_numbers_texts_and_what_is_of_no_record_may_be_kept():
    def how(m: nn.Module, y: Tensor) -> None:
        m.steps = getattr(m, "steps", 0) + 1
        m.text, m.shape, m.weights = f"{y}", y.shape, m.head.weight.detach().mean()

    check_right(keep(how))


def test_records_are_not_written_into_what_all_of_them_share():
    shared = torch.zeros(1, 6, dtype=torch.float64)
    example = keep(lambda m, y: shared.add_(y.detach()))
    module, batch = made(example)
    with alone("records", module) as passes, pytest.raises(UnsupportedModelError, match="written"):
        run(passes, replay(example, module, batch))
    assert not shared.any()


# -- 4: passes that are given up half-way -----------------------------------------------------


def test_records_that_part_at_one_point_and_not_at_another_are_combined():
    """The branch that a record takes depends on the parameters."""
    example = Example(
        net(
            lambda m, x: m.head(m.body(x) if m.gate(x).sum() > 0 else x * m.gain),
            **MLP, gate=linear(6, 1), gain=weight(6),
        )
    )  # fmt: skip
    module, batch = made(example)
    here, point = rows(example, module, batch), flatten(trained(module)).detach() * -1.1
    with at_point(trained(module), point):
        there = rows(example, module, batch)
    expected = here - 0.5 * there
    query = Query((Term(), Term(-0.5, point)), 1e9, 0.0)
    with alone("records", module) as passes:
        found = passes.gradients(query, replay(example, module, batch))
        torch.testing.assert_close(found.norms(), expected.norm(dim=1))
        places = torch.tensor([0, 5, 17])
        only = found.restrict(places).weighted_sum(torch.arange(4.0).double())
    torch.testing.assert_close(only, torch.arange(4.0).double() @ expected[:, places])


def test_records_are_split_by_what_the_model_asks():
    for ask in (
        lambda x: x[0, 0].item() > 0,
        lambda x: bool(x[0, 0] > 0),
        lambda x: len((x > 0).nonzero()) > 3,
        lambda x: x.tolist()[0][0] > 0,
        lambda x: x.detach().numpy()[0, 0] > 0,
    ):
        check_right(Example(net(lambda m, x, ask=ask: m.head(m.body(x) if ask(x) else x), **MLP)))


def test_an_engine_that_gives_up_half_way_leaves_the_answer_and_the_numbers_to_the_next():
    """The step counts itself and keeps a tensor once, after it has drawn."""
    example = keep(lambda m, y: setattr(m, "last", F.dropout(y, 0.5)))
    answers = []
    for engine in ("records", "one_by_one"):
        module, batch = made(example)
        torch.manual_seed(5)
        with RecordPasses(module, trained(module), engine) as passes:
            answers.append(
                passes.answer(Query((Term(),), 0.1, 0.0), replay(example, module, batch))
            )
            answers.append(torch.rand(2))
    assert torch.equal(answers[0].value, answers[2].value) and torch.equal(answers[1], answers[3])


# -- 5: taps ----------------------------------------------------------------------------------

IN_PLACE = (
    lambda y: y.relu_(),
    lambda y: (y.view(-1).relu_(), y)[1],
    lambda y: (y[:, :3].mul_(2.0), y)[1],
    lambda y: (y.t().tanh_(), y)[1],
    lambda y: y.unsqueeze(1).clamp_(-0.5, 0.5).squeeze(1),
    lambda y: (y.__setitem__((slice(None), 1), 0.0), y)[1],
    lambda y: y.reshape(-1).add_(1.0).view_as(y).sigmoid_(),
    lambda y: torch.cat([part.exp() for part in y.clone().split(2, 1)], 1).relu_(),
)
LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: nn.LayerNorm(6),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 1), nn.Flatten()),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()
    ),
    "raw": net(lambda m, x: x @ m.a, a=weight(6, 6)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_whose_output_is_written_into_keeps_its_gradient(layer):
    for change in IN_PLACE:
        check_right(hidden(lambda m, y, of=change: of(m.layer(y)), layer=LAYERS[layer]))


def test_a_tap_without_a_gradient_is_an_error_where_the_loss_reaches_it(monkeypatch):
    example = Example(net(lambda m, x: m.head(m.body(x)), **MLP))
    module, batch = made(example)
    deaf = nn.Identity().register_forward_hook(print)
    monkeypatch.setattr(layer_calls, "_watch", lambda call, done: deaf)
    with (
        alone("records", module) as passes,
        pytest.raises(UnsupportedModelError, match="no gradient"),
    ):
        run(passes, replay(example, module, batch))


def test_a_layer_that_the_loss_does_not_reach_is_none():
    check_right(hidden(lambda m, y: (m.other(y), y.tanh())[1], other=linear()))


# -- 6: losses that compare records -----------------------------------------------------------


class Pairs(L.LightningModule):
    """A network and a loss of its scores."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(6, 4), loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]))


def contrastive(scores: Tensor) -> Tensor:
    y = F.normalize(scores, dim=1)
    return F.cross_entropy(y @ y.t() / 0.1, torch.arange(len(y)))


def hinge(scores: Tensor) -> Tensor:
    return (1.0 - scores[:, 0]).relu().mean()


@pytest.mark.parametrize("loss", [contrastive, hinge])
def test_a_loss_that_compares_records_is_refused_and_one_with_its_margin_met_is_not(loss):
    torch.manual_seed(0)
    model = Pairs(loss)
    batch = [100 * model.net.weight.detach()[:1].expand(N, 6).clone()]
    params = list(model.parameters())
    with RecordPasses(model, params, only("records")) as passes:
        found = passes.run(lambda b: model.training_step(b, 0), batch, N)
        assert (found.norms() < 1e-30).all()  # on this batch, up to what a bound adds to norms
        pipeline = Pipeline(default_collate, lambda b: b, lambda b: model.training_step(b, 0))
        runner = Runner(model, passes, params, pipeline, model.device)
        twins, settings = TwinState(model), partial(Settings, eps=1e-7)
        dry_run = partial(DryRun([batch[0][0]]).run, runner, settings, 1.0, twins)
        if loss is hinge:
            assert dry_run().kind == "isolated"
            return
        with pytest.raises(UnsupportedModelError, match="compares records with each other"):
            dry_run()
