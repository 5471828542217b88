"""A run ends where the optimizer's moments are edited, or a step is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from tests.strategies.edits.users_code import between_steps, by_hand, in_the_module

pytestmark = pytest.mark.filterwarnings("ignore:.*already private")


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def damps_moments(model: Any) -> None:
    for state in model.trainer.optimizers[0].state.values():
        state["exp_avg"].mul_(0.5)


def forgets_moments(model: Any) -> None:
    model.trainer.optimizers[0].state.clear()


def replaces_moments(model: Any) -> None:
    for state in model.trainer.optimizers[0].state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


@pytest.mark.parametrize("edit", [damps_moments, forgets_moments, replaces_moments])
@pytest.mark.parametrize("place", [between_steps, in_the_module])
def test_an_edit_of_the_moments_of_the_optimizer_voids_the_run(place, edit, run, assert_voided):
    def change(model: Any) -> None:
        model.make_optimizer = adam

    assert_voided(place, edit, change=change, match=r"its state.*between two steps")
    run(place, edit, change=change, gradient_edits="moments are damped")


def steps_if(model: Any, condition: Callable[[Any], bool]) -> None:
    """In manual optimization."""
    by_hand(model)

    def step(loss: Tensor) -> None:
        model.manual_backward(loss)
        if condition(model):
            model.optimizers().step()

    model.by_hand = step


SKIPPED = r"some batches and not for others.*gradient_edits="


def test_a_step_that_is_left_out_voids_the_run(run, weights):
    only_the_first = {"change": lambda m: steps_if(m, lambda model: model.global_step == 0)}

    with pytest.raises(VoidedRunError, match=SKIPPED):
        run(trainer={"max_steps": -1, "max_epochs": 1}, **only_the_first)
    assert run.privacy.steps == 2


def test_a_step_left_out_of_optimizer_step_voids_the_run(run):
    def change(model: Any) -> None:
        def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            closure()
            if batch_idx != 1:
                optimizer.step()

        model.optimizer_step = optimizer_step

    with pytest.raises(VoidedRunError, match=SKIPPED):
        run(change=change)


def test_a_first_step_after_batches_without_one_is_refused(run, weights):
    def change(model: Any) -> None:
        model.batches = 0

        def every_third(model: Any) -> bool:
            model.batches += 1
            return model.batches % 3 == 0

        steps_if(model, every_third)

    whole = {"trainer": {"max_steps": -1, "max_epochs": 1}, "change": change}
    with (
        pytest.raises(MisconfigurationException, match=SKIPPED),
        pytest.warns(PrivacyWarning, match="charged and never released"),
    ):
        run(**whole)
    assert run.privacy.steps == 3
    assert math.isfinite(run.privacy.epsilon)
    assert torch.equal(weights(run.model), run.start)

    with pytest.warns(PrivacyWarning, match="charged and never released"):
        run(gradient_edits="every third batch is stepped for", **whole)
    assert not torch.equal(weights(run.model), run.start)


class CountsFirst(torch.optim.SGD):
    """Writes to its state before it evaluates its closure, and edits gradients after it."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("count", torch.zeros(())).add_(1)
        loss = closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)
        super().step()
        return loss


def test_what_an_optimizer_does_in_its_own_step_is_its_own(run, plain):
    def change(model: Any) -> None:
        model.make_optimizer = lambda params: CountsFirst(params, lr=1.0)

    assert torch.equal(run(change=change, trainer={"max_steps": 1}), plain)
    run(change=change)
