"""Metrics of noise, read back from real loggers; the released share of clipped records."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from tests.zoo import private

SIZE = 6 * 8 + 8 + 8 * 3 + 3


def rows_of(logger):
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file)}


def trained(make_trainer, model, loader, loggers, *, epochs=2, **arguments):
    privacy = private(**arguments)
    trainer = make_trainer(
        max_epochs=epochs, log_every_n_steps=5, logger=loggers, callbacks=[privacy]
    )
    trainer.fit(model, loader)
    return privacy, trainer


def test_metrics_are_the_public_numbers_of_the_step(
    classifier, mlp, loader, make_trainer, tmp_path
):
    logger = CSVLogger(tmp_path)

    _, trainer = trained(
        make_trainer, classifier(mlp()), loader, logger, noise_multiplier=1.5, max_grad_norm=0.4
    )

    rows = rows_of(logger)
    assert list(rows) == [4, 9, 14, 19]
    for step, row in rows.items():
        found = {
            name.removeprefix("privacy/"): float(value)
            for name, value in row.items()
            if name.startswith("privacy/")
        }
        assert found["sample_rate"] == pytest.approx(0.1)
        assert found["expected_batch_size"] == pytest.approx(24)
        assert found["clip_norm"] == pytest.approx(0.4)
        assert found["noise_norm"] == pytest.approx(1.5 * 0.4 * math.sqrt(SIZE) / 24, rel=1e-5)
        assert found["steps_left"] == 19 - step
        assert 0 <= found["signal_ratio"] < 10
        assert "share_clipped" not in found
    assert float(trainer.callback_metrics["privacy/steps_left"]) == 0


@pytest.mark.parametrize("clip_norm", [1e-3, 1e3])
def test_the_released_share_is_that_of_clipped_records_and_costs_nothing_more(
    clip_norm, classifier, mlp, loader, make_trainer, tmp_path
):
    logger = CSVLogger(tmp_path)

    privacy, _ = trained(
        make_trainer,
        classifier(mlp(), lambda p: torch.optim.SGD(p, lr=1e-3 / clip_norm)),
        loader,
        logger,
        epochs=8,
        noise_multiplier=0.5,
        max_grad_norm=clip_norm,
        count_clipped=True,
    )

    whole = privacy._run.signal.whole
    share, noise = whole.share_clipped
    assert whole.counts == 80
    # In one release: 0.5 · √1.01 / (2 · 0.1 · 24).
    assert noise == pytest.approx(0.5 * math.sqrt(1.01) / (0.2 * 24) / math.sqrt(80), rel=1e-6)
    sampling = 0.5 / math.sqrt(24 * 80)  # of the number of records in a batch
    assert abs(share - (clip_norm < 1)) < 5 * math.hypot(noise, sampling)
    assert privacy.epsilon == PLDAccountant().epsilon([(PoissonGaussian(0.5, 0.1), 80)], 1e-5)
    # The noise in the gradient is longer by the count's part of the bound.
    expected = 0.5 * clip_norm * math.sqrt(1.01 * SIZE) / 24
    assert whole.noise_norm == pytest.approx(expected, rel=1e-6)
    assert "privacy/share_clipped" in rows_of(logger)[79]


def of_yaml(logger):
    return yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())


def of_tensorboard(logger):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    content = events.PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    return {name: value.number_value or value.string_value for name, value in start.hparams.items()}


def test_hyper_parameters_of_privacy_stand_beside_the_users(
    classifier, mlp, loader, make_trainer, tmp_path
):
    class Saving(classifier):
        def __init__(self, net, width):
            super().__init__(net)
            self.save_hyperparameters(ignore="net")

    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tensorboard")]
    privacy, _ = trained(
        make_trainer, Saving(mlp(), 8), loader, loggers, target_epsilon=3.0, max_grad_norm=0.4
    )

    for logger in loggers:
        found = of_yaml(logger)
        assert found["width"] == 8
        settings = found["privacy"]
        assert (settings["target_epsilon"], settings["target_delta"]) == (3.0, 1e-5)
        assert settings["noise_multiplier"] == pytest.approx(privacy.noise_multiplier)
        assert (settings["sample_rate"], settings["num_records"]) == (0.1, 240)
        assert settings["planned_steps"] == 20
        assert settings["estimator"] == "MeanGradient(max_grad_norm=0.4)"
    assert of_tensorboard(loggers[1]) == {"width": 8}  # which was logged first
