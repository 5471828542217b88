"""engine="one_by_one": each record alone through collate_fn and training_step, whatever the code."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Diff2, Poisson
from lightning_dp.accounting.events import VoidedRunError
from tests.strategies.one_by_one.models import (
    ESTIMATORS,
    MODELS,
    SEEN,
    Base,
    C,
    Cell,
    Coupled,
    N,
    RawParameters,
    WeightNorm,
    clipped_by_a_loop,
    records,
)


@pytest.mark.parametrize("kind", MODELS)
def test_the_sum_is_that_of_a_loop_over_records(kind, released_sum):
    expected = clipped_by_a_loop(kind(), records())
    total = released_sum(kind())
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)
    assert expected.norm() > C


@pytest.mark.parametrize("kind", [RawParameters, WeightNorm, Cell, Coupled])
def test_one_more_record_moves_the_sum_by_at_most_c(kind, released_sum):
    data, large = records(), torch.full((1, 6), 1e3)
    more = TensorDataset(torch.cat([data.tensors[0], large]), torch.cat([data.tensors[1], y0()]))
    difference = released_sum(kind(), more) - released_sum(kind(), data)
    assert float(difference.norm()) <= C + 1e-5


UNCHECKED = {"isolation_probe": False, "spot_checks": False}


def y0() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_makes_the_steps_of_the_other_engines(name, fit, weights):
    found = []
    for engine in ("layers", "one_by_one"):
        model, estimator = Base(), ESTIMATORS[name]()
        asked = {} if estimator is None else {"estimator": estimator, "max_grad_norm": None}
        fit(model, engine=engine, seed=1, **asked, trainer={"max_steps": 4})
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
    total = released_sum(model, isolation_probe=False)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)
    assert not model.largest and not model.last and sum(model.queue) == 0


def test_generators_of_the_module_draw_anew_for_each_record(fit):
    draws: SimpleQueue[float] = SimpleQueue()  # no snapshot holds what is in it

    class Own(Base):
        def build(self) -> None:
            super().build()
            self.generator = torch.Generator().manual_seed(0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            draws.put(float(torch.rand((), generator=self.generator)))
            return super().training_step(batch, batch_idx)

    estimator = Diff2(9, C, 0.5, split=2.0)
    options = {**UNCHECKED, "trainer": {"max_steps": 2}, "batch_size": N}
    fit(Own(), estimator=estimator, max_grad_norm=None, **options)
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


def test_both_points_of_a_difference_see_the_same_random_numbers(fit):
    draws: SimpleQueue[float] = SimpleQueue()  # no snapshot holds what is in it

    class Draws(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            draws.put(float(torch.rand(())))
            return super().training_step(batch, batch_idx)

    estimator = Diff2(9, C, 0.5, split=2.0)
    options = {**UNCHECKED, "trainer": {"max_steps": 2}, "batch_size": N}
    fit(Draws(), estimator=estimator, max_grad_norm=None, **options)
    drawn = [draws.get() for _ in range(draws.qsize())]
    second = drawn[N:]
    assert second[0::2] == second[1::2] and len(set(drawn)) == 2 * N


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


def test_a_module_that_never_gives_a_loss_ends_the_run(fit):
    class Silent(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)

    with pytest.raises(VoidedRunError, match="no gradient for any record of the first batch"):
        fit(Silent())


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


def test_workers_hand_over_both_kinds_of_batches(fit, weights):
    here, there = Base(), Base()
    fit(here)
    fit(there, workers=1)
    assert torch.equal(weights(here), weights(there))


def test_layers_in_eval_mode_train(released_sum):
    model = Base()
    model.net.eval()
    expected = clipped_by_a_loop(Base(), records())
    torch.testing.assert_close(released_sum(model), expected, rtol=0, atol=1e-5)
