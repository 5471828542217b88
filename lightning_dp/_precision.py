"""Sums in float64, also for tensors of a device that has none."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["has_float64", "in_float64", "where_used"]


@functools.cache
def has_float64(kind: str) -> bool:
    """Tell whether a kind of device computes in float64: Apple's does not.

    Example:
        >>> has_float64("cpu")
        True
    """
    try:
        torch.ones(1, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor as float64: where it is, or on the host if its device has no float64.

    For what has few entries: a number or a few for each record.
    """
    return tensor.double() if has_float64(tensor.device.type) else tensor.cpu().double()


def where_used(numbers: Tensor, device: torch.device) -> Tensor:
    """Return what :func:`in_float64` may have left on the host on the device; rounded, if it has to be.

    A norm that is rounded to float32 is off by 6e-8 of itself at most; one that float32 does not hold
    is infinite, so that its record contributes nothing.
    """
    if numbers.device.type == device.type or has_float64(device.type):
        return numbers.to(device)
    return numbers.float().to(device)
