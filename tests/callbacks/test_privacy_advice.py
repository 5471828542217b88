"""Advice in real fits: printed once, silent where it should be, from public numbers and releases."""

from __future__ import annotations

import logging

import pytest

from lightning_dp.estimators import Diff2, Storm
from tests.zoo import private

LOGGER = "lightning.pytorch.utilities.rank_zero"


@pytest.fixture
def blocks(caplog):
    """The advice that was printed, block by block."""
    caplog.set_level(logging.INFO, LOGGER)

    def found():
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if message.startswith("privacy advice:")]

    return found


def trained(trainer, model, loader, **arguments):
    privacy = private(**arguments)
    trainer.callbacks.append(privacy)
    trainer.fit(model, loader)
    return privacy


def test_a_block_is_printed_once_before_the_first_step(
    blocks, classifier, mlp, loader, make_trainer
):
    seen = []

    class Watched(classifier):
        def training_step(self, batch, batch_idx):
            seen.append(len(blocks()))
            return super().training_step(batch, batch_idx)

    trained(make_trainer(max_epochs=2), Watched(mlp()), loader, target_epsilon=3.0)

    assert seen == [1] * 20
    lines = blocks()[0].splitlines()
    assert len(lines) == 3
    assert "240 records, 24 a step on average (q = 0.1), 20 steps (2 epochs)" in lines[0]
    assert lines[2].strip().startswith("try: batch_size=")


@pytest.mark.parametrize(
    ("trainer_arguments", "arguments"),
    [({"max_epochs": 1}, {"advice": False}), ({"fast_dev_run": 3}, {})],
    ids=["opted out", "fast_dev_run"],
)
def test_nothing_is_printed_where_nobody_asks(
    trainer_arguments, arguments, blocks, classifier, mlp, loader, make_trainer
):
    privacy = trained(
        make_trainer(**trainer_arguments),
        classifier(mlp()),
        loader,
        target_epsilon=3.0,
        **arguments,
    )
    assert blocks() == []
    if "advice" in arguments:
        assert privacy.report().learning == {}


@pytest.mark.parametrize(
    ("estimator", "share"),
    [(Diff2(restart_every=4), 0.25), (Storm(momentum=0.2), 1.0), (None, 1.0)],
    ids=["Diff2", "Storm", "DP-SGD"],
)
def test_releases_of_gradients_are_followed_before_post_processing(
    estimator, share, classifier, mlp, loader, make_trainer
):
    from lightning_dp.postprocessing import Momentum

    privacy = trained(
        make_trainer(max_epochs=2),
        classifier(mlp()),
        loader,
        noise_multiplier=2.0,
        estimator=estimator,
        postprocessing=[Momentum(0.9)],
    )
    whole = privacy._run.signal.whole
    assert whole.steps == pytest.approx(20 * share)
    # The lengths of raw releases: what momentum makes of them would be far longer.
    # The gradient adds to it: 1.1 ± .05 times the noise with Storm, in 24 runs.
    assert whole.released_norm == pytest.approx(whole.noise_norm, rel=0.4)


def test_a_resumed_run_is_judged_as_a_whole(classifier, mlp, loader, make_trainer, tmp_path):
    first = make_trainer(max_epochs=2)
    trained(first, classifier(mlp()), loader, noise_multiplier=2.0)
    first.save_checkpoint(tmp_path / "last.ckpt")
    privacy = private(noise_multiplier=2.0)

    make_trainer(max_epochs=3, callbacks=[privacy]).fit(
        classifier(mlp()), loader, ckpt_path=tmp_path / "last.ckpt", weights_only=False
    )

    whole = privacy._run.signal.whole
    assert (whole.steps, whole.last_step) == (30, 30)
    assert whole.agreements == 28  # each fit has a first release
    assert privacy._run.setting.steps == 30
