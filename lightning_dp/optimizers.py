r"""Optimizers that use the variance of the noise in the private gradient, which is public.

The strategy writes it into each parameter group that has the key ``"noise_variance"``, before each step.
It is known for chains of filters of first order: with x_0 the estimate and x_1, ... what the
post-processors make of it, each is :math:`x_i(t) = a_i(t) x_i(t-1) + b_i(t) x_{i-1}(t)`, and x_0 has the
release in the place of the x before it. The covariance of the noise in (x_0, x_1, ...) follows step by
step; the last variance is :math:`\sum_k h_k^2 s_k^2`, h the response of the whole chain to the release
of step k and s_k the standard deviation of its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from lightning_dp._validate import between
from lightning_dp.estimators.base import AbstractEstimator
from lightning_dp.postprocessing import AbstractPostProcessor

__all__ = ["NOISE_VARIANCE", "DPAdamW", "NoiseFilter", "with_noise_variance"]

NOISE_VARIANCE = "noise_variance"


class DPAdamW(AdamW):
    r"""AdamW that subtracts the noise from its second moment.

    .. math::
        φ_t = β_2 φ_{t-1} + (1 - β_2) Φ_t, \qquad
        θ_t = (1 - η λ) θ_{t-1} - η \frac{\hat m_t}{\sqrt{\max(\hat v_t - \hat φ_t,\; f \hat φ_t)} + ε}

    with :math:`\hat m, \hat v` AdamW's moments after their bias correction, Φ_t the variance of the noise
    in each entry of ``p.grad`` at step t, and :math:`\hat φ` corrected alike. Noise alone makes
    :math:`\hat v` as large as :math:`\hat φ` everywhere, so AdamW under noise is SGD with momentum;
    with it subtracted, entries of small gradients take larger steps again (Tang, Shpilevskiy and
    Lécuyer, DP-AdamBC, 2023, arXiv:2312.14334). All of it is public, so it costs no privacy.

    In a private run the strategy writes Φ_t, for any schedule, momentum or smoothing, and refuses where
    it is not known. Without one Φ is 0 and this is AdamW, bit for bit where AdamW loops over parameters
    (on the CPU).

    Args:
        params, lr, betas, eps, weight_decay: as for ``torch.optim.AdamW``.
        floor: f in (0, 1]. What is left of pure noise is about
            :math:`\sqrt{2 (1 - β_2) / (1 + β_2)}` of :math:`\hat φ`, 3 % for β_2 = 0.999: a smaller floor
            lets entries without a gradient take steps :math:`1/\sqrt f` times as long.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = DPAdamW([weight], lr=0.1)
        >>> optimizer.param_groups[0]["noise_variance"] = 0.5        # a private run does this
        >>> weight.grad = torch.tensor([1.0, 1.0])
        >>> optimizer.step()
        >>> weight.data                                              # 0.1 / sqrt(1 - 0.5)
        tensor([-0.1414, -0.1414])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        floor: float = 0.05,
    ) -> None:
        self._own = {
            "floor": between("(0, 1]")("floor", floor),
            NOISE_VARIANCE: 0.0,
            "noise_average": 0.0,
        }
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.defaults.update(self._own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**self._own, **param_group})
        if any(param.is_complex() for param in self.param_groups[-1]["params"]):
            raise ValueError(
                "DPAdamW takes real parameters. Keep the parts of complex ones in one real parameter."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:  # of AdamW, whose state may be loaded
            for name, value in self._own.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; ``closure`` computes the loss, and gradients are released in it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        noise = beta2 * group["noise_average"] + (1 - beta2) * group[NOISE_VARIANCE]
        group["noise_average"] = noise
        if not params:
            return
        states = [self._state(param) for param in params]
        gradients = [param.grad for param in params]
        first, second, steps = (
            [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        torch._foreach_add_(steps, 1)
        counts = [float(step) for step in steps]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        squares = list(torch._foreach_sub(second, noise)) if noise > 0 else second
        if noise > 0:
            torch._foreach_clamp_min_(squares, group["floor"] * noise)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, first, roots, [-lr / (1 - beta1**t) for t in counts])

    def _state(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


@dataclass
class NoiseFilter:
    """The variance of the noise in each entry of the private gradient, followed over steps.

    Args:
        estimator: turns releases into estimates.
        postprocessing: applied to these, in order.

    Example:
        >>> from lightning_dp import MeanGradient, Momentum
        >>> chain = NoiseFilter(MeanGradient(), [Momentum(0.5)])
        >>> chain.advance(step=0, noise_std=1.0, size=10)
        1.0
        >>> round(chain.advance(step=1, noise_std=1.0, size=10), 4)  # (1/3)² + (2/3)²
        0.5556
    """

    estimator: AbstractEstimator
    postprocessing: Sequence[AbstractPostProcessor]
    covariance: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = 1 + len(self.postprocessing)
        self.covariance = [[0.0] * size for _ in range(size)]

    @property
    def part_without_variance(self) -> str | None:
        """The name of the first part whose noise is not known; None if all are."""
        if self.estimator.memory(0) is None:
            return repr(self.estimator)
        mixing = [each for each in self.postprocessing if not each.is_entrywise]
        unknown = [each for each in self.postprocessing if each.filter(0, 2) is None] + mixing[1:]
        return repr(unknown[0]) if unknown else None

    def advance(self, step: int, noise_std: float, size: int) -> float | None:
        """Return the variance at step t; None if it is not known.

        Args:
            step: t, from 0.
            noise_std: of the noise in each entry of the release.
            size: d, the entries of the gradient.
        """
        memory = self.estimator.memory(step)
        filters = [each.filter(step, size) for each in self.postprocessing]
        if memory is None or None in filters:
            return None
        if memory == 0 and not filters:  # as nearly always
            self.covariance = [[noise_std**2]]
            return noise_std**2
        before = self.covariance
        row, gain = (
            [0.0] * len(before),
            1.0,
        )  # of x_(i-1), on the x of the step before and the release
        rows, gains = list[list[float]](), list[float]()
        for i, (kept, new) in enumerate([(memory, 1.0), *filters]):  # type: ignore[misc]
            row, gain = [new * each for each in row], new * gain
            row[i] += kept
            rows.append(row)
            gains.append(gain)
        both = list(zip(rows, gains, strict=True))
        moved = [[sum(map(float.__mul__, row, column)) for column in before] for row in rows]
        self.covariance = [
            [sum(map(float.__mul__, a, b)) + g * h * noise_std**2 for b, h in both]
            for a, g in zip(moved, gains, strict=True)
        ]
        return self.covariance[-1][-1]


def with_noise_variance(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups that have a place for the variance of the noise in ``p.grad``."""
    return [group for group in optimizer.param_groups if NOISE_VARIANCE in group]
