"""Comparison of two answers: did a record move the others' gradients, and through what?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.isolation.passes import Answer, Call

__all__ = ["CURES", "Pair", "common_factor", "mixing_module", "moved"]

_TOLERANCE = 1e-3  # of float32, with room for sums in another order
_FLOOR = 1e-3  # below this part of the largest gradient, rounding is all there may be

CURES = {
    "module": (
        "lets the records of a batch change each other's outputs (a normalisation over the batch, "
        "routing with a capacity or with statistics of the batch, positions counted over the batch). "
        "Normalise each record alone (GroupNorm, LayerNorm), route each token without looking "
        "at others, count positions along the record"
    ),
    "denominator": (
        "the loss divides by something that other records change: class weights "
        "(cross_entropy(weight=...)), the number of tokens or mask entries in the batch, or of "
        "targets that are not ignored (ignore_index). Take the loss of each record first, with "
        "reduction='none' and the record's own denominator, and then its mean over the records"
    ),
    "sum": (
        "the loss is a sum over the records, or is divided by a fixed number. Gradients per record "
        "are those of a mean: use reduction='mean', or .mean() over the records"
    ),
    "pairs": (
        "training_step mixes or compares records (a contrastive or ranking loss, mixup, statistics "
        "of the batch). Use a loss of single records, or let one record of the data set hold "
        "everything that is compared"
    ),
    "rows": (
        "the layers see another number of rows than there are records. The model must keep records "
        "in the first dimension of every layer's input, one row each"
    ),
}


@dataclass(frozen=True)
class Pair:
    """Two batches that differ in one record, with the answers about all their other records.

    Args:
        before, after: the answers, for the same weights of the others.
        rows_before, rows_after: where the others stand in each batch, in the same order.
        sizes: the number of records in each batch.
    """

    before: Answer
    after: Answer
    rows_before: Sequence[int]
    rows_after: Sequence[int]
    sizes: tuple[int, int]


def moved(before: Answer, after: Answer, factor: float = 1.0) -> bool:
    """Tell whether more than rounding lies between the second answer and ``factor`` times the first.

    Each record's norm is compared, and the weighted sum parameter by parameter.
    """
    if _differ(before.norms * factor, after.norms, floor=0.0):
        return True
    scale = max(float(_largest(part)) for part in after.parts if part.numel())
    return any(
        _differ(a if factor == 1 else a * factor, b, floor=_FLOOR * scale)
        for a, b in zip(before.parts, after.parts, strict=True)
        if a.numel()
    )


def common_factor(before: Answer, after: Answer) -> float | None:
    """Return c if the second answer is c times the first, up to rounding; else None."""
    total = float(before.norms.sum())
    factor = float(after.norms.sum()) / total if total > 0 else 0.0
    return None if moved(before, after, factor) else factor


def mixing_module(pair: Pair) -> Call | None:
    """Find the first module that gave the other records other outputs for the same inputs."""
    for a, b in zip(pair.before.calls, pair.after.calls, strict=False):
        if a.name != b.name:
            return None
        changed = [_rows_moved(pair, x, y) for x, y in zip(a.inputs, b.inputs, strict=False)]
        results = [_rows_moved(pair, x, y) for x, y in zip(a.outputs, b.outputs, strict=False)]
        if any(results) and not any(changed):
            return a
    return None


def _rows_moved(pair: Pair, a: Tensor, b: Tensor) -> bool:
    """Compare the others' rows of a tensor with one row per record, and anything else as a whole."""
    if a.dim() and b.dim() and (len(a), len(b)) == pair.sizes:
        a, b = a[list(pair.rows_before)], b[list(pair.rows_after)]
    if a.shape != b.shape:
        return True
    return _differ(a, b, floor=0.0)


def _differ(a: Tensor, b: Tensor, floor: float) -> bool:
    if not a.numel():
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.dtype == b.dtype == torch.float32:  # the usual one stays as it is: it may be large
        a, b = a.double(), b.double()
    scale = torch.maximum(_largest(a), _largest(b))
    return not bool(_largest(a - b) <= _TOLERANCE * (scale + floor))


def _largest(a: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(a, ord=torch.inf)
    return largest
