"""Ordinary batches can be probed, and what cannot is refused; crashes are none of its outcomes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation import probe_isolation


class Named(NamedTuple):
    x: Tensor
    names: list[str]
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    names: list[str]
    y: Tensor
    note: None = None


class Own:
    """A batch class of a user's own, as PyTorch's manual has it."""

    def __init__(self, x: Tensor, names: list[str], y: Tensor) -> None:
        self.x, self.names, self.y = x, names, y
        self.size, self.weights = len(x), np.ones(len(x), np.float32)

    def to(self, device: Any) -> Own:
        return self


class Encoding(UserDict):
    """As BatchEncoding of transformers."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError
        return self.data[name]


def dictionary(x: Tensor, names: list[str], y: Tensor) -> Any:
    return Encoding(x=x, names=names, y=y, flag=True, empty=[], rate=0.5, scale=torch.tensor(2.0))


BATCHES = [Named, Frozen, Own, dictionary]


@pytest.fixture
def with_names(model_class, make_network):
    """Takes any such batch; its loss compares records if told so."""

    class WithNames(model_class):
        pairs = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output = self.net(batch.x)
            assert len(batch.names) == len(output)
            assert all(isinstance(name, str) for name in batch.names)
            if self.pairs:
                return F.cross_entropy(output @ output.T, torch.arange(len(output)))
            return F.cross_entropy(output, batch.y)

    return WithNames(make_network(), F.cross_entropy)


@pytest.mark.parametrize("make", BATCHES)
@pytest.mark.parametrize("pairs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_texts_and_classes_of_a_users_own_are_no_obstacle(make, pairs, with_names):
    with_names.pairs = pairs
    batch = make(torch.zeros(5, 6), [f"img{i}.png" for i in range(5)], torch.zeros(5).long())

    found = probe_isolation(with_names, batch)

    assert found.outcome == ("coupled" if pairs else "isolated")


def test_a_batch_of_texts_alone(model_class, make_network):
    class Reads(model_class):
        def training_step(self, batch, batch_idx):
            return self.net(torch.tensor([[float(len(t))] * 6 for t in batch])).square().mean()

    assert probe_isolation(Reads(make_network(), None), ["a", "bcd", "ef"]).outcome == "isolated"


def test_a_list_of_one_tensor_for_each_record(model_class, make_network):
    class Detects(model_class):
        def training_step(self, batch, batch_idx):
            images, targets = batch
            x = torch.stack([image.flatten()[:6] for image in images])
            y = torch.stack([target["boxes"].sum() for target in targets])
            return (self.net(x).sum(1) - y).square().mean()

    images = [torch.zeros(3, 4, 2 + i) for i in range(5)]
    targets = [{"boxes": torch.zeros(i, 4), "name": "n", "index": i} for i in range(5)]

    found = probe_isolation(Detects(make_network(), None), (images, targets, torch.zeros(5)))

    assert "not probed" not in str(found) or "TypeError" not in str(found)


def by_hand(model_class, loss):
    class ByHand(model_class):
        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss(self.net(batch[0]), batch[1]))
            optimizer.step()
            scheduler.step()

    return ByHand


@pytest.mark.parametrize("couples", [False, True])
def test_manual_optimization_is_probed(couples, model_class, make_network):
    def compare(output, y):
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    model = by_hand(model_class, compare if couples else F.cross_entropy)(make_network(), None)
    before = [param.clone() for param in model.parameters()]

    found = probe_isolation(model, (torch.zeros(4, 6), torch.zeros(4).long()))

    assert found.outcome == ("coupled" if couples else "isolated")
    assert all(map(torch.equal, before, model.parameters()))
    assert "optimizers" not in vars(model)


def supervised_contrast(output: Tensor, y: Tensor) -> Tensor:
    """Only records with the same label say anything."""
    output = F.normalize(output)
    same = (y[:, None] == y[None]).float() - torch.eye(len(y))
    return -(same * F.log_softmax(output @ output.T, 1)).sum() / same.sum().clamp(min=1.0)


def test_a_loss_of_equal_labels_gets_equal_labels(model_class, make_network):
    model = model_class(make_network(), supervised_contrast)

    found = probe_isolation(model, (torch.zeros(4, 6), torch.zeros(4).long()))

    assert found.outcome == "coupled"


def test_lengths_are_not_zero_where_they_may_not_be(model_class):
    class Packs(model_class):
        def training_step(self, batch, batch_idx):
            x, lengths = batch
            nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.net(x).square().mean()

    model = Packs(nn.Linear(6, 2), None)

    assert (
        probe_isolation(model, (torch.zeros(4, 9, 6), torch.ones(4).long())).outcome == "isolated"
    )


def test_objects_that_are_not_looked_into_are_named_in_the_outcome(model_class, make_network):
    class Boxed:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = torch.ones(3)

    model = model_class(make_network(), lambda out, box: (out * box.scale).square().mean())

    found = probe_isolation(model, (torch.zeros(4, 6), Boxed()))

    assert str(found) == "probed, isolated (not tried: what objects of Boxed hold)"


def test_a_records_partner_has_another_text(model_class, make_network):
    """A loss that compares the texts of records: each may occur once in a batch of four."""

    class Reads(model_class):
        def training_step(self, batch, batch_idx):
            x, texts = batch
            first = torch.tensor([text == min(texts) for text in texts])
            return (self.net(x).square().mean(1) * (1 + first.float())).mean()

    batch = torch.zeros(4, 6), ["d", "c", "b", "a"]

    assert probe_isolation(Reads(make_network(), None), batch).outcome == "coupled"


class NoTensors:
    """A batch of which nothing is known."""


@pytest.mark.parametrize("kind", ["raises", "no gradient", "unknown"])
def test_what_cannot_be_probed_is_an_error_before_a_charge(
    kind, model_class, make_network, make_trainer, tmp_path
):
    def loss(output: Tensor, y: Tensor) -> Tensor:
        if kind == "raises" and (y < 50).any():
            raise ValueError(f"secret label {y[0]}")
        return F.cross_entropy(output, y - 50) if kind == "raises" else 0.0 * output.sum()

    def collate(records: list[Any]) -> Any:
        x, y = zip(*records, strict=True)
        return NoTensors() if kind == "unknown" else (torch.stack(x), torch.stack(y))

    data = TensorDataset(torch.zeros(32, 6), torch.full((32,), 51))
    model, privacy = (
        model_class(make_network(), loss),
        DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5),
    )

    with pytest.raises(
        MisconfigurationException, match=r"not be probed.*isolation_probe=False"
    ) as e:
        make_trainer(max_steps=1, callbacks=[privacy]).fit(
            model, DataLoader(data, batch_size=8, collate_fn=collate)
        )

    assert "secret" not in str(e.value)
    assert privacy.steps == 0
