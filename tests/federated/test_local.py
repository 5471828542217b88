"""What a client answers, against one record at a time; and what it refuses, as in a Trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.boundary import Query, Term
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.federated.local import LocalRecords
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients import RawGradientHookError, UnsupportedModelError

ENGINES = ["auto", "layers", "records", "hooks", "one_by_one"]


def gradient(module: nn.Module, point: Tensor, record: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of one record, by plain autograd in float64."""
    net = copy.deepcopy(module.net).double()
    for param, value in zip(
        net.parameters(), unflatten(point, list(net.parameters())), strict=True
    ):
        param.data = value
    x, y = record
    loss = nn.functional.cross_entropy(net(x.double().unsqueeze(0)), y.unsqueeze(0))
    return flatten(torch.autograd.grad(loss, list(net.parameters())))


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
    local = LocalRecords(module, blobs, engine=engine, chunk_size=3)

    answer = local.bounded_sum(query, records)

    assert answer.clip_norm == clip_norm
    torch.testing.assert_close(
        answer.value.double(), slow_sum(module, blobs, query, records), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("chunk_size", [1, 7, 240])
def test_chunks_change_nothing_but_memory(module, recorded, blobs, chunk_size):
    data = recorded(*blobs.tensors)
    sizes: list[int] = []
    module.net.register_forward_hook(lambda net, args, out: sizes.append(len(out)))
    query = Query((Term(),), 0.3, 0.0)

    answer = LocalRecords(module, data, chunk_size=chunk_size).bounded_sum(query, range(100))

    assert max(sizes) == min(chunk_size, 100)
    assert sum(sizes) == 100
    assert data.asked == list(range(100))
    torch.testing.assert_close(
        answer.value.double(), slow_sum(module, blobs, query, range(100)), rtol=1e-4, atol=1e-5
    )


def test_an_empty_batch_gives_zeros_and_reads_nothing(module, recorded, blobs):
    data = recorded(*blobs.tensors)

    answer = LocalRecords(module, data).bounded_sum(Query((Term(),), 0.3, 1.0), [])

    assert answer.value.shape == flatten(list(module.parameters())).shape
    assert not answer.value.any()
    assert data.asked == []


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_record_that_is_not_finite_contributes_zero(module, blobs, bad, unit):
    x, y = blobs.tensors
    spoiled = TensorDataset(torch.cat([x, torch.full((1, 6), bad)]), torch.cat([y, y[:1]]))
    query = Query((Term(),), 0.3, 1.0)

    with_it = LocalRecords(module, spoiled, unit=unit).bounded_sum(query, [0, 240, 1]).value

    without = LocalRecords(module, blobs, unit=unit).bounded_sum(query, [0, 1]).value
    assert with_it.isfinite().all()
    if bad != 3e38:  # that one has a gradient, clipped like any other
        torch.testing.assert_close(with_it, without)


def test_one_record_moves_the_sum_by_the_clip_norm_at_most(module, blobs):
    x, y = blobs.tensors
    loud = TensorDataset(torch.cat([x, torch.full((1, 6), 1e4)]), torch.cat([y, y[:1]]))
    local, query = LocalRecords(module, loud), Query((Term(),), 0.3, 1.0)

    quiet = local.bounded_sum(query, range(240)).value.double()
    moved = local.bounded_sum(query, range(241)).value.double() - quiet

    assert float(moved.norm()) == pytest.approx(0.3, rel=1e-3)


# -- client level -----------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", [4, 400])  # the second is below every record's norm
def test_the_whole_client_is_clipped_once(module, blobs, divisor):
    exact = slow_sum(module, blobs, Query((Term(),), math.inf, 0.0), range(50))
    clip_norm = float(exact.norm()) / divisor
    local = LocalRecords(module, blobs, unit="client", chunk_size=16)

    answer = local.bounded_sum(Query((Term(),), clip_norm, 1.0), range(50))

    assert answer.clip_norm == clip_norm
    torch.testing.assert_close(answer.value.double(), exact / divisor, rtol=1e-4, atol=1e-6)


def test_a_client_below_the_clip_norm_is_left_alone(module, blobs):
    exact = slow_sum(module, blobs, Query((Term(),), math.inf, 0.0), range(50))

    local = LocalRecords(module, blobs, unit="client")
    answer = local.bounded_sum(Query((Term(),), 2 * float(exact.norm()), 1.0), range(50))

    torch.testing.assert_close(answer.value.double(), exact, rtol=1e-4, atol=1e-6)


# -- the module and its data are left as they were --------------------------------------------


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
        def __init__(self) -> None:
            super().__init__(Chatty())
            self.accuracy = MulticlassAccuracy(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            output = self(x)
            self.accuracy.update(output, y)
            self.log("accuracy", self.accuracy)
            self.log_dict({"train_loss": output.sum()}, prog_bar=True)
            return {"loss": nn.functional.cross_entropy(output, y), "epoch": self.current_epoch}

    module = Logging()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = set(vars(module))

    LocalRecords(module, blobs).bounded_sum(Query((Term(1.0, other_point(module, 1)),), 1, 1), [1])

    assert set(vars(module)) == attributes
    torch.testing.assert_close(module.state_dict(), before)
    assert module.accuracy.tp.sum() == 0
    assert all(param.grad is None for param in module.parameters())
    for part in module.modules():
        assert not part._forward_hooks and not part._backward_hooks


def test_both_points_share_their_dropout_masks(classifier, blobs):
    module = classifier(Chatty())
    module.net.register_buffer("calls", torch.zeros(1))
    point = module_point = flatten(list(module.parameters()))
    query = Query((Term(1.0, point), Term(-1.0, module_point.clone())), 1.0, 0.0)

    assert not LocalRecords(module, blobs).bounded_sum(query, range(50)).value.any()


def test_an_error_in_the_users_code_leaves_the_module_clean(classifier, mlp, blobs):
    class Failing(classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise KeyError("user")

    module = Failing(mlp())
    before = flatten(list(module.parameters())).clone()

    with pytest.raises(KeyError, match="user"):
        LocalRecords(module, blobs).bounded_sum(
            Query((Term(point=other_point(module, 1)),), 1, 1), [1]
        )

    torch.testing.assert_close(flatten(list(module.parameters())), before)
    assert all(not part._forward_hooks for part in module.modules())
    assert "log" not in vars(module)


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
        return {
            "x": torch.stack([2 * x for x, _ in records]),
            "y": torch.stack([y for _, y in records]),
        }

    module = Scaled(mlp())
    loader = DataLoader(blobs, batch_size=4, shuffle=True, collate_fn=collate)
    query = Query((Term(),), 0.3, 0.0)

    answer = LocalRecords(module, loader).bounded_sum(query, range(6))

    assert seen == [4, 2]
    expected = slow_sum(module, blobs, query, range(6))
    torch.testing.assert_close(answer.value.double(), expected, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_not_part_of_the_flat_vector(module, blobs):
    module.net[0].requires_grad_(False)
    local = LocalRecords(module, blobs)

    answer = local.bounded_sum(Query((Term(),), 0.3, 0.0), range(5)).value

    assert answer.shape == local.point.shape == (8 * 3 + 3,)


@pytest.mark.parametrize("way", [lambda loss: None, Tensor.detach, lambda loss: {"loss": None}])
def test_a_chunk_without_a_loss_is_never_answered(way, classifier, mlp, blobs, tmp_path):
    class Skips(classifier):
        at = -1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return way(loss) if batch_idx == self.at else loss

    module, query = Skips(mlp()), Query((Term(),), 0.3, 1.0)
    local, ledger = LocalRecords(module, blobs, chunk_size=5), ReleaseLedger(tmp_path, "records")
    spending = Spending("trial", 9, lambda i: [Gaussian(1.0)], math.inf, 1e-5)

    def make(rng: Any) -> bytes:
        return local.bounded_sum(query, range(10)).value.numpy().tobytes()

    ledger.release(spending, 0, 0, make)
    module.at = 1

    with pytest.raises(VoidedRunError, match=r"Skips gave no gradient.*don't skip batches"):
        ledger.release(spending, 1, 0, make)
    module.at = -1
    for run in (spending, Spending("other", 9, lambda i: [Gaussian(1.0)], math.inf, 1e-5)):
        with pytest.raises(VoidedRunError, match="Skips gave no gradient"):
            ledger.release(run, 1, 0, make)
    assert ledger.epsilon(1e-5) == math.inf


# -- refused ----------------------------------------------------------------------------------


def test_batch_norm_is_refused(classifier, blobs):
    module = classifier(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))

    with pytest.raises(MisconfigurationException, match=r"net\.1.*GroupNorm"):
        LocalRecords(module, blobs)


@pytest.mark.parametrize("change", ["frozen", "manual", "hooked", "plain"])
def test_modules_that_cannot_be_answered_for_are_refused(module, blobs, change):
    expected: Any = MisconfigurationException
    if change == "frozen":
        module.requires_grad_(False)
    elif change == "manual":
        module.automatic_optimization = False
    elif change == "plain":
        module = module.net
    else:
        module.net[0].weight.register_hook(print)
        expected = RawGradientHookError
    message = {
        "frozen": "no trainable parameter",
        "manual": "manual optimization",
        "hooked": "gradient hooks",
        "plain": "Sequential and not a",
    }[change]

    with pytest.raises(expected, match=message):
        LocalRecords(module, blobs)


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


@pytest.mark.parametrize("arguments", [{"unit": "user"}, {"chunk_size": 0}, {"engine": "magic"}])
def test_arguments_out_of_range_are_named(module, blobs, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=name):
        LocalRecords(module, blobs, **arguments)


def test_rows_that_are_not_records_are_refused(module, blobs):
    def twice(records: list[Any]) -> Any:
        x, y = zip(*records, strict=True)
        return torch.stack(x + x), torch.stack(y + y)

    loader = DataLoader(blobs, batch_size=4, collate_fn=twice)
    local = LocalRecords(module, loader, engine="layers")

    with pytest.raises(UnsupportedModelError, match="exactly one row"):
        local.bounded_sum(Query((Term(),), 1.0, 1.0), [1, 2, 3])


def test_a_record_cannot_be_asked_twice(module, blobs):
    with pytest.raises(ValueError, match="twice"):
        LocalRecords(module, blobs).bounded_sum(Query((Term(),), 1.0, 1.0), [1, 2, 1])


def test_lost_records_are_refused(module, blobs):
    loader = DataLoader(blobs, batch_size=4, collate_fn=lambda records: None)

    with pytest.raises(TypeError, match="collate_fn returned None"):
        LocalRecords(module, loader).bounded_sum(Query((Term(),), 1.0, 1.0), [1])
