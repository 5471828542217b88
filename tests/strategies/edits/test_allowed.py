"""Gradients may be read and clipped as Lightning does it, and edits that are declared are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import Precision

from lightning_dp.report import PrivacyReport
from tests.strategies.edits.users_code import (
    by_hand,
    in_clipping,
    in_the_module,
    scales,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*already private")


def reads_the_norm(model: Any) -> None:
    model.norm = torch.stack([param.grad.norm() for param in trained(model)]).norm()


def test_reading_the_gradients_is_no_edit(run, plain):
    assert torch.equal(run(in_the_module, reads_the_norm, trainer={"max_steps": 1}), plain)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_lightnings_clipping_passes_and_clips_the_private_gradient(algorithm, run, plain):
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}

    automatic = run(trainer=clip)

    moved = (automatic - run.start).abs()
    assert 0 < moved.max() <= 2 * 0.5 * 1e-3 * (1 + 1e-5)  # two steps of lr 0.5
    assert torch.equal(run(in_clipping, clips_as_documented, trainer=clip), automatic)


def clips_as_documented(model: Any) -> None:
    trainer = model.trainer
    algorithm = trainer.gradient_clip_algorithm or "norm"
    model.clip_gradients(trainer.optimizers[0], trainer.gradient_clip_val or 1e-3, algorithm)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clip_gradients_clips_the_private_gradient_in_manual_optimization(algorithm, run):
    """It is called when there is no gradient yet, since the release is part of the step."""

    def change(model: Any) -> None:
        by_hand(model)
        model.before_step = lambda: model.clip_gradients(model.optimizers(), 1e-3, algorithm)

    clipped = run(change=change)

    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    assert torch.equal(clipped, run(trainer=clip))


def test_clip_gradients_with_constants_of_the_module_passes(run):
    own = run(in_clipping, clips_as_documented)

    assert torch.equal(own, run(trainer={"gradient_clip_val": 1e-3}))


def clips_at_the_loss(model: Any) -> None:
    model.clip_gradients(model.trainer.optimizers[0], 1e-3 * float(model.loss), "norm")


def clips_at_the_second_step(model: Any) -> None:
    if model.global_step:
        model.clip_gradients(model.trainer.optimizers[0], 1e-3, "norm")


@pytest.mark.parametrize("clips", [clips_at_the_loss, clips_at_the_second_step])
def test_clipping_that_is_not_that_of_the_first_step_voids_the_run(clips, assert_voided):
    assert_voided(in_clipping, clips, match="otherwise than in the first step")


def test_a_clipping_that_the_module_leaves_out_all_along_passes(run, plain):
    clip = {"gradient_clip_val": 1e-3, "max_steps": 1}

    assert torch.equal(run(in_clipping, lambda model: None, trainer=clip), plain)


def test_a_plugin_keeps_its_class_name_and_its_attributes(run, make_trainer):
    seen = []

    def look(model: Any) -> None:
        plugin = model.trainer.precision_plugin
        plugin.marked = True
        seen.append(type(plugin).__qualname__)

    run(in_the_module, look, trainer={"max_steps": 1})

    assert seen == ["Precision"]
    assert run.trainer.precision_plugin.marked
    assert type(run.trainer.precision_plugin) is Precision


def test_a_declared_edit_is_printed_by_the_report(run):
    run(in_the_module, scales, gradient_edits="halved", trainer={"max_steps": 1})

    report = run.privacy.report()

    line = "gradient edits: halved (declared by the user, not checked)"
    assert line in str(report)
    assert "halved (declared by the user, not checked)" in report.markdown()
    assert report.to_dict()["gradient_edits"] == "halved"
    assert PrivacyReport.from_dict(report.to_dict()) == report
