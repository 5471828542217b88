"""ε and metrics of the noise in progress bar, loggers and other callbacks."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray

from lightning_dp.accounting.base import epsilon_text, float32_above
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.hooks import PrivacyCallback

EPSILON = "privacy/epsilon"
NOISE_MULTIPLIER = "privacy/noise_multiplier"

_WINDOW = 50  # steps at least, over which the signal beneath the noise is averaged
_MAX_NODES = 300
_MOST = 100_000  # steps to log, of one kind, that are looked at one by one
_SHORT, _TOGETHER = 64, 4  # a stretch of the curve ends at that step, or at a multiple of its first
_HORIZON = 100_000  # steps of a plan without an end for which nodes are chosen


class PrivacyLogger(PrivacyCallback):
    """Logs ``privacy/epsilon``, ``privacy/noise_multiplier`` and other metrics of the noise.

    At the steps to log, loggers also get, from public numbers and releases alone:

    - ``privacy/sample_rate``, ``privacy/expected_batch_size``: q and B = qN of the step;
    - ``privacy/clip_norm``: C, of the next step where it moves; ``privacy/noise_norm``: z·C·√d / B, the
      norm of the noise in the mean gradient;
    - ``privacy/signal_ratio``: the estimated norm of the gradient over that of the noise, over the last
      50 steps or more; 0 where noise hides it. It may stay far below 1 in a large model that learns;
    - ``privacy/share_clipped``: with ``count_clipped=True`` or a clip norm that moves, the noised share
      of clipped records;
    - ``privacy/steps_left``: of the plan, as far as the budget affords them.

    The settings of privacy are in the loggers' hyper-parameters (``hparams.yaml``, W&B's config).

    The plan is known, so ε is read from a curve at the steps to log and at the ends of epochs (of
    very long runs, at some of them). Between two of these it is the ε of the next one: an upper
    bound. The curve is computed a stretch at a time, when its first step comes, so that a long run
    starts at once. At the stop and at the end the ε that was spent is computed itself. Written
    directly, since ``self.log`` costs more than a private step of a small model.

    :class:`DifferentialPrivacy` and the private strategies bring one along.
    """

    def __init__(self) -> None:
        self._curve = _Curve()
        self._logged_at = -1
        self._published: tuple[float, float] | None = None  # the two metrics that are kept current

    def on_privacy_start(self, trainer: Trainer, run: PrivateRun, folder: Path) -> None:
        self._curve, self._logged_at, self._published = _Curve(), -1, None
        if trainer.loggers:
            _log_hyperparameters(trainer, run)
        self._publish(trainer, run)

    def on_privacy_replan(self, trainer: Trainer, run: PrivateRun) -> None:
        self._curve = _Curve()  # of the plan that is left

    def on_privacy_step(self, trainer: Trainer, run: PrivateRun) -> None:
        self._publish(trainer, run, final=run.stop_reason is not None)

    def on_privacy_end(self, trainer: Trainer, run: PrivateRun) -> None:
        self._publish(trainer, run, final=True)

    def _publish(self, trainer: Trainer, run: PrivateRun, *, final: bool = False) -> None:
        """Bring the metrics up to date, and write them to the loggers at a step to log, or a stop."""
        every = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        epsilon = float32_above(run.epsilon if final else self._curve.read(run, every))
        current = epsilon, run.noise_multiplier or 0.0
        is_log_step = every > 0 and run.step % every == 0
        if current == self._published and not (is_log_step or final):
            return  # as at most steps: the Trainer has them already
        self._published = current
        metrics = dict(zip((EPSILON, NOISE_MULTIPLIER), current, strict=True))
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
        shown: dict[str, Any] = trainer.progress_bar_metrics  # which print text as it is
        shown[EPSILON] = _shown(metrics[EPSILON], run.config.target_epsilon)
        if run.step and (is_log_step or final) and self._logged_at != run.steps_begun:
            self._logged_at = run.steps_begun
            metrics.update(_of_noise(run))
            trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=run.step - 1)  # Lightning counts from 0
                logger.save()


def _of_noise(run: PrivateRun) -> dict[str, float]:
    """Return the metrics of the latest step that tell what its noise means for learning."""
    setting, signal, mechanism = run.setting, run.signal, run.mechanism
    if setting is None or mechanism is None:
        return {}
    rate = mechanism.plan.rate(max(0, mechanism.step - 1))
    metrics = {
        "sample_rate": rate,
        "expected_batch_size": rate * setting.num_records,
        "clip_norm": setting.clip_norm if mechanism.clip_norm is None else mechanism.clip_norm,
        "noise_norm": setting.noise_norm,
        "steps_left": run.remaining_steps,
    }
    if signal is not None and signal.whole.steps:
        recent = signal.recent(_WINDOW)
        metrics["noise_norm"] = signal.recent(1).noise_norm
        metrics["signal_ratio"] = recent.signal_ratio
        if recent.share_clipped is not None:
            metrics["share_clipped"] = recent.share_clipped[0]
    return {f"privacy/{name}": value for name, value in metrics.items() if math.isfinite(value)}


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
        "clipping": repr(config.clipping),
        "postprocessing": repr(list(config.postprocessing)),
        "sampling": repr(config.sampling),
        "noise": repr(config.noise),
        "sample_rate": batches.sample_rate,
        "expected_batch_size": batches.expected_batch_size,
        "num_records": batches.num_records,
        "most_rows": None if config.unit is None else config.unit.most_rows,
        "augmentations": config.augmentations,
        "count_clipped": config.counts_clipped,
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


def _log_hyperparameters(trainer: Trainer, run: PrivateRun) -> None:
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


class _Curve:
    """ε after the steps of a plan, from the step at which it is read first."""

    def __init__(self) -> None:
        self._nodes: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # steps ahead of the first
        self._values = np.zeros(0)  # ε there, NaN where it was not needed yet
        self._steps = self._step = 0  # charged, and of the plan, at the first
        self._around = -1, -1  # the nodes around the latest reading
        self._latest = math.nan

    def read(self, run: PrivateRun, every: int) -> float:
        """Return ε now, or at the next node; ``every`` is the interval of steps to log."""
        before, node = self._around
        if before < self._ahead(run) <= node:  # as at most steps
            return self._latest
        place = self._place(run)
        if place == len(self._nodes):  # it is new; or a plan without an end has no last node
            self._begin(run, every)
            place = self._place(run)
        if math.isnan(self._values[place]):
            stretch = self._stretch(place, run)
            self._values[stretch] = run.epsilon_curve(self._nodes[stretch] - self._ahead(run))
        self._around = int(self._nodes[place - 1]) if place else -1, int(self._nodes[place])
        self._latest = float(self._values[place])
        return self._latest

    def _begin(self, run: PrivateRun, every: int) -> None:
        self._steps, self._step = run.steps_begun, run.step
        self._nodes = _nodes(run, every)
        self._values = np.full(len(self._nodes), np.nan)

    def _place(self, run: PrivateRun) -> int:
        return int(np.searchsorted(self._nodes, self._ahead(run)))

    def _ahead(self, run: PrivateRun) -> int:
        """Return how far the run is on the curve."""
        # A step that asked nothing was not charged, but has its place on the curve.
        return max(run.steps_begun - self._steps, run.step - self._step)

    def _stretch(self, place: int, run: PrivateRun) -> slice:
        """Return the nodes from a place on that together cost little more than one."""
        if not run.config.accountant.shares_curve:
            return slice(place, place + 1)
        longest = max(_SHORT, int(_TOGETHER * self._nodes[place]))
        return slice(place, max(place + 1, int(np.searchsorted(self._nodes, longest))))


def _nodes(run: PrivateRun, every: int) -> NDArray[np.int64]:
    """Return steps ahead at which ε is computed: 0, those to log, epochs' ends, and the last one."""
    assert run.batches is not None
    endless = not math.isfinite(run.remaining_steps)
    last = _HORIZON if endless else int(run.remaining_steps)
    periods = [run.batches.steps_per_epoch, *([every] if every > 0 else [])]
    wanted = [_spread(range(p - run.step % p, last, p), _MOST) for p in periods]
    nodes = np.unique(np.concatenate([np.array([0, last]), *wanted]))
    return _spread(nodes, _MAX_NODES)


def _spread(steps: Sequence[int] | NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return so many of them, dense at first and then geometric; all, if they are fewer."""
    if len(steps) <= most:
        return np.array(steps, dtype=np.int64)
    places = np.geomspace(1, len(steps), most).astype(np.int64) - 1
    distinct = np.unique(np.minimum(places, len(steps) - 1)).tolist()
    return np.array([steps[place] for place in distinct], dtype=np.int64)


def _shown(epsilon: float, target: float | None) -> str:
    """Return the text of the progress bar: ``2.345/3`` where there is a budget."""
    if target is None or not math.isfinite(epsilon):
        return epsilon_text(epsilon)
    return f"{epsilon_text(epsilon)}/{epsilon_text(target)}"
