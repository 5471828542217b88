"""ε and the noise multiplier, read back from where users look."""

from __future__ import annotations

import csv
import json
import re
import struct
import time
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_dp.accounting import PLDAccountant, PoissonGaussian, epsilon_text
from lightning_dp.schedules import StepDecay
from tests.zoo import private

DELTA = 1e-5
EPSILON, NOISE = "privacy/epsilon", "privacy/noise_multiplier"


def true_epsilon(steps, noise_multiplier=2.0, sample_rate=0.1):
    return PLDAccountant().epsilon([(PoissonGaussian(noise_multiplier, sample_rate), steps)], DELTA)


def from_tensorboard(logger, name):
    """{logged step: value}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return {scalar.step: scalar.value for scalar in events.Scalars(name)}


def from_csv(logger, name):
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


def leveldb_records(content):
    """The records of a LevelDB log (W&B's transaction log) behind its header of 7 bytes."""
    position, whole = 7, b""
    while position + 7 <= len(content):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def from_wandb(logger, name):
    import wandb

    wandb.finish()
    (path,) = Path(logger.save_dir).glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # W&B's own process writes the file, on a busy machine late
    records = wandb_records(path)
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, f"W&B did not finish {path}"
        time.sleep(0.2)
        records = wandb_records(path)
    rows = [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for record in records
    ]
    return {row["trainer/global_step"]: row[name] for row in rows if name in row}


def wandb_records(path):
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(data) for data in leveldb_records(path.read_bytes())]


@pytest.fixture(params=["tensorboard", "csv", "wandb"])
def logger_and_reader(request, tmp_path, monkeypatch):
    if request.param == "tensorboard":
        return TensorBoardLogger(tmp_path), from_tensorboard
    if request.param == "csv":
        return CSVLogger(tmp_path), from_csv
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return WandbLogger(offline=True, save_dir=tmp_path), from_wandb


def test_loggers_hold_exact_values_at_the_interval_and_at_the_stop(
    logger_and_reader, classifier, mlp, loader, make_trainer
):
    logger, read = logger_and_reader
    privacy = private(target_epsilon=1.0, noise_multiplier=2.0)
    trainer = make_trainer(max_epochs=100, log_every_n_steps=5, logger=logger, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    last = trainer.global_step
    assert last > 10 and last % 5
    # Lightning numbers a logged step from 0: after 5 steps it says 4.
    steps = [*range(5, last, 5), last]
    assert read(logger, EPSILON) == pytest.approx(
        {step - 1: true_epsilon(step) for step in steps}, rel=1e-3
    )
    assert read(logger, NOISE) == pytest.approx({step - 1: 2.0 for step in steps})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_values_are_logged_at_the_ordinary_end_too(
    accumulate, classifier, mlp, loader, make_trainer, tmp_path
):
    logger = CSVLogger(tmp_path)
    privacy = private(noise_multiplier=2.0)
    trainer = make_trainer(
        max_epochs=3,
        log_every_n_steps=7,
        accumulate_grad_batches=accumulate,
        logger=logger,
        callbacks=[privacy],
    )

    trainer.fit(classifier(mlp()), loader)

    last = 30 // accumulate
    steps = sorted({*range(7, last + 1, 7), last})
    assert from_csv(logger, EPSILON) == pytest.approx(
        {step - 1: true_epsilon(step, sample_rate=0.1 * accumulate) for step in steps}, rel=1e-3
    )


def test_the_noise_multiplier_is_that_of_the_step_just_made(
    classifier, mlp, loader, make_trainer, tmp_path
):
    logger = CSVLogger(tmp_path)
    privacy = private(noise_multiplier=2.0, noise_schedule=StepDecay(every=3, factor=0.5))
    trainer = make_trainer(max_epochs=1, log_every_n_steps=1, logger=logger, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    expected = {step: 2.0 * 0.5 ** (step // 3) for step in range(10)}
    assert from_csv(logger, NOISE) == pytest.approx(expected)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_progress_bar_is_never_below_the_true_epsilon(
    accumulate, classifier, mlp, loader, make_trainer, at_each_step
):
    privacy = private(target_epsilon=2.0, noise_multiplier=2.0)
    shown = []
    watch = at_each_step(
        lambda trainer, _: shown.append(
            (trainer.global_step, trainer.progress_bar_metrics[EPSILON])
        )
    )
    trainer = make_trainer(
        max_epochs=3,
        log_every_n_steps=5,
        accumulate_grad_batches=accumulate,
        callbacks=[privacy, watch],
    )

    trainer.fit(classifier(mlp()), loader)

    assert len(shown) > 8
    for step, text in shown:
        epsilon, target = map(float, text.split("/"))
        truth = true_epsilon(step, sample_rate=0.1 * accumulate)
        assert truth * (1 - 1e-3) <= epsilon <= target == 2.0
        if step % 5 == 0 and step:
            assert epsilon == pytest.approx(truth, rel=1e-3, abs=1e-3)
    assert float(shown[-1][1].split("/")[0]) == pytest.approx(privacy.epsilon, rel=1e-3, abs=1e-3)


def test_both_progress_bars_show_epsilon_beside_its_target(
    classifier, mlp, loader, make_trainer, capsys
):
    for bar in (TQDMProgressBar(), RichProgressBar(refresh_rate=1)):
        privacy = private(target_epsilon=2.0, noise_multiplier=2.0)
        trainer = make_trainer(max_epochs=1, callbacks=[privacy, bar], enable_progress_bar=True)
        capsys.readouterr()

        trainer.fit(classifier(mlp()), loader)

        shown = epsilon_text(privacy.epsilon)
        printed = "".join(capsys.readouterr()).replace("\n", "").replace(" ", "")
        assert re.search(rf"privacy/epsilon[=:]{shown}/2", printed)


def test_model_checkpoint_can_name_and_monitor_epsilon(
    classifier, mlp, loader, make_trainer, tmp_path
):
    checkpoint = ModelCheckpoint(
        dirpath=tmp_path,
        monitor=EPSILON,
        mode="max",
        filename="{epoch}-{privacy/epsilon:.6f}",
        auto_insert_metric_name=False,
    )
    privacy = private(noise_multiplier=2.0)
    trainer = make_trainer(
        max_epochs=3,
        log_every_n_steps=7,
        enable_checkpointing=True,
        callbacks=[privacy, checkpoint],
    )

    trainer.fit(classifier(mlp()), loader)

    assert float(checkpoint.best_model_score) == pytest.approx(true_epsilon(30), rel=1e-6)
    assert checkpoint.best_model_path.endswith(f"2-{true_epsilon(30):.6f}.ckpt")
