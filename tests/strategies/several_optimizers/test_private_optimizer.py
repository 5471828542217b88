"""Which of several optimizers is private is named, and checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.estimators import Diff2
from tests.strategies.several_optimizers.gan import GAN


@pytest.mark.parametrize("named", [1, "critic", "critic.0"])
def test_the_private_optimizer_is_named_by_its_place_or_its_module(named, fit):
    privacy = fit(GAN(), private_optimizer=named, trainer={"max_steps": 2})

    report = str(privacy.report())
    assert "private optimizer: SGD of critic (number 1 of 2); public" in report
    assert "SGD of generator" in report


class Shared(GAN):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.parameters(), 0.1),
            torch.optim.SGD(self.critic.parameters(), 0.1),
        ]


class Moved(GAN):
    """Needs a closure of its own."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (GAN, {"private_optimizer": None}, r"gives 2 optimizers.*private_optimizer=1\).*'critic'"),
        (GAN, {"private_optimizer": 2}, "private_optimizer=2 is no place among the 2.*0 to 1"),
        (GAN, {"private_optimizer": "net"}, r"is no module of GAN.*\['generator', 'critic'\]"),
        (Shared, {"private_optimizer": 1}, r"both hold the parameters \['critic.0.bias'"),
        (Shared, {}, "2 hold some of them.*private_optimizer=0"),
        (GAN, {"engine": "hooks"}, "generated rows.*engine='layers'"),
        (GAN, {"engine": "records"}, "whole batch.*engine='records'.*at 'auto'"),
        (GAN, {"engine": "one_by_one"}, "runs training_step once for each record"),
        (GAN, {"estimator": Diff2(2)}, "must run training_step again"),
        (Moved, {}, r"without a backward\(\) of the LightningModule's own"),
    ],
    ids=[
        "none",
        "place",
        "module",
        "both",
        "two",
        "hooks",
        "functional",
        "alone",
        "diff2",
        "backward",
    ],
)
def test_what_cannot_be_trained_is_refused(model, settings, message, fit):
    with pytest.raises((MisconfigurationException, TypeError), match=f"(?s){message}"):
        fit(model(), **settings)

    assert fit.privacy.steps <= 2


def test_private_optimizer_of_a_single_one(classifier, mlp, make_trainer, loader):
    data = DataLoader(TensorDataset(torch.randn(24, 6), torch.arange(24) % 3), batch_size=12)
    for named in (0, "net"):
        privacy = DifferentialPrivacy(
            noise_multiplier=1.0, target_delta=1e-3, private_optimizer=named, isolation_probe=False
        )
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), data)
        assert privacy.steps == 2


@pytest.mark.parametrize("value", [-1, 1.5, True, "", "a b", [0]])
def test_private_optimizer_is_checked(value):
    with pytest.raises((ValueError, TypeError), match="private_optimizer"):
        DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-3, private_optimizer=value)
