"""A private checkpoint that is trained on without the callback: Lightning's warning says so."""

from __future__ import annotations

import warnings

import pytest

from lightning_dp.callbacks import DifferentialPrivacy


@pytest.fixture
def resume(mlp, classifier, loader, make_trainer, tmp_path):
    """Train one epoch privately, and go on from its checkpoint with these callbacks; the warnings."""

    def private():
        return DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5, advice=False)

    def run(is_private):
        trainer = make_trainer(callbacks=[private()], max_epochs=1)
        trainer.fit(classifier(mlp()), loader)
        trainer.save_checkpoint(tmp_path / "private.ckpt")
        again = make_trainer(callbacks=[private()] if is_private else [], max_epochs=2)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            again.fit(classifier(mlp()), loader, ckpt_path=tmp_path / "private.ckpt")
        return "\n".join(str(each.message) for each in found)

    return run


def test_lightning_names_what_is_missing_in_capital_letters(resume):
    assert "DifferentialPrivacy (training goes on WITHOUT PRIVACY" in resume(is_private=False)


def test_nothing_is_missing_where_the_callback_is(resume):
    assert "WITHOUT PRIVACY" not in resume(is_private=True)
