"""Manual optimization: one backward pass and one step on each batch."""

from __future__ import annotations

import pytest
import torch

from lightning_dp._warnings import PrivacyWarning


@pytest.fixture
def manual(classifier):
    class Manual(classifier):
        backwards = steps = 1

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for _ in range(self.backwards):
                self.manual_backward(super().training_step(batch, batch_idx))
            for _ in range(self.steps):
                optimizer.step()

    return Manual


def test_manual_optimization(privacy, manual, mlp, loader, make_trainer, assert_trained):
    model = manual(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert_trained(trainer, model, privacy, loader, manual(mlp()), steps=20)


def test_manual_optimization_without_a_step_warns(privacy, manual, mlp, loader, make_trainer):
    model = manual(mlp())
    model.steps = 0
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match=r"charged and never released.*Call it once per batch"):
        trainer.fit(model, loader)

    assert trainer.global_step == 0
    assert privacy.steps == 10  # each batch was looked at


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 2}, "Two optimizer steps on one batch"),
        ({"backwards": 2}, "Backward ran more than once for one batch"),
    ],
)
def test_manual_optimization_uses_a_batch_once(
    wrong, message, privacy, manual, mlp, loader, make_trainer
):
    model = manual(mlp())
    for name, value in wrong.items():
        setattr(model, name, value)

    with pytest.raises(RuntimeError, match=message):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)

    assert privacy.steps == 1


def test_stepping_the_bare_optimizer_is_an_error(privacy, classifier, mlp, loader, make_trainer):
    class Bare(classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().optimizer.step()

    with pytest.raises(RuntimeError, match="gradients that were not made private"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(Bare(mlp()), loader)
