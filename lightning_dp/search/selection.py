"""A random, secret number of trainings, of which only the best is ever seen."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning_dp._files import local_folder
from lightning_dp._refusals import RefusedRun
from lightning_dp._validate import between, normalise, number, positive, probability, whole
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.calibration import calibrate_history
from lightning_dp.accounting.declared_in_advance import EnvelopeAccountant
from lightning_dp.accounting.events import RepeatAndSelect, sampled_gaussian
from lightning_dp.accounting.journal import new_id
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.rdp import StreamingRDPAccountant
from lightning_dp.accounting.search import draw_number_of_runs

__all__ = ["Attempt", "Selection"]

_Released = TypeVar("_Released")


@dataclass(frozen=True)
class Attempt:
    """One training of a selection.

    Args:
        privacy: for ``DifferentialPrivacy(**attempt.privacy, ...)``; none of it may be changed.
        quiet: for ``Trainer(**attempt.quiet, ...)``: no logger, no checkpoints, no bars, and a
            folder that is deleted.
    """

    privacy: dict[str, Any]
    quiet: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Selection(Generic[_Released]):
    """A random number K of trainings of which the best is released, for ``target_epsilon`` in all.

    That costs far less than K trainings in view of everybody: :class:`RepeatAndSelect` has the
    theorem and its conditions. Done here: the noise is calibrated; the whole search is charged in a
    journal in ``folder`` before anything is trained; K is drawn from the operating system's entropy,
    once; each training may use ``steps`` at ``sample_rate`` at most; what is printed, logged or
    warned in this process meanwhile is swallowed, and the folder of the journals and files of the
    trainings is deleted; the number of a training is told to nobody.

    For you to keep, since no program can:

    - **Time.** How long the search took tells K. Who may see the result must not see when it began
      and ended, the bill, the load of the machine, or dates of files. Nor may results be handed
      out earlier when they are ready earlier.
    - ``train`` draws its hyper-parameters itself, from a distribution that was fixed without
      looking at the data, with fresh randomness, and remembers nothing from call to call.
    - ``train`` sends nothing anywhere: no W&B run, no file, no other process's output.
    - The score comes from what the training released, on records that ε is not about.
    - If the search is killed it has cost all of its ε, and to begin again costs it again. Files of
      a killed search stay in the system's folder for temporary files: delete them.

    Args:
        mean: of K, at least 1. 10 is usual.
        shape: of K's distribution: 0 logarithmic (cheapest), 1 geometric; finite, above -1.
        target_epsilon: ε > 0 of the whole search.
        target_delta: δ in (0, 1).
        steps, sample_rate: the most of one training.
        folder: for the journal of the search, on this machine.
        relation: "add_remove" or "replace_one".

    Raises:
        ValueError: naming the argument, or if no noise keeps to the budget.

    Example:
        >>> import tempfile
        >>> selection = Selection(
        ...     mean=10, shape=0, target_epsilon=3.0, target_delta=1e-5, steps=1000, sample_rate=0.01,
        ...     folder=tempfile.mkdtemp(),
        ... )
        >>> round(selection.noise_multiplier, 2)
        1.08
    """

    mean: float
    shape: float
    target_epsilon: float
    target_delta: float
    steps: int
    sample_rate: float
    folder: str | Path
    relation: Relation = "add_remove"

    def __post_init__(self) -> None:
        normalise(self, between("[1, inf)"), "mean")
        normalise(self, between("(-1, inf)"), "shape")
        normalise(self, positive, "target_epsilon")
        normalise(self, probability, "target_delta")
        normalise(self, whole, "steps")
        normalise(self, number, "sample_rate")
        check_relation(self.relation)
        object.__setattr__(self, "folder", local_folder("folder", self.folder))
        _ = self.noise_multiplier  # refuses what cannot be met

    @cached_property
    def noise_multiplier(self) -> float:
        """z of every training."""
        return calibrate_history(
            lambda z: [(self._event(z), 1)],
            self.target_epsilon,
            self.target_delta,
            relation=self.relation,
            accountant=StreamingRDPAccountant(),
        )

    @property
    def event(self) -> RepeatAndSelect:
        """The event that the whole search is charged as."""
        return self._event(self.noise_multiplier)

    def _event(self, noise_multiplier: float) -> RepeatAndSelect:
        run = (sampled_gaussian(noise_multiplier, self.sample_rate), self.steps)
        return RepeatAndSelect([run], self.mean, self.shape)

    def best(self, train: Callable[[Attempt], tuple[float, _Released]]) -> _Released:
        """Charge the search, train K times, and return what the best training released.

        Args:
            train: trains once, and returns a score (larger is better; NaN counts as the worst) and
                what may be published if it is the best.

        Raises:
            RefusedRun: if a training fails: without saying which, nor how many there were.
        """
        ledger = Ledger()
        ledger.begin(new_id(), Path(self.folder))
        ledger.charge(self.event)
        ledger.end()
        with _silence():
            found = self._best_of(draw_number_of_runs(self.mean, self.shape), train)
        return found

    def _best_of(self, runs: int, train: Callable[[Attempt], tuple[float, _Released]]) -> _Released:
        results = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory(prefix="lightning-dp-") as folder:
                try:
                    results.append(train(self._attempt(folder)))
                except Exception as error:
                    raise RefusedRun(
                        f"A training of the search failed with {type(error).__name__}. The search "
                        "was charged, and nothing of it is released. Try train on public data first.",
                        topic="trials",
                    ) from None
        # NaN is smaller than anything.
        return max(results, key=lambda each: (each[0] == each[0], each[0]))[1]

    def _attempt(self, folder: str) -> Attempt:
        envelope = EnvelopeAccountant(self.noise_multiplier, self.sample_rate, self.steps)
        alone = envelope.epsilon(envelope.history(), self.target_delta, self.relation)
        privacy = {
            "target_epsilon": 1.001 * alone,  # the same plan may differ in its last digits
            "target_delta": self.target_delta,
            "noise_multiplier": self.noise_multiplier,
            "relation": self.relation,
            "accountant": envelope,
            "ledger_dir": folder,
        }
        quiet = {
            "default_root_dir": folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Attempt(privacy, quiet)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Swallow what this process prints, logs and warns."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
