"""Optimizers, schedulers, precision and limits of an ordinary Trainer go on working."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_dp._warnings import PrivacyWarning
from tests.zoo import private

DELTA = 1e-5


def test_fused_adamw(privacy, classifier, mlp, loader, make_trainer, assert_trained):
    model = classifier(mlp(), lambda params: torch.optim.AdamW(params, lr=0.02, fused=True))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


def test_parameter_groups_with_their_own_learning_rates(
    privacy, classifier, mlp, loader, make_trainer
):
    net = mlp()
    model = classifier(
        net,
        lambda _: torch.optim.SGD(
            [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}], lr=0.3
        ),
    )

    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)

    assert net[0].weight.equal(mlp()[0].weight)
    assert not net[2].weight.equal(mlp()[2].weight)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_cycle_schedule_over_the_estimated_steps(
    accumulate, privacy, classifier, mlp, loader, make_trainer
):
    class OneCycle(classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.5, total_steps=self.trainer.estimated_stepping_batches
            )
            return [optimizer], [{"scheduler": self.cycle, "interval": "step"}]

    model = OneCycle(mlp())
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[privacy])

    trainer.fit(model, loader)

    assert model.cycle.total_steps == trainer.global_step == privacy.steps == 20 // accumulate
    assert model.cycle.last_epoch == model.cycle.total_steps


def test_reduce_on_plateau(privacy, classifier, mlp, loader, make_trainer):
    class Plateau(classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=1e9, threshold_mode="abs"
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }

    trainer = make_trainer(max_epochs=3, callbacks=[privacy])

    trainer.fit(Plateau(mlp()), loader, loader)

    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)


def test_bf16_mixed(privacy, classifier, mlp, loader, make_trainer, assert_trained):
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, precision="bf16-mixed", callbacks=[privacy])

    trainer.fit(model, loader)

    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_max_steps(accumulate, privacy, classifier, mlp, loader, make_trainer):
    trainer = make_trainer(max_steps=7, accumulate_grad_batches=accumulate, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == privacy.steps == 7


@pytest.mark.parametrize(("interval", "at"), [(0.5, [5, 10, 15, 20]), (4, [4, 8, 14, 18])])
def test_val_check_interval(interval, at, privacy, classifier, mlp, loader, make_trainer):
    validated_at = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            validated_at.append(trainer.global_step)

    trainer = make_trainer(
        max_epochs=2,
        val_check_interval=interval,
        num_sanity_val_steps=0,
        callbacks=[privacy, Watch()],
    )

    trainer.fit(classifier(mlp()), loader, loader)

    assert validated_at == at
    assert trainer.global_step == privacy.steps == 20


def test_fast_dev_run(privacy, classifier, mlp, loader, make_trainer):
    trainer = make_trainer(fast_dev_run=2, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader, loader)

    assert trainer.global_step == privacy.steps == 2


def test_fast_dev_run_with_a_target(classifier, mlp, loader, make_trainer):
    privacy = private(target_epsilon=1.0)

    make_trainer(fast_dev_run=True, callbacks=[privacy]).fit(classifier(mlp()), loader)

    assert privacy.steps == 1
    assert 0.99 < privacy.epsilon <= 1.0


def test_gradient_clip_val_warns_that_the_gradient_is_private_already(
    privacy, classifier, mlp, loader, make_trainer, weights
):
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=1.0))
    trainer = make_trainer(max_steps=1, gradient_clip_val=1e-3, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match=r"gradient_clip_val=0.001.*already private"):
        trainer.fit(model, loader)

    assert float((weights(model) - weights(mlp())).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_moving_average_of_the_weights(privacy, classifier, mlp, loader, make_trainer, weights):
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append(weights(pl_module))

    model = classifier(mlp())
    average = EMAWeightAveraging(decay=0.8)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy, Watch(), average])

    trainer.fit(model, loader)

    assert trainer.global_step == privacy.steps == len(seen) == 10
    expected = seen[0]
    for later in seen[1:]:
        expected = 0.8 * expected + 0.2 * later
    torch.testing.assert_close(weights(model), expected)


class _Listener(torch.optim.SGD):
    """Keeps what its closure gives it, as one that sets its step size by the loss would use it."""

    def step(self, closure=None):
        self.heard = closure()
        return super().step()


def test_an_optimizer_is_not_told_the_loss(privacy, classifier, mlp, loader, make_trainer):
    model = classifier(mlp(), lambda params: _Listener(params, lr=0.1))
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    trainer.fit(model, loader)

    assert trainer.optimizers[0].heard is None
    assert privacy.steps == trainer.global_step
