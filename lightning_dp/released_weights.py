"""Fingerprints of weights: by them a model is known again that was trained before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["fingerprints", "some_of"]

_SAMPLE = 4096  # entries of a tensor that are looked at
_MOST = 16  # tensors of a model that are remembered


def fingerprints(tensors: Iterable[object]) -> list[str]:
    """Return a hash for each tensor, of its exact values wherever they are.

    After a private step no two tensors share their values, so one of them in a new model says that
    the model, or a part of it, was trained. Tensors whose values are all equal say nothing: that is
    how they are made (biases, norms).

    Args:
        tensors: as in the values of a ``state_dict``; whatever else is among them is left out.

    Example:
        >>> one, other = torch.tensor([0.5, 1.5]), torch.tensor([0.5, 1.25])
        >>> fingerprints([one, torch.zeros(3)]) == fingerprints([one.clone()])
        True
        >>> fingerprints([one]) == fingerprints([other])
        False
    """
    return [each for each in map(_fingerprint, tensors) if each is not None]


def some_of(found: Sequence[str]) -> list[str]:
    """Return as many of them as a journal keeps, evenly chosen from first to last."""
    if len(found) <= _MOST:
        return list(found)
    return [found[i * (len(found) - 1) // (_MOST - 1)] for i in range(_MOST)]


def _fingerprint(tensor: object) -> str | None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].cpu().contiguous()
    if sample.numel() < 2 or bool((sample == sample[0]).all()):
        return None
    digest = hashlib.blake2b(f"{tensor.dtype} {tensor.numel()} ".encode(), digest_size=8)
    digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
