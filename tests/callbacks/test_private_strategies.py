"""Privacy by a strategy instead of a callback; never by both."""

from __future__ import annotations

import pytest

from lightning_dp import PrivacyConfig
from lightning_dp.callbacks import DifferentialPrivacy, PrivateSingleDeviceStrategy

DELTA = 1e-5


def test_the_strategy_door(classifier, mlp, loader, make_trainer):
    config = PrivacyConfig(target_epsilon=2.0, target_delta=DELTA)
    strategy = PrivateSingleDeviceStrategy("cpu", privacy=config)
    trainer = make_trainer(max_epochs=2, strategy=strategy)

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == strategy.private_run.steps == 20
    assert 0.99 * 2.0 < strategy.private_run.epsilon <= 2.0


def test_the_registered_strategy_with_the_callback(privacy, classifier, mlp, loader, make_trainer):
    trainer = make_trainer(max_epochs=1, strategy="private_single_device", callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert type(trainer.strategy) is PrivateSingleDeviceStrategy
    assert trainer.global_step == privacy.steps == 10


def test_the_registered_strategy_without_a_configuration_is_refused(
    classifier, mlp, loader, make_trainer
):
    trainer = make_trainer(max_epochs=1, strategy="private_single_device")

    with pytest.raises(ValueError, match=r"no privacy configuration.*PrivacyConfig"):
        trainer.fit(classifier(mlp()), loader)


def test_privacy_configured_twice_is_refused(privacy, classifier, mlp, loader, make_trainer):
    config = PrivacyConfig(target_epsilon=2.0, target_delta=DELTA)
    strategy = PrivateSingleDeviceStrategy("cpu", privacy=config)

    with pytest.raises(ValueError, match="Privacy is configured twice"):
        make_trainer(strategy=strategy, callbacks=[privacy]).fit(classifier(mlp()), loader)

    assert privacy.steps == strategy.private_run.steps == 0


def test_two_callbacks_are_refused(privacy, classifier, mlp, loader, make_trainer):
    other = DifferentialPrivacy(noise_multiplier=1.0, target_delta=DELTA)

    with pytest.raises((ValueError, RuntimeError)):  # Lightning refuses equal callbacks first
        make_trainer(callbacks=[privacy, other]).fit(classifier(mlp()), loader)

    assert privacy.steps == other.steps == 0
