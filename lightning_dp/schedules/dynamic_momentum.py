"""The noise schedule of gradient descent with momentum under the PL condition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from lightning_dp._validate import normalise, number, positive, whole
from lightning_dp.schedules.base import AbstractSchedule
from lightning_dp.schedules.checks import condition_number, momentum_weight

__all__ = ["DynamicMomentum"]


@dataclass(frozen=True)
class DynamicMomentum(AbstractSchedule):
    r"""s(t) = γ^(-t/4) if T <= T̂, else γ^(t/4), with γ = 1 - η0/κ: for momentum.

    "On Dynamic Noise Influence in Differential Private Learning" (anonymous submission),
    Theorem 4.6, for the bias-corrected average
    :class:`~lightning_dp.postprocessing.Momentum` with weight β and learning rate η0 / (2M): the
    influence of step t = 1..T is :math:`q_t = c_1 \gamma^{T+t}` in a run of T <= T̂ steps and
    :math:`q_t = c_2 \gamma^{\hat T-1} \gamma^{T-t}` in a longer one, where

        T̂ = max{t : γ^(t-1) >= (1-β) / (1-β^t)}.

    A short run is still averaging over all gradients, so the best noise *grows*; a long one is like
    plain gradient descent and it decays. One case applies to the whole run, so the constants
    c1, c2 cancel. The theorem asks for η0 <= 8 / (1 + √(1 + 64βγ(γ-β)^-2(1-β)^-3)), which
    is not checked. For β = 0 and T >= 2 it is ``DynamicGD(kappa / eta0)``.

    The shape depends on T only through the case; beyond ``steps`` it goes on by the same formula.

    Args:
        kappa: κ > 1, the condition number. An estimate from private data is not covered by any ε.
        eta0: η0 in (0, κ).
        beta: β in [0, γ), the weight of the past.
        steps: T >= 1, the length of the run.

    Raises:
        ValueError: for values outside these bounds.

    Example:
        >>> DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=500).turning_step
        230
        >>> short = DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=200)
        >>> long = DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=500)
        >>> round(short(40), 4), round(long(40), 4)
        (1.1057, 0.9044)
    """

    kappa: float
    eta0: float
    beta: float
    steps: int

    def __post_init__(self) -> None:
        normalise(self, condition_number, "kappa", of="DynamicMomentum")
        normalise(self, number, "eta0", of="DynamicMomentum")
        if not 0 < self.eta0 < self.kappa:
            raise ValueError(
                f"DynamicMomentum(eta0={self.eta0}) must be above 0 and below kappa={self.kappa}."
            )
        normalise(self, momentum_weight, "beta", of="DynamicMomentum")
        if not self.beta < 1 - self.eta0 / self.kappa:
            raise ValueError(
                f"DynamicMomentum(beta={self.beta}) must be below gamma = 1 - eta0/kappa = "
                f"{1 - self.eta0 / self.kappa:.6g} (Theorem 4.6)."
            )
        normalise(self, whole, "steps", of="DynamicMomentum")

    @property
    def turning_step(self) -> int:
        """T̂: runs of at most this many steps have noise that grows."""
        return _turning_step(self.kappa, self.eta0, self.beta)

    def __call__(self, step: int) -> float:
        sign = -1 if self.steps <= self.turning_step else 1
        return math.exp(sign * step / 4 * math.log1p(-self.eta0 / self.kappa))

    @staticmethod
    def recommended_steps(kappa: float, eta0: float, alpha: float) -> int:
        """T = ⌈(2κ/η0) ln(1 + η0/(κα))⌉, Theorem 4.6 (there up to a constant factor).

        Args:
            kappa: κ > 1.
            eta0: η0 in (0, κ).
            alpha: α > 0, see :func:`lightning_dp.schedules.paper.paper_alpha`.
        """
        kappa = condition_number("kappa", kappa, of="DynamicMomentum.recommended_steps")
        eta0 = positive("eta0", eta0, of="DynamicMomentum.recommended_steps")
        alpha = positive("alpha", alpha, of="DynamicMomentum.recommended_steps")
        return math.ceil(2 * kappa / eta0 * math.log1p(eta0 / (kappa * alpha)))


@lru_cache(maxsize=16)
def _turning_step(kappa: float, eta0: float, beta: float) -> int:
    """Search for T̂; it is asked for at every step."""

    def is_averaging(t: int) -> bool:
        """γ^(t-1) >= (1-β) / (1-β^t), in logarithms."""
        excess = math.log1p(-(beta**t)) - math.log1p(-beta)
        return (t - 1) * math.log1p(-eta0 / kappa) + excess >= 0

    # Lemma B.7: γ^(t-1) (1-β^t) rises, then falls, and holds with equality at t = 1.
    high = 2
    while is_averaging(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_averaging(middle) else (low, middle)
    return low
