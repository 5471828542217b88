"""Snapshots of modules: what they see, what they put back, what they leave alone."""

from __future__ import annotations

import copy
import importlib
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from types import MethodType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributions import Normal
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp.gradients.snapshot import (
    Difference,
    RandomState,
    Snapshot,
    apart,
    is_same_content,
    restored,
)


@dataclass
class Bank:
    rows: list = field(default_factory=list)
    size: int = 0


class Pair(NamedTuple):
    rate: float
    rows: list


class Ring:
    """A user's own class."""

    def __init__(self):
        self.start, self.rows = 0, torch.zeros(3)


@dataclass(slots=True)
class Running:
    """A class of ``attrs.define`` is one, too."""

    mean: float = 0.0


class Reservoir(list):
    """A list that counts what it was shown."""

    seen = 0


class Weight(float):
    """A number of a class of one's own."""


class Metres(float):
    """A number that is compared with none of its class."""

    __hash__ = None

    def __eq__(self, other):
        raise TypeError


def times(factor):
    """Return a function that holds a number."""
    return lambda x: factor * x


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.layers.scale, self.layers[0].labels = 1.0, {"a": 1}
        self.layers.due, self.layers.done = [1.0], []
        self.accuracy = MulticlassAccuracy(3)
        self.queue = deque([torch.zeros(2)], maxlen=2)
        self.counts, self.by_label = Counter("aa"), defaultdict(list)
        self.order = OrderedDict(a=1, b=2)
        self.names, self.pair = {"x"}, Pair(0.1, [2])
        self.array, self.tensor = np.zeros(3), torch.ones(2)
        self.bank, self.ring = Bank(), Ring()
        self.bank.me = self.bank  # a circle
        self.running, self.reservoir = Running(), Reservoir([0.0])
        self.prior, self.labels = Normal(0.0, 1.0), frozenset("a")
        self.share, self.adjacency = Fraction(1, 2), torch.eye(2).to_sparse()
        self.many, self.scaled = [0.0] * 30_000, partial(max, 1.0)
        self.weight, self.loss, self.draw = Weight(1.0), times(1.0), [1.0].count
        self.length, self.bound = Metres(1.0), MethodType(partial(max, 1.0), self)
        self.inside, self.given = torch.no_grad()(times(1.0)), partial(times(1.0), factor=1.0)
        self.generator, self.numpy = torch.Generator(), np.random.default_rng(0)
        self.legacy, self.python = np.random.RandomState(0), random.Random(0)
        self.teachers = [nn.Sequential(nn.Linear(2, 2))]
        self.nothing, self.nan, self.mean = None, math.nan, np.float64(0)


