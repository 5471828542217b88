"""The answers of a client's records, against one record at a time, and refusals as in a Trainer."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.boundary import Query, Term
from lightning_dp.federated import AsyncClient, AsyncPlan, ClientPrivacy, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients import RawGradientHookError, UnsupportedModelError
from tests.federated.zoo import history

ENGINES = ["auto", "layers", "records", "hooks", "one_by_one"]


def gradient(module: nn.Module, point: Tensor, record: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of one record, by plain autograd in float64."""
    net = copy.deepcopy(module.net).double()
    params = list(net.parameters())
    for param, value in zip(params, unflatten(point, params), strict=True):
        param.data = value
    x, y = record
    loss = nn.functional.cross_entropy(net(x.double().unsqueeze(0)), y.unsqueeze(0))
    return flatten(torch.autograd.grad(loss, params))


def slow_sum(module: nn.Module, data: Any, query: Query, records: Sequence[int]) -> Tensor:
    """Record by record: combine, then clip, then add."""
    now = flatten(list(module.net.parameters())).double()
    total = torch.zeros_like(now)
    for record in records:
        part = sum(
            term.weight * gradient(module, now if term.point is None else term.point, data[record])
            for term in query.terms
        )
        total += part * min(1.0, query.clip_norm / float(part.norm()))
    return total


@pytest.fixture
def module(classifier: Any, mlp: Callable[[], nn.Module]) -> Any:
    return classifier(mlp())


def other_point(module: nn.Module, distance: float) -> Tensor:
    flat = flatten(list(module.parameters()))
    generator = torch.Generator().manual_seed(5)
    return flat + distance * torch.randn(len(flat), generator=generator)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip_norm", [0.3, math.inf])
def test_the_sum_is_that_of_a_loop_over_records(module, blobs, engine, clip_norm):
    query = Query((Term(point=other_point(module, 0.3)),), clip_norm, 0.0)
    records = [3, 239, 0, 17, 100, 101, 102]
    answer = LocalRecords(module, blobs, engine=engine, chunk_size=3).bounded_sum(query, records)
    assert answer.clip_norm == clip_norm
    expected = slow_sum(module, blobs, query, records)
    torch.testing.assert_close(answer.value.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 7, 240])
