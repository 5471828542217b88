"""All of an ordinary Trainer and module goes on working: optimizers, options, hooks, metrics."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp import FullBatch
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.strategies.hooks import PrivacyCallback
from lightning_dp.strategies.strategy import install
from tests.zoo import clipped, flat, gradient_rows, private

# -- optimizers, schedulers, precision and limits ------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_cycle_schedule_over_the_estimated_steps(accumulate, privacy, classifier, mlp, fit):
    class OneCycle(classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.5, total_steps=self.trainer.estimated_stepping_batches
            )
            return [optimizer], [{"scheduler": self.cycle, "interval": "step"}]

    model = OneCycle(mlp())

    trainer = fit(model, privacy, max_epochs=2, accumulate_grad_batches=accumulate)

    assert model.cycle.total_steps == trainer.global_step == privacy.steps == 20 // accumulate
    assert model.cycle.last_epoch == model.cycle.total_steps


def test_bf16_mixed(privacy, classifier, mlp, loader, fit, assert_trained):
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))

    trainer = fit(model, privacy, max_epochs=2, precision="bf16-mixed")

    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


def test_fast_dev_run_with_a_target(classifier, mlp, fit):
    privacy = private(target_epsilon=1.0)

    fit(classifier(mlp()), privacy, fast_dev_run=True)

    assert privacy.steps == 1
    assert 0.99 < privacy.epsilon <= 1.0


def test_gradient_clip_val_warns_that_the_gradient_is_private_already(
    privacy, classifier, mlp, fit, weights
):
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=1.0))

    with pytest.warns(PrivacyWarning, match=r"gradient_clip_val=0.001.*already private"):
        fit(model, privacy, max_steps=1, gradient_clip_val=1e-3)

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


def test_an_optimizer_is_not_told_the_loss(privacy, classifier, mlp, fit):
    model = classifier(mlp(), lambda params: _Listener(params, lr=0.1))

    trainer = fit(model, privacy, max_epochs=1)

    assert trainer.optimizers[0].heard is None
    assert privacy.steps == trainer.global_step


# -- manual optimization: one backward pass and one step on each batch ---------------------------


@pytest.fixture
def manual(classifier):
    class Manual(classifier):
        steps = 1

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            for _ in range(self.steps):
                optimizer.step()

    return Manual


def test_manual_optimization_without_a_step_warns(privacy, manual, mlp, fit):
    model = manual(mlp())
    model.steps = 0

    with pytest.warns(PrivacyWarning, match=r"charged and never released.*Call it once per batch"):
        trainer = fit(model, privacy, max_epochs=1)

    assert trainer.global_step == 0
    assert privacy.steps == 10  # each batch was looked at


# -- modules with metrics, unused, frozen or own parameters --------------------------------------


def test_frozen_layers_do_not_move_and_take_no_part_of_the_norm(
    classifier, mlp, loader, fit, weights
):
    silent = private(noise_multiplier=0.0, max_grad_norm=1e-3, sampling=FullBatch())
    net = mlp()
    net[0].requires_grad_(False)
    model = classifier(net, lambda params: torch.optim.SGD(params, lr=1.0))

    fit(model, silent, DataLoader(loader.dataset, batch_size=240), max_steps=1)

    assert weights(net[0]).equal(weights(mlp()[0]))
    # Every record is clipped; were frozen gradients in the norm, the rest would be shorter.
    head = mlp()
    head[0].requires_grad_(False)
    mean = clipped(gradient_rows(head, *loader.dataset.tensors), 1e-3) / 240
    torch.testing.assert_close(weights(mlp()[2]) - weights(net[2]), mean, rtol=1e-3, atol=1e-8)


def test_parts_in_eval_mode_are_trained_as_they_are(classifier, loader, fit):
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    net[:2].eval()
    expected = flat(net) - clipped(gradient_rows(net, *loader.dataset.tensors), 0.1) / 240
    silent = private(noise_multiplier=0.0, max_grad_norm=0.1, sampling=FullBatch())

    model = classifier(net, lambda params: torch.optim.SGD(params, lr=1.0))
    fit(model, silent, DataLoader(loader.dataset, batch_size=240), max_steps=1)

    torch.testing.assert_close(flat(net), expected, rtol=0, atol=1e-5)
    assert [part.training for part in net] == [False, False, True]


# -- what training_step may do and return, and what hooks around it see --------------------------


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
        return flat(model)

    assert torch.equal(fit(Twice), fit(classifier))


def test_a_loss_kept_for_the_next_batch_is_refused(privacy, classifier, mlp, fit):
    class Keeps(classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                self.kept = loss
                return loss
            return loss + self.kept

    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)):
        fit(Keeps(mlp()), privacy, max_epochs=1)

    assert privacy.steps == 2


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


# -- callbacks hear of the privacy of a fit where Lightning has no hook --------------------------


class Hears(PrivacyCallback):
    """Writes down which hook was called after how many charged steps."""

    def __init__(self):
        self.heard = []

    def on_privacy_start(self, trainer, run, folder):
        self.heard.append(("start", run.steps, folder.name))

    def on_privacy_replan(self, trainer, run):
        self.heard.append(("replan", run.steps))

    def on_privacy_step(self, trainer, run):
        self.heard.append(("step", run.steps))

    def on_privacy_save(self, run, content):
        self.heard.append(("save", content.steps))

    def on_privacy_end(self, trainer, run):
        self.heard.append(("end", run.steps))

    def on_privacy_teardown(self, trainer, run):
        self.heard.append(("teardown", run.steps))


def test_hooks_are_called_in_the_order_of_a_fit(privacy, classifier, mlp, loader, make_trainer):
    hears = Hears()
    trainer = make_trainer(max_steps=2, callbacks=[hears, privacy])

    trainer.fit(classifier(mlp()), loader)
    trainer.save_checkpoint(trainer.default_root_dir + "/after.ckpt")

    assert hears.heard == [
        ("start", 0, "privacy"),
        ("step", 1),
        ("step", 2),
        ("end", 2),
        ("teardown", 2),
        ("save", 2),
    ]


def test_a_fit_that_fails_is_torn_down_and_has_no_end(
    privacy, classifier, mlp, loader, make_trainer
):
    class Fails(L.Callback):
        def on_train_batch_end(self, *_):
            raise KeyError("mine")

    hears = Hears()
    trainer = make_trainer(max_steps=2, callbacks=[hears, privacy, Fails()])

    with pytest.raises(KeyError, match="mine"):
        trainer.fit(classifier(mlp()), loader)

    assert [each[0] for each in hears.heard] == ["start", "step", "teardown"]


def test_a_private_strategy_takes_no_step_outside_a_fit(privacy, classifier, mlp, make_trainer):
    trainer = make_trainer(max_steps=1, callbacks=[privacy])
    strategy = install(trainer, privacy._run)
    strategy.connect(classifier(mlp()))

    with pytest.raises(RuntimeError, match="trains only while its Trainer fits a model"):
        strategy.backward(torch.zeros(()), None)
