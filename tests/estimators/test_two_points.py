"""Queries over two points: the batch runs twice, is seen once, and differs by parameters only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.estimators import AbstractEstimator
from lightning_dp.functional import flatten
from lightning_dp.sampling import FullBatch
from tests.zoo import clipped, flat, gradient_rows, private


@dataclass(frozen=True)
class Difference(AbstractEstimator):
    """v_t = v_(t-1) + clip(g(x_t) - g(x_(t-1))), starting from clip(g(x_0))."""

    clip_norm: float

    def init(self, params: Sequence[Tensor]) -> State:
        return {"v": None, "point": None}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        terms = (Term(),) if state["v"] is None else (Term(), Term(-1.0, state["point"]))
        return Query(terms, self.clip_norm, noise_multiplier)

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        v = released.value if state["v"] is None else state["v"] + released.value
        return v, {"v": v, "point": flatten(params)}


def _slow_run(net: nn.Module, data: Any, clip_norm: float, steps: int, lr: float) -> Tensor:
    """In float64, each record's gradient at both points by itself."""
    twin, (features, y) = net.double(), data.tensors

    def rows(point: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(point, twin.parameters())
        return gradient_rows(twin, features.double(), y)

    x = flat(twin)
    v, before = torch.zeros_like(x), None
    for _ in range(steps):
        difference = rows(x) - (0.0 if before is None else rows(before))
        v = v + clipped(difference, clip_norm) / len(data)
        before, x = x, x - lr * v
    return x


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk", [240, 80])
@pytest.mark.parametrize("clip_norm", [100.0, 0.3])
def test_differences_equal_a_slow_loop(classifier, mlp, blobs, make_trainer, chunk, clip_norm):
    exact = {"noise_multiplier": 0.0, "sampling": FullBatch()}
    privacy = private(estimator=Difference(clip_norm), **exact)
    model = classifier(mlp())
    make_trainer(max_epochs=4, callbacks=[privacy]).fit(model, DataLoader(blobs, chunk))

    expected = _slow_run(mlp(), blobs, clip_norm, steps=4, lr=0.1)
    assert torch.allclose(flatten(list(model.parameters())).double(), expected, atol=1e-5)


def test_the_second_pass_leaves_no_trace_and_sees_the_same_dropout(classifier, blobs, make_trainer):
    masks: list[Tensor] = []  # in a closure, which no snapshot holds

    class Counting(classifier):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
            self.register_buffer("passes", torch.zeros(()))
            self.logged = 0
            self.net[1].register_forward_hook(lambda m, i, o: masks.append((o != 0) | (i[0] == 0)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.passes += 1
            with torch.no_grad():
                self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)
            return super().training_step(batch, batch_idx)

    privacy = private(estimator=Difference(1.0), sampling=FullBatch())
    model = Counting()
    trainer = make_trainer(max_epochs=3, callbacks=[privacy])
    trainer.fit(model, DataLoader(blobs, 240))

    assert float(model.passes) == 3
    assert int(model.accuracy.tp.sum() + model.accuracy.fn.sum()) in (0, 240)  # reset each epoch
    # Steps 2 and 3 run twice (each pass calls the net twice): the same masks at both points.
    assert len(masks) == 2 + 4 + 4
    assert torch.equal(masks[2], masks[4]) and torch.equal(masks[3], masks[5])
    assert not torch.equal(masks[2], masks[6])
    assert "log" not in vars(model)
    assert privacy.steps == 3


def test_manual_optimization_is_refused(classifier, mlp, loader, make_trainer):
    class Manual(classifier):  # type: ignore[misc, valid-type]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    privacy = private(estimator=Difference(1.0))
    with pytest.raises(Exception, match="manual optimization"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(Manual(mlp()), loader)
