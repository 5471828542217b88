"""All of an ordinary Trainer and module goes on working: data, optimizers, options, hooks."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp._refusals import PrivacyWarning
from lightning_dp.strategies.hooks import PrivacyCallback
from lightning_dp.strategies.strategy import install
from tests.zoo import Classifier, flat, private

# -- data and precision ----------------------------------------------------------------------------


class Blobs(L.LightningDataModule):
    """A data module; its loaders have the sizes of a list, one for each time that one is made."""

    def __init__(self, data: Any, sizes: Any = (24,), **options: Any) -> None:
        super().__init__()
        self.data, self.sizes, self.options, self.made = data, sizes, options, 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.made += 1
        size = self.sizes[min(self.made, len(self.sizes)) - 1]
        return DataLoader(self.data, batch_size=size, shuffle=True, **self.options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=60)


def with_strings(records: Any) -> dict[str, Any]:
    x, y = zip(*records, strict=True)
    names = [f"class {int(label)}" for label in y]
    return {"x": torch.stack(x), "names": names, "meta": {"source": "blobs"}}


class Reads(Classifier):
    """Takes batches of either form."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            assert batch["meta"] == {"source": "blobs"}
            y = torch.tensor([int(name.removeprefix("class ")) for name in batch["names"]])
            batch = batch["x"], y
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("loads", "options"),
    [
        ({"num_workers": 2, "persistent_workers": True}, {}),
        ({"collate_fn": with_strings}, {"limit_val_batches": 0}),
        ({}, {"precision": "bf16-mixed"}),
        ({}, {"reload_dataloaders_every_n_epochs": 1}),
        ({}, {"reload_dataloaders_every_n_epochs": 1, "accumulate_grad_batches": 3}),
    ],
    ids=["workers", "collate_fn", "bf16", "reloaded", "reloaded, accumulated"],
)
def test_it_trains(loads, options, privacy, mlp, blobs, fit):
    model = Reads(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    data = Blobs(blobs, **loads)
    trainer = fit(model, privacy, data, max_epochs=2, **options)
    steps = 2 * math.ceil(10 / options.get("accumulate_grad_batches", 1))
    assert trainer.global_step == privacy.steps == steps
    assert data.made == (2 if "reload_dataloaders_every_n_epochs" in options else 1)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    x, y = blobs.tensors
    loss, untrained = (nn.functional.cross_entropy(net(x), y) for net in (model, mlp()))
    assert loss < 0.9 * untrained


def test_a_reloaded_loader_of_another_size_is_refused(privacy, mlp, blobs, fit):
    data, reloads = Blobs(blobs, [24, 12]), {"reload_dataloaders_every_n_epochs": 1}
    with pytest.raises(ValueError, match="batches changed during the run"):
        fit(Classifier(mlp()), privacy, data, max_epochs=2, **reloads)
    assert privacy.steps == 10


# -- optimizers, schedulers and limits -----------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_cycle_schedule_over_the_estimated_steps(accumulate, privacy, mlp, fit):
    class OneCycle(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.5, total_steps=self.trainer.estimated_stepping_batches
            )
            return [optimizer], [{"scheduler": self.cycle, "interval": "step"}]

    model = OneCycle(mlp())
    trainer = fit(model, privacy, max_epochs=2, accumulate_grad_batches=accumulate)
    assert model.cycle.total_steps == trainer.global_step == privacy.steps == 20 // accumulate
    assert model.cycle.last_epoch == model.cycle.total_steps


def test_fast_dev_run_with_a_target(mlp, fit):
    privacy = private(target_epsilon=1.0)
    fit(Classifier(mlp()), privacy, fast_dev_run=True)
    assert privacy.steps == 1
    assert 0.99 < privacy.epsilon <= 1.0


def test_gradient_clip_val_warns_that_the_gradient_is_private_already(privacy, mlp, fit):
    model = Classifier(mlp(), lambda params: torch.optim.SGD(params, lr=1.0))
    with pytest.warns(PrivacyWarning, match=r"gradient_clip_val=0.001.*already private"):
        fit(model, privacy, max_steps=1, gradient_clip_val=1e-3)
    assert float((flat(model) - flat(mlp())).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_moving_average_of_the_weights(privacy, mlp, fit, at_each_step):
    seen: list[Any] = []
    watch = at_each_step(lambda trainer, module: seen.append(flat(module)))
    model, average = Classifier(mlp()), EMAWeightAveraging(decay=0.8)
    # The average exchanges the weights before callbacks behind it.
    fit(model, privacy, callbacks=[watch, average], max_epochs=1)
    expected, *others = seen
    for later in others:
        expected = 0.8 * expected + 0.2 * later
    assert privacy.steps == len(seen) == 10
    torch.testing.assert_close(flat(model), expected)


class Listens(torch.optim.SGD):
    """Keeps what its closure gives it, as one that sets its step size by the loss would use it."""

    def step(self, closure: Any = None) -> Any:
        self.heard = closure()
        return super().step()


def test_an_optimizer_is_not_told_the_loss(privacy, mlp, fit):
    model = Classifier(mlp(), lambda params: Listens(params, lr=0.1))
    assert fit(model, privacy, max_epochs=1).optimizers[0].heard is None


# -- training_step and the hooks around it -------------------------------------------------------


def test_manual_optimization_without_a_step_warns(privacy, mlp, fit):
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))

    with pytest.warns(PrivacyWarning, match=r"charged and never released.*Call it once per batch"):
        trainer = fit(Manual(mlp()), privacy, max_epochs=1)
    assert (trainer.global_step, privacy.steps) == (0, 10)  # each batch was looked at


