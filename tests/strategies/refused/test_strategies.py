"""Strategies that cannot train privately, and two configurations of one."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from torch import nn

from lightning_dp import PrivacyConfig
from lightning_dp.callbacks import DifferentialPrivacy, PrivateSingleDeviceStrategy
from lightning_dp.strategies.checks import (
    check_strategy,
)


def uninitialised(kind: type[Any]) -> Any:
    """An object of a strategy whose own package is not installed."""
    return object.__new__(kind)


@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(),
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
