"""The best noise for a given influence of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp._validate import positive
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["FromInfluence"]


@dataclass(frozen=True)
class FromInfluence(AbstractSchedule):
    r"""s(t) = (q_t / q_0)^(-1/4): minimises Σ q_t σ_t² at equal Σ 1/σ_t².

    "On Dynamic Noise Influence in Differential Private Learning" (anonymous submission),
    Lemma 4.1: the minimum of :math:`\sum_t q_t \sigma_t^2` under :math:`\sum_t 1/\sigma_t^2 = R` is
    (Σ √q_t)² / R, at :math:`\sigma_t^2 = \frac{1}{R} \sum_i \sqrt{q_i / q_t}`. The gain over constant
    noise is :math:`T^2 \mathrm{Var}(\sqrt{q_t}) / R`.

    Args:
        influence: q_0, ..., q_(T-1), each finite and greater than 0: how much the variance of step
            t's noise adds to the final loss; only ratios matter. **Taken from private data, it is a
            query to them that no ε covers**: use public data, theory, or an earlier release. See
            :mod:`lightning_dp.influence`.

    Raises:
        ValueError: for values outside these bounds; when called for a step >= T.

    Example:
        >>> [FromInfluence((1.0, 16.0))(t) for t in (0, 1)]    # noise is halved where it hurts most
        [1.0, 0.5]
    """

    influence: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.influence, tuple):
            raise ValueError(
                f"FromInfluence(influence={type(self.influence).__name__}) must be a tuple of "
                "numbers: FromInfluence(tuple(values))."
            )
        if not self.influence:
            raise ValueError("FromInfluence(influence=()) must hold one value for each step.")
        checked = tuple(
            positive(f"influence[{step}]", value, of="FromInfluence")
            for step, value in enumerate(self.influence)
        )
        object.__setattr__(self, "influence", checked)

    def __call__(self, step: int) -> float:
        if not 0 <= step < len(self.influence):
            raise ValueError(
                f"FromInfluence has {len(self.influence)} values and none for step {step}: give one "
                "for each step of the run."
            )
        return math.exp((math.log(self.influence[0]) - math.log(self.influence[step])) / 4)
