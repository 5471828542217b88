"""A bias-corrected moving average of the released gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp._validate import normalise, number
from lightning_dp.estimators.base import State
from lightning_dp.postprocessing.base import AbstractPostProcessor

__all__ = ["Momentum"]


@dataclass(frozen=True)
class Momentum(AbstractPostProcessor):
    """m_t = [β (1 - β^(t-1)) m_(t-1) + (1 - β) g_t] / (1 - β^t), t = 1, 2, ...

    A convex combination of all released gradients, so the first steps are not too small. Use it
    with an optimizer that has no momentum of its own.

    Args:
        beta: β in [0, 1); 0 is the identity.

    Raises:
        ValueError: if ``beta`` is outside [0, 1).

    Example:
        >>> momentum = Momentum(beta=0.9)
        >>> m, state = momentum.apply(momentum.init([torch.zeros(1)]), torch.tensor([1.0]))
        >>> m, state = momentum.apply(state, torch.tensor([0.0]))
        >>> m                                        # weights 0.9 * 0.1 and 0.1 over their sum
        tensor([0.4737])
    """

    beta: float

    def __post_init__(self) -> None:
        normalise(self, number, "beta", of="Momentum")
        if not 0 <= self.beta < 1:
            raise ValueError(f"Momentum(beta={self.beta}) must be in [0, 1).")

    def init(self, params: Sequence[Tensor]) -> State:
        return {"average": torch.zeros(sum(param.numel() for param in params)), "steps": 0}

    def apply(self, state: State, estimate: Tensor) -> tuple[Tensor, State]:
        steps = state["steps"] + 1
        weight = (1 - self.beta) / (1 - self.beta**steps)
        average = torch.lerp(state["average"].to(estimate), estimate, weight)
        return average, {"average": average, "steps": steps}