def test_a_loss_kept_for_the_next_batch_is_refused(privacy, mlp, fit):
    class Keeps(Classifier):
        kept = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.kept is None:
                self.kept = loss
            return loss if batch_idx == 0 else loss + self.kept

    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)):
        fit(Keeps(mlp()), privacy, max_epochs=1)
    assert privacy.steps == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_user_hooks_see_private_gradients_or_none(accumulate, mlp, fit):
    after_backward: list[Any] = []
    before_step: list[Any] = []

    def after(*arguments: Any) -> None:
        after_backward.extend(param.grad for param in model.parameters())

    def before(*arguments: Any) -> None:
        before_step.append(torch.cat([param.grad.flatten() for param in model.parameters()]))

    model = Classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.0))
    looks = L.Callback()
    for each in (model, looks):
        each.on_after_backward, each.on_before_optimizer_step = after, before
    noisy, options = private(noise_multiplier=1e6), {"accumulate_grad_batches": accumulate}
    fit(model, noisy, callbacks=[looks], max_epochs=1, **options)

    assert len(after_backward) == 2 * 4 * 10
    assert all(grad is None for grad in after_backward)
    assert len(before_step) == 2 * 10 // accumulate
    std = 1e6 / (24 * accumulate)
    assert float(torch.cat(before_step).std()) == pytest.approx(std, rel=0.25)


class Hears(PrivacyCallback):
    """Writes down which hook was called after how many charged steps."""

    def __init__(self, fails: bool = False) -> None:
        self.heard: list[Any] = []
        self.fails = fails

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.fails:
            raise KeyError("mine")

    def on_privacy_start(self, trainer: Any, run: Any, folder: Any) -> None:
        self.heard.append(("start", run.steps, folder.name))

    def on_privacy_replan(self, trainer: Any, run: Any) -> None:
        self.heard.append(("replan", run.steps))

    def on_privacy_step(self, trainer: Any, run: Any) -> None:
        self.heard.append(("step", run.steps))

    def on_privacy_save(self, run: Any, content: Any) -> None:
        self.heard.append(("save", content.steps))

    def on_privacy_end(self, trainer: Any, run: Any) -> None:
        self.heard.append(("end", run.steps))

    def on_privacy_teardown(self, trainer: Any, run: Any) -> None:
        self.heard.append(("teardown", run.steps))


def test_hooks_are_called_in_the_order_of_a_fit(privacy, mlp, fit, tmp_path):
    hears, fails = Hears(), Hears(fails=True)
    trainer = fit(Classifier(mlp()), privacy, callbacks=[hears], max_steps=2)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    begin, end = [("start", 0, "privacy"), ("step", 1)], [("teardown", 2), ("save", 2)]
    assert hears.heard == [*begin, ("step", 2), ("end", 2), *end]
    with pytest.raises(KeyError, match="mine"):
        fit(Classifier(mlp()), private(), callbacks=[fails], max_steps=2)
    assert fails.heard == [*begin, ("teardown", 1)]


def test_a_private_strategy_takes_no_step_outside_a_fit(privacy, mlp, make_trainer):
    trainer = make_trainer(max_steps=1, callbacks=[privacy])
    strategy = install(trainer, privacy._run)
    strategy.connect(Classifier(mlp()))
    with pytest.raises(RuntimeError, match="trains only while its Trainer fits a model"):
        strategy.backward(torch.zeros(()), None)