def test_chunks_change_nothing_except_memory(module, recorded, blobs, chunk_size):
    data, sizes = recorded(*blobs.tensors), []
    module.net.register_forward_hook(lambda net, args, out: sizes.append(len(out)))
    query, local = Query((Term(),), 0.3, 0.0), LocalRecords(module, data, chunk_size=chunk_size)
    assert not local.bounded_sum(query, []).value.any() and data.asked == []
    answer = local.bounded_sum(query, range(100)).value
    assert max(sizes) == min(chunk_size, 100) and sum(sizes) == 100
    assert data.asked == list(range(100))
    expected = slow_sum(module, blobs, query, range(100))
    torch.testing.assert_close(answer.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_record_that_is_not_finite_contributes_zero(module, blobs, unit):
    x, y = blobs.tensors
    spoiled = TensorDataset(torch.cat([x, torch.full((1, 6), math.nan)]), torch.cat([y, y[:1]]))
    query = Query((Term(),), 0.3, 1.0)
    with_it = LocalRecords(module, spoiled, unit=unit).bounded_sum(query, [0, 240, 1]).value
    without = LocalRecords(module, blobs, unit=unit).bounded_sum(query, [0, 1]).value
    torch.testing.assert_close(with_it, without)


@pytest.mark.parametrize("divisor", [0.5, 4, 400])  # the last is below every record's norm
def test_the_whole_client_is_clipped_once(module, blobs, divisor):
    exact = slow_sum(module, blobs, Query((Term(),), math.inf, 0.0), range(50))
    clip_norm = float(exact.norm()) / divisor
    local = LocalRecords(module, blobs, unit="client", chunk_size=16)
    answer = local.bounded_sum(Query((Term(),), clip_norm, 1.0), range(50))
    assert answer.clip_norm == clip_norm
    expected = exact / max(divisor, 1)
    torch.testing.assert_close(answer.value.double(), expected, rtol=1e-4, atol=1e-6)


# -- the module and its data are left as they were ---------------------------------------------


class Chatty(nn.Module):
    """Buffers that count, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


def test_nothing_is_logged_counted_or_left_on_the_module(classifier, blobs):
    class Logging(classifier):
        fails = False

        def __init__(self) -> None:
            super().__init__(Chatty())
            self.accuracy = MulticlassAccuracy(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            output = self(x)
            self.accuracy.update(output, y)
            self.log("accuracy", self.accuracy)
            self.log_dict({"train_loss": output.sum()}, prog_bar=True)
            if self.fails:
                raise KeyError("user")
            return {"loss": nn.functional.cross_entropy(output, y), "epoch": self.current_epoch}

    module = Logging()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    local, attributes = LocalRecords(module, blobs), set(vars(module))
    query = Query((Term(1.0, other_point(module, 1)),), 1, 1)
    local.bounded_sum(query, [1])
    Logging.fails = True
    with pytest.raises(KeyError, match="user"):
        local.bounded_sum(query, [1])
    assert set(vars(module)) == attributes
    torch.testing.assert_close(module.state_dict(), before)
    assert module.accuracy.tp.sum() == 0
    assert all(param.grad is None for param in module.parameters())
    assert not any(part._forward_hooks or part._backward_hooks for part in module.modules())


def test_both_points_share_their_dropout_masks(classifier, blobs):
    module = classifier(Chatty())
    point = flatten(list(module.parameters()))
    query = Query((Term(1.0, point), Term(-1.0, point.clone())), 1.0, 0.0)
    assert not LocalRecords(module, blobs).bounded_sum(query, range(50)).value.any()


def test_the_loaders_collate_function_batch_size_and_transfer_hooks_are_used(
    classifier, mlp, blobs
):
    seen: list[int] = []

    class Scaled(classifier):
        def training_step(self, batch: Any) -> Tensor:  # Lightning allows it without batch_idx
            seen.append(len(batch["x"]))
            return nn.functional.cross_entropy(self(batch["x"]), batch["y"])

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "x": batch["x"] / 2}

    def collate(records: list[Any]) -> dict[str, Tensor]:
        x, y = zip(*records, strict=True)
        return {"x": 2 * torch.stack(x), "y": torch.stack(y)}

    module, query = Scaled(mlp()), Query((Term(),), 0.3, 0.0)
    loader = DataLoader(blobs, batch_size=4, shuffle=True, collate_fn=collate)
    answer = LocalRecords(module, loader).bounded_sum(query, range(6))
    assert seen == [4, 2]
    expected = slow_sum(module, blobs, query, range(6))
    torch.testing.assert_close(answer.value.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [lambda loss: None, Tensor.detach, lambda loss: {"loss": None}])
def test_a_chunk_without_a_loss_voids_the_ledger(way, classifier, mlp, blobs, tmp_path):
    class Skips(classifier):
        at: Any = None  # the first record of a chunk

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return way(loss) if self.at is not None and self.at.equal(batch[0][0]) else loss

    module, query = Skips(mlp()), Query((Term(),), 0.3, 1.0)
    local, ledger = LocalRecords(module, blobs, chunk_size=5), ReleaseLedger(tmp_path, "data")
    one, other = (
        Spending(run, 9, lambda i: [Gaussian(1.0)], math.inf, 1e-5) for run in ("one", "other")
    )

    def make(rng: Any) -> bytes:
        return local.bounded_sum(query, range(10)).value.numpy().tobytes()

    ledger.release(one, 0, 0, make)
    module.at = blobs.tensors[0][5]
    with pytest.raises(VoidedRunError, match=r"Skips gave no gradient.*don't skip batches"):
        ledger.release(one, 1, 0, make)
    module.at = None
    for run in (one, other):
        with pytest.raises(VoidedRunError, match="Skips gave no gradient"):
            ledger.release(run, 1, 0, make)
    assert ledger.epsilon(1e-5) == math.inf


def centred(self, batch, batch_idx):
    mean, self.mean = getattr(self, "mean", 0.0), batch[0].mean(0)
    return (self.layer(batch[0] - mean) ** 2).mean()


def alternating(self, batch, batch_idx):
    return (-1) ** batch_idx * (self.layer(batch[0]) ** 2).mean()


@pytest.mark.parametrize("engine", ["auto", "one_by_one"])
@pytest.mark.parametrize("step", [centred, alternating])
def test_no_chunk_reads_what_another_one_left_or_how_many_were_before(engine, step):
    local = LocalRecords(with_step(step), data(6), chunk_size=2, engine=engine)
    query = Query((Term(),), 1.0, 1.0)
    alone = [local.bounded_sum(query, [i]).value for i in range(6)]
    torch.testing.assert_close(local.bounded_sum(query, range(6)).value, sum(alone))


# -- refused -----------------------------------------------------------------------------------


def changed(module: Any, change: str) -> Any:
    if change == "frozen":
        module.requires_grad_(False)
    elif change == "manual":
        module.automatic_optimization = False
    elif change == "hooked":
        module.net[0].weight.register_hook(print)
    elif change == "batch norm":
        module.net.append(nn.BatchNorm1d(3))
    return module.net if change == "plain" else module


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("frozen", MisconfigurationException, "no trainable parameter"),
        ("manual", MisconfigurationException, "manual optimization"),
        ("hooked", RawGradientHookError, "gradient hooks"),
        ("plain", MisconfigurationException, "Sequential and not a"),
        ("batch norm", MisconfigurationException, r"net\.3.*GroupNorm"),
    ],
)
def test_modules_that_cannot_be_answered_for_are_refused(module, blobs, change, error, message):
    with pytest.raises(error, match=message):
        LocalRecords(changed(module, change), blobs)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (Stream(), "IterableDataset"),
        (ConcatDataset([TensorDataset(torch.zeros(0, 6))]), "empty"),
        (DataLoader([1, 2], batch_size=None), "batch_size=None"),
        (DataLoader([1, 2], sampler=[0]), "chooses records with list"),
    ],
)
def test_data_that_cannot_be_sampled_is_refused(module, records, message):
    with pytest.raises(MisconfigurationException, match=message):
        LocalRecords(module, records)


def test_rows_that_are_not_records_are_refused(module, blobs):
    def twice(records: list[Any]) -> Any:
        x, y = zip(*records, strict=True)
        return torch.stack(x + x), torch.stack(y + y)

    query = Query((Term(),), 1.0, 1.0)
    doubled = DataLoader(blobs, batch_size=4, collate_fn=twice)
    with pytest.raises(UnsupportedModelError, match="exactly one row"):
        LocalRecords(module, doubled, engine="layers").bounded_sum(query, [1, 2, 3])
    with pytest.raises(ValueError, match="twice"):
        LocalRecords(module, blobs).bounded_sum(query, [1, 2, 1])
    lost = DataLoader(blobs, batch_size=4, collate_fn=lambda records: None)
    with pytest.raises(TypeError, match="collate_fn returned None"):
        LocalRecords(module, lost).bounded_sum(query, [1])


# -- training_step, as a Trainer calls it, and tried before the first charge -------------------


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        numbers: list[Any] = []  # in closures, which no snapshot holds
        self.note, self.numbers = numbers.append, lambda: numbers

    def loss(self, batch: Any, number: Any = "none") -> Tensor:
        self.note(number)
        return self.layer(batch[0]).mean()


def with_step(step: Callable[..., Any]) -> Base:
    return type("Module", (Base,), {"training_step": step})()


def named(self, batch, batch_idx):
    return self.loss(batch, batch_idx)


@functools.wraps(named)
def decorated(*arguments, **keywords):
    return named(*arguments, **keywords)


def data(count: int = 4) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, generator=torch.Generator().manual_seed(0)))


def answer(folder, module, records: Any = None, **settings: Any) -> bytes:
    local = LocalRecords(module, records or data(), **settings)
    plan = AsyncPlan(3, PolynomialSizes(0, 3), InverseSteps(0.1, 0.01))
    privacy = ClientPrivacy(1.0, 2.0, target_epsilon=math.inf)
    client = AsyncClient(local, plan, privacy, ReleaseLedger(folder, "data"), run="trial")
    facts = {"run": "trial", "round": 0, "counter": 0}
    return client.answer(Message("round", facts, {"model": local.point}).to_bytes())


BUGS = {
    "needs more": (lambda self, batch, batch_idx, dataloader_idx: self.loss(batch), TypeError),
    "needs a keyword": (lambda self, batch, *, batch_idx: self.loss(batch), TypeError),
    "wrong key": (lambda self, batch, i: self.layer(batch["x"]).mean(), TypeError),
    "wrong shape": (lambda self, batch, i: self.layer(batch[0][:, :2]).mean(), RuntimeError),
    "trainer": (lambda self, batch, i: self.loss(batch) * self.trainer.max_epochs, RuntimeError),
    "no loss": (lambda self, batch, i: None, Exception),
    "detached": (lambda self, batch, i: self.loss(batch).detach(), Exception),
    "no key": (lambda self, batch, i: {"objective": self.loss(batch)}, Exception),
    "weights of the batch": (
        lambda self, batch, i: (self.layer(batch[0])[:, 0] * batch[0][:, 0].softmax(0)).sum(),
        MisconfigurationException,
    ),
    "a first batch that stays": (
        lambda self, batch, i: self.layer(batch[0] + first_of(self, batch[0])).mean(),
        MisconfigurationException,
    ),
}


def first_of(self, x: Tensor) -> Tensor:
    self.__dict__.setdefault("first", x[:1].clone())
    return self.first


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_in_training_step_costs_nothing(tmp_path, name):
    step, error = BUGS[name]
    with pytest.raises(error) as caught:
        answer(tmp_path, with_step(step))
    notes = getattr(caught.value, "__notes__", [])
    assert "before anything was charged" in f"{caught.value} {notes}"
    assert history(tmp_path) == []
    answer(tmp_path, with_step(named))  # mended, the same run goes on
    assert len(history(tmp_path)) == 1


def test_it_is_tried_before_the_first_round_only(tmp_path):
    seen: list[int] = []

    def counting(self, batch, batch_idx):
        seen.append(len(batch[0]))
        return self.loss(batch, batch_idx)

    local = LocalRecords(with_step(counting), data())
    random = torch.get_rng_state()
    local.try_once()
    assert 2 <= min(seen) <= max(seen) <= 4 and torch.equal(random, torch.get_rng_state())
    tried = len(seen)
    answer(tmp_path, with_step(counting))
    assert len(seen) > 2 * tried and seen[:tried] == seen[tried : 2 * tried]
    del seen[:]
    answer(tmp_path, with_step(counting))  # a new process, asked again
    assert seen == []
