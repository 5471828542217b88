"""ε and the noise multiplier, where users look: progress bar, loggers, other callbacks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray

from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.rounding import epsilon_text, float32_above
from lightning_dp.run import PrivateRun

__all__ = ["EPSILON", "NOISE_MULTIPLIER", "Publisher"]

EPSILON = "privacy/epsilon"
NOISE_MULTIPLIER = "privacy/noise_multiplier"

_MAX_NODES = 300
_SHORT, _TOGETHER = 64, 4  # a stretch of the curve ends at that step, or at a multiple of its first
_HORIZON = 100_000  # steps of a plan without an end for which nodes are chosen


class Publisher:
    """Keeps ``privacy/epsilon`` and ``privacy/noise_multiplier`` current.

    The plan is known, so ε is read from a curve at the steps to log and at the ends of epochs (of
    very long runs, at some of them). Between two of these it is the ε of the next one: an upper
    bound. The curve is computed a stretch at a time, when its first step comes, so that a long run
    starts at once. At the stop and at the end ε is computed anew. Written directly, since
    ``self.log`` costs more than a private step of a small model.

    Args:
        trainer: whose metrics and loggers are written.
        run: whose ε; its plan has been declared.
    """

    def __init__(self, trainer: Trainer, run: PrivateRun) -> None:
        self._trainer = trainer
        self._run = run
        self._every = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        assert run.mechanism is not None
        self._logged_at = -1
        self.begin()

    def begin(self) -> None:
        """Choose the nodes of a curve that begins now: of the plan that is left."""
        run = self._run
        assert run.mechanism is not None
        self._start, self._first_step = run.steps, run.mechanism.step
        self._nodes = self._choose_nodes()
        self._values = np.full(len(self._nodes), np.nan)

    def _choose_nodes(self) -> NDArray[np.int64]:
        """Steps ahead at which ε is computed: 0, those to log, epochs' ends, and the last one."""
        run = self._run
        assert run.batches is not None and run.mechanism is not None
        endless = not math.isfinite(run.remaining_steps)
        last = _HORIZON if endless else int(run.remaining_steps)
        done = run.mechanism.step
        periods = [run.batches.steps_per_epoch, *([self._every] if self._every > 0 else [])]
        wanted = {0, last}.union(*(range(p - done % p, last, p) for p in periods))
        nodes = np.array(sorted(wanted), dtype=np.int64)
        if len(nodes) > _MAX_NODES:  # dense at first, then geometric
            places = np.geomspace(1, len(nodes), _MAX_NODES).astype(int) - 1
            nodes = nodes[np.unique(places)]
        return nodes

    def publish(self, *, final: bool = False) -> None:
        """Bring the metrics up to date, and write them to the loggers at a step to log.

        Args:
            final: training has come to its end or to a stop.
        """
        mechanism = self._run.mechanism
        assert mechanism is not None
        metrics = {
            EPSILON: float32_above(self._run.epsilon if final else self._read()),
            NOISE_MULTIPLIER: self._run.noise_multiplier or 0.0,
        }
        self._trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
        shown: dict[str, Any] = self._trainer.progress_bar_metrics  # which print text as it is
        shown[EPSILON] = self._shown(metrics[EPSILON])
        is_log_step = self._every > 0 and mechanism.step % self._every == 0
        if mechanism.step and (is_log_step or final) and self._logged_at != self._run.steps:
            self._logged_at = self._run.steps
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics, step=mechanism.step - 1)  # Lightning counts from 0
                logger.save()

    def _shown(self, epsilon: float) -> str:
        """Return the text of the progress bar: ``2.345/3`` where there is a budget."""
        target = self._run.config.target_epsilon
        if target is None or not math.isfinite(epsilon):
            return epsilon_text(epsilon)
        return f"{epsilon_text(epsilon)}/{target:g}"

    def _read(self) -> float:
        """ε at the node that is next, or now."""
        run = self._run
        place = int(np.searchsorted(self._nodes, self._ahead()))
        if place == len(self._nodes):  # a plan without an end has no last node
            self.begin()
            place = 0
        if math.isnan(self._values[place]):
            ahead, stretch = self._ahead(), self._stretch(place)
            self._values[stretch] = run.epsilon_curve(self._nodes[stretch] - ahead)
        return float(self._values[place])

    def _ahead(self) -> int:
        """Return how far the run is on the curve."""
        run = self._run
        assert run.mechanism is not None
        # A step that asked nothing was not charged, but has its place on the curve.
        return max(run.steps - self._start, run.mechanism.step - self._first_step)

    def _stretch(self, place: int) -> slice:
        """The nodes from a place on that are computed together: they cost little more than one."""
        if not isinstance(self._run.config.accountant, PLDAccountant):
            return slice(place, place + 1)
        longest = max(_SHORT, int(_TOGETHER * self._nodes[place]))
        return slice(place, max(place + 1, int(np.searchsorted(self._nodes, longest))))
