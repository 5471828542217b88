"""Two steps of a small network with code of a user in between, refused at once or later."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from tests.strategies.edits.users_code import REFUSED, Edit, Setting


@pytest.fixture
def run(classifier, mlp, loader, make_trainer, weights):
    """``run(place, edit, ...)``: two steps of a small network, whose noise is always the same."""

    class Model(classifier):
        def __init__(self) -> None:
            super().__init__(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
            self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.loss = loss.detach()
            if self.automatic_optimization:
                return loss
            return self.by_hand(loss)

        def by_hand(self, loss: Tensor) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.before_step()
            optimizer.step()

        def before_step(self) -> None:
            pass

    def fit(
        place: Callable[[Setting, Edit], None] = lambda setting, edit: None,
        edit: Edit = lambda model: None,
        *,
        change: Callable[[Any], None] = lambda model: None,
        trainer: dict[str, Any] | None = None,
        **privacy: Any,
    ) -> Tensor:
        setting = Setting(Model(), [], [])
        change(setting.model)
        place(setting, edit)
        run.model = setting.model
        run.start = weights(setting.model)
        unchecked = {"isolation_probe": False, "spot_checks": False}
        settings = {"noise_multiplier": 0.5, "target_delta": 1e-5, **unchecked}
        run.privacy = DifferentialPrivacy(seed=1, **settings, **privacy)
        options = {"max_steps": 2, "plugins": setting.plugins, **(trainer or {})}
        run.trainer = make_trainer(callbacks=[*setting.callbacks, run.privacy], **options)
        torch.manual_seed(0)
        run.trainer.fit(setting.model, loader)
        return weights(setting.model)

    run = fit
    return run


@pytest.fixture
def plain(run) -> Tensor:
    """The weights after one step that nobody edits."""
    return run(trainer={"max_steps": 1})


@pytest.fixture
def assert_refused_at_once(run, weights) -> Callable[..., None]:
    """The first step is charged, nothing moves, and the message has the cure."""

    def check(*arguments: Any, match: str = REFUSED, **options: Any) -> None:
        with pytest.raises(MisconfigurationException, match=match):
            run(*arguments, **options)
        assert run.privacy.steps == 1
        assert math.isfinite(run.privacy.epsilon)
        assert torch.equal(weights(run.model), run.start)

    return check


@pytest.fixture
def assert_voided(run, weights) -> Callable[..., None]:
    """The second step does not reach the weights, and ε of the first one is withdrawn."""

    def check(*arguments: Any, match: str = REFUSED, **options: Any) -> None:
        after_one_step = run(*arguments, trainer={"max_steps": 1}, **options)
        with pytest.raises(VoidedRunError, match=match):
            run(*arguments, **options)
        assert run.privacy.steps == 2
        assert math.isinf(run.privacy.epsilon)
        assert torch.equal(weights(run.model), after_one_step)

    return check
