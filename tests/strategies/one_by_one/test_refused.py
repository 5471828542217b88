"""Refusals where records run alone, told before anything is charged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients import UnsupportedModelError
from tests.strategies.one_by_one.models import ESTIMATORS, Base, Contrastive, Coupled


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


def test_metrics_that_cannot_be_put_together_are_refused(fit):
    class Pearson(Base):
        def build(self) -> None:
            super().build()
            self.pearson = torchmetrics.PearsonCorrCoef()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.pearson.update(batch[0].flatten(), batch[0].flatten().square())
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match=r"PearsonCorrCoef.*on_train_batch_end"):
        fit(Pearson())


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


REFUSED = [Contrastive, Coupled]


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_of_other_engines_name_this_one(kind, fit):
    """That it is a cure, another test shows."""
    with pytest.raises(Exception, match=r"Or run each record alone with engine='one_by_one'"):
        fit(kind(), engine="auto")
