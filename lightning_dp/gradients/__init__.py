"""Gradient engines: who computes the gradient of each record."""

from __future__ import annotations

from lightning_dp.gradients.base import AbstractGradientEngine, UnsupportedModelError
from lightning_dp.gradients.opacus_hooks import OpacusHooks
from lightning_dp.gradients.raw import RawGradientGuard, RawGradientHookError

__all__ = [
    "AbstractGradientEngine",
    "OpacusHooks",
    "RawGradientGuard",
    "RawGradientHookError",
    "UnsupportedModelError",
    "make_engine",
]


def make_engine(name: str) -> AbstractGradientEngine:
    """The engine of that name; "auto" is the best there is.

    Raises:
        ValueError: for a name that is not known.
    """
    engines = {"auto": OpacusHooks, "hooks": OpacusHooks}
    if name not in engines:
        raise ValueError(f"engine={name!r} is not one of {sorted(engines)}.")
    return engines[name]()
