"""The batch as it was on the host, where looking at it waits for no device."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["HostCopies"]


class HostCopies:
    """Remembers which tensors of the latest batch were moved to a device, and from where.

    Of integers only (labels, words), and only where Lightning alone moves them, so that a device's
    tensor has the values of the host's. One that was written to since then is known no longer.

    Args:
        is_plain: no hook of the user's moves batches, or changes them afterwards.

    Example:
        >>> import torch
        >>> copies, labels = HostCopies(is_plain=True), torch.tensor([1, 2])
        >>> there = labels.clone()
        >>> copies.moved([labels], [there])
        >>> copies.of(there.view(2, 1)).data_ptr() == labels.data_ptr()
        True
        >>> copies.of(there.add_(1)) is there
        True
    """

    def __init__(self, is_plain: bool) -> None:
        self._is_plain = is_plain
        self._pairs: dict[int, tuple[Tensor, Tensor, int]] = {}

    def moved(self, before: Any, after: Any) -> None:
        """Remember a batch that was moved, in place of the one before."""
        self._pairs = {}
        if not self._is_plain:
            return
        here, there = tree_leaves(before), tree_leaves(after)
        if len(here) != len(there):
            return
        for mine, its in zip(here, there, strict=True):
            if _is_plain(mine) and _is_plain(its) and mine.shape == its.shape:
                self._pairs[its.data_ptr()] = mine, its, its._version

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor as it is on the host, of the same shape; itself, where that is not known."""
        mine, its, version = self._pairs.get(tensor.data_ptr(), (None, None, 0))
        if mine is None or its is None or its._version != version:
            return tensor
        is_whole = tensor.dtype == its.dtype and tensor.numel() == its.numel()
        is_whole = is_whole and tensor.is_contiguous() and its.is_contiguous()
        return mine.reshape(tensor.shape) if is_whole else tensor


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor and not leaf.is_floating_point() and not leaf.is_inference()
