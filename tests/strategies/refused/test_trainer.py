"""Trainers, callbacks, strategies and tuners that cannot train privately."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_dp import PrivacyConfig
from lightning_dp._warnings import PrivacyWarning
from lightning_dp.callbacks import DifferentialPrivacy, PrivateSingleDeviceStrategy
from lightning_dp.strategies.checks import (
    check_strategy,
)


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
    "BatchSizeFinder": (BatchSizeFinder, "outside the ledger.*batch size"),
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


# -- strategies ------------------------------------------------------------------------------------


def uninitialised(kind: type[Any]) -> Any:
    """An object of a strategy whose own package is not installed."""
    return object.__new__(kind)


@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(),
        ModelParallelStrategy(),
        uninitialised(DeepSpeedStrategy),
        uninitialised(XLAStrategy),
        uninitialised(SingleDeviceXLAStrategy),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_strategies_that_shard_or_compile_are_refused(strategy):
    name = type(strategy).__name__
    with pytest.raises(Exception, match=f"(?s)strategy {name} is not supported.*strategy='ddp'"):
        check_strategy(strategy)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_launchers_that_copy_the_process_are_refused(strategy, make_trainer):
    trainer = make_trainer(strategy=strategy, devices=2)

    with pytest.raises(Exception, match=r"(?s)spawn or fork.*strategy='ddp' in a script"):
        check_strategy(trainer.strategy)


def test_a_forked_fit_is_refused(loader, classifier, mlp, make_trainer, privacy, assert_refused):
    model = classifier(mlp())
    trainer = make_trainer(strategy="ddp_fork", devices=1, max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, loader), "spawn or fork.*strategy='ddp' in a script", model
    )


class Hookless(L.LightningModule):
    """Can be pickled for a process that is spawned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "strategy",
    ["ddp_fork", "ddp_notebook", pytest.param("ddp_spawn", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_refusal_of_a_copied_process_comes_from_the_parent(
    strategy, devices, loader, make_trainer, privacy
):
    trainer = make_trainer(strategy=strategy, devices=devices, max_epochs=1, callbacks=[privacy])

    with pytest.raises(MisconfigurationException, match=r"spawn or fork.*devices=1") as refused:
        trainer.fit(Hookless(), loader)

    assert refused.value.__cause__ is None and refused.value.__suppress_context__


def test_several_devices_of_a_notebook_are_refused_in_the_parent(
    loader, make_trainer, privacy, monkeypatch
):
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE"
    monkeypatch.setattr(connector, True)
    trainer = make_trainer(devices=2, max_epochs=1, callbacks=[privacy])

    with pytest.raises(MisconfigurationException, match=r"spawn or fork.*strategy='ddp'"):
        trainer.fit(Hookless(), loader)


def test_another_error_of_a_fit_arrives_as_it_is(loader, make_trainer, privacy):
    model = Hookless()
    model.configure_optimizers = lambda: 1 / 0  # type: ignore[method-assign]

    with pytest.raises(ZeroDivisionError):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)


def test_one_device_and_ddp_are_not_refused():
    check_strategy(SingleDeviceStrategy(torch.device("cpu")))
    check_strategy(DDPStrategy())


# -- two doors, two packages -----------------------------------------------------------------------


def test_two_configurations_are_refused(loader, classifier, mlp, make_trainer, assert_refused):
    model = classifier(mlp())
    two = [DifferentialPrivacy(noise_multiplier=z, target_delta=1e-5) for z in (1.0, 2.0)]
    trainer = make_trainer(max_epochs=1, callbacks=two)

    assert_refused(lambda: trainer.fit(model, loader), "configured twice.*Keep one of them", model)


def test_a_callback_beside_a_configured_strategy_is_refused(
    loader, classifier, mlp, make_trainer, privacy, assert_refused
):
    model = classifier(mlp())
    strategy = PrivateSingleDeviceStrategy(
        privacy=PrivacyConfig(noise_multiplier=2.0, target_delta=1e-5)
    )
    trainer = make_trainer(max_epochs=1, callbacks=[privacy], strategy=strategy)

    assert_refused(lambda: trainer.fit(model, loader), "configured twice.*Keep one of them", model)


def test_a_private_strategy_without_configuration_is_refused(
    loader, classifier, mlp, make_trainer, assert_refused
):
    model = classifier(mlp())
    trainer = make_trainer(max_epochs=1, strategy=PrivateSingleDeviceStrategy())

    assert_refused(
        lambda: trainer.fit(model, loader), "no privacy configuration.*privacy=PrivacyConfig", model
    )


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
