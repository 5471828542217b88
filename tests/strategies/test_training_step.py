"""What training_step may do and return, and what hooks around it see."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from tests.zoo import private


def test_a_forward_pass_before_training_does_not_matter(
    privacy, classifier, mlp, loader, make_trainer
):
    class Draws(classifier):
        def on_train_start(self):
            self(torch.zeros(2, 6))  # as logger.experiment.add_graph does

    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    trainer.fit(Draws(mlp()), loader)

    assert trainer.global_step == privacy.steps == 10


@pytest.mark.parametrize("engine", ["auto", "records"])
def test_a_forward_pass_beside_the_loss_is_no_part_of_it(
    engine, classifier, mlp, loader, make_trainer
):
    class Twice(classifier):
        def training_step(self, batch, batch_idx):
            self(torch.ones_like(batch[0]))
            return super().training_step(batch, batch_idx)

    def fit(kind):
        privacy = private(noise_multiplier=0.0, seed=1, engine=engine)
        model = kind(mlp())
        make_trainer(max_steps=3, callbacks=[privacy]).fit(model, loader)
        return nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(fit(Twice), fit(classifier))


def test_a_loss_kept_for_the_next_batch_is_refused(privacy, classifier, mlp, loader, make_trainer):
    class Keeps(classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                self.kept = loss
                return loss
            return loss + self.kept

    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(Keeps(mlp()), loader)

    assert privacy.steps == 2


def test_training_step_may_return_a_dictionary(
    privacy, classifier, mlp, loader, make_trainer, assert_trained
):
    ends = []

    class Dictionary(classifier):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "rows": len(batch[0])}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            ends.append(outputs["rows"] == len(batch[0]))

    model = Dictionary(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert ends == [True] * 20
    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_user_hooks_see_private_gradients_or_none(
    accumulate, classifier, mlp, loader, make_trainer
):
    after_backward, before_step = [], []

    class Looks(L.Callback):
        def on_after_backward(self, trainer, pl_module):
            after_backward.extend(param.grad for param in pl_module.parameters())

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            before_step.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]))

    class LooksToo(classifier):
        def on_after_backward(self):
            after_backward.extend(param.grad for param in self.parameters())

        def on_before_optimizer_step(self, optimizer):
            before_step.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    noisy = private(noise_multiplier=1e6)
    model = LooksToo(mlp(), lambda params: torch.optim.SGD(params, lr=0.0))
    trainer = make_trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[Looks(), noisy]
    )

    trainer.fit(model, loader)

    assert len(after_backward) == 2 * 4 * 10
    assert all(grad is None for grad in after_backward)
    assert len(before_step) == 2 * 10 // accumulate
    std = 1e6 / (24 * accumulate)
    assert float(torch.cat(before_step).std()) == pytest.approx(std, rel=0.25)
