"""Callbacks and schedulers that act on metrics of the training data, which carry no noise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from lightning_dp._checks import MisconfigurationError
from lightning_dp._refusals import warn
from lightning_dp.run import PrivateRun

__all__ = ["Monitors"]

_PUBLIC = ("epoch", "step", "global_step")  # also where the module logs them
_CURE = (
    "It carries no noise, and what follows it steers the next steps by the records past ε. Follow a "
    "metric of public validation data, or take a schedule that is fixed in advance (StepLR, "
    "CosineAnnealingLR, OneCycleLR)."
)


class Monitors:
    """Refuses schedulers that follow a metric of the training data; says which callbacks act on one.

    Metrics of the training data are those that are logged while training: Lightning keeps them
    apart from those of validation. Which a name is shows when it is logged for the first time, so
    :meth:`check` is to be called before anything could follow it; it costs a comparison.

    Args:
        trainer: whose schedulers, callbacks and metrics.
        run: whose report says what is not covered.
    """

    def __init__(self, trainer: Trainer, run: PrivateRun) -> None:
        self._trainer = trainer
        self._run = run
        self._logged = 0  # metrics that were known at the last look
        self._said: set[str] = set()

    def begin(self) -> None:
        """Check what is known before the first step; without validation, all metrics are training's."""
        by_hand = next(self._stepped_by_hand(), None)
        if not self._trainer.enable_validation:
            if by_hand is not None:
                raise MisconfigurationError(
                    f"The module steps a {by_hand} itself, and without validation it can only be by "
                    f"a metric of the training data. {_CURE}",
                    topic="schedulers",
                )
            self._refuse_schedulers(lambda name: True)
        elif by_hand is not None:
            self._warn_once(
                f"The module steps a {by_hand} itself. If it does so by a metric of the training data, "
                f"ε does not hold. {_CURE}"
            )
        for name, part in self._trainer.lightning_module.named_modules():
            if isinstance(part, Metric) and part.state_dict():
                self._note(f"what the metric {name!r} counted, saved in checkpoints without noise")
        self.check()

    def check(self) -> None:
        """Look again if something was logged for the first time.

        Raises:
            MisconfigurationException: if a scheduler follows a metric of the training data.
        """
        results: Any = self._trainer.fit_loop.epoch_loop._results
        if len(results) == self._logged:
            return
        self._logged = len(results)
        names = {name for result in results.values() for name in _names(result.meta)}
        self._refuse_schedulers(names.__contains__)
        for who, does, name in self._acting():
            if name in names and not _is_public(name):
                self._note(f"{who}: {does}, without noise")
                self._warn_once(
                    f"{who} uses a metric of the training data: {does}. It carries no noise and ε does "
                    "not cover it; the report says so. Use a metric of public validation data, "
                    "'privacy/epsilon', or none."
                )

    def _refuse_schedulers(self, is_of_training: Callable[[str], bool]) -> None:
        for config in self._trainer.lr_scheduler_configs:
            name = config.monitor
            if config.reduce_on_plateau and name and is_of_training(name) and not _is_public(name):
                raise MisconfigurationError(
                    f"The scheduler {type(config.scheduler).__name__} follows {name!r}, a metric of "
                    f"the training data. {_CURE}",
                    topic="schedulers",
                )

    def _stepped_by_hand(self) -> Iterator[str]:
        """Yield the kinds of plateau schedulers that Lightning does not step."""
        module = self._trainer.lightning_module
        returned = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        stepped = {id(each) for each in returned} if module.automatic_optimization else set()
        for scheduler in (*returned, *vars(module).values()):
            if isinstance(scheduler, ReduceLROnPlateau) and id(scheduler) not in stepped:
                yield type(scheduler).__name__

    def _acting(self) -> Iterator[tuple[str, str, str]]:
        """Yield a callback with its argument, what it does with a metric, and the metric's name."""
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            kind = type(callback).__name__
            if isinstance(monitor := getattr(callback, "monitor", None), str):
                does = (
                    "what it decides (when training stops, which weights are kept) tells about the "
                    "records, and its scores are saved in checkpoints"
                )
                yield f"{kind}(monitor={monitor!r})", does, monitor
            if isinstance(filename := getattr(callback, "filename", None), str):
                for name in re.findall(r"{([^{}:!]+)", filename):
                    yield f"{kind}(filename={filename!r})", "values are in file names", name

    def _note(self, text: str) -> None:
        if text not in self._run.not_covered:
            self._run.not_covered = (*self._run.not_covered, text)

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            if self._trainer.is_global_zero:
                warn(message, topic="schedulers")


def _is_public(name: str) -> bool:
    return name in _PUBLIC or name.startswith("privacy/")


def _names(meta: Any) -> set[str]:
    """Return the names under which Lightning hands out a metric."""
    return {meta.name, meta.forked_name(True), meta.forked_name(False)}
