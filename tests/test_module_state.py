"""Snapshots of modules: what they see, what they put back, what they leave alone."""

from __future__ import annotations

import copy
import functools
import math
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp._held import HeldTensor
from lightning_dp._lazy_copies import is_one_memory
from lightning_dp._module_state import Difference, ModuleState

SEEN: list[float] = []
TOTAL = 0.0
_memory = types.ModuleType("memory")  # a module of the user's
_memory.last = 0.0


@dataclass
class Bank:
    rows: list = field(default_factory=list)
    size: int = 0


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1.0


def counter():
    count = 0

    def increase():
        nonlocal count
        count += 1

    return increase


@functools.lru_cache
def note(value):
    SEEN.append(value)


class Model(LightningModule):
    shared: ClassVar[dict] = {}
    steps = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.accuracy = MulticlassAccuracy(3)
        self.queue = deque([torch.zeros(2)], maxlen=2)
        self.counts, self.by_label = Counter("aa"), defaultdict(list)
        self.order = OrderedDict(a=1, b=2)
        self.names, self.pair = {"x"}, (1, [2])
        self.array, self.tensor = np.zeros(3), torch.ones(2)
        self.bank, self.slotted = Bank(), Slotted()
        self.bank.me = self.bank  # a circle
        self.generator, self.numpy = torch.Generator(), np.random.default_rng(0)
        self.legacy, self.python = np.random.RandomState(0), random.Random(0)
        self.increase, self.bound = counter(), functools.partial(max, [3])
        self.teachers = [nn.Linear(2, 2)]
        self.nothing, self.nan = None, math.nan

    def uses_globals(self):
        global TOTAL
        TOTAL += 1.0
        note(1.0)
        _memory.last += 1.0

    def with_default(self, seen=[]):  # noqa: B006
        seen.append(1)


