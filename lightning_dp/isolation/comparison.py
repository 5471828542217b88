r"""The comparison of two runs: how far the clipped sum of the kept samples moves, in units of C.

Some samples of a batch are kept, the others exchanged for copies of them. With :math:`a_i` and
:math:`b_i` the gradients of the k kept ones in the two runs, of n in the whole batch, the movement is

.. math:: \frac{n}{kC} \Bigl\| \sum_i \mathrm{clip}_C(a_i) - \mathrm{clip}_C(b_i) \Bigr\|,
    \qquad \frac1C \sqrt{\frac nk \sum_i \| \mathrm{clip}_C(a_i) - \mathrm{clip}_C(b_i) \|^2},
    \qquad \frac nk \Bigl| \sum_i \frac{\|a_i\| - \|b_i\|}{\max(C, \|a_i\|)} \Bigr|,

whichever is largest: what clipping should bound by C is the sum, and the first is an estimate of what
the exchanged samples did to that of the whole batch. The second sees movements that cancel in this sum
and would not in others. The third sees a common factor, such as another denominator of the loss, which
clipping hides while all gradients are longer than C, and would not later.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dp.clipping import Rescaling
from lightning_dp.functional import in_float64, number_of_entries
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.batches import RowOwners
from lightning_dp.gradients.batches import leaves as leaves_of
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.parameter_sum import BookkeptGradients, MaterialisedGradients
from lightning_dp.gradients.snapshot import is_same_content

__all__ = [
    "NOT_SAMPLED",
    "TOLERANCE",
    "Call",
    "Entries",
    "GradientSample",
    "UnitRows",
    "are_given_the_same",
    "are_same_rows",
    "exchanged",
    "first_that_mixes",
    "have_same_shapes",
    "movement",
    "movement_if_ordered",
    "own_copies",
    "owners_in",
    "places_in",
    "resolution",
    "rows_in",
    "take_sample",
    "watch_calls",
    "were_ordered",
]

TOLERANCE = 0.05
"""C that the sum of the whole batch may move by: rounding, and no coupling worth the name."""

_ROUNDING = 1e-4  # of a gradient's length
_SINGLE, _HALF_ROUNDING = (
    1e-5,
    8.0,
)  # units of eps that are rounding; coarser types have a larger eps
_OUTPUT_ROUNDING = 1e-3  # of a module's largest output
_SKETCH = 1 << 16  # entries that are kept of a longer sum
_PARAMETERS, _ENTRIES = 8, 32  # parameters looked at, and entries of each gradient


@dataclass(frozen=True)
class GradientSample:
    """The part that is kept of the gradients of some samples of one run; sensitive.

    Args:
        total: their clipped sum in units of C, or a sketch of it that keeps its length.
        norms: of each gradient before it is clipped, in units of C (of the norm from which on another
            rule bends), shape (k,); 0 if it is not finite.
        entries: of each clipped gradient, some, in units of C, shape (k, m), weighted so that their
            square is on average that of all; None where the engine keeps norms alone.
    """

    total: Tensor = field(repr=False)
    norms: Tensor = field(repr=False)
    entries: Tensor | None = field(repr=False)


NOT_SAMPLED = GradientSample(torch.zeros(0), torch.zeros(0), None)
"""Of gradients that are there, where nothing but that is compared."""


@dataclass(frozen=True)
class Entries:
    """The entries of each gradient that are compared, drawn of some parameters.

    Args:
        size: of a flat gradient.
        places: in flat gradients, sorted and distinct.
        weights: of each.
        parameters: the number of the one that each is of.
        seed: public.
    """

    size: int
    places: Tensor
    weights: Tensor
    parameters: Tensor
    seed: int

    @classmethod
    def drawn(cls, params: Sequence[Tensor], seed: int) -> Entries:
        """Draw them; the same seed gives the same ones."""
        generator = random.Random(seed)
        sizes = [number_of_entries([param]) for param in params]
        starts = [0, *accumulate(sizes)]
        chosen = generator.sample(range(len(sizes)), min(_PARAMETERS, len(sizes)))
        numbers = [i for i in sorted(chosen) if sizes[i]]
        places, weights, of = list[int](), list[float](), list[int]()
        for i in numbers:
            count = min(_ENTRIES, sizes[i])
            places += [starts[i] + j for j in sorted(generator.sample(range(sizes[i]), count))]
            weights += [(count * len(numbers) / (sizes[i] * len(sizes))) ** -0.5] * count
            of += [i] * count
        whole = partial(torch.tensor, dtype=torch.int64)
        return cls(
            sum(sizes), whole(places), torch.tensor(weights, dtype=torch.float64), whole(of), seed
        )


def take_sample(
    gradients: AbstractPerSampleGradients,
    rows: list[int],
    clip_norm: float,
    which: Entries,
    clipping: Rescaling,
) -> GradientSample:
    """Return what is compared of the gradients of some samples.

    They cannot be used afterwards, unless they are never made (:class:`BookkeptGradients`).

    Args:
        gradients: of all samples of the run.
        rows: the places of the samples.
        clip_norm: C; where it is infinite, the unit is 1.
        which: of each gradient's entries.
        clipping: the rule.
    """
    if isinstance(gradients, BookkeptGradients):
        gradients = gradients.of(torch.tensor(rows))
        rows = list(range(len(rows)))
    norms = clipping.norms(gradients).detach()  # first: what is made for them may be used again
    unit = clip_norm if clip_norm < math.inf else 1.0
    factors = clipping.factors(norms, clip_norm) / unit
    at = torch.tensor(rows, device=norms.device)
    weights = torch.zeros_like(factors).index_copy_(0, at, factors[at])
    try:
        few = gradients.restrict(which.places)
    except NotImplementedError:
        few = None
    entries = None
    if isinstance(few, MaterialisedGradients):
        found = in_float64(few.entries().detach()[at])
        own = in_float64(factors[at])
        # Of the parameter that a place is in, or of all.
        own = own[:, which.parameters.to(own.device)] if own.dim() > 1 else own.unsqueeze(1)
        found = found * own * which.weights.to(found)
        entries = torch.where(found.isfinite(), found, 0.0)
    total = _sketch(gradients.sums_by_parameter(weights), which.size, which.seed)
    lengths = clipping.relative_norms(in_float64(norms[at]), clip_norm)
    return GradientSample(in_float64(total), lengths.where(lengths.isfinite(), 0.0), entries)


def movement(before: GradientSample, after: GradientSample, n: int, k: int) -> Tensor:
    """Return the estimate, in C, of how far the sum of the whole batch moved.

    Args:
        before, after: the same k samples, in the same order.
        n: the samples of the whole batch.
        k: those that were kept.
    """
    moved: Tensor = (before.total - after.total).norm() * (n / k)
    longer = ((before.norms - after.norms) / before.norms.clamp(min=1.0)).sum().abs() * (n / k)
    moved = torch.maximum(moved, longer)
    if before.entries is None or after.entries is None:
        return moved
    apart = (before.entries - after.entries).norm() * (n / k) ** 0.5
    return torch.maximum(moved, apart)


def movement_if_ordered(
    before: GradientSample, after: GradientSample, n: int, k: int, eps: float
) -> float:
    """Return how far the sum moved, in C, if some samples alone have gradients that they had among all.

    By some entries of these, and their norms: each row of the second run is paired with the nearest one
    of the first; infinity where that is another gradient, and not this one up to rounding.
    """
    if before.entries is None or after.entries is None:
        return math.inf
    # Entries are at most C: norms that are far longer would decide alone.
    longest = before.norms.max().clamp(min=1.0)
    rows = torch.cat([before.entries, (before.norms / longest).unsqueeze(1)], dim=1)
    others = torch.cat([after.entries, (after.norms / longest).unsqueeze(1)], dim=1)
    rounding = max(_ROUNDING, 0.0 if eps < _SINGLE else _HALF_ROUNDING * eps)
    left, pairs = list(range(len(rows))), list[int]()
    for row in others:
        distances = (rows[left] - row).norm(dim=1)
        nearest = int(distances.argmin())
        if not float(distances[nearest]) <= rounding * (float(row.norm()) + rounding):
            return math.inf
        pairs.append(left.pop(nearest))
    own = before.entries[pairs]
    found = GradientSample(own.sum(0), before.norms[pairs], own)
    return float(movement(found, replace(after, total=after.entries.sum(0)), n, k))


def resolution(eps: float, n: int, k: int) -> float:
    """Return the movement, in C, that rounding alone may show.

    Where two runs have other shapes inside the model, gradients differ by some ``eps`` of their length,
    each in another direction.

    Args:
        eps: of the type in which the model computes.
        n, k: see :func:`movement`.

    Example:
        >>> resolution(torch.finfo(torch.float32).eps, 512, 128) < TOLERANCE
        True
        >>> resolution(torch.finfo(torch.bfloat16).eps, 512, 128) < TOLERANCE
        False
    """
    return (256.0 if eps < _SINGLE else _HALF_ROUNDING) * eps * n / math.sqrt(k)


def _sketch(parts: Iterable[Tensor], size: int, seed: int) -> Tensor:
    """Add up signed, shifted rows of a long vector: a linear map that keeps its length on average.

    Args:
        parts: of the vector, in order; a short one is kept as it is.
        size: entries of all parts.
        seed: public.
    """
    rows, generator = -(-size // _SKETCH), torch.Generator().manual_seed(seed)
    signs = (torch.randint(2, (rows,), generator=generator) * 2 - 1).tolist()
    shifts = torch.randint(_SKETCH, (rows,), generator=generator).tolist()
    if rows <= 1:
        signs, shifts = [1], [0]
    found, begin = torch.zeros(0), 0
    for part in parts:
        if not len(found):
            found = part.new_zeros(min(size, _SKETCH))
        while len(part):
            row, at = divmod(begin, _SKETCH)
            to = (at + shifts[row]) % _SKETCH
            here, part = part.tensor_split([min(_SKETCH - at, len(found) - to)])
            found[to : to + len(here)].add_(here.detach(), alpha=signs[row])
            begin += len(here)
    return found


# -- batches -----------------------------------------------------------------------------------------


class UnitRows(tuple[Any, ...]):
    """The rows of one unit, as one of several samples."""

    __slots__ = ()


def rows_in(samples: Sequence[Any]) -> list[Any]:
    """Return the rows of samples, one unit's after the other's."""
    found = (each if isinstance(each, UnitRows) else (each,) for each in samples)
    return [row for rows in found for row in rows]


def owners_in(samples: Sequence[Any]) -> RowOwners | None:
    """Return the sample of each row; None where each row is one."""
    if not any(isinstance(each, UnitRows) for each in samples):
        return None
    counts = torch.tensor([len(each) for each in samples])
    return RowOwners(len(samples), torch.arange(len(samples)).repeat_interleave(counts))


def places_in(samples: Sequence[Any], kept: Sequence[int]) -> list[int]:
    """Return the places of the rows of some samples among those of all.

    Example:
        >>> places_in([UnitRows("ab"), UnitRows("c"), UnitRows("de")], [0, 2])
        [0, 1, 3, 4]
    """
    owners = owners_in(samples)
    places = None if owners is None else owners.places()
    return list(kept) if places is None else [int(row) for i in kept for row in places[i]]


def _like(place: Any, given: Any) -> Any:
    """Return a sample for a place; of a unit as many rows as are there, so that all rows stay."""
    if not isinstance(place, UnitRows):
        return given
    return UnitRows(given[i % len(given)] for i in range(len(place)))


def exchanged(samples: Sequence[Any], kept: Sequence[int], turn: int = 0) -> list[Any]:
    """Return samples of which some stay at their places, with copies of them at the others.

    Args:
        samples: n samples.
        kept: the places of k of them, at least one; each is copied as often as any other, or once more.
        turn: the kept sample whose copy is put first.

    Example:
        >>> "".join(exchanged("abcdef", [1, 4]))
        'bbebee'
        >>> exchanged([UnitRows("ab"), UnitRows("c")], [1])
        [('c', 'c'), ('c',)]
    """
    found, given = list(samples), turn
    for place in range(len(samples)):
        if place not in kept:
            found[place] = _like(samples[place], samples[kept[given % len(kept)]])
            given += 1
    return found


def own_copies(samples: Sequence[Any]) -> list[Any]:
    """Return copies of samples, of which a ``collate_fn`` may do what it likes."""
    try:
        return [copy.deepcopy(sample, _rows_cloned(sample)) for sample in samples]
    except Exception:  # objects of the user's that cannot be copied: views of a file
        return list(samples)


def _rows_cloned(sample: Any) -> dict[int, Any]:
    """Return clones of tensors, by identity: ``deepcopy`` would copy all rows of their storage."""
    tensors = (each for each in leaves_of(sample, rows=True) if isinstance(each, Tensor))
    return {id(each): each.detach().clone() for each in tensors}


def were_ordered(before: Any, after: Any, size: int, kept: Sequence[int]) -> bool:
    """Return True if some kept samples are not where they were put, and all rows are of the first batch.

    Args:
        before, after: two batches, of which one may be padded further.
        size: the samples in each.
        kept: the places of the kept ones in their lists.
    """
    leaves = _leaves_of_samples(before, after, size)
    if all(_are_equal(leaves, i, i) for i in kept):
        return False
    # A row of other samples' making is no order: let the gradients show it.
    return all(any(_are_equal(leaves, i, j) for i in range(size)) for j in range(size))


def are_same_rows(before: Any, after: Any, size: int, kept: Sequence[int]) -> bool:
    """Return True if two batches of a size hold the same of some samples, up to padding."""
    leaves = _leaves_of_samples(before, after, size)
    return all(_are_equal(leaves, i, i) for i in kept)


def are_given_the_same(before: Any, after: Any, size: int, kept: Sequence[int]) -> bool:
    """Return True if two batches hold the same for some samples, and in what all of them share."""
    mine, its = leaves_of(before, rows=True), leaves_of(after, rows=True)
    if len(mine) != len(its):
        return False
    return all(_are_the_same(a, b, size, kept) for a, b in zip(mine, its, strict=True))


def _are_the_same(a: Any, b: Any, size: int, kept: Sequence[int]) -> bool:
    if isinstance(a, Tensor | np.ndarray) and isinstance(b, Tensor | np.ndarray):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        if a.dim() and b.dim() and len(a) == len(b) == size:
            a, b = a[list(kept)], b[list(kept)]
        return is_same_content(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b) == size:
        return all(a[i] == b[i] for i in kept)
    return type(a) is type(b) and bool(a == b)


def have_same_shapes(before: Any, after: Any) -> bool:
    """Return True if the tensors of both batches have the same shapes: dropout is drawn by shape."""
    shapes = [
        [getattr(leaf, "shape", None) for leaf in leaves_of(batch, rows=True)]
        for batch in (before, after)
    ]
    return shapes[0] == shapes[1]


def _leaves_of_samples(before: Any, after: Any, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of both batches that have a row for each sample, on the host."""
    of_both = [
        (torch.as_tensor(a).detach().cpu(), torch.as_tensor(b).detach().cpu())
        for a, b in zip(leaves_of(before, rows=True), leaves_of(after, rows=True), strict=False)
        if isinstance(a, Tensor | np.ndarray) and isinstance(b, Tensor | np.ndarray)
    ]
    return [(a, b) for a, b in of_both if a.dim() == b.dim() > 0 and len(a) == len(b) == size]


