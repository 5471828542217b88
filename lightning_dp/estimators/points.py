"""The distance between parameters, from which difference estimators make their clip norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp.functional import flatten

__all__ = ["distance"]


def distance(params: Sequence[Tensor], point: Tensor) -> float:
    """‖x - point‖, x the parameters as one flat vector.

    Raises:
        RuntimeError: if it is not finite: no difference of gradients could be bounded by it.
    """
    step = flatten(params) - point
    norm = float(torch.linalg.vector_norm(step, dtype=torch.float64))
    if not math.isfinite(norm):
        raise RuntimeError(
            "The parameters are no longer finite, so a difference of gradients has no bound: "
            "training has diverged. Lower the learning rate, diff_norm, or restart_every "
            "(Diff2.recommend() proposes values)."
        )
    return norm
