"""The digits of norms and sums: float64 also for a device that has none, and all of those of float32."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["FullPrecision", "full_precision", "has_float64", "in_float64", "where_used"]


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


class _Setting(NamedTuple):
    """A setting of torch for the whole process, and its value with which nothing is rounded."""

    holder: Any
    name: str
    full: object

    def read(self) -> object:
        return getattr(self.holder, self.name)

    def write(self, value: object) -> None:
        setattr(self.holder, self.name, value)


def _settings() -> tuple[tuple[_Setting, ...], tuple[_Setting, ...]]:
    """Return the settings of the CPU, and all of them."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    onednn: Any = torch.backends.mkldnn
    if not hasattr(cudnn, "conv"):  # before torch 2.9
        legacy = (_Setting(cuda.matmul, "allow_tf32", False), _Setting(cudnn, "allow_tf32", False))
        return legacy[:1], legacy
    on_cpu = tuple(
        _Setting(holder, "fp32_precision", "ieee") for holder in (onednn.matmul, onednn.conv)
    )
    on_cuda = tuple(
        _Setting(holder, "fp32_precision", "ieee") for holder in (cuda.matmul, cudnn.conv)
    )
    return on_cpu, (*on_cpu, *on_cuda)


_ON_CPU, _ON_DEVICES = _settings()
_ROUNDING = ("tf32", "bf16", True)


class FullPrecision:
    """Inside, some settings are those with which nothing is rounded; see :func:`full_precision`.

    May be entered again, when it was left.
    """

    def __init__(self, lowered: tuple[tuple[_Setting, object], ...]) -> None:
        self._lowered = lowered

    @property
    def changes_any(self) -> bool:
        """True if something is rounded outside."""
        return bool(self._lowered)

    def __enter__(self) -> None:
        for setting, _ in self._lowered:
            setting.write(setting.full)

    def __exit__(self, *exception: object) -> None:
        for setting, value in self._lowered:
            setting.write(value)


_AS_IT_IS = FullPrecision(())


def full_precision(device: torch.device) -> FullPrecision:
    """Return a context in which products of float32 matrices, and convolutions, keep float32's digits.

    Elsewhere the entries of their factors may be rounded to the 11 digits of TensorFloat-32, or the 8 of
    bfloat16: CUDA's convolutions are unless they are told not to, and matrices are after
    ``torch.set_float32_matmul_precision("medium")``, which Lightning recommends. A model may compute
    its gradients like that. Norms and sums may not: terms that cancel in one of them and leave rounding
    errors in the other would let a record through that is longer than its bound.

    Args:
        device: where the products are. The settings are read now.
    """
    settings = _ON_CPU if device.type == "cpu" else _ON_DEVICES
    lowered = [(each, value) for each in settings if (value := each.read()) in _ROUNDING]
    return FullPrecision(tuple(lowered)) if lowered else _AS_IT_IS