CHANGES = {
    "buffer": (lambda m: m.layers(torch.randn(4, 2)), "layers.1.running_mean"),
    "buffer replaced": (
        lambda m: setattr(m.layers[1], "running_var", torch.full((2,), 7.0)),
        "layers.1.running_var",
    ),
    "metric": (lambda m: m.accuracy.update(torch.tensor([1]), torch.tensor([1])), "accuracy.tp"),
    "deque": (lambda m: m.queue.append(torch.ones(2)), "queue"),
    "tensor in a deque": (lambda m: m.queue[0].add_(1), "queue"),
    "number": (lambda m: setattr(m, "nothing", 1), "nothing"),
    "new attribute": (lambda m: setattr(m, "fresh", 1), "(names in Model)"),
    "deleted attribute": (lambda m: delattr(m, "nan"), "(names in Model)"),
    "counter": (lambda m: m.counts.update("a"), "counts"),
    "defaultdict": (lambda m: m.by_label["cat"].append(1), "by_label"),
    "ordered dictionary": (lambda m: m.order.move_to_end("a"), "order"),
    "set": (lambda m: m.names.add("y"), "names"),
    "list in a tuple": (lambda m: m.pair[1].append(3), "pair"),
    "array": (lambda m: m.array.__setitem__(0, 1.0), "array"),
    "tensor": (lambda m: m.tensor.mul_(2), "tensor"),
    "tensor of another shape": (lambda m: m.tensor.resize_(5).fill_(0), "tensor"),
    "dataclass": (lambda m: m.bank.rows.append(1), "bank.rows"),
    "number in an object": (lambda m: setattr(m.bank, "size", 2), "bank.size"),
    "slots": (lambda m: setattr(m.slotted, "value", 2.0), "slotted.value"),
    "torch generator": (lambda m: torch.rand(1, generator=m.generator), "generator"),
    "numpy generator": (lambda m: m.numpy.random(), "numpy"),
    "numpy's old generator": (lambda m: m.legacy.rand(), "legacy"),
    "python generator": (lambda m: m.python.random(), "python"),
    "closure": (lambda m: m.increase(), "counter.<locals>.increase.count"),
    "argument of a partial": (lambda m: m.bound.args[0].append(1), "bound"),
    "hidden module": (lambda m: m.teachers[0].register_buffer("x", torch.ones(1)), "teachers"),
    "mode": (lambda m: m.layers[1].eval(), "layers.1.training"),
    "class attribute": (lambda m: setattr(Model, "steps", Model.steps + 1), "Model.steps"),
    "container of a class": (lambda m: Model.shared.update(a=1), "Model.shared"),
    "global number": (lambda m: m.uses_globals(), "Model.uses_globals.TOTAL"),
    "variable of a module": (lambda m: m.uses_globals(), "Model.uses_globals._memory.last"),
    "global of a helper": (lambda m: m.uses_globals(), "note.SEEN"),
    "default argument": (lambda m: m.with_default(), "Model.with_default.__defaults__"),
    "parameter": (lambda m: m.layers[0].weight.data.add_(1), "layers.0.weight"),
    "new submodule": (lambda m: setattr(m, "more", nn.Linear(1, 1)), ""),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_each_change_is_seen_and_put_back(name):
    change, place = CHANGES[name]
    model = Model()
    note.cache_clear()
    before = ModuleState.of(model, parameters=True)
    change(model)
    found = before.differences(ModuleState.of(model, parameters=True))
    assert found
    assert any(place in each.name for each in found)
    before.restore()
    assert before.differences(ModuleState.of(model, parameters=True)) == ()


def test_nothing_differs_from_itself_nor_from_a_copy():
    model = Model()
    state = ModuleState.of(model, parameters=True)
    assert state.differences(ModuleState.of(model, parameters=True)) == ()
    assert state.differences(ModuleState.of(copy.deepcopy(model), parameters=True)) == ()


def test_objects_stay_the_same_objects():
    model = Model()
    kept = {name: id(value) for name, value in vars(model).items()}
    before = ModuleState.of(model)
    for name in ("queue", "tensor", "array", "bank", "order", "generator"):
        setattr(model, name, None)
    before.restore()
    assert {name: id(value) for name, value in vars(model).items()} == kept


def test_kinds():
    model = Model()
    before = ModuleState.of(model, parameters=True)
    for name in ("buffer", "metric", "deque", "torch generator", "parameter"):
        CHANGES[name][0](model)
    kinds = {
        each.name: each.kind for each in before.differences(ModuleState.of(model, parameters=True))
    }
    before.restore()
    assert kinds["layers.1.running_var"] == "buffer"
    assert kinds["accuracy.tp"] == kinds["accuracy._update_count"] == "metric"
    assert kinds["queue"] == "attribute"
    assert kinds["generator"] == "random"
    assert kinds["layers.0.weight"] == "parameter"


def test_names_hold_no_keys():
    model = Model()
    model.by_label["secret"] = [1]
    before = ModuleState.of(model)
    model.by_label["secret"].append(2)
    found = before.differences(ModuleState.of(model))
    assert [each.name for each in found] == ["by_label"]


class Counting(Callback):
    def __init__(self):
        self.rows = []


def test_callbacks_of_users_are_held():
    callback = Counting()
    before = ModuleState.of(nn.Linear(1, 1), [callback])
    callback.rows.append(1)
    after = ModuleState.of(nn.Linear(1, 1), [callback])
    assert before.differences(after) == (Difference("Counting.rows", "attribute"),)
    before.restore()
    assert callback.rows == []


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
    model.deep = []
    inner = model.deep
    for _ in range(500):
        inner.append([])
        inner = inner[0]
    before = ModuleState.of(model)
    assert before.differences(ModuleState.of(model)) == ()
    model.odd.append(1)
    before.restore()
    assert len(model.odd) == 5


def test_what_is_long_is_kept_by_reference():
    model = Model()
    model.records = [torch.zeros(1) for _ in range(30_000)]
    before = ModuleState.of(model)
    model.records.append(torch.zeros(1))
    before.restore()
    assert len(model.records) == 30_000


def test_the_trainer_and_the_hooks_are_no_state():
    model = Model()
    before = ModuleState.of(model)
    model._trainer = object()
    model.layers.register_forward_hook(lambda *args: None)
    assert before.differences(ModuleState.of(model)) == ()
    before.restore()
    assert model._trainer is not None


def test_what_hooks_of_users_keep_is_held():
    model, features = Model(), []
    model.layers.register_forward_hook(lambda *args: features.append(1))
    before = ModuleState.of(model)
    model.layers(torch.zeros(2, 2))
    assert any(each.name.endswith("features") for each in before.differences(ModuleState.of(model)))
    before.restore()
    assert features == []


def test_a_frozen_backbone_is_not_copied():
    backbone = nn.Linear(4096, 4200).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(4, 1))
    before = ModuleState.of(model, parameters=True)
    backbone.weight.data.zero_()
    before.restore()
    assert not backbone.weight.any()


def test_weights_take_memory_only_where_they_are_written_to():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    place = model[0].weight.data_ptr()
    before = ModuleState.of(model, parameters=True)
    held = [p for p in before._parts if isinstance(p, HeldTensor) and p.kind == "parameter"]
    assert all(is_one_memory(part.owner.detach(), part._values) for part in held)

    with torch.no_grad():
        model[1].weight.mul_(2)
    shared = [is_one_memory(part.owner.detach(), part._values) for part in held]
    assert sorted(shared) == [False, True, True, True]
    after = ModuleState.of(model, parameters=True)
    assert [each.name for each in before.differences(after)] == ["1.weight"]

    before.drop_parameters()
    after.drop_parameters()
    assert model[0].weight.data_ptr() == place