CHANGES = {
    "buffer": (lambda m: m.layers(torch.randn(4, 2)), "layers.1.running_mean", "buffer"),
    "buffer replaced": (
        lambda m: setattr(m.layers[1], "running_var", torch.full((2,), 7.0)),
        "layers.1.running_var",
        "buffer",
    ),
    "new buffer": (
        lambda m: m.layers[0].register_buffer("seen", torch.ones(1)),
        "layers.0.seen",
        "buffer",
    ),
    "metric": (lambda m: m.accuracy.update(torch.tensor([1]), torch.tensor([1])), "accuracy.tp"),
    "deque": (lambda m: m.queue.append(torch.ones(2)), "queue"),
    "tensor in a deque": (lambda m: m.queue[0].add_(1), "queue"),
    "number": (lambda m: setattr(m, "nothing", 1), "nothing"),
    "number of NumPy": (lambda m: setattr(m, "mean", np.float64(1)), "mean"),
    "attribute of a child": (lambda m: setattr(m.layers, "scale", 2.0), "layers.scale"),
    "new attribute": (lambda m: setattr(m, "fresh", 1), "fresh"),
    "deleted attribute": (lambda m: delattr(m, "nan"), "nan"),
    "counter": (lambda m: m.counts.update("a"), "counts"),
    "defaultdict": (lambda m: m.by_label["cat"].append(1), "by_label"),
    "ordered dictionary": (lambda m: m.order.move_to_end("a"), "order"),
    "set": (lambda m: m.names.add("y"), "names"),
    "list in a tuple": (lambda m: m.pair[1].append(3), "pair"),
    "array": (lambda m: m.array.__setitem__(0, 1.0), "array"),
    "tensor": (lambda m: m.tensor.mul_(2), "tensor"),
    "tensor by its data": (lambda m: m.tensor.data.mul_(2), "tensor"),
    "tensor of another shape": (lambda m: m.tensor.resize_(5).fill_(0), "tensor"),
    "dataclass": (lambda m: m.bank.rows.append(1), "bank.rows"),
    "number in an object": (lambda m: setattr(m.ring, "start", 2), "ring.start"),
    "tensor in an object": (lambda m: m.ring.rows.add_(1), "ring.rows"),
    "number in a slot": (lambda m: setattr(m.running, "mean", 2.0), "running.mean"),
    "attribute of a list": (lambda m: setattr(m.reservoir, "seen", 2), "reservoir.seen"),
    "item of a list with attributes": (lambda m: m.reservoir.append(1.0), "reservoir"),
    "another object of a library's": (lambda m: setattr(m, "prior", Normal(1.0, 1.0)), "prior"),
    "another frozen set": (lambda m: setattr(m, "labels", m.labels | {"b"}), "labels"),
    "another fraction": (lambda m: setattr(m, "share", Fraction(1, 3)), "share"),
    "another sparse tensor": (
        lambda m: setattr(m, "adjacency", torch.ones(2, 2).to_sparse()),
        "adjacency",
    ),
    "number of one's own class": (lambda m: setattr(m, "weight", Weight(2.0)), "weight"),
    "function that holds another number": (lambda m: setattr(m, "loss", times(2.0)), "loss"),
    "number that cannot be compared": (lambda m: setattr(m, "length", Metres(2.0)), "length"),
    "method without a name": (
        lambda m: setattr(m, "bound", MethodType(partial(max, 2.0), m)),
        "bound",
    ),
    "function in a function": (
        lambda m: setattr(m, "inside", torch.no_grad()(times(2.0))),
        "inside",
    ),
    "other arguments of a nameless function": (
        lambda m: setattr(m, "given", partial(times(1.0), factor=2.0)),
        "given",
    ),
    "number in a function's place": (lambda m: setattr(m, "loss", 2.0), "loss"),
    "method of another object": (lambda m: setattr(m, "draw", [2.0].count), "draw"),
    "other arguments": (lambda m: setattr(m, "scaled", partial(max, 2.0)), "scaled"),
    "another long list": (lambda m: setattr(m, "many", [1.0] * 30_000), "many"),
    "torch generator": (lambda m: torch.rand(1, generator=m.generator), "generator", "random"),
    "numpy generator": (lambda m: m.numpy.random(), "numpy", "random"),
    "numpy's old generator": (lambda m: m.legacy.rand(), "legacy", "random"),
    "python generator": (lambda m: m.python.random(), "python", "random"),
    "hidden module": (
        lambda m: m.teachers[0][0].register_buffer("x", torch.ones(1)),
        "teachers.0.x",
        "buffer",
    ),
    "mode": (lambda m: m.layers[1].eval(), "layers.1.training"),
    "parameter": (lambda m: m.layers[0].weight.data.add_(1), "layers.0.weight", "parameter"),
    "key of a child's dictionary": (
        lambda m: m.layers[0].labels.update(b=m.layers[0].labels.pop("a")),
        "layers.0.labels",
    ),
    "item of a child's list": (
        lambda m: m.layers.done.append(m.layers.due.pop()),
        "layers.done",
    ),
    "new submodule": (lambda m: setattr(m, "more", nn.Linear(1, 1)), "more"),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_each_change_is_seen_and_put_back(name):
    change, place, *kinds = CHANGES[name]
    model = Model()
    before = Snapshot.of(model, parameters=True)
    assert before.differences(Snapshot.of(model, parameters=True)) == ()
    change(model)
    found = before.differences(Snapshot.of(model, parameters=True))
    assert Difference(place, kinds[0] if kinds else "attribute") in found
    before.restore()
    assert before.differences(Snapshot.of(model, parameters=True)) == ()


def test_objects_of_an_installed_package_of_the_users_are_looked_into(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "hospital"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("")
    package.joinpath("state.py").write_text("class Mean:\n    value = 0.0\n")
    package.joinpath("model.py").write_text(
        "from lightning.pytorch import LightningModule\nfrom hospital.state import Mean\n"
        "class Model(LightningModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.mean = Mean()\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    model = importlib.import_module("hospital.model").Model()

    before = Snapshot.of(model)
    model.mean.value = 1.0

    assert [each.name for each in before.differences(Snapshot.of(model))] == ["mean.value"]


def test_parameters_are_held_on_request_only():
    model = Model()
    before, weight = Snapshot.of(model), model.layers[0].weight
    weight.data.zero_()
    model.layers[0].weight = nn.Parameter(torch.ones(2, 2))
    assert before.differences(Snapshot.of(model)) == ()
    before.restore()
    assert bool(model.layers[0].weight.all())
    assert Snapshot.of(model, parameters=True).differences(Snapshot.of(Model(), parameters=True))


def test_nothing_differs_from_a_copy():
    model = Model()
    other = Snapshot.of(copy.deepcopy(model), parameters=True)
    assert Snapshot.of(model, parameters=True).differences(other) == ()


def test_objects_stay_the_same_objects():
    model = Model()
    ids = {name: id(value) for name, value in vars(model).items()}
    before = Snapshot.of(model)
    for name in ("queue", "tensor", "array", "bank", "order", "generator"):
        setattr(model, name, None)
    before.restore()
    assert {name: id(value) for name, value in vars(model).items()} == ids


def test_names_hold_no_keys():
    model = Model()
    model.by_label["secret"] = [1]
    before = Snapshot.of(model)
    model.by_label["secret"].append(2)
    assert before.differences(Snapshot.of(model)) == (Difference("by_label", "attribute"),)


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        ([1, math.nan, np.float64("nan")], [1, math.nan, np.float64("nan")], True),
        ([0, "a"], [0, "b"], False),
        ([0, 1], [False, True], False),
        (np.random.default_rng(0).bit_generator.state, torch.get_rng_state(), False),
        (np.random.RandomState(0).get_state(), np.random.RandomState(0).get_state(), True),
        (np.random.RandomState(0).get_state(), random.Random(0).getstate(), False),
    ],
)
def test_contents_of_one_kind_are_compared_value_by_value(a, b, is_same):
    assert is_same_content(a, b) is is_same


def test_a_module_that_changes_at_each_step_costs_one_walk():
    model = Model()
    model.layers.count = 0
    first = Snapshot.of(model)
    model.layers.count += 1
    second = Snapshot.of(model)
    model.layers.count += 1
    third = Snapshot.of(model)
    assert second._still is not first._still
    assert third._still is second._still
    for earlier, later in ((first, second), (second, third), (first, third)):
        assert earlier.differences(later) == (Difference("layers.count", "attribute"),)
    first.restore()
    assert model.layers.count == 0


class Odd:
    """An object that lets nobody look."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


def test_odd_objects_raise_nothing():
    model = Model()
    model.odd = [Odd(), (x for x in "ab"), open, type("Meta", (), {}), torch.ones(1).expand(4)]
    model.sparse = torch.eye(2).to_sparse()
    model.records = [torch.zeros(1) for _ in range(30_000)]
    model.deep = []
    inner = model.deep
    for _ in range(500):
        inner.append([])
        inner = inner[0]
    before = Snapshot.of(model)
    assert before.differences(Snapshot.of(model)) == ()
    model.odd.append(1)
    before.restore()
    assert len(model.odd) == 5


def test_the_trainer_and_the_hooks_are_no_state():
    model = Model()
    before = Snapshot.of(model)
    model._trainer = object()
    model.layers.register_forward_hook(lambda *args: None)
    assert before.differences(Snapshot.of(model)) == ()
    before.restore()
    assert model._trainer is not None


class Trainer:
    def __init__(self, module):
        self.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[0])
        self.lr_scheduler_configs = [type("Config", (), {"scheduler": plateau})()]


def test_settings_of_optimizers_and_what_their_schedulers_keep_are_held():
    model = Model()
    model._trainer = Trainer(model)
    group = model._trainer.optimizers[0].param_groups[0]
    params, before = group["params"], Snapshot.of(model)
    group["momentum"] = 0.9
    model._trainer.lr_scheduler_configs[0].scheduler.step(1.0)
    found = before.differences(Snapshot.of(model))
    assert Difference("optimizers.0.param_groups.0.momentum", "setting") in found
    assert Difference("lr_schedulers.0.best", "attribute") in found
    before.restore()
    assert before.differences(Snapshot.of(model)) == ()
    assert group["params"] is params


# -- passes without a trace -----------------------------------------------------------------------


def everything(model):
    state, drawn = Snapshot.of(model, parameters=True), RandomState(model.device)
    return state, drawn, [(p.grad, p.requires_grad) for p in model.parameters()]


def do_everything(model):
    for name, (change, *_) in CHANGES.items():
        if name not in ("parameter", "deleted attribute"):
            change(model)
    model.layers[0](torch.rand(3, 2)).sum().backward()
    model.layers[0].weight.requires_grad_(False)
    model.log("loss", torch.rand(()))
    print(random.random(), np.random.rand())


@pytest.mark.parametrize("raises", [False, True])
def test_a_pass_leaves_no_trace(raises, capsys):
    model = Model()
    model.layers[0](torch.ones(1, 2)).sum().backward()
    (state, drawn, gradients), values = everything(model), model.layers[0].weight.grad.clone()
    try:
        with restored(model), restored(model):
            do_everything(model)
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    now, drawn_now, gradients_now = everything(model)
    assert state.differences(now) == () and drawn.is_same(drawn_now)
    assert all(a is c and b is d for (a, b), (c, d) in zip(gradients, gradients_now, strict=True))
    assert torch.equal(model.layers[0].weight.grad, values)
    assert capsys.readouterr().out == ""
    assert "log" not in vars(model)


def test_two_passes_draw_the_same():
    model, drawn = Model(), []
    for _ in range(2):
        with restored(model):
            own = torch.rand(1, generator=model.generator).item(), model.python.random()
            drawn.append((torch.rand(1).item(), random.random(), *own))
    assert drawn[0] == drawn[1]


def test_records_apart_draw_differently_and_count_alone():
    model, drawn = Model(), []
    model.accuracy.update(torch.tensor([1]), torch.tensor([1]))
    before = Snapshot.of(model)
    for _ in range(2):
        with apart(model):
            assert model.accuracy._update_count == 0
            drawn.append((torch.rand(1).item(), torch.rand(1, generator=model.generator).item()))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    assert before.differences(Snapshot.of(model)) == ()


def test_a_seed_makes_random_states_and_leaves_those_of_now():
    device = torch.device("cpu")
    before = torch.get_rng_state()
    seeded = [RandomState.seeded(device, 3), RandomState.seeded(device, 3)]
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []
    for state in seeded:
        with state.again():
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)
