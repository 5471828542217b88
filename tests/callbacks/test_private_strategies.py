"""Privacy by a strategy, with or without a callback."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from lightning_dp import PrivacyConfig
from lightning_dp.callbacks import PrivateSingleDeviceStrategy
from lightning_dp.report.files import read_report
from lightning_dp.report.run_report import report_of_run

DELTA = 1e-5


def test_the_strategy_door_shows_and_writes_what_the_callback_does(
    classifier, mlp, loader, make_trainer, tmp_path
):
    config = PrivacyConfig(target_epsilon=2.0, target_delta=DELTA)
    strategy = PrivateSingleDeviceStrategy("cpu", privacy=config)
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(max_epochs=2, strategy=strategy, logger=logger, log_every_n_steps=20)

    trainer.fit(classifier(mlp()), loader)

    run = strategy.private_run
    assert trainer.global_step == run.steps == 20
    assert 0.99 * 2.0 < run.epsilon <= 2.0
    assert "privacy/epsilon" in trainer.callback_metrics
    assert trainer.progress_bar_metrics["privacy/epsilon"].endswith("/2")
    assert "privacy/epsilon" in Path(logger.log_dir, "metrics.csv").read_text()
    (path,) = Path(logger.log_dir).glob("privacy_report-*.json")
    assert read_report(path) == report_of_run(run)


def test_the_registered_strategy_with_the_callback(privacy, classifier, mlp, loader, make_trainer):
    trainer = make_trainer(max_epochs=1, strategy="private_single_device", callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert type(trainer.strategy) is PrivateSingleDeviceStrategy
    assert trainer.global_step == privacy.steps == 10