def _are_equal(leaves: Sequence[tuple[Tensor, Tensor]], i: int, j: int) -> bool:
    """Compare two rows, as far as both reach: one may be padded further."""
    for a, b in leaves:
        both = [slice(0, min(x, y)) for x, y in zip(a.shape[1:], b.shape[1:], strict=True)]
        if not is_same_content(a[i][tuple(both)], b[j][tuple(both)]):
            return False
    return True


# -- calls of modules ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Args:
        name, kind: of the module; "" is the LightningModule itself.
        inputs, outputs: tensors only.
    """

    name: str
    kind: str
    inputs: list[Tensor] = field(repr=False)
    outputs: list[Tensor] = field(repr=False)


def watch_calls(module: nn.Module, calls: list[Call]) -> ModuleHooks:
    """Return hooks that note every call of every module while they are on."""

    def tensors(values: Any) -> list[Tensor]:
        if isinstance(values, Mapping):
            values = list(values.values())
        values = values if isinstance(values, list | tuple) else [values]
        return [each.detach().clone() for each in values if isinstance(each, Tensor)]

    def note(name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = tensors(args) + tensors(kwargs)
        calls.append(Call(name, type(part).__name__, given, tensors(output)))

    hooks = ModuleHooks()  # copies that training_step makes are other modules
    for name, part in module.named_modules():
        hooks.add(part, partial(part.register_forward_hook, with_kwargs=True), partial(note, name))
    return hooks


def first_that_mixes(
    before: Sequence[Call], after: Sequence[Call], rows: list[int], size: int
) -> str:
    """Return the dotted name and the class of that module, in words; "" if none is found.

    Args:
        before, after: the calls in two runs.
        rows: of the same samples in each.
        size: the number of samples in each.
    """

    def moved(a: Tensor, b: Tensor) -> bool:
        if a.dim() and b.dim() and len(a) == len(b) == size:
            a, b = a[rows], b[rows]
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if not a.is_floating_point():
            return not bool((a == b).all())
        scale = a.abs().amax() if a.numel() else a.new_zeros(())
        return not bool(((a - b).abs() <= _OUTPUT_ROUNDING * scale).all())

    for a, b in zip(before, after, strict=False):
        if a.name != b.name:
            return ""
        results = [pair for pair in zip(a.outputs, b.outputs, strict=False) if pair[0].dim()]
        given = zip(a.inputs, b.inputs, strict=False)
        if a.name and any(starmap(moved, results)) and not any(starmap(moved, given)):
            return f"the outputs of {a.name} ({a.kind})"
    return ""
