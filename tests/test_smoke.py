"""The main job, end to end."""

from __future__ import annotations

from lightning_dp.callbacks import DifferentialPrivacy


def test_a_private_fit_spends_its_budget_and_no_more(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(target_epsilon=2.0, target_delta=1e-5)
    trainer = make_trainer(max_epochs=3, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == privacy.steps == 30
    assert 1.99 < privacy.epsilon <= 2.0
