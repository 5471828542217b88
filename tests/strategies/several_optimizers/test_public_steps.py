"""Steps of public optimizers follow no record, and are refused where they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.sampling import FullBatch
from tests.strategies.several_optimizers.gan import FIXED, GAN, is_real


class FeatureMatching(GAN):
    def generator_loss(self, x: Tensor) -> Tensor:
        fake = self.critic[0](self.generator(torch.randn(FIXED, 4))).mean(0)
        return (fake - self.critic[0](x).mean(0).detach()).square().sum()


class FromEpoch1(GAN):
    def generator_loss(self, x: Tensor) -> Tensor:
        matching = FeatureMatching.generator_loss(self, x)
        return super().generator_loss(x) + (self.current_epoch > 0) * matching


class CountsRecords(GAN):
    def generator_loss(self, x: Tensor) -> Tensor:
        return is_real(self.critic(self.generator(torch.randn(len(x), 4))))


class Encoder(GAN):
    """An autoencoder whose encoder is called public."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        encoder, decoder = self.optimizers()
        encoder.zero_grad()
        decoder.zero_grad()
        self.manual_backward(self.critic(self.generator(batch[0][:, :4])).square().mean())
        encoder.step()
        decoder.step()


REFUSED = {
    "feature matching": FeatureMatching,
    "from epoch 1": FromEpoch1,
    "number of records": CountsRecords,
    "encoder": Encoder,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_public_step_that_follows_the_records_is_refused(name, fit):
    with pytest.raises((MisconfigurationException, VoidedRunError), match="public optimizer"):
        fit(REFUSED[name](), isolation_probe=True, spot_checks=True, trainer={"max_epochs": 2})


@pytest.mark.slow
def test_a_public_step_may_follow_the_number_of_records_of_a_full_batch(fit):
    whole = {"sampling": FullBatch(), "batch_size": 48, "trainer": {"max_steps": 2}}
    privacy = fit(CountsRecords(), isolation_probe=True, **whole)

    assert privacy.steps == 1


@pytest.mark.parametrize(
    ("order", "toggles"),
    [
        ("gd", False),
        pytest.param("gd", True, marks=pytest.mark.slow),
        pytest.param("dg", False, marks=pytest.mark.slow),
        pytest.param("dg", True, marks=pytest.mark.slow),
    ],
)
def test_an_ordinary_gan_passes_all_checks(order, toggles, fit):
    model = GAN()
    model.order, model.toggles = order, toggles

    privacy = fit(model, isolation_probe=True, spot_checks=True)

    assert privacy.steps == 4
    assert privacy._run.isolation == "compared on made-up samples"


def test_a_discriminator_that_mixes_records_is_refused(fit):
    class Mixes(GAN):
        def critic_loss(self, x: Tensor) -> Tensor:
            logits = self.critic(x) - self.critic(x).mean()
            return is_real(logits)

    with pytest.raises(
        (MisconfigurationException, TypeError), match="couples the records of a batch"
    ):
        fit(Mixes(), isolation_probe=True)
