"""engine="one_by_one": each record alone through collate_fn and training_step, whatever the code."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, CubicNewton, Diff2, FullBatch, Poisson
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.estimators import Storm
from lightning_dp.gradients import UnsupportedModelError

C = 0.3
N = 10
SEEN: list[float] = [0.0]  # outside of every model


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.build()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class TimeFirst(Base):
    """An ordinary LSTM with the records in the second dimension."""

    def build(self) -> None:
        self.lstm, self.head = nn.LSTM(2, 5), nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.head(self.lstm(x.view(-1, 3, 2).transpose(0, 1))[0][-1]), y)


class Coupled(Base):
    """A loss over the batch, which any other engine refuses; and a sum, with noise inside."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (losses.sum() - 0.2).abs() + 0.2 + losses.max()


MODELS = [TimeFirst, Coupled]  # of other code, gradients/test_contract.py has a table


def records(count: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 3)


def clipped_by_a_loop(model: L.LightningModule, data: Any, collate: Any = None) -> Tensor:
    """Run the records one after the other, each in a copy of the model, and add them up."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for record in data:
        alone = copy.deepcopy(model)
        batch = (collate or torch.utils.data.default_collate)([record])
        loss = alone.training_step(batch, 0)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        if loss is None:
            continue
        SEEN[:] = [0.0]
        loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
        flat = torch.cat([grad.double().flatten() for grad in grads])
        if bool(flat.isfinite().all()):
            total += flat * min(1.0, C / float(flat.norm()))
    return total


ESTIMATORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "diff2": lambda: Diff2(3, C, 0.5, split=2.0),
    "storm": lambda: Storm(momentum=0.3, max_grad_norm=C),
    "cubic_newton": lambda: CubicNewton(
        strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=3, max_grad_norm=C, keep=40
    ),
}


@pytest.fixture
def fit(make_trainer):
    def run(
        model: L.LightningModule,
        data: Any = None,
        *,
        collate: Any = None,
        workers: int = 0,
        batch_size: int = 4,
        callbacks: Sequence[L.Callback] = (),
        trainer: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        settings = {
            "noise_multiplier": 0.0,
            "max_grad_norm": C,
            "target_delta": 1e-5,
            "sampling": FullBatch(),
            "engine": "one_by_one",
        }
        privacy = DifferentialPrivacy(**{**settings, **options})
        arguments = {"max_steps": 1, "callbacks": [privacy, *callbacks], **(trainer or {})}
        made = make_trainer(**arguments)
        data = records() if data is None else data
        made.fit(model, DataLoader(data, batch_size, collate_fn=collate, num_workers=workers))
        return made, privacy

    return run


@pytest.fixture
def released_sum(fit, weights):
    """lr = 1 and q = 1, so one update times N is the released sum."""

    def run(model: L.LightningModule, data: Any = None, **options: Any) -> Tensor:
        before = weights(model).double()
        fit(model, data, **options)
        return (before - weights(model).double()) * len(records() if data is None else data)

    return run


# -- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_the_sum_is_that_of_a_loop_over_records(kind, released_sum):
    expected = clipped_by_a_loop(kind(), records())
    total = released_sum(kind())
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)
    assert expected.norm() > C


@pytest.mark.parametrize("kind", [TimeFirst, Coupled])
def test_one_more_record_moves_the_sum_by_at_most_c(kind, released_sum):
    data, large = records(), torch.full((1, 6), 1e3)
    more = TensorDataset(
        *map(torch.cat, zip(data.tensors, (large, torch.tensor([0])), strict=True))
    )
    difference = released_sum(kind(), more) - released_sum(kind(), data)
    assert float(difference.norm()) <= C + 1e-5


UNCHECKED = {"checks": Checks(dry_run=False, comparisons=False)}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_makes_the_steps_of_the_other_engines(name, fit, weights):
    found = []
    for engine in ("layers", "one_by_one"):
        model, estimator = Base(), ESTIMATORS[name]()
        asked = {} if estimator is None else {"estimator": estimator, "max_grad_norm": None}
        steps = 4 if name in ("diff2", "cubic_newton") else 2  # which begin again after three
        fit(model, engine=engine, seed=1, **asked, **UNCHECKED, trainer={"max_steps": steps})
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_without_noise_and_clipping_it_is_plain_training(make_trainer, fit, weights):
    plain, private = Base(), Base()
    make_trainer(max_steps=3).fit(plain, DataLoader(records(), batch_size=N))
    fit(private, max_grad_norm=float("inf"), batch_size=N, trainer={"max_steps": 3})
    torch.testing.assert_close(weights(private), weights(plain), rtol=0, atol=1e-6)


class Remembers(Base):
    """Everything that may pass from one record to the next."""

    def build(self) -> None:
        super().build()
        SEEN[:] = [0.0]
        self.last, self.queue = 0.0, deque([0.0], maxlen=4)
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("largest", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.mean.update(loss.detach())
        self.largest.copy_(torch.maximum(self.largest, loss.detach()))
        kept = self.last + sum(self.queue) + SEEN[-1]
        self.last = float(loss)
        self.queue.append(float(loss))
        SEEN.append(float(loss))
        seen = self.trainer.callback_metrics.get("seen", torch.zeros(())) if self._trainer else 0
        self.log("seen", loss.detach(), on_step=True)
        return loss * (1 + self.largest + self.mean.compute() + seen + kept)

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer:
            super().log(*args, **kwargs)


def test_no_record_sees_what_another_left(released_sum):
    """The oracle begins with a copy of the model for each record."""
    expected = clipped_by_a_loop(Remembers(), records())
    model = Remembers()
    total = released_sum(model, checks=Checks(dry_run=False))
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)
    assert not model.largest and not model.last and sum(model.queue) == 0


@pytest.mark.parametrize("own", [False, True])
def test_each_record_draws_anew_and_both_points_of_its_difference_the_same(own, fit):
    """From the global generator, and from one of the module."""
    draws: SimpleQueue[float] = SimpleQueue()  # no snapshot holds what is in it

    class Draws(Base):
        def build(self) -> None:
            super().build()
            self.generator = torch.Generator().manual_seed(0) if own else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            draws.put(float(torch.rand((), generator=self.generator)))
            return super().training_step(batch, batch_idx)

    estimator = Diff2(9, C, 0.5, split=2.0)
    options = {**UNCHECKED, "trainer": {"max_steps": 2}, "batch_size": N}
    fit(Draws(), estimator=estimator, max_grad_norm=None, **options)
    drawn = [draws.get() for _ in range(draws.qsize())]
    assert drawn[N::2] == drawn[N + 1 :: 2] and len(set(drawn)) == 2 * N


def test_what_a_record_draws_does_not_depend_on_the_others(released_sum):
    class Draws(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            torch.randn(int(x[0, 0].abs() * 100))  # so many numbers that depend on the record
            if x[0, 0] > 100:
                torch.manual_seed(0)
            return F.cross_entropy(self.net(x + torch.randn_like(x)), y)

    data = records()
    other = TensorDataset(data.tensors[0].clone(), data.tensors[1])
    other.tensors[0][2] = 200.0
    sums = []
    for each in (data, other):
        model = Draws()
        torch.manual_seed(5)
        sums.append(released_sum(model, each))
    assert float((sums[0] - sums[1]).norm()) <= 2 * C + 1e-5


def test_records_are_collated_alone(released_sum):
    """Graphs in one long tensor: no row is a record, and each has the neighbours of its own only."""

    def collate(graphs: list[Any]) -> dict[str, Any]:
        sizes = torch.tensor([len(x) for x, _ in graphs])
        return {
            "nodes": torch.cat([x for x, _ in graphs]),
            "graph": torch.repeat_interleave(torch.arange(len(graphs)), sizes),
            "y": torch.stack([y for _, y in graphs]),
        }

    class Graphs(Base):
        def build(self) -> None:
            self.net = nn.Linear(6, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nodes = torch.tanh(self.net(batch["nodes"]))
            pooled = nodes.new_zeros(len(batch["y"]), 3).index_add(0, batch["graph"], nodes)
            return F.cross_entropy(pooled, batch["y"])

    generator = torch.Generator().manual_seed(2)
    data = [(torch.randn(2 + i % 3, 6, generator=generator), torch.tensor(i % 3)) for i in range(N)]
    expected = clipped_by_a_loop(Graphs(), data, collate)
    total = released_sum(Graphs(), data, collate=collate)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)


def test_a_collate_fn_that_empties_its_samples_may_run_twice(released_sum):
    def collate(samples: list[dict[str, Any]]) -> Any:
        return torch.stack([s.pop("x") for s in samples]), torch.stack(
            [s.pop("y") for s in samples]
        )

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> Any:
            x, y = records()[index]
            return {"x": x, "y": y}

    expected = clipped_by_a_loop(Base(), records())
    torch.testing.assert_close(
        released_sum(Base(), Samples(), collate=collate), expected, rtol=0, atol=1e-5
    )


def test_a_record_without_a_loss_contributes_zero(released_sum):
    class Skips(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _ = batch
            return None if x[0, 0] > 0 else super().training_step(batch, batch_idx)

    expected = clipped_by_a_loop(Skips(), records())
    torch.testing.assert_close(released_sum(Skips()), expected, rtol=0, atol=1e-5)


def test_a_record_that_is_not_finite_contributes_zero(released_sum):
    data = records()
    data.tensors[0][3] = float("nan")
    expected = clipped_by_a_loop(Base(), data)
    torch.testing.assert_close(released_sum(Base(), data), expected, rtol=0, atol=1e-5)


def test_poisson_batches_with_empty_chunks(fit):
    """Stand-in records run, and leave nothing."""
    trainer, privacy = fit(
        Base(),
        sampling=Poisson(),
        noise_multiplier=1.0,
        batch_size=1,
        trainer={"max_steps": 12, "accumulate_grad_batches": 2},
    )
    assert trainer.global_step == 12 and privacy.report().steps == 12


# -- what is told of the records together: in logs, metrics, hooks and the report ----------------


def test_what_is_logged_and_counted_is_that_of_the_batch(fit):
    class Logs(Base):
        def build(self) -> None:
            super().build()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            output = self.net(x)
            loss = F.cross_entropy(output, y)
            self.accuracy(output, y)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log_dict({"loss": loss, "count": len(x)}, on_step=True, on_epoch=True)
            self.log("total", float(len(x)), reduce_fx="sum", batch_size=len(x))
            return {"loss": loss, "output": output.detach()}

    seen = []
    for engine in ("layers", "one_by_one"):
        trainer, _ = fit(Logs(), engine=engine, sampling=FullBatch(), batch_size=N)
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if "privacy" not in k}
        seen.append({k: round(v, 5) for k, v in metrics.items() if "count" not in k})
    assert seen[0] == seen[1]
    assert {"accuracy_step", "accuracy_epoch", "loss_step", "total"} <= set(seen[0])


# -- refused before anything is charged ----------------------------------------------------------


def test_manual_optimization_is_refused_before_anything_is_charged(fit):
    class Manual(Base):
        def build(self) -> None:
            super().build()
            self.automatic_optimization = False

    with pytest.raises(MisconfigurationException, match="Use automatic optimization"):
        fit(Manual())


def test_layers_that_keep_statistics_stay_refused(fit):
    class Norm(Base):
        def build(self) -> None:
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    with pytest.raises(MisconfigurationException, match="BatchNorm"):
        fit(Norm())


def test_a_metric_counts_the_rows_of_the_batch_whatever_its_state_is(fit):
    class Pearson(Base):
        def build(self) -> None:
            super().build()
            self.pearson = torchmetrics.PearsonCorrCoef()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.pearson.update(batch[0].flatten(), batch[0].flatten().square())
            return super().training_step(batch, batch_idx)

    model, x = Pearson(), records().tensors[0].flatten()
    fit(model, sampling=FullBatch(), batch_size=N)
    expected = torchmetrics.functional.pearson_corrcoef(x, x.square())
    torch.testing.assert_close(model.pearson.compute(), expected)


def test_no_second_derivative_is_refused_with_a_cure(fit):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient * ctx.saved_tensors[0]

    class NoSecond(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.cross_entropy(Once.apply(self.net(x)), y)

    with pytest.raises(UnsupportedModelError, match="an estimator without Hessians"):
        fit(NoSecond(), estimator=ESTIMATORS["cubic_newton"](), max_grad_norm=None)
