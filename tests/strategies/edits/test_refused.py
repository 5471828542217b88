"""The optimizer uses what was released; every other gradient ends the run before a weight moves."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.strategies.edits.users_code import (
    EDITS,
    PLACES,
    by_hand,
    in_a_callback,
    in_the_module,
    scales,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*already private")


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_the_training_and_is_refused(edit, run, plain, assert_refused_at_once):
    declared = run(in_the_module, edit, gradient_edits="some", trainer={"max_steps": 1})
    assert not torch.equal(declared, plain)

    assert_refused_at_once(in_the_module, edit, match="Model.on_before_optimizer_step")


@pytest.mark.parametrize("place", PLACES)
def test_an_edit_is_refused_wherever_it_is_made(place, run, plain, assert_refused_at_once):
    declared = run(place, scales, gradient_edits="some", trainer={"max_steps": 1})
    assert not torch.equal(declared, plain)

    assert_refused_at_once(place, scales)


def test_an_edit_in_manual_optimization_is_refused(assert_refused_at_once):
    assert_refused_at_once(
        in_the_module, scales, change=by_hand, match=r"call self.clip_gradients\(\) with constants"
    )


def test_an_edit_of_a_later_step_voids_the_run(assert_voided):
    def later(model: Any) -> None:
        if model.global_step == 1:
            scales(model)

    assert_voided(in_a_callback, later)


def test_a_gradient_of_a_frozen_parameter_is_refused(assert_refused_at_once):
    def moves_a_frozen_weight(model: Any) -> None:
        model.frozen.grad = torch.ones_like(model.frozen)

    assert_refused_at_once(
        in_the_module, moves_a_frozen_weight, match=r"would move the frozen parameters \['frozen'\]"
    )


def takes_a_parameter_out(model: Any) -> None:
    model.trainer.optimizers[0].param_groups[0]["params"].pop(-1)


def scales_in_the_optimizer(model: Any) -> None:
    model.trainer.optimizers[0].grad_scale = torch.tensor(2.0)


@pytest.mark.parametrize("edit", [takes_a_parameter_out, scales_in_the_optimizer])
def test_the_optimizer_is_told_nothing_else_between_release_and_step(edit, assert_refused_at_once):
    assert_refused_at_once(in_the_module, edit)


def test_an_edit_is_not_hidden_by_the_clipping_after_it(assert_refused_at_once):
    assert_refused_at_once(in_the_module, scales, trainer={"gradient_clip_val": 1e-3})


def test_an_error_that_was_caught_does_not_let_the_next_step_pass(run, weights):
    def change(model: Any) -> None:
        by_hand(model)
        original = model.by_hand

        def stubborn(loss: Tensor) -> None:
            with contextlib.suppress(MisconfigurationException):
                original(loss)
            model.optimizers().optimizer.step()

        model.by_hand = stubborn

    with pytest.raises(RuntimeError, match="gradients that were not made private"):
        run(in_the_module, scales, change=change)
    assert torch.equal(weights(run.model), run.start)
