"""Whole runs on the device: saved and resumed, in lower precision, with bad records, with edits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from device import DEVICE
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from models import Model
from torch import Tensor, nn

from lightning_dp import Checks, CubicNewton, Diff2, FullBatch, Momentum
from lightning_dp.accounting.events import VoidedRunError

UNCHECKED = {"checks": Checks(dry_run=False, comparisons=False), "advice": False}


STATES: dict[str, dict[str, Any]] = {
    "momentum": {"postprocessing": [Momentum(0.9)]},
    "diff2": {"estimator": Diff2(restart_every=4)},
    "inner steps": {"estimator": CubicNewton(1.0, 1.0, 3, keep=20, fresh_batches=True)},
}


@pytest.mark.parametrize("case", STATES)
def test_resumed_run_is_the_run_that_was_not_interrupted(
    case: str, fit: Callable[..., Any], tmp_path: Path
) -> None:
    settings = {**UNCHECKED, **STATES[case], "sampling": FullBatch()}
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    options = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": 4}
    whole = fit(DEVICE, trainer=options, **settings)
    resumed = fit(DEVICE, trainer={"max_steps": 4}, ckpt_path=tmp_path / "step=2.ckpt", **settings)
    assert resumed.trainer.global_step == whole.trainer.global_step == 4
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_mixed_precision_trains(name: str, fit: Callable[..., Any]) -> None:
    options = {"precision": "bf16-mixed"}
    there = fit(DEVICE, name, trainer=options, **UNCHECKED)
    here = fit("cpu", name, trainer=options, **UNCHECKED)
    exact = fit("cpu", name, **UNCHECKED)
    assert there.privacy.steps == 3
    torch.testing.assert_close(there.weights, here.weights, rtol=0.05, atol=0.01)
    assert not torch.equal(there.weights, exact.weights)


@pytest.mark.skipif(torch.device(DEVICE).type != "cuda", reason="float16 as Lightning has it")
def test_float16_trains_with_a_constant_loss_scale(fit: Callable[..., Any]) -> None:
    there = fit(DEVICE, trainer={"precision": "16-mixed"}, **UNCHECKED)
    on_cpu = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    here = fit("cpu", trainer={"plugins": [on_cpu]}, **UNCHECKED)
    assert there.privacy.steps == 3
    torch.testing.assert_close(there.weights, here.weights, rtol=0.01, atol=0.002)
    assert not torch.equal(here.weights, fit("cpu", **UNCHECKED).weights)


class Poisoned(Model):
    """Records whose loss or input is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.masked_fill((x[:, :1] > 0.5), float("nan"))
        x = torch.where(x[:, 1:2] > 0.8, float("inf"), x)
        return nn.functional.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_records_that_are_not_finite_contribute_nothing(
    engine: str, fit: Callable[..., Any]
) -> None:
    settings = {"model": Poisoned, "engine": engine, **UNCHECKED}
    there, here = fit(DEVICE, **settings), fit("cpu", **settings)
    assert there.weights.isfinite().all()
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=1e-5)


class Edits(L.Callback):
    """Writes to the private gradient at one step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.at:
            next(module.parameters()).grad[0, 0] += 1.0


@pytest.mark.parametrize("steps", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_an_edit_of_the_gradient_withdraws_epsilon(steps: int, fit: Callable[..., Any]) -> None:
    options = {"callbacks": [Edits(at=1)], "max_steps": steps}
    with pytest.raises(VoidedRunError, match="was written to"):
        fit(DEVICE, trainer=options, noise_multiplier=1.0, **UNCHECKED)


def test_an_edit_is_seen_before_anything_is_saved(fit: Callable[..., Any], tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    options = {"callbacks": [Edits(at=1), saving], "enable_checkpointing": True, "max_steps": 4}
    with pytest.raises(VoidedRunError, match="was written to"):
        fit(DEVICE, trainer=options, noise_multiplier=1.0, **UNCHECKED)
    assert not list(tmp_path.glob("*.ckpt"))


class Ignoring(Model):
    """Divides by the number of targets that are not ignored."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, ignore_index=2)


def test_ignored_targets_are_found(fit: Callable[..., Any]) -> None:
    with pytest.raises(VoidedRunError, match="not ignored"):
        fit(DEVICE, model=Ignoring, trainer={"max_steps": 3}, advice=False)
