"""Trainers, callbacks and tuners that cannot train privately."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_dp._warnings import PrivacyWarning


class TakesIterator(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_training_step_with_dataloader_iter_is_refused(
    loader, make_trainer, privacy, assert_refused
):
    model, trainer = TakesIterator(), make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, loader), r"dataloader_iter.*training_step\(batch", model
    )


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.GradScaler")
@pytest.mark.filterwarnings("ignore:.*torch.amp.GradScaler")
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"overfit_batches": 2}, r"overfit_batches=2.*limit_train_batches"),
        ({"overfit_batches": 0.5}, r"overfit_batches=0.5.*limit_train_batches"),
        (
            {"plugins": [MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))]},
            "16-mixed.*bf16-mixed",
        ),
    ],
)
def test_trainer_arguments_under_which_epsilon_would_not_hold_are_refused(
    arguments, match, loader, classifier, mlp, make_trainer, privacy, assert_refused
):
    model = classifier(mlp())
    trainer = make_trainer(max_epochs=1, callbacks=[privacy], **arguments)

    assert_refused(lambda: trainer.fit(model, loader), match, model)


CALLBACKS = {
    "LearningRateFinder": (LearningRateFinder, "outside the ledger.*learning rate"),
    "BatchSizeFinder": (BatchSizeFinder, "outside the ledger.*physical one that fits"),
    "GradientAccumulationScheduler": (
        lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "sampling rate.*accumulate_grad_batches",
    ),
    "StochasticWeightAveraging": (
        lambda: StochasticWeightAveraging(swa_lrs=0.1),
        "extra pass.*EMAWeightAveraging",
    ),
    "BackboneFinetuning": (
        lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1),
        "changes which parameters.*before fit",
    ),
}


@pytest.mark.parametrize("behind", [True, False], ids=["listed after", "listed before"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_trains_past_the_ledger_is_refused(
    name, behind, loader, classifier, mlp, make_trainer, privacy, assert_refused
):
    make, reason = CALLBACKS[name]
    callbacks = [privacy, make()] if behind else [make(), privacy]
    model = classifier(mlp())
    model.backbone = nn.Linear(2, 2)  # BackboneFinetuning looks for it
    model.train_dataloader = lambda: loader  # BatchSizeFinder wants to make it anew
    model.batch_size = 24
    trainer = make_trainer(max_epochs=1, callbacks=callbacks)

    assert_refused(lambda: trainer.fit(model), f"{name} cannot be used.*{reason}", model)


class FromModule(L.LightningModule):
    """Brings its callback itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.learning_rate, self.batch_size = nn.Linear(6, 3), 0.1, 24

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def test_a_callback_that_the_model_brings_is_refused(loader, make_trainer, privacy, assert_refused):
    model = FromModule()
    model.configure_callbacks = lambda: StochasticWeightAveraging(swa_lrs=0.1)  # type: ignore
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, loader), "StochasticWeightAveraging cannot be used", model
    )


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_a_tuner_is_refused(method, loader, make_trainer, privacy, assert_refused):
    model, trainer = FromModule(), make_trainer(max_epochs=1, callbacks=[privacy])
    model.train_dataloader = lambda: loader  # type: ignore[method-assign]

    assert_refused(
        lambda: getattr(Tuner(trainer), method)(model), "Finder cannot be used.*ledger", model
    )
    assert not trainer.fit_loop.epoch_loop.global_step


# -- the set of trained parameters ---------------------------------------------------------------


class Changes(Callback):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.change(trainer.optimizers[0], pl_module.net)


def adds_a_group(optimizer: Any, net: Any) -> None:
    optimizer.add_param_group({"params": [net[2].bias.requires_grad_(True)]})


def unfreezes(optimizer: Any, net: Any) -> None:
    net[0].bias.requires_grad_(True)


def unfreezes_outside_the_optimizer(optimizer: Any, net: Any) -> None:
    net[2].bias.requires_grad_(True)


def freezes(optimizer: Any, net: Any) -> None:
    net[0].weight.requires_grad_(False)


def replaces(optimizer: Any, net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = net[0].weight


@pytest.mark.parametrize(
    "change", [adds_a_group, unfreezes, unfreezes_outside_the_optimizer, freezes, replaces]
)
def test_changing_the_trained_parameters_during_fit_is_refused(
    change, loader, classifier, mlp, make_trainer, privacy, assert_refused
):
    model = classifier(
        mlp(), lambda params: torch.optim.SGD(list(params)[:3], lr=0.1)
    )  # not the last bias
    for bias in (model.net[0].bias, model.net[2].bias):
        bias.requires_grad_(False)
    trainer = make_trainer(max_epochs=1, callbacks=[Changes(change), privacy])

    assert_refused(
        lambda: trainer.fit(model, loader),
        "set of trained parameters changed during fit.*before fit",
        model,
    )


# -- another package -------------------------------------------------------------------------------


def test_a_trainer_of_pytorch_lightning_is_refused(loader, tmp_path, privacy, assert_refused):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Model(pytorch_lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Model()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[privacy],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )

    assert_refused(
        lambda: trainer.fit(model, loader),
        "'pytorch_lightning'.*Import everything from lightning.pytorch",
        model,
    )


def test_a_module_of_pytorch_lightning_is_refused(loader, make_trainer, privacy, assert_refused):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Model(pytorch_lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

    model, trainer = Model(), make_trainer(max_epochs=1, callbacks=[privacy])

    # Lightning refuses this itself, before any callback is asked.
    assert_refused(
        lambda: trainer.fit(model, loader), "must be a `LightningModule`.*got `.*Model`", model
    )


def test_clipping_the_private_gradient_again_warns(loader, classifier, mlp, make_trainer, privacy):
    trainer = make_trainer(max_steps=1, callbacks=[privacy], gradient_clip_val=1.0)

    with pytest.warns(PrivacyWarning, match="gradient_clip_val=1.0.*max_grad_norm"):
        trainer.fit(classifier(mlp()), loader)


def test_somebody_elses_hook_on_a_gradient_is_refused(
    loader, classifier, mlp, make_trainer, privacy, assert_refused
):
    model = classifier(mlp())
    seen: list[torch.Tensor] = []
    handle = model.net[0].weight.register_hook(seen.append)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, loader), "gradient hooks.*Remove them before fit", model
    )
    handle.remove()
    assert seen == []
