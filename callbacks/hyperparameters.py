"""The settings of privacy among the hyper-parameters that loggers keep."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_dp.run import PrivateRun

__all__ = ["hyperparameters", "log_hyperparameters"]


def hyperparameters(run: PrivateRun) -> dict[str, Any]:
    """Return the settings of a run whose plan was declared, as plain values.

    What is infinite (a plan without an end) is left out.
    """
    config, batches = run.config, run.batches
    assert batches is not None
    values: dict[str, Any] = {
        "target_epsilon": config.target_epsilon,
        "target_delta": config.target_delta,
        "relation": config.relation,
        "noise_multiplier": run.noise_multiplier,
        "noise_schedule": repr(config.noise_schedule),
        "estimator": repr(config.resolved_estimator()),
        "postprocessing": repr(list(config.postprocessing)),
        "sampling": repr(config.sampling),
        "noise": repr(config.noise),
        "sample_rate": batches.sample_rate,
        "expected_batch_size": batches.expected_batch_size,
        "num_records": batches.num_records,
        "count_clipped": config.count_clipped,
        "seeded": run.is_seeded,
    }
    if run.setting is not None:
        values["planned_steps"] = run.setting.steps
        values["noise_norm"] = run.setting.noise_norm
    return {
        name: value
        for name, value in values.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def log_hyperparameters(trainer: Trainer, run: PrivateRun) -> None:
    """Give them to all loggers, under ``privacy``, besides the user's own.

    Lightning has written ``hparams.yaml`` by now, and TensorBoardLogger never writes it again, so that
    is done here. TensorBoard's own page of hyper-parameters keeps what was logged first: it shows these
    where the module saves none.
    """
    if not trainer.is_global_zero:
        return
    settings = {"privacy": hyperparameters(run)}
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(settings)
            logger.save()
            continue
        logger.log_hyperparams({**dict(_mapping(logger.hparams)), **settings})
        path = os.path.join(logger.log_dir, logger.NAME_HPARAMS_FILE)
        if os.path.isdir(logger.log_dir):
            save_hparams_to_yaml(path, logger.hparams)


def _mapping(hparams: Any) -> Any:
    """Return hyper-parameters as a mapping: TensorBoardLogger may keep a namespace."""
    return vars(hparams) if isinstance(hparams, Namespace) else hparams
