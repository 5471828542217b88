"""What the schedules check about their arguments; written so that NaN fails."""

from __future__ import annotations

import math

from lightning_dp._validate import number, shown

__all__ = ["condition_number", "momentum_weight"]


def condition_number(name: str, value: object, *, of: str | None = None) -> float:
    """Return a finite number greater than 1: at κ = 1, all noise but the last step's is free."""
    result = number(name, value, of=of)
    if not 1 < result < math.inf:
        raise ValueError(
            f"{shown(name, value, of)} must be finite and greater than 1: it is M / mu, smoothness "
            "over the PL constant."
        )
    return result


def momentum_weight(name: str, value: object, *, of: str | None = None) -> float:
    """Return a number in [0, 1)."""
    result = number(name, value, of=of)
    if not 0 <= result < 1:
        raise ValueError(f"{shown(name, value, of)} must be in [0, 1).")
    return result
