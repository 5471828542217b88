"""A copy goes from one pass to the next only if it is as a new one would be."""

import copy
import functools
import itertools
import threading
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dp.isolation.model_copies import ModelCopies
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.untouched import Untouched

X, Y = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 2


class Full(nn.Module):
    """Holds something of every kind that is looked into."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2), nn.LSTM(2, 2)])
        self.register_buffer("seen", torch.zeros(2))
        self.plain, self.number = torch.ones(3, 2), 1.0
        self.nested = {"a": [(1, [2.0])], "b": deque([1]), "c": {1, 2}}
        self.settings = SimpleNamespace(rate=0.1, inner=SimpleNamespace(x=[1]))
        self.call = functools.partial(max, [1, 2])


def _data(m):
    m.layers[0].weight.data.mul_(2.0)


def _other_memory(m):
    m.layers[0].weight.data = m.layers[0].weight.data + 1.0


def _by_numpy(m):
    m.layers[0].bias.detach().numpy()[0] = 7.0


EDITS = {
    "attribute": lambda m: setattr(m, "number", 2.0),
    "new attribute": lambda m: setattr(m.layers[0], "last", None),
    "mode": lambda m: m.layers[1].eval(),
    "item": lambda m: m.nested["a"][0][1].append(3.0),
    "deque": lambda m: m.nested["b"].append(1),
    "set": lambda m: m.nested["c"].add(3),
    "key": lambda m: m.nested.update(d=1),
    "object": lambda m: setattr(m.settings, "rate", 0.2),
    "inner object": lambda m: m.settings.inner.x.clear(),
    "partial": lambda m: m.call.args[0].append(3),
    "buffer": lambda m: m.seen.add_(1.0),
    "other buffer": lambda m: setattr(m, "seen", m.seen.clone()),
    "plain tensor": lambda m: m.plain.zero_(),
    "form of a tensor": lambda m: m.plain.t_(),
    "weight, uncounted": _data,
    "weight in other memory": _other_memory,
    "weight by NumPy": _by_numpy,
    "frozen": lambda m: m.layers[0].weight.requires_grad_(False),
    "gradient": lambda m: setattr(m.layers[0].weight, "grad", torch.zeros(2, 3)),
    "name on a weight": lambda m: setattr(m.layers[0].weight, "note", 1),
    "hook": lambda m: m.layers[0].register_forward_hook(lambda *_: None),
    "hook of a weight": lambda m: m.layers[0].weight.register_hook(lambda g: None),
    "another layer": lambda m: m.layers.append(nn.ReLU()),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_is_seen(edit):
    module = copy.deepcopy(Full())
    before = Untouched(module)
    assert before.is_whole and before.is_so()
    edit(module)
    assert not before.is_so()


def test_names_that_are_left_out_may_change_and_reading_is_no_edit():
    module = Full()
    before = Untouched(module, frozenset({"number"}))
    module.number = 2.0
    module.layers[0](torch.ones(1, 3)).sum()
    module.layers[0].weight.data_ptr()  # torch ends the sharing, and the values are the same
    assert before.is_so()
    module.other = 1
    assert not before.is_so()


class Slots:
    __slots__ = ("x",)


UNSEEN = {
    "counter": itertools.count(),
    "iterator": iter([1]),
    "lock": threading.Lock(),
    "array": np.zeros(2),
    "random": torch.Generator(),
    "slots": Slots(),
    "cache": functools.cache(len),
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("thing", UNSEEN.values(), ids=UNSEEN)
def test_of_what_cannot_be_looked_into_nothing_is_told(thing):
    held = Untouched([{"a": thing}])
    assert not held.is_whole and not held.is_so()


class Model(LightningModule):
    """Its loss is multiplied by the number of its calls, wherever that is kept."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def count(self, batch_idx):
        return 1

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.count(x) * nn.functional.cross_entropy(self.layer(x), y)


class InAttribute(Model):
    calls = 0

    def count(self, x):
        self.calls += 1
        return self.calls


class InList(Model):
    def __init__(self):
        super().__init__()
        self.calls = {"of": []}

    def count(self, x):
        self.calls["of"].append(1)
        return len(self.calls["of"])


class InBuffer(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def count(self, x):
        return self.calls.add_(1).clone()


class InIterator(Model):
    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    def count(self, x):
        return next(self.calls)


class InCache(Model):
    """A statistic of the first batch that this object has seen."""

    batch = None

    @functools.cache  # noqa: B019
    def mean(self):
        return float(self.batch.mean())

    def count(self, x):
        self.batch = x
        found = self.mean()
        del self.batch
        return found


SEEN = weakref.WeakKeyDictionary()


class InWeakDictionary(Model):
    def count(self, x):
        return SEEN.setdefault(self, float(x.mean()))


def _answers(model):
    passes = Passes(model, "auto", ["layer.weight", "layer.bias"], None)
    with passes.quietly():
        return [passes.run((x, Y), 4).norms for x in (X, X, 1 - X, X, 1 - X)]


@pytest.mark.parametrize(
    "kind", [InAttribute, InList, InBuffer, InIterator, InCache, InWeakDictionary]
)
def test_each_pass_begins_as_the_first_one(kind):
    torch.manual_seed(0)
    model = kind()
    first, second, other, third, last = _answers(model)
    alone = _answers(copy.deepcopy(model))[0]
    for each in (second, third, alone):
        torch.testing.assert_close(each, first, rtol=0, atol=0)
    torch.testing.assert_close(last, other, rtol=0, atol=0)
    torch.manual_seed(0)
    plain = Model()
    factor = (
        float((1 - X).mean() / X.mean())
        if "Cache" in kind.__name__ or "Weak" in kind.__name__
        else 1
    )
    one, _, two, *_ = _answers(plain)
    torch.testing.assert_close(other / first, two / one * factor, rtol=1e-4, atol=0)


def test_a_model_that_changes_nothing_is_copied_once_for_all_passes_after_the_first(monkeypatch):
    made = []
    make = ModelCopies.make
    monkeypatch.setattr(
        ModelCopies, "make", lambda self, memo=None: made.append(1) or make(self, memo)
    )
    _answers(Model())
    assert len(made) == 2  # the first pass also adds up
    made.clear()
    _answers(InAttribute())
    assert len(made) == 5
