"""What the schedules check about their arguments; written so that NaN fails."""

from __future__ import annotations

import math

__all__ = ["check_beta", "check_condition_number", "check_positive", "check_steps"]


def check_steps(name: str, steps: int) -> None:
    """A whole number of steps, at least 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not steps >= 1:
        raise ValueError(f"{name}(steps={steps!r}) must be an integer of at least 1.")


def check_positive(name: str, argument: str, value: float) -> None:
    """A finite number greater than 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name}({argument}={value}) must be finite and greater than 0.")


def check_condition_number(name: str, kappa: float) -> None:
    """A finite condition number greater than 1: at 1, all noise but the last step's is free."""
    if not 1 < kappa < math.inf:
        raise ValueError(
            f"{name}(kappa={kappa}) must be finite and greater than 1: it is M / mu, smoothness over "
            "the PL constant."
        )


def check_beta(name: str, beta: float) -> None:
    """A momentum weight in [0, 1)."""
    if not 0 <= beta < 1:
        raise ValueError(f"{name}(beta={beta}) must be in [0, 1).")
