"""A client calls ``training_step`` as a Trainer does, and tries it before its first charge."""

from __future__ import annotations

import functools
import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dp.boundary import Query, Term
from lightning_dp.federated import AsyncClient, AsyncPlan, ClientPrivacy, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message

RECORDS = 4


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        numbers: list[Any] = []  # in closures, which no snapshot holds
        self.note, self.numbers = numbers.append, lambda: numbers

    def loss(self, batch: Any, number: Any) -> Tensor:
        self.note(number)
        return self.layer(batch[0]).mean()


def wrapped(function):
    @functools.wraps(function)
    def inside(*arguments, **named):
        return function(*arguments, **named)

    return inside


class Named(Base):
    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx)


class Underscore(Base):
    def training_step(self, batch, _):
        return self.loss(batch, _)


class OtherNames(Base):
    def training_step(self, sample, step_number=-1):
        return self.loss(sample, step_number)


class Swapped(Base):
    def training_step(self, batch_idx, batch):  # Lightning passes the batch first
        return self.loss(batch_idx, batch)


class Alone(Base):
    def training_step(self, batch):
        return self.loss(batch, "none")


class Stars(Base):
    def training_step(self, *args):
        return self.loss(args[0], args[1])


class StarsAfter(Base):
    def training_step(self, batch, *args, **kwargs):
        assert not kwargs
        return self.loss(batch, *args)


class KeywordOnly(Base):
    def training_step(self, batch, *, scale=1.0):
        return self.loss(batch, "none") * scale


class Decorated(Base):
    @wrapped
    def training_step(self, batch, number):
        return self.loss(batch, number)


class Typed(Base):
    def training_step(self, batch: Any, batch_idx: int, /) -> Tensor:
        return self.loss(batch, batch_idx)


KINDS = [Named, Underscore, OtherNames, Swapped, Alone, Stars, StarsAfter, KeywordOnly, Decorated]
KINDS += [Typed]


def data(num_records: int = RECORDS) -> TensorDataset:
    return TensorDataset(torch.randn(num_records, 3, generator=torch.Generator().manual_seed(0)))


def in_a_trainer(module: Base) -> list[Any]:
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    trainer = L.Trainer(max_steps=2, enable_model_summary=False, accelerator="cpu", **settings)
    trainer.fit(module, DataLoader(data(), batch_size=2))
    return module.numbers()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_training_step_gets_what_a_trainer_gives_it(kind):
    module = kind()
    local = LocalRecords(module, data(), chunk_size=2)
    local.try_once()
    tried = len(module.numbers())
    local.bounded_sum(Query((Term(),), 1.0, 1.0), range(RECORDS))
    assert module.numbers()[tried:] == in_a_trainer(kind())


PLAN = AsyncPlan(3, PolynomialSizes(0, 3), InverseSteps(0.1, 0.01))


def answer(folder, module, records: Any = None, **settings: Any) -> bytes:
    local = LocalRecords(module, records or data(), **settings)
    privacy = ClientPrivacy(1.0, 2.0, target_epsilon=math.inf)
    client = AsyncClient(local, PLAN, privacy, ReleaseLedger(folder, "data"), run="trial")
    facts = {"run": "trial", "round": 0, "counter": 0}
    return client.answer(Message("round", facts, {"model": local.point}).to_bytes())


class NeedsMore(Base):
    def training_step(self, batch, batch_idx, dataloader_idx):
        return self.loss(batch, batch_idx)


class NeedsKeyword(Base):
    def training_step(self, batch, *, batch_idx):
        return self.loss(batch, batch_idx)


class WrongKey(Base):
    def training_step(self, batch, batch_idx):
        return self.layer(batch["x"]).mean()


class WrongShape(Base):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0][:, :2]).mean()


class NeedsTrainer(Base):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean() * self.trainer.max_epochs


class NoLoss(Base):
    def training_step(self, batch, batch_idx):
        return None


class Detached(Base):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean().detach()


class NoKey(Base):
    def training_step(self, batch, batch_idx):
        return {"objective": self.layer(batch[0]).mean()}


BUGS = {
    NeedsMore: TypeError,
    NeedsKeyword: TypeError,
    WrongKey: TypeError,
    WrongShape: RuntimeError,
    NeedsTrainer: RuntimeError,
    NoLoss: Exception,
    Detached: Exception,
    NoKey: Exception,
}


@pytest.mark.parametrize("kind", BUGS)
def test_a_mistake_in_training_step_costs_nothing(tmp_path, kind):
    with pytest.raises(BUGS[kind]) as caught:
        answer(tmp_path, kind())
    notes = getattr(caught.value, "__notes__", [])
    assert "before anything was charged" in f"{caught.value} {notes}"
    assert ReleaseLedger(tmp_path, "data").history() == []
    answer(tmp_path, Named())  # mended, the same run goes on
    assert len(ReleaseLedger(tmp_path, "data").history()) == 1


class Unreadable(Dataset):
    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        raise FileNotFoundError(f"record-{i}.png")


def test_data_that_cannot_be_read_cost_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        answer(tmp_path, Named(), Unreadable())
    assert ReleaseLedger(tmp_path, "data").history() == []


class Proud(Base):
    """Cannot bear records that are not real; keeps a number of what it saw, in a plain attribute."""

    def training_step(self, batch, batch_idx):
        self.largest = max(getattr(self, "largest", 0.0), float(batch[0].max()))
        if float(batch[0].min()) >= 0:
            raise ValueError("no real record is like that")
        return self.loss(batch, batch_idx)


def test_the_trial_can_be_left_out_and_leaves_nothing_behind(tmp_path):
    module = Proud()
    with pytest.raises(ValueError, match="no real record"):
        answer(tmp_path, module)
    assert not hasattr(module, "largest")
    answer(tmp_path, module, try_first=False)


def test_it_is_tried_before_the_first_round_only(tmp_path):
    seen = []

    class Counting(Base):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch[0]))
            return self.loss(batch, batch_idx)

    local = LocalRecords(Counting(), data())
    random = torch.get_rng_state()
    local.try_once()
    assert seen == [2] and torch.equal(random, torch.get_rng_state())
    answer(tmp_path, Counting())
    assert seen[1] == 2
    del seen[:]
    answer(tmp_path, Counting())  # a new process, asked again
    assert seen == []


def test_what_cannot_be_made_up_is_not_tried(tmp_path):
    def collate(rows):
        return torch.stack([row[0] for row in rows]), ["a name" for _ in rows]

    answer(tmp_path, Named(), DataLoader(data(), batch_size=2, collate_fn=collate))
    assert len(ReleaseLedger(tmp_path, "data").history()) == 1
