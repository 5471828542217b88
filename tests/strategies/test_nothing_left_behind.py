"""After a fit, however it ended, model and Trainer are as a plain fit leaves them."""

from __future__ import annotations

import signal

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp import Checks
from lightning_dp.strategies.update_guard import StepGuard
from tests.zoo import private

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Planted(Exception):
    pass


@pytest.fixture
def privacy():
    return private()


@pytest.fixture
def failing(classifier):
    """A classifier that can be told to fail in its fourth step, at different places."""

    class Fails(classifier):
        error = None
        where = "after forward"

        def is_to_fail(self):
            return self.error is not None and isinstance(self._trainer, Trainer)  # not when probed

        def training_step(self, batch, batch_idx):
            fails = self.is_to_fail() and batch_idx == 3
            if fails and self.where == "before forward":
                raise self.error
            loss = super().training_step(batch, batch_idx)
            if fails and self.where == "after forward":
                raise self.error
            return loss

        def on_after_backward(self):
            if self.is_to_fail() and self.where == "after backward":
                raise self.error

        def on_before_optimizer_step(self, optimizer):
            if self.is_to_fail() and self.where == "before the step":
                raise self.error

    return Fails


@pytest.fixture(autouse=True)
def keyboard():
    """Lightning ignores Ctrl+C for the rest of the process once it was pressed."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def traces(model: nn.Module):
    """Everything a fit could leave on modules and parameters, by name."""
    found = {"type": type(model), "state": list(model.state_dict())}
    for name, part in model.named_modules():
        found[f"{name} class"] = type(part)
        found[f"{name} attributes"] = set(vars(part))
        for hooks in HOOKS:
            found[f"{name} {hooks}"] = len(getattr(part, hooks))
        found[f"{name} training"] = part.training
    for name, param in model.named_parameters():
        found[f"{name} class"] = type(param)
        found[f"{name} attributes"] = set(vars(param))
        found[f"{name} hooks"] = (
            len(param._backward_hooks or ()),
            len(param._post_accumulate_grad_hooks or ()),
        )
        found[f"{name} requires_grad"] = param.requires_grad
    return found


@pytest.mark.parametrize("checks", [True, False])
def test_a_fit_leaves_what_a_plain_fit_leaves(checks, failing, mlp, loader, make_trainer):
    privacy, models = private(checks=Checks(dry_run=checks, comparisons=checks)), []
    for callbacks in ([], [privacy]):
        models.append(failing(mlp()))
        make_trainer(max_steps=3, limit_val_batches=1, callbacks=callbacks).fit(
            models[-1], loader, loader
        )

    assert privacy.steps == 3
    assert traces(models[1]) == traces(models[0])


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("before forward", Planted()),
        ("after forward", KeyboardInterrupt()),
        ("after backward", Planted()),
        ("before the step", KeyboardInterrupt()),
    ],
)
def test_an_interrupted_fit_leaves_what_a_plain_one_leaves(
    where, error, privacy, failing, mlp, loader, fit, make_trainer
):
    models = []
    for callbacks in ([], [privacy]):
        models.append(failing(mlp()))
        models[-1].error, models[-1].where = error, where
        with pytest.raises((Planted, SystemExit)):
            make_trainer(max_epochs=2, callbacks=callbacks).fit(models[-1], loader)

    assert 0 < privacy.steps <= 4
    assert traces(models[1]) == traces(models[0])
    # And the model can be trained again, plainly and privately.
    models[1].error = None
    make_trainer(max_steps=2).fit(models[1], loader)
    spent = privacy.steps
    fit(models[1], privacy, max_steps=2)
    assert privacy.steps == spent + 2


def test_a_refused_fit_leaves_the_model_alone(privacy, failing, mlp, fit, blobs):
    model = failing(mlp())
    before = traces(model)
    with pytest.raises(Exception, match="batch_size=None"):
        fit(model, privacy, DataLoader(blobs, batch_size=None), max_epochs=1)

    assert (
        traces(model).items()
        >= {
            name: value for name, value in before.items() if not name.startswith(" attributes")
        }.items()
    )


def test_gradients_of_the_last_step_are_private_or_gone(classifier, mlp, fit):
    privacy = private(noise_multiplier=1e6)
    model = classifier(mlp())

    fit(model, privacy, max_steps=3)

    left = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(float(grad.abs().mean()) > 1e3 for grad in left)


def test_the_same_trainer_validates_tests_and_predicts_before_and_after(
    privacy, classifier, mlp, loader, make_trainer
):
    class Everything(classifier):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    plain_loader = torch.utils.data.DataLoader(loader.dataset, batch_size=24)
    model = Everything(mlp())
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    def evaluate():
        x, y = loader.dataset.tensors
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(x), y))
        (validated,) = trainer.validate(model, plain_loader, verbose=False)
        (tested,) = trainer.test(model, plain_loader, verbose=False)
        predicted = torch.cat(trainer.predict(model, plain_loader))
        assert validated["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert tested["test_loss"] == pytest.approx(loss, rel=1e-5)
        assert len(predicted) == 240
        return loss

    before = evaluate()
    assert privacy.steps == 0
    trainer.fit(model, loader)
    after = evaluate()

    assert privacy.steps == 20  # evaluation charges nothing
    assert after < before


def test_an_ordinary_trainer_after_a_private_one_is_ordinary(
    privacy, classifier, mlp, loader, fit, make_trainer, weights
):
    """The class of Lightning's own strategy is not touched, and neither is the user's loader."""
    sampler = loader.batch_sampler
    fit(classifier(mlp()), privacy, max_epochs=1)
    assert loader.batch_sampler is sampler

    model, expected = classifier(mlp()), classifier(mlp())
    trainer = make_trainer(max_epochs=1)
    torch.manual_seed(7)
    trainer.fit(model, loader)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    torch.manual_seed(7)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()

    assert privacy.steps == 10
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
    torch.testing.assert_close(weights(model), weights(expected))


# -- no optimizer steps with gradients that were not released ------------------------------------


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    module = nn.Linear(2, 2)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_step_that_was_not_allowed_raises_and_one_is_allowed_once(optimizer):
    guard = StepGuard(optimizer)
    guard.allow()
    optimizer.step()

    with pytest.raises(
        RuntimeError, match=r"optimizer.step\(\) was called with gradients that were not"
    ):
        optimizer.step()
