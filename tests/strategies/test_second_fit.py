"""Another fit, also after an exception, goes on spending the same ledger."""

from __future__ import annotations

import pytest

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.accounting import PLDAccountant
from lightning_dp.callbacks import DifferentialPrivacy

DELTA = 1e-5


def test_a_second_fit_goes_on_spending_the_same_ledger(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        noise_multiplier=1.0, target_delta=DELTA, isolation_probe=False, spot_checks=False
    )
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])
    model = classifier(mlp())

    trainer.fit(model, loader)
    first = privacy.epsilon
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model, loader)

    assert trainer.global_step == privacy.steps == len(charges()) == 50
    assert privacy.epsilon > first
    assert privacy.epsilon == PLDAccountant().epsilon([(e, 1) for e in charges()], DELTA)


def test_a_second_fit_of_another_trainer_cannot_exceed_the_budget(
    classifier, mlp, loader, make_trainer, charges
):
    privacy = DifferentialPrivacy(
        target_epsilon=1.0,
        noise_multiplier=3.0,
        target_delta=DELTA,
        isolation_probe=False,
        spot_checks=False,
    )
    model = classifier(mlp())

    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    assert privacy.steps == 10
    second = make_trainer(max_epochs=100, callbacks=[privacy])
    second.fit(model, loader)

    assert 0 < second.global_step == privacy.steps - 10
    events = charges()
    assert privacy.epsilon <= 1.0
    assert PLDAccountant().epsilon([(e, 1) for e in [*events, events[0]]], DELTA) > 1.0


def test_a_second_fit_with_nothing_left_trains_nothing(
    classifier, mlp, loader, make_trainer, weights
):
    privacy = DifferentialPrivacy(
        target_epsilon=1.0, target_delta=DELTA, isolation_probe=False, spot_checks=False
    )
    model = classifier(mlp())
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    before, spent = weights(model), privacy.epsilon

    second = make_trainer(max_epochs=1, callbacks=[privacy])
    with pytest.warns(PrivacyWarning, match="No training step was made"):
        second.fit(model, loader)

    assert second.global_step == 0
    assert (privacy.steps, privacy.epsilon) == (10, spent)
    assert weights(model).equal(before)


def test_a_fit_after_an_exception_keeps_what_was_charged(
    classifier, mlp, loader, make_trainer, charges
):
    class Fails(classifier):
        fails_at = 4

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == self.fails_at:
                raise ArithmeticError("planted")
            return loss

    privacy = DifferentialPrivacy(
        noise_multiplier=1.0, target_delta=DELTA, isolation_probe=False, spot_checks=False
    )
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])
    model = Fails(mlp())
    with pytest.raises(ArithmeticError, match="planted"):
        trainer.fit(model, loader)
    assert trainer.global_step == 4
    assert privacy.steps == len(charges()) == 5  # the fifth batch was looked at

    model.fails_at = -1
    again = make_trainer(max_epochs=1, callbacks=[privacy])
    again.fit(model, loader)

    assert again.global_step == 10
    assert privacy.steps == len(charges()) == 15
