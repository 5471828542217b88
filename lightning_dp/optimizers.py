"""Optimizers that use the variance of the noise in the private gradient, which is public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from lightning_dp._validate import between

__all__ = ["NOISE_VARIANCE", "DPAdamW"]

NOISE_VARIANCE = "noise_variance"
"""The key of parameter groups into which the strategy writes it before each step, if they have it."""


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
