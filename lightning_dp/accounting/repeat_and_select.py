"""A private hyper-parameter search: a random number of runs, of which only the best is released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dp.accounting.base import check_entry
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.number_of_runs import check_distribution, success_rate

__all__ = ["RepeatAndSelect"]


@dataclass(frozen=True)
class RepeatAndSelect(AbstractEvent):
    """K private runs on one data set, K random and secret, of which only the best one is released.

    Costs far less than K runs in view of everybody, since the others stay secret (Papernot and
    Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", arXiv 2110.03620v2, Theorems 2
    and 6). :class:`StreamingRDPAccountant` evaluates it; other accountants refuse it.

    Holds if all of this is so:

    - K is drawn by :func:`draw_number_of_runs` with this ``mean`` and ``shape``, before the first
      run, and once: no run is added, left out or stopped by what others gave.
    - The runs are independent and alike: each draws its hyper-parameters itself, with replacement,
      from one distribution that was fixed without looking at the data. None costs more than
      ``runs``; where candidates differ, ``runs`` is a history that bounds each of them.
    - K, the other runs, their checkpoints, journals, logs and scores, and the time that the
      search took stay secret for good. Of the best run all that it released may be published.
    - "Best" is by a score computed from what a run released and from records that ε is not about
      (public, or a hold-out set that gets no guarantee). A score computed from the protected
      records has to be a noisy release of its own, booked in ``runs``.

    The neighbouring relation and its sampling are those of ``runs``.

    Args:
        runs: the history of one run, ``[(event, count), ...]``.
        mean: the expected number of runs, at least 1. With 1 (and a finite ``shape``) there is one
            run, and the cost is that of ``runs``.
        shape: above -1: eta of the truncated negative binomial distribution (1 geometric, 0
            logarithmic), or ``inf`` for Poisson, where K = 0 must release something that does not
            depend on the data.

    Raises:
        ValueError: if an argument is out of range or NaN.

    Example:
        One run, a search of ten runs on average, and ten runs that everybody sees:

        >>> from lightning_dp.accounting import PoissonGaussian, StreamingRDPAccountant
        >>> step = PoissonGaussian(noise_multiplier=1.0, sample_rate=0.01)
        >>> search = RepeatAndSelect([(step, 1000)], mean=10, shape=0)
        >>> histories = [(step, 1000)], [(search, 1)], [(step, 10_000)]
        >>> [round(StreamingRDPAccountant().epsilon(h, delta=1e-5), 2) for h in histories]
        [2.1, 3.52, 6.71]
    """

    runs: Sequence[tuple[AbstractEvent, int]]
    mean: float
    shape: float

    def __post_init__(self) -> None:
        mean, shape = check_distribution(self.mean, self.shape)
        if shape != math.inf:
            success_rate(mean, shape)  # raises where there is none
        object.__setattr__(self, "runs", tuple(check_entry(entry) for entry in self.runs))
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "shape", shape)

    @property
    def pair(self) -> tuple[float, float]:
        """Raises ValueError: no single Gaussian costs the same."""
        raise ValueError(
            "RepeatAndSelect is bounded by Rényi divergences only: use StreamingRDPAccountant()."
        )

    def to_dict(self) -> dict[str, object]:
        """Return the name, the runs as pairs, the mean, and the shape (``"inf"`` for Poisson)."""
        return {
            "event": "RepeatAndSelect",
            "runs": [[event.to_dict(), count] for event, count in self.runs],
            "mean": self.mean,
            "shape": "inf" if self.shape == math.inf else self.shape,
        }
