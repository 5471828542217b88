"""The noise schedule of gradient descent under the PL condition."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp._validate import normalise, positive
from lightning_dp.schedules.base import AbstractSchedule
from lightning_dp.schedules.checks import condition_number

__all__ = ["DynamicGD"]


@dataclass(frozen=True)
class DynamicGD(AbstractSchedule):
    r"""s(t) = γ^(t/4) with γ = 1 - 1/κ: minimises the utility bound of private gradient descent.

    "On Dynamic Noise Influence in Differential Private Learning" (anonymous submission),
    Theorem 4.3: for an M-smooth loss with PL constant μ, κ = M/μ, and learning rate 1/M, the noise
    of step t has influence :math:`q_t \propto \gamma^{T-t}` on the final loss, and the best
    :math:`\sigma_t^2 \propto \gamma^{t/2}` at equal :math:`\sum_t 1/\sigma_t^2`. That is
    ``Exponential(rate=-log(γ) / 4)``; it does not depend on the number of steps. For minibatches
    the influence is the same (Theorem 4.7).

    Args:
        kappa: κ > 1, the condition number. At κ = 1 only the last step's noise counts, and no
            positive schedule is best. An estimate of κ from private data is not covered by any ε.

    Raises:
        ValueError: if ``kappa`` is not finite and above 1.

    Example:
        >>> round(DynamicGD(kappa=10.0)(4), 10)     # γ = 0.9
        0.9
        >>> DynamicGD.recommended_steps(kappa=10.0, alpha=0.01)
        48
    """

    kappa: float

    def __post_init__(self) -> None:
        normalise(self, condition_number, "kappa", of="DynamicGD")

    def __call__(self, step: int) -> float:
        return math.exp(step / 4 * math.log1p(-1 / self.kappa))

    @staticmethod
    def recommended_steps(kappa: float, alpha: float) -> int:
        """T = ⌈2κ ln(1 + 1/(κα))⌉, Theorem 4.3.

        The proof's minimiser (its Eq. 26) is ⌈2 ln(1 + (1 - √γ)²/α) / ln(1/γ)⌉, which is smaller
        by about 2κ ln(4κ): the theorem puts 1/κ in the place of (1 - √γ)².

        Args:
            kappa: κ > 1.
            alpha: α > 0, see :func:`lightning_dp.schedules.paper.paper_alpha`.
        """
        kappa = condition_number("kappa", kappa, of="DynamicGD.recommended_steps")
        alpha = positive("alpha", alpha, of="DynamicGD.recommended_steps")
        return math.ceil(2 * kappa * math.log1p(1 / (kappa * alpha)))
