"""The privacy budget as a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp._validate import probability, whole
from lightning_dp.accounting.base import AbstractAccountant, Relation, check_relation
from lightning_dp.accounting.events import sampled_gaussian
from lightning_dp.accounting.pld import accountant_or_default

__all__ = ["PrivacyBudget"]


class PrivacyBudget(Metric):
    """ε spent by Gaussian steps that a training loop reports.

    For your own training loops, and for plots; inside a Trainer the callback keeps the books.

    - ``update(noise_multiplier, sample_rate, steps)`` adds steps, and a call does so and returns ε. None
      is ever forgotten, since Lightning calls ``reset`` after each epoch on metrics that are logged:
      another budget is another object. The state is in ``state_dict``.
    - ``compute()`` is ε at ``target_delta``, from the accountant, under ``relation``.
    - In a distributed job every process counts the same steps, so nothing is reduced.

    Args:
        target_delta: δ in (0, 1).
        relation: "add_remove" or "replace_one".
        accountant: default the tight numerical one.

    Raises:
        ValueError: for a bad δ, noise multiplier, sampling rate or number of steps.

    Example:
        >>> budget = PrivacyBudget(target_delta=1e-5)
        >>> budget.update(noise_multiplier=1.0, sample_rate=0.01, steps=1000)
        >>> round(float(budget.compute()), 2)
        1.83
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    plot_lower_bound = 0.0

    noise_multipliers: Tensor
    sample_rates: Tensor
    counts: Tensor

    def __init__(
        self,
        target_delta: float,
        relation: Relation = "add_remove",
        accountant: AbstractAccountant | None = None,
    ) -> None:
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        check_relation(relation)
        self.target_delta = probability("target_delta", target_delta)
        self.relation: Relation = relation
        self.accountant = accountant_or_default(accountant)
        for name in ("noise_multipliers", "sample_rates", "counts"):
            empty = torch.zeros(0, dtype=torch.float64)
            self.add_state(name, empty, dist_reduce_fx=None, persistent=True)

    def update(self, noise_multiplier: float, sample_rate: float = 1.0, steps: int = 1) -> None:
        """Add ``steps`` steps: noise z·C on the sum over a Poisson batch of rate q (1: all)."""
        noise_multiplier, sample_rate = sampled_gaussian(noise_multiplier, sample_rate).pair
        steps = whole("steps", steps, 0)
        last = (self.noise_multipliers[-1:], self.sample_rates[-1:])
        if [float(v) for part in last for v in part] == [noise_multiplier, sample_rate]:
            self.counts = torch.cat([self.counts[:-1], self.counts[-1:] + steps])
            return
        for name, value in (
            ("noise_multipliers", noise_multiplier),
            ("sample_rates", sample_rate),
            ("counts", steps),
        ):
            setattr(self, name, torch.cat([getattr(self, name), self.counts.new_tensor([value])]))

    def forward(self, noise_multiplier: float, sample_rate: float = 1.0, steps: int = 1) -> Tensor:
        """Add steps as :meth:`update`, and return ε of all."""
        self.update(noise_multiplier, sample_rate, steps)
        epsilon = self.compute()
        self._forward_cache: Any = epsilon  # which Lightning logs at a step
        return epsilon

    def reset(self) -> None:
        """Keep all steps: what was spent cannot be taken back."""

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> nn.Module:
        """Go to another device; another type would round noise and counts."""

        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, exclude_state)

    def compute(self) -> Tensor:
        """Return ε, a float64 scalar."""
        steps = zip(
            self.noise_multipliers.tolist(),
            self.sample_rates.tolist(),
            self.counts.tolist(),
            strict=True,
        )
        history = [(sampled_gaussian(z, q), int(count)) for z, q, count in steps]
        epsilon = self.accountant.epsilon(history, self.target_delta, self.relation)
        return torch.tensor(epsilon, dtype=torch.float64)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Draw ``val``: one ε, or several over time (default: ε now).

        Returns:
            matplotlib's figure and axes.
        """
        return self._plot(val, ax)
