"""Comparison of two answers: did a record move the others' gradients, and through what?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.isolation.answers import Answer, Call
from lightning_dp.isolation.ignored import CURE

__all__ = ["CURES", "Pair", "common_factor", "mixing_module", "moved", "reordered"]

_SAME_SIZE = 1e-4  # of float32, where each row is computed as it was
_OTHER_SIZE = 1e-2  # kernels of other sizes round in another way, which steep losses enlarge
_FLOOR = 1e-2  # below this part of a record's largest entry, rounding is all there may be
_LEAST_NORM = 1e-3  # the same of the largest norm

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
        f"targets that are not ignored (ignore_index). {CURE}"
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
    "owners": (
        "training_step mixes or compares records (layers or a loss over the rows of several records), "
        "or rows_of_records() names other owners than the rows have. Let each record's output depend "
        "on its own rows alone, and give the owner of each row in the order of the layers' input"
    ),
    "no loss": (
        "training_step gives no loss, or no gradient, because of what one record holds (a number "
        "that is not finite, a size or a label out of its usual range), so this record decides "
        "whether the others count. Return the loss as it is: records whose gradients are not "
        "finite count as zero, and the others are kept"
    ),
    "steps": (
        "what the model keeps of a step's records outside its trained weights (a running maximum or "
        "mean, a queue of features, the last batch, a logged metric that is read back) changes the "
        "gradients of the next step. Compute it from the weights, fix it in advance, or leave it "
        "to logging"
    ),
    "settings": (
        "a hook, a callback or a scheduler changes gradients, the learning rate, other settings of the "
        "optimizer or modes of layers by what it saw of the records, without noise. Fix them in "
        "advance, or as functions of released values"
    ),
    "rows": (
        "the layers see another number of rows than there are records. The collate_fn and the model "
        "must keep records in the first dimension of every layer's input, one row each; where rows "
        "of a record are in it, say whose they are with lightning_dp.rows_of_records()"
    ),
}


@dataclass(frozen=True)
class Pair:
    """The calls of modules in two batches that differ in some records.

    Args:
        before, after: the calls in the two batches.
        rows_before, rows_after: where the others stand in each batch, in the same order.
        sizes: the number of records in each batch.
    """

    before: Sequence[Call]
    after: Sequence[Call]
    rows_before: Sequence[int]
    rows_after: Sequence[int]
    sizes: tuple[int, int]


def moved(before: Answer, after: Answer, factor: float = 1.0) -> bool:
    """Tell whether more than rounding lies between the second answer and ``factor`` times the first.

    Between batches of one size there is hardly any.

    Each record's norm is compared, and its gradient parameter by parameter. A second answer with
    other records than the first is another one.
    """
    if before.norms.shape != after.norms.shape or len(before.parts) != len(after.parts):
        return True
    tolerance = _SAME_SIZE if before.count == after.count else _OTHER_SIZE
    norms = before.norms.double() * factor, after.norms.double()
    least = _LEAST_NORM * torch.maximum(*norms).amax()
    if _differ(norms[0][:, None], norms[1][:, None], least, tolerance):
        return True
    pairs = [(a * factor, b) for a, b in zip(before.parts, after.parts, strict=True) if a.numel()]
    if not pairs:
        return False
    floor = _FLOOR * torch.stack([_largest(a) for a, _ in pairs]).amax(0)
    return any(_differ(a, b, floor, tolerance) for a, b in pairs)


_FEW = 64  # rows that are compared with each other


def reordered(before: Answer, after: Answer, changed: int) -> bool:
    """Tell whether all gradients but so many are in both answers, in other rows.

    A model may sort or shuffle its records: their sum is the same.

    Args:
        changed: how many records of the second batch are not in the first.
    """
    rows = range(len(before.norms))
    if len(after.norms) > _FEW or before.count != len(rows) or after.count != len(after.norms):
        return False
    left, missing = list(rows), 0
    for i in range(len(after.norms)):
        own = after.about([i])
        there = next((row for row in left if not moved(before.about([row]), own)), None)
        if there is None:
            missing += 1
        else:
            left.remove(there)
    return missing <= changed


def common_factor(before: Answer, after: Answer) -> float | None:
    """Return c if the second answer is c times the first, up to rounding; else None."""
    total = float(before.norms.sum())
    factor = float(after.norms.sum()) / total if total > 0 else 0.0
    return None if moved(before, after, factor) else factor


def mixing_module(pair: Pair) -> Call | None:
    """Find the first module that gave the other records other outputs for the same inputs."""
    for a, b in zip(pair.before, pair.after, strict=False):
        if a.name != b.name:
            return None
        changed = [_rows_moved(pair, x, y) for x, y in zip(a.inputs, b.inputs, strict=False)]
        rows = [(x, y) for x, y in zip(a.outputs, b.outputs, strict=False) if x.dim()]  # no losses
        results = [_rows_moved(pair, x, y) for x, y in rows]
        if any(results) and not any(changed):
            return a
    return None


def _rows_moved(pair: Pair, a: Tensor, b: Tensor) -> bool:
    """Compare the others' rows of a tensor with one row per record, and anything else as a whole."""
    if a.dim() and b.dim() and (len(a), len(b)) == pair.sizes:
        a, b = a[list(pair.rows_before)], b[list(pair.rows_after)]
    if a.shape != b.shape:
        return True
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return _differ(a.reshape(1, -1), b.reshape(1, -1), 0.0, _OTHER_SIZE)


def _differ(a: Tensor, b: Tensor, floor: Tensor | float, tolerance: float) -> bool:
    """Compare matrices row by row, each row by its own scale."""
    if not a.numel():
        return False
    if not a.dtype == b.dtype == torch.float32:  # the usual one stays as it is: it may be large
        a, b = a.double(), b.double()
    scale = torch.maximum(_largest(a), _largest(b))
    return not bool((_largest(a - b) <= tolerance * (scale + floor)).all())


def _largest(a: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(a, ord=torch.inf, dim=1)
    return largest
