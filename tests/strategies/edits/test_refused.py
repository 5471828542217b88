"""The optimizer uses what was released; every other gradient ends the run before a weight moves."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.strategies.edits.users_code import (
    EDITS,
    PLACES,
    by_hand,
    in_a_callback,
    in_the_module,
    scales,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*already private")


@pytest.mark.parametrize(
    ("place", "edit"),
    [(place, scales) for place in PLACES] + [(in_the_module, edit) for edit in EDITS],
)
def test_an_edit_changes_the_training_and_is_refused(
    place, edit, run, plain, assert_refused_at_once
):
    declared = run(place, edit, gradient_edits="some", trainer={"max_steps": 1})
    assert not torch.equal(declared, plain)

    assert_refused_at_once(place, edit)


def copies(model: Any) -> None:
    trained(model)[0].grad = trained(model)[0].grad.clone()


def clips_at_a_norm_that_is_never_reached(model: Any) -> None:
    """Else a clipping by hand would end the run at the first step whose norm it bounds."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def takes_a_parameter_out(model: Any) -> None:
    model.trainer.optimizers[0].param_groups[0]["params"].pop(-1)


def scales_in_the_optimizer(model: Any) -> None:
    model.trainer.optimizers[0].grad_scale = torch.tensor(2.0)


@pytest.mark.parametrize(
    "edit",
    [copies, clips_at_a_norm_that_is_never_reached, takes_a_parameter_out, scales_in_the_optimizer],
)
def test_so_is_one_that_changes_nothing_yet_or_what_the_optimizer_is_told(
    edit, assert_refused_at_once
):
    assert_refused_at_once(in_the_module, edit, match="Model.on_before_optimizer_step")


def test_a_gradient_of_a_frozen_parameter_is_refused(assert_refused_at_once):
    def gives(model: Any) -> None:
        model.frozen.grad = torch.ones_like(model.frozen)

    match = r"would move the frozen parameters \['frozen'\]"
    assert_refused_at_once(in_the_module, gives, match=match)
    assert_refused_at_once(in_the_module, gives, match=match, gradient_edits="others")


def test_an_edit_in_manual_optimization_is_refused(assert_refused_at_once):
    assert_refused_at_once(
        in_the_module, scales, change=by_hand, match=r"call self.clip_gradients\(\) with constants"
    )


def test_an_edit_of_a_later_step_voids_the_run(assert_voided):
    def later(model: Any) -> None:
        if model.global_step == 1:
            scales(model)

    assert_voided(in_a_callback, later)


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
