"""Refusals of settings that have no meaning with cubic Newton steps, before anything is charged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import CubicNewton, FullBatch, LaplacianSmoothing, Momentum, PrivacyConfig
from lightning_dp.boundary import State
from lightning_dp.schedules import AbstractAdaptiveSchedule
from tests.zoo import private


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strong_convexity": 0.0}, "strong_convexity=0"),
        ({"strong_convexity": -1.0}, "strong_convexity=-1"),
        ({"strong_convexity": math.inf}, "strong_convexity=inf"),
        ({"hessian_lipschitz": -0.1}, "hessian_lipschitz=-0.1"),
        ({"inner_steps": 0}, "inner_steps=0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0"),
        ({"max_grad_norm": math.inf}, "max_grad_norm=inf"),
        ({"keep": 0}, "keep=0"),
        ({"keep_fraction": 0.0}, "keep_fraction=0"),
        ({"keep_fraction": 1.1}, "keep_fraction=1.1"),
        ({"keep": 2, "keep_fraction": 0.5}, "give one of them"),
        ({"mask_seed": -1}, "mask_seed=-1"),
        ({"box": 0.0}, "box=0"),
        ({"max_step_size": -1.0}, "max_step_size=-1"),
        ({"weight_decay": -1.0}, "weight_decay=-1"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    good: dict[str, Any] = {"strong_convexity": 1.0, "hessian_lipschitz": 1.0, "inner_steps": 3}
    with pytest.raises(ValueError, match=message):
        CubicNewton(**{**good, **changes})


def optimizer_of(kind: Any, **options: Any) -> Any:
    return lambda params: kind(params, **options)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optimizer_of(torch.optim.Adam), "Adam would change it"),
        (optimizer_of(torch.optim.SGD, lr=1.0, momentum=0.9), r"SGD\(momentum=0.9\)"),
        (optimizer_of(torch.optim.SGD, lr=1.0, momentum=0.9, nesterov=True), "momentum"),
        (optimizer_of(torch.optim.SGD, lr=1.0, weight_decay=0.1), r"CubicNewton\(weight_decay"),
        (optimizer_of(torch.optim.SGD, lr=1.0, maximize=True), "maximize"),
    ],
)
def test_other_optimizers_are_refused(fit, tmp_path, optimizer, message):
    with pytest.raises(ValueError, match=message):
        fit(CubicNewton(1.0, 1.0, 3), noise_multiplier=1.0, optimizer=optimizer)
    nothing_was_charged(fit, tmp_path)


def nothing_was_charged(fit: Any, folder: Path) -> None:
    assert fit.privacy.steps == 0 and fit.model.count_passes() == 0
    assert not list(folder.rglob("*.journal"))


def test_more_coordinates_than_parameters_are_refused_before_the_first_step(fit, tmp_path):
    with pytest.raises(ValueError, match="keep=7 coordinates of 6"):
        fit(CubicNewton(1.0, 1.0, 3, keep=7), noise_multiplier=1.0)
    nothing_was_charged(fit, tmp_path)


def test_a_subclass_of_sgd_may_do_anything_and_is_refused(fit, tmp_path):
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="Own would change it"):
        fit(CubicNewton(1.0, 1.0, 3), noise_multiplier=1.0, optimizer=optimizer_of(Own, lr=1.0))
    nothing_was_charged(fit, tmp_path)


@pytest.mark.parametrize("processor", [Momentum(0.9), LaplacianSmoothing(1.0)])
def test_post_processing_of_gradients_is_refused(processor):
    with pytest.raises(ValueError, match=r"postprocessing=.*acts on private gradients"):
        PrivacyConfig(
            target_delta=1e-5,
            noise_multiplier=1.0,
            estimator=CubicNewton(1.0, 1.0, 3),
            postprocessing=(processor,),
        )


@dataclass(frozen=True)
class ByNorm(AbstractAdaptiveSchedule):
    def __call__(self, step: int) -> float:
        return 1.0

    def init(self) -> State:
        return {}

    def now(self, state: State, step: int) -> float:
        return 1.0

    def observe(self, state: State, released: Tensor) -> State:
        return state


def test_noise_that_is_chosen_from_released_gradients_is_refused():
    with pytest.raises(ValueError, match=r"noise_schedule=ByNorm.*fixed in advance"):
        PrivacyConfig(
            target_delta=1e-5,
            target_epsilon=1.0,
            estimator=CubicNewton(1.0, 1.0, 3),
            noise_schedule=ByNorm(),
        )


# -- engines -------------------------------------------------------------------------------------


def test_the_hooks_engine_is_refused_by_name(fit, tmp_path):
    with pytest.raises(
        MisconfigurationException, match=r"Hessian-vector.*: hooks\. Use engine='auto'"
    ):
        fit(CubicNewton(1.0, 1.0, 3), noise_multiplier=1.0, engine="hooks")
    nothing_was_charged(fit, tmp_path)


def test_one_inner_step_needs_no_hessian_and_runs_on_the_hooks(fit):
    estimator = CubicNewton(1.0, 1.0, 1, keep=3)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "seed": 1, "trainer": {"max_epochs": 2}}
    by_hooks = fit(estimator, engine="hooks", **options).model.flat
    by_books = fit(estimator, engine="bookkeeping", **options).model.flat
    torch.testing.assert_close(by_hooks, by_books, rtol=0, atol=1e-12)


def test_manual_optimization_is_refused(classifier, mlp, blobs, make_trainer, tmp_path):
    class Manual(classifier):  # type: ignore[misc, valid-type]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    model = Manual(mlp(), lambda p: torch.optim.SGD(p, lr=1.0))
    model.automatic_optimization = False
    privacy = private(estimator=CubicNewton(1.0, 1.0, 3))
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])
    with pytest.raises(MisconfigurationException, match="Use automatic optimization"):
        trainer.fit(model, DataLoader(blobs, batch_size=24))
    assert privacy.steps == 0 and not list(tmp_path.rglob("*.journal"))


# -- blow-ups ------------------------------------------------------------------------------------


class Steep(nn.Module):
    """An outlook on a loss of curvature 1e6 to someone who says that it is 1e-3."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 1e3 * self.net(x)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "cure", [None, {"box": 1.0}, pytest.param({"max_step_size": 1e-6}, marks=pytest.mark.slow)]
)
def test_steps_that_are_too_long_raise_with_their_cures(classifier, blobs, make_trainer, cure):
    estimator = CubicNewton(1e-3, 10.0, 60, 1e6, 1e9, **(cure or {}))
    privacy = private(noise_multiplier=0.0, estimator=estimator, sampling=FullBatch())
    model = classifier(Steep(), lambda p: torch.optim.SGD(p, lr=1.0))
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])
    loader = DataLoader(TensorDataset(*blobs.tensors), batch_size=240)
    if cure is not None:
        trainer.fit(model, loader)
        assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
        return
    with pytest.raises(RuntimeError, match=r"no longer finite.*box.*max_step_size.*strong_conv"):
        trainer.fit(model, loader)
    assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
