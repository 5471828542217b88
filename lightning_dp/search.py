"""Trials whose results are all seen, and that keep to one budget together, across crashes too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import filelock

from lightning_dp._files import FILE_MODE, local_folder, make_folder, replaced
from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._validate import normalise, number, optional, positive, probability, whole
from lightning_dp.accounting.base import (
    AbstractAccountant,
    Relation,
    check_relation,
    epsilon_text,
)
from lightning_dp.accounting.calibration import alike, calibrate_steps
from lightning_dp.accounting.events import History, check_history
from lightning_dp.accounting.external import Declared
from lightning_dp.accounting.pld import EnvelopeAccountant, PLDAccountant
from lightning_dp.accounting.rdp import OneOrderAccountant, order_of_budget

__all__ = ["Search", "Trial"]

STATE = "search.json"
"""The file in which a search keeps its settings and the number of trials that were begun."""

_FORMAT = "lightning-dp-search-1"


class Trial:
    """One trial of a search, and the part of the budget that is its own.

    Args:
        number: 0, 1, ...
        share: arguments of a training that keep to that part.
    """

    def __init__(self, number: int, share: dict[str, Any]) -> None:
        self.number = number
        self._share: dict[str, Any] | None = share

    def share(self) -> dict[str, Any]:
        """Return all arguments that are about the budget, once.

        For ``DifferentialPrivacy(**trial.share(), ...)`` or ``PrivacyConfig``. None of them may be
        changed, and no second training may have them.

        Raises:
            RefusedRun: the second time.
        """
        share, self._share = self._share, None
        if share is None:
            raise RefusedRun(
                f"The share of trial {self.number} was taken already, and two trainings would spend it "
                "twice. Begin another trial.",
                topic="trials",
            )
        return share


@dataclass(frozen=True, kw_only=True)
class Search:
    """A number of trials, fixed in advance, that cost at most ``target_epsilon`` together.

    Every trial has the same share of the budget from the start. Its results may be seen, and may
    decide what the next trial tries, and whether there is one. Two ways to share:

    - with ``steps`` and ``sample_rate``: the most that any trial may use. All trials get the noise
      multiplier with which ``trials`` times that plan costs ``target_epsilon``, by
      :class:`PLDAccountant`: tight. A trial stops after ``steps``, and refuses a larger rate.
    - without: trials may differ in batch size, epochs and schedules. Each calibrates its noise for
      its share, ``rho(a) <= (target_epsilon - penalty) / trials`` at one Rényi order a that
      the budget fixes. It takes 5 to 8 % more noise.

    A trial is begun when :meth:`trial` returns it, durably. One that was killed, pruned or never
    used has taken its share; a search that is made again with the same ``folder`` goes on with
    the trials that are left, also in other processes at the same time. The journals of the trials
    are in that folder, no others may be, and ``python -m lightning_dp.report FOLDER`` adds them up.

    It covers what the trials release, and so not a choice by a score on private records: compute
    scores on public ones, or on a hold-out set that gets no guarantee.

    Args:
        trials: how many, at least 1.
        target_epsilon: ε > 0 of all of them together.
        target_delta: δ in (0, 1) of all of them together.
        folder: for the journals and the state, on this machine.
        steps, sample_rate: the most of one trial, both or none.
        relation: "add_remove" or "replace_one".
        spent: what ran before on the same records, e.g. ``[(ApproximateDP(...), 1)]``.

    Raises:
        ValueError: naming the argument; also if ``folder`` has a search with other settings, or
            ``spent`` leaves nothing.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> search = Search(trials=5, target_epsilon=3.0, target_delta=1e-5, folder=folder)
        >>> search.trial().number, search.trial().number, search.left
        (0, 1, 3)
        >>> again = Search(trials=5, target_epsilon=3.0, target_delta=1e-5, folder=folder)
        >>> [trial.number for trial in again]
        [2, 3, 4]
    """

    trials: int
    target_epsilon: float
    target_delta: float
    folder: str | Path
    steps: int | None = None
    sample_rate: float | None = None
    relation: Relation = "add_remove"
    spent: History = ()

    def __post_init__(self) -> None:
        normalise(self, whole, "trials")
        normalise(self, positive, "target_epsilon")
        normalise(self, probability, "target_delta")
        normalise(self, optional(whole), "steps")
        normalise(self, optional(number), "sample_rate")
        check_relation(self.relation)
        if (self.steps is None) != (self.sample_rate is None):
            raise ValueError(
                f"steps={self.steps} and sample_rate={self.sample_rate}: give both, the most that any "
                "trial may use, or none."
            )
        object.__setattr__(self, "folder", local_folder("folder", self.folder))
        object.__setattr__(self, "spent", tuple(check_history(self.spent, "spent")))
        _ = self._share  # refuses what cannot be met
        with self._state() as state:
            state.check(self._settings())

    # -- trials ----------------------------------------------------------------------------

    def trial(self) -> Trial:
        """Begin the next trial, durably.

        Raises:
            RefusedRun: if none is left.
        """
        with self._state() as state:
            state.check_journals(f"knows of {state.begun} trials")
            if not state.begun < self.trials:
                raise RefusedRun(
                    f"All {self.trials} trials of this search were begun, and one more would exceed "
                    f"ε = {self.target_epsilon:g}. Begin another search on a separate budget.",
                    topic="trials",
                )
            state.write(state.begun + 1)
        return Trial(state.begun - 1, {**self._share, "ledger_dir": str(self.folder)})

    def __iter__(self) -> Iterator[Trial]:
        """Begin trials until none is left, each when it is asked for."""
        while self.left:
            yield self.trial()

    @property
    def left(self) -> int:
        """The number of trials that were not begun."""
        with self._state() as state:
            return self.trials - state.begun

    @property
    def epsilon(self) -> float:
        """ε of all that was released, which is the whole budget from the first trial on.

        What came out of the trials does not lower it, as results may have decided on the next ones.
        """
        with self._state() as state:
            if state.begun:
                return self.target_epsilon
        return PLDAccountant().epsilon(self.spent, self.target_delta, self.relation)

    # -- shares ----------------------------------------------------------------------------

    @cached_property
    def _share(self) -> dict[str, Any]:
        """The arguments that give a trial its share."""
        if self.steps is None or self.sample_rate is None:
            accountant, epsilon = self._of_one_order()
            noise = {}
        else:
            z = calibrate_steps(
                alike(self.sample_rate, self.steps * self.trials),
                self.target_epsilon,
                self.target_delta,
                relation=self.relation,
                spent=self.spent,
            )
            envelope = EnvelopeAccountant(z, self.sample_rate, self.steps)
            noise = {"noise_multiplier": z}
            accountant = envelope
            # A little more: the same plan, composed again, may differ in its last digits.
            epsilon = 1.001 * envelope.epsilon(envelope.history(), self.target_delta, self.relation)
        return {
            "target_epsilon": epsilon,
            "target_delta": self.target_delta,
            "relation": self.relation,
            "accountant": accountant,
            **noise,
        }

    def _of_one_order(self) -> tuple[AbstractAccountant, float]:
        """Return the accountant of one order, and ε of a share by it."""
        left = Declared.of(self.spent, self.relation).left_of(self.target_delta)
        accountant = OneOrderAccountant(order_of_budget(self.target_epsilon, self.target_delta))
        spent = accountant.divergence(self.spent, self.relation)
        room = self.target_epsilon - spent - (accountant.penalty(left) if left > 0 else 0.0)
        if not (left > 0 and room > 0):
            raise RefusedSetting(
                f"spent leaves nothing of target_epsilon={self.target_epsilon:g} at "
                f"target_delta={self.target_delta:g} for trials. Raise one of them.",
                topic="budget-exhausted",
            )
        # The share of δ that spent takes is not the trials'.
        return accountant, accountant.penalty(self.target_delta) + room / self.trials

    # -- the state -------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        spent = [[event.to_dict(), count] for event, count in self.spent]
        return {
            "trials": self.trials,
            "target_epsilon": self.target_epsilon,
            "target_delta": self.target_delta,
            "steps": self.steps,
            "sample_rate": self.sample_rate,
            "relation": self.relation,
            "spent": spent,
        }

    def _state(self) -> _State:
        return _State(Path(self.folder), self._settings())


def search_text(path: Path) -> str:
    """Return the state of a search as one line.

    Raises:
        RefusedRun: if it cannot be read.
    """
    content = _read(path)
    return (
        f"{path}: a search of {content['trials']} trials, {content['begun']} of them begun: "
        f"ε = {epsilon_text(content['target_epsilon'], 6)} at δ = "
        f"{epsilon_text(content['target_delta'], 6)} for all of them"
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a state."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        for name in ("trials", "begun"):
            whole(name, content[name], 0)
        for name in ("target_epsilon", "target_delta"):
            positive(name, content[name])
        return content
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedRun(
            f"{path} cannot be read ({error}), so it is unknown how many trials were begun. "
            "Put the right file back, or begin a search in another folder, with the journals "
            "of this one as spent=sweep_history(...).",
            topic="trials",
        ) from None


class _State:
    """The locked file of a search."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._path, self._settings = folder / STATE, settings
        self._lock = filelock.FileLock(f"{self._path}.lock", mode=FILE_MODE)
        self.begun = 0

    def __enter__(self) -> _State:
        make_folder(self._path.parent)
        self._lock.acquire()
        try:
            if self._path.exists():
                self.begun = int(_read(self._path)["begun"])
            else:
                self.check_journals("is missing")
                self.write(0)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def check(self, settings: dict[str, Any]) -> None:
        """Refuse a search with other settings."""
        known = _read(self._path)
        for name, value in settings.items():
            if known.get(name) != json.loads(json.dumps(value)):
                raise RefusedSetting(
                    f"{name}={value!r}, and the search in {self._path.parent} was begun with "
                    f"{known.get(name)!r}. Give the same as the trials before, or another folder.",
                    topic="trials",
                )

    def check_journals(self, state: str) -> None:
        """Refuse to go on where more trainings have journals than trials were begun."""
        found = sum(1 for _ in self._path.parent.glob("*.journal"))
        if found > self.begun:
            raise RefusedRun(
                f"{found} trainings have their journals in {self._path.parent}, and {STATE} there "
                f"{state}: it was lost or is an old copy, or they were no trials of this search. Put "
                "the right file back, or begin a search in another folder, with the journals of this "
                "one as spent=sweep_history(...).",
                topic="trials",
            )

    def write(self, begun: int) -> None:
        """Write how many trials were begun, durably."""
        content = {"format": _FORMAT, **self._settings, "begun": begun}
        with replaced(self._path) as file:
            file.write(json.dumps(content, indent=1).encode())
        self.begun = begun
