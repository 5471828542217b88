"""Stateless functions of tensors: precision, norms and clipping, flat vectors, smoothing, losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp import _validate
from lightning_dp._validate import above_0, flag, instance, normalise, not_negative, positive, whole
from lightning_dp._world import HeldParts

__all__ = [
    "LARGEST_NORM",
    "FullPrecision",
    "SparseVector",
    "check_coordinates",
    "clip_factors",
    "clip_factors_and_unit",
    "flat_zeros",
    "flatten",
    "full_precision",
    "has_float64",
    "in_float64",
    "laplacian_smoothing",
    "losses_of_records",
    "number_of_entries",
    "parts_of",
    "random_k",
    "real",
    "shared_mask",
    "squares_of_products",
    "unflatten",
    "where_used",
]

# -- precision: float64 where a device has it, and all digits of float32 ---------------------------


@functools.cache
def has_float64(kind: str) -> bool:
    """Return whether a kind of device computes in float64: Apple's does not."""
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


def _settings() -> tuple[tuple[_Setting, ...], tuple[_Setting, ...]]:
    """Return the settings of the CPU, and all of them."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    onednn: Any = torch.backends.mkldnn
    if not hasattr(cudnn, "conv"):  # before torch 2.9
        legacy = (_Setting(cuda.matmul, "allow_tf32", False), _Setting(cudnn, "allow_tf32", False))
        return legacy[:1], legacy
    holders = onednn.matmul, onednn.conv, cuda.matmul, cudnn.conv
    settings = tuple(_Setting(each, "fp32_precision", "ieee") for each in holders)
    return settings[:2], settings


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
            setattr(setting.holder, setting.name, setting.full)

    def __exit__(self, *exception: object) -> None:
        for setting, value in self._lowered:
            setattr(setting.holder, setting.name, value)


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
    lowered = [(s, now) for s in settings if (now := getattr(s.holder, s.name)) in _ROUNDING]
    return FullPrecision(tuple(lowered)) if lowered else _AS_IT_IS


# -- norms and clipping ----------------------------------------------------------------------------

# float32 norms of long rows come out too small (by 3.7e-4 at 1e7 elements), and an under-estimated
# norm is an under-clipped record. So squares are added in blocks of this length, and the blocks in
# float64. The error is then at most 3e-7, also for equal entries, whose rounding errors do not cancel.
_ROW = 256

# Squares of float32 numbers below 1e-19 vanish. A norm is trusted if the entries whose squares may
# have vanished cannot change it: d entries of 1e-19 have a squared norm of d · 1e-38, less than
# d · _TRUSTED² = d · 1e-20 by far. Rows with a smaller norm are summed again in float64.
_TRUSTED = 1e-10
_ENTRIES = 1 << 16  # of float64 copies: they stay in the cache
_ENTRIES_ON_DEVICE = 1 << 24  # where each call costs more than its work

# Factors of a product must not come out too small, for what they are multiplied with may be large.
# So a norm has a floor, far above whatever some operation rounds to zero, and it is infinite where
# scaling the other factor down to it would leave too few digits.
_LEAST_FACTOR, _LARGEST_FACTOR = 1e-35, 1e33


def length(vector: Tensor, params: Sequence[Tensor] = ()) -> Tensor:
    """Return the L2 norm of a flat vector, right to 3e-7, as a number in float64; without a copy of it.

    Args:
        vector: of any length.
        params: the parameters that it has an entry for each entry of. Where each process holds a part of
            them, it is that of the whole vector, and all processes ask for it together.

    Example:
        >>> length(torch.tensor([3.0, 4.0]))
        tensor(5., dtype=torch.float64)
    """
    square = squared_row_norms(vector.detach().unsqueeze(0))[0]
    if isinstance(params, HeldParts):
        square = params.added_up(square)
    return square.sqrt_()


def as_rows(gradient: Tensor) -> Tensor:
    """Reshape (n, *shape) to (n, d), also for shape () and for n = 0."""
    dimensions = gradient.dim()
    if dimensions == 2:
        return gradient
    return gradient.flatten(1) if dimensions > 1 else gradient.unsqueeze(-1)


def squared_row_norms(gradient: Tensor) -> Tensor:
    """Return the squared L2 norm of each record's part, accumulated in two levels, as float64.

    Right for all finite float32 numbers, if the rows themselves are what is summed afterwards. For
    norms that are multiplied, use :func:`factor_norms`. On the host, if the device has no float64.
    """
    rows, kind = as_rows(gradient), gradient.device.type
    if rows.dtype == torch.float64 or (kind != "cpu" and has_float64(kind)):
        return _squares_in_float64(rows)  # on a device, looking at the norms would wait for it
    rows = rows.float()
    return squares_of_blocks(block_norms(rows), rows)


def block_norms(rows: Tensor) -> Tensor:
    """Return the norms of the blocks of float32 rows on the CPU: shape (n, blocks of a row).

    Each block is squared and added in float32; ``vector_norm`` does not overflow.
    """
    columns = rows.shape[1]
    size = _block(columns)
    if size == columns:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return norms
    whole = columns // size * size
    blocks = (rows if whole == columns else rows[:, :whole]).reshape(len(rows), whole // size, size)
    norms = torch.linalg.vector_norm(blocks, dim=2)
    if whole == columns:
        return norms
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
    return torch.cat([norms, rest], dim=1)


@functools.lru_cache(maxsize=1024)
def _block(columns: int) -> int:
    """Return how many entries are added in float32: of equal parts, if they are not too many."""
    if columns <= _ROW:
        return columns
    return next((each for each in range(_ROW, _ROW // 4, -1) if columns % each == 0), _ROW)


def squares_of_blocks(norms: Tensor, rows: Tensor) -> Tensor:
    """Return :func:`squared_row_norms` of rows whose :func:`block_norms` are known."""
    squares = in_float64(norms).square_().sum(1)
    least, most = (float(each) for each in squares.aminmax()) if len(squares) else (1.0, 1.0)
    small = rows.shape[1] * _TRUSTED**2
    if not (small < least and most < math.inf):
        again = (~((squares > small) & squares.isfinite())).nonzero().flatten()
        squares[again] = _squares_in_float64(rows[again.to(rows.device)].cpu())
    return squares


def _squares_in_float64(rows: Tensor) -> Tensor:
    """Square and add some entries at a time; on a device more of them: there is no cache to fit."""
    entries = _ENTRIES if rows.device.type == "cpu" else _ENTRIES_ON_DEVICE
    if rows.numel() <= entries:
        squares: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
        return squares
    columns = min(rows.shape[1], entries) or 1
    found = []
    for some in torch.split(rows, max(1, entries // columns)):
        parts = [_squares_in_float64(part) for part in torch.split(some, columns, dim=1)]
        found.append(torch.stack(parts).sum(0))
    return torch.cat(found)


def factor_norms(factors: Tensor) -> Tensor:
    """Return the L2 norm of each row as float64, for rows whose product with others is added.

    Never too small, for the others may be large: at least 1e-35, next to which everything that some
    operation may round to zero is negligible. Infinite above 1e33, where the product overflows.

    Example:
        >>> factor_norms(torch.tensor([[3e-30, 4e-30], [0.0, 0.0], [3e36, 0.0]]))
        tensor([5.0000e-30, 1.4142e-35,        inf], dtype=torch.float64)
    """
    rows = as_rows(factors)
    return as_factor_norms(squared_row_norms(rows).sqrt_(), rows.shape[1])


def as_factor_norms(norms: Tensor, columns: int) -> Tensor:
    """Return norms of rows with ``columns`` columns, in place, as :func:`factor_norms` says."""
    norms.add_(_LEAST_FACTOR * math.sqrt(columns))
    return norms.masked_fill_(norms > _LARGEST_FACTOR, math.inf)


def squares_of_products(products: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return Σ_k ‖a_k‖² ‖b_k‖² of each record as float64, for pairs (a_k, b_k) and rows alone, (a_k,).

    With :func:`factor_norms` of pairs and :func:`squared_row_norms` of rows alone, of all of them in one
    go: float32 tensors on the CPU, records first. A tensor that stands in several is looked at once.

    Example:
        >>> a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]])
        >>> squares_of_products([(a, b), (a,)])
        tensor([125.], dtype=torch.float64)
    """
    each: dict[object, Tensor] = {}  # by place, as rows
    numbers: dict[object, int] = {}
    chosen = []
    for product in products:
        found: tuple[int, ...] = ()
        for tensor in product:
            place = _place(tensor)
            if place not in each:
                each[place], numbers[place] = as_rows(tensor), len(numbers)
            found += (numbers[place],)
        chosen.append(found)
    norms = list(map(block_norms, each.values()))
    blocks = tuple([found.shape[1] for found in norms])
    squares = torch.cat(norms, dim=1).double().square_()
    if len(blocks) < squares.shape[1]:
        squares = squares @ _sums_of(blocks)  # where one is not finite, no sum is: looked at again
    lengths = tuple([rows.shape[1] for rows in each.values()])
    least, floors, first, second, alone = _numbers_of(tuple(chosen), lengths)
    if ((squares > least) & (squares < _LARGEST_FACTOR**2)).all():  # next to which floors vanish
        both = squares.index_select(1, first) * squares.index_select(1, second)
        return both.sum(1) + squares.index_select(1, alone).sum(1)
    for number, rows in enumerate(each.values()):
        squares[:, number] = squares_of_blocks(norms[number], rows)
    factors = squares.sqrt().add_(floors)
    factors.masked_fill_(factors > _LARGEST_FACTOR, math.inf)
    both = factors.index_select(1, first) * factors.index_select(1, second)
    return both.square_().sum(1) + squares.index_select(1, alone).sum(1)


def _place(tensor: Tensor) -> object:
    """Return what two views of the same rows have in common."""
    is_plain = tensor.is_contiguous() and tensor.numel()
    return (tensor.data_ptr(), tensor.numel()) if is_plain else id(tensor)


@functools.lru_cache(maxsize=64)
def _numbers_of(
    chosen: tuple[tuple[int, ...], ...], lengths: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Return trusted squares and floors of factors by lengths; places of both factors, of rows alone."""
    wide = torch.tensor(lengths, dtype=torch.float64)
    pairs = [each for each in chosen if len(each) > 1]
    places = [a for a, _ in pairs], [b for _, b in pairs], [i[0] for i in chosen if len(i) == 1]
    chosen_places = (torch.tensor(each, dtype=torch.int64) for each in places)
    return wide * _TRUSTED**2, wide.sqrt() * _LEAST_FACTOR, *chosen_places


@functools.lru_cache(maxsize=64)
def _sums_of(blocks: tuple[int, ...]) -> Tensor:
    """Return the matrix that adds up the columns of each block."""
    place = torch.arange(len(blocks)).repeat_interleave(torch.tensor(blocks))
    return torch.nn.functional.one_hot(place, len(blocks)).double()


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """Return ``min(1, C / norm)`` per record, and 0 for a record whose norm is not finite.

    A factor of 0 means that the record contributes nothing, so one NaN, infinite or overflowing
    record changes the sum by no more than any other.

    Args:
        norms: shape (n,), non-negative or non-finite.
        clip_norm: C > 0, may be infinite.

    Example:
        >>> clip_factors(torch.tensor([0.5, 2.0, float("nan")]), clip_norm=1.0)
        tensor([1.0000, 0.5000, 0.0000])
    """
    clip_norm = above_0("clip_norm", clip_norm)
    wide = norms.double() if has_float64(norms.device.type) else norms
    factors = (clip_norm / wide).clamp_(max=1.0)  # 0 or NaN where the norm is not finite
    return factors.nan_to_num_(nan=0.0).to(norms.dtype)


# Above it a weight of C / norm has too few digits left to bound anything.
LARGEST_NORM = 1e32


def clip_factors_and_unit(norms: Tensor, clip_norm: float) -> tuple[Tensor, float]:
    """Return :func:`clip_factors` over a unit, and the unit: C if it is far from 1, else 1.

    So neither weights nor partial sums leave the range of float32.
    """
    factors = clip_factors(norms.masked_fill(norms > LARGEST_NORM, math.inf), clip_norm)
    if 1e-3 <= clip_norm <= 1e3 or clip_norm == math.inf:
        return factors, 1.0
    unit = min(clip_norm, LARGEST_NORM)
    return factors / unit, unit


def check_coordinates(name: str, numbers: Tensor) -> None:
    """Refuse numbers of entries that are not a set in its order."""
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or not len(numbers):
        raise ValueError(
            f"{name} must be a vector of int64 numbers, at least one; got {tuple(numbers.shape)} of "
            f"{numbers.dtype}."
        )
    if not (numbers[0] >= 0 and bool((numbers[1:] > numbers[:-1]).all())):
        raise ValueError(f"{name} must be sorted, distinct and not negative.")


def real(tensor: Tensor) -> Tensor:
    """Return the same entries as real numbers: of a complex tensor, shape (..., 2), both parts."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def number_of_entries(tensors: Sequence[Tensor]) -> int:
    """Return d, the number of real entries of all tensors."""
    return sum(_entries(tensors))


def _entries(tensors: Sequence[Tensor]) -> list[int]:
    return [each.numel() * (2 if each.is_complex() else 1) for each in tensors]


def is_finite(vector: Tensor) -> bool:
    """Return True if all numbers are finite, as their sum shows unless it overflows."""
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all entries, in order, as one flat vector of real numbers."""
    return torch.cat([real(tensor.detach()).reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo :func:`flatten`: views of ``vector`` (copies if complex), of each tensor's shape and dtype."""
    return [_as(part, t) for part, t in zip(parts_of(vector, like), like, strict=True)]


def _as(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        part = torch.complex(*part.view(*like.shape, 2).unbind(-1))  # a view may be unaligned
    part = part.view_as(like)
    return part if part.dtype is like.dtype else part.to(like.dtype)


def parts_of(vector: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the flat view of ``vector`` that belongs to each tensor."""
    return vector.split_with_sizes(_entries(like))  # torch.split asks in Python what it is given


def shares_memory(vector: Tensor, state: Any) -> bool:
    """Return True if a state of dicts and lists has a tensor in the memory of a vector."""
    if isinstance(state, Tensor):
        return state.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    parts = list(state.values()) if isinstance(state, dict) else state
    return isinstance(parts, list | tuple) and any(shares_memory(vector, each) for each in parts)


def brought_to(state: Any, device: torch.device) -> Any:
    """Return a state of dicts and lists with all its tensors on a device: a file is read on the host."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: brought_to(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([brought_to(value, device) for value in state])
    return state


def flat_zeros(like: Sequence[Tensor], size: int | None = None) -> Tensor:
    """Return a flat vector of zeros where the tensors are, of their length, in at least float32."""
    size = number_of_entries(like) if size is None else size
    return torch.zeros(size, dtype=flat_dtype(like), device=like[0].device)


def flat_memory(like: Sequence[Tensor]) -> Tensor:
    """Return the same as :func:`flat_zeros`, before anything was written into it."""
    return torch.empty(number_of_entries(like), dtype=flat_dtype(like), device=like[0].device)


def flat_dtype(like: Sequence[Tensor]) -> torch.dtype:
    """Return the type of flat vectors of such tensors: theirs, but at least float32."""
    return functools.reduce(torch.promote_types, {t.dtype.to_real() for t in like}, torch.float32)


# -- Laplacian smoothing ---------------------------------------------------------------------------

# Entries worked on at once. Two buffers of this size fit into a core's cache; smaller blocks lose to
# the cost of a call. On a device, a block only bounds the memory.
_CPU_BLOCK, _OTHER_BLOCK = 2**18, 2**24
# The condition number of A_σ is 1 + 4σ. Much above this σ, float32 rounding errors exceed 5e-7 of
# the result where that is rough and small, so blocks are computed in float64.
_FLOAT32_SIGMA = 10.0


def laplacian_smoothing(v: Tensor, sigma: float) -> Tensor:
    r"""Solve :math:`(I - \sigma L)\, u = v`, with L the 1-D Laplacian with periodic boundary.

    :math:`A_\sigma = I - \sigma L` has 1 + 2σ on the diagonal and -σ next to it, also in the
    two corners, so :math:`u = \mathrm{ifft}(\mathrm{fft}(v) / (1 + 2σ - 2σ \cos(2πk/d)))`.

    - A constant vector stays as it is, and the sum of the entries the same (up to rounding).
    - Any length: for d = 1 the result is v, for d = 2 both neighbours are the other entry.
    - float64 stays float64; all other types are computed in float32 or better and cast back.
      In float32 the error is at most 5e-7 of ‖u‖.
    - Runs on the device of ``v``, in 2 to 12 passes over blocks for σ up to 10, with memory of the
      blocks' size (or of v's, if σ is so large that the kernel is longer than d), besides the result.

    Args:
        v: one or more vectors of length d, of shape (..., d). Its autograd history is not followed.
        sigma: σ >= 0; 0 is the identity.

    Returns:
        u, of the shape, type and device of ``v``.

    Example:
        >>> laplacian_smoothing(torch.tensor([0.0, 5.0, 0.0, 0.0]), sigma=1.0)
        tensor([1.0000, 2.3333, 1.0000, 0.6667])
    """
    sigma = not_negative("sigma", sigma, of="laplacian_smoothing")
    if not v.is_floating_point():
        raise TypeError(f"laplacian_smoothing(v) needs real floating-point numbers, not {v.dtype}.")
    if v.dim() == 0:
        raise ValueError("laplacian_smoothing(v) needs at least one dimension, v has none.")
    v = v.detach()
    if sigma == 0 or v.numel() == 0:
        return v.clone()
    dtype = _working_dtype(v, sigma)
    weights = _weights(sigma, dtype)
    if 2 ** len(weights) - 1 > v.shape[-1]:
        return _in_rotation(v.to(dtype), weights).to(v.dtype)
    return _in_blocks(v, weights, dtype)


def _working_dtype(v: Tensor, sigma: float) -> torch.dtype:
    """Choose the precision in which the error stays below 5e-7 of the result."""
    if v.dtype == torch.float64 or (sigma > _FLOAT32_SIGMA and has_float64(v.device.type)):
        return torch.float64
    return torch.float32


def _weights(sigma: float, dtype: torch.dtype) -> list[float]:
    r"""Return the weight of the entry :math:`2^j` away, for the averages that make up A⁻¹.

    With z the shift by one entry and ω = exp(-θ), θ = 2 asinh(1 / (2√σ)) (2 cosh θ = 2 + 1/σ):

    .. math:: A_σ^{-1} = \frac{1-ω}{1-ωz} \frac{1-ω}{1-ωz^{-1}}, \quad
        \frac{1-ω}{1-ωz} = \prod_{j \ge 0} \frac{1 + ω^{2^j} z^{2^j}}{1 + ω^{2^j}},

    so each factor is an average of an entry, weight 1 / (1 + a), and another, weight a / (1 + a),
    a = ω^(2^j). The product telescopes: J factors of the first kind make the geometric kernel
    Σ_k ω^k z^k cut off at k < 2^J, scaled to sum 1. The tail that is missing has the weight
    ω^(2^J), and J is chosen so that it is lost in rounding.
    """
    theta = 2 * math.asinh(0.5 / math.sqrt(sigma))
    negligible = 17.3 if dtype == torch.float32 else 37.4  # -log of 3e-8, of 2^-54
    count = max(1, math.ceil(math.log2(negligible / theta)))
    powers = [math.exp(-theta * 2**j) for j in range(count)]
    return [a / (1 + a) for a in powers]


def _in_rotation(x: Tensor, weights: list[float]) -> Tensor:
    """Average on the whole circle: a kernel longer than the vector wraps around it."""
    for j, weight in enumerate(weights):
        for shift in (2**j, -(2**j)):
            x = torch.lerp(x, x.roll(shift % x.shape[-1], -1), weight)
    return x


def _in_blocks(v: Tensor, weights: list[float], dtype: torch.dtype) -> Tensor:
    """Average block by block, each with as many entries on either side as the kernel reaches.

    Each average uses up entries at one end, 2 (2^J - 1) in all. Nearest neighbours come first: rough
    parts shrink before rounding errors of their size are made.
    """
    size, radius = v.shape[-1], 2 ** len(weights) - 1
    rows = v.numel() // size
    most = _CPU_BLOCK if v.device.type == "cpu" else _OTHER_BLOCK
    length = min(size, max(most // rows, 4 * radius))
    result = torch.empty_like(v, memory_format=torch.contiguous_format)
    for start in range(0, size, length):
        stop = min(start + length, size)
        x = _circular_slice(v, start - radius, stop + radius).to(dtype)
        for j, weight in enumerate(weights):
            shift = 2**j
            x = torch.lerp(x[..., shift:], x[..., :-shift], weight)
            x = torch.lerp(x[..., :-shift], x[..., shift:], weight)
        result[..., start:stop] = x
    return result


def _circular_slice(v: Tensor, start: int, stop: int) -> Tensor:
    """Return entries start..stop-1 of the circle, at most one turn further; a view if possible."""
    size = v.shape[-1]
    parts = [v[..., max(start, 0) : min(stop, size)]]
    if start < 0:
        parts.insert(0, v[..., size + start :])
    if stop > size:
        parts.append(v[..., : stop - size])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


# -- vectors of which only some coordinates are sent -----------------------------------------------

_DTYPES = (torch.float32, torch.float64)


def shared_mask(seed: int, round_: int, size: int, keep: int) -> Tensor:
    """Choose ``keep`` of ``size`` coordinates, all sets equally likely: int64, sorted, distinct.

    A function of its arguments only, so everyone who knows the seed has the same set, on any
    machine and with any version of NumPy: each coordinate gets one raw 64-bit word of the Philox
    4x64 stream with key (seed, round), and those with the smallest words are kept. No global
    random state is read or changed. The choice is public and costs no privacy.

    Args:
        seed: shared by all, 0 <= seed < 2^64.
        round_: 0 <= round < 2^64; each has its own set.
        size: d, the number of coordinates.
        keep: k, 1 <= k <= d.

    Example:
        >>> shared_mask(seed=7, round_=0, size=10, keep=3)
        tensor([1, 4, 8])
    """
    seed, round_, size, keep = _check_mask(seed, round_, size, keep)
    # Raw words, and no method of a Generator: NumPy keeps the stream of a bit generator the same in
    # all versions, but not what its methods make of it.
    stream = np.random.Philox(key=np.array([seed, round_], dtype=np.uint64))
    words = stream.random_raw(size)
    last = np.partition(words, keep - 1)[keep - 1]
    below = np.flatnonzero(words < last)
    ties = np.flatnonzero(words == last)[: keep - below.size]  # of equal words the first ones
    return torch.from_numpy(np.sort(np.concatenate([below, ties])).astype(np.int64))


def _check_mask(
    seed: object, round_: object, size: object, keep: object
) -> tuple[int, int, int, int]:
    """Return the four as plain numbers, or raise."""
    length = whole("size", size, 1, 2**62)
    return (
        _validate.seed("seed", seed),
        _validate.seed("round_", round_),
        length,
        whole("keep", keep, 1, length),
    )


@dataclass(frozen=True)
class SparseVector:
    """A vector with few known coordinates, the others 0: their values, and a public seed.

    The coordinates are ``shared_mask(seed, round_, size, len(values))``: who knows seed and round
    needs to be sent the values only.

    Args:
        values: float32 or float64, at the coordinates in increasing order.
        size: d, the length of the vector.
        seed, round_: as in :func:`shared_mask`.

    Example:
        >>> sent = random_k(torch.ones(1000), keep=100, seed=7, round_=0)
        >>> sent.keep, SparseVector(sent.values, size=1000, seed=7, round_=0).dense().sum()
        (100, tensor(1000.))
    """

    values: Tensor = field(repr=False)
    size: int
    seed: int
    round_: int

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.dtype not in _DTYPES:
            raise ValueError(
                f"values of shape {tuple(self.values.shape)} and {self.values.dtype} must be a "
                "vector of float32 or float64."
            )
        normalise(self, _validate.seed, "seed", "round_")
        normalise(self, whole, "size")
        _check_mask(self.seed, self.round_, self.size, self.keep)

    @property
    def keep(self) -> int:
        """k, the number of known coordinates."""
        return len(self.values)

    def coordinates(self) -> Tensor:
        """Return the sorted coordinates at which the values belong."""
        return shared_mask(self.seed, self.round_, self.size, self.keep)

    def dense(self) -> Tensor:
        """Return all d entries."""
        if self.keep == self.size:
            return self.values.clone()
        full = torch.zeros(self.size, dtype=self.values.dtype)
        full[self.coordinates()] = self.values.cpu()
        return full


def random_k(u: Tensor, keep: int, seed: int, round_: int) -> SparseVector:
    """Return S(u): d/k times ``keep`` = k of the d entries of ``u``, the rest 0.

    Unbiased over a random seed, E S(u) = u, with E‖S(u) - u‖² = (d/k - 1) ‖u‖². The set does not
    depend on u: only the values say anything about the data.

    Args:
        u: flat, float32 or float64, of length d.
        keep: k, 1 <= k <= d; k = d sends u itself.
        seed, round_: as in :func:`shared_mask`.

    Definition 3 of the paper that :class:`~lightning_dp.CubicNewton` names.

    Example:
        >>> random_k(torch.arange(10.0), keep=5, seed=7, round_=0).dense()
        tensor([ 0.,  2.,  0.,  6.,  8.,  0., 12.,  0., 16.,  0.])
    """
    if u.dim() != 1 or u.dtype not in _DTYPES:
        raise ValueError(
            f"u has shape {tuple(u.shape)} and {u.dtype}; it must be flat, float32 or float64."
        )
    seed, round_, _, keep = _check_mask(seed, round_, len(u), keep)
    if keep == len(u):
        return SparseVector(u.detach().clone(), keep, seed, round_)
    coordinates = shared_mask(seed, round_, len(u), keep)
    values = u.detach()[coordinates.to(u.device)] * (len(u) / keep)
    return SparseVector(values, len(u), seed, round_)


# -- the loss of each record of a language model ---------------------------------------------------


def losses_of_records(
    logits: Tensor,
    labels: Tensor,
    *,
    shift: bool,
    ignore_index: int = -100,
    tokens_per_record: float | None = None,
) -> Tensor:
    r"""Return the cross-entropy of each record, from its own tokens alone.

    .. math:: \ell_i = \frac{1}{m_i} \sum_{t:\, y_{i,t} \ne \mathrm{ignore\_index}}
        -\log \mathrm{softmax}(x_{i,t})_{y_{i,t}}

    with m_i the number of the record's labels that are not ignored, or ``tokens_per_record``. Take
    ``.mean()`` of it in ``training_step``. The mean over all tokens of a batch, which language models
    return as ``.loss``, weighs a record by how long the others are, so clipping its gradient would not
    bound what it does.

    - Each record counts alike, however many tokens it has. In a mean over all tokens long ones count
      more. For that, give ``tokens_per_record``: a public constant, about as many labels as a record has.
      ε covers no constant that is computed from the private records.
    - A record without a label has the loss 0 and the gradient 0.
    - For records of equally many labels it is the same as the mean over all tokens.
    - Computed in float32 at least, also for logits of half precision.

    Args:
        logits: x, shape (n, T, classes).
        labels: y, shape (n, T), whole numbers.
        shift: True for causal models, where the label of a position is its own token and the model
            predicts the next one: position t is compared with label t + 1. False where labels stand
            at their positions: masked words, sequence to sequence, tags.
        ignore_index: the label of positions that do not count.
        tokens_per_record: m for all records; None for the number of each one's own labels.

    Returns:
        Shape (n,).

    Example:
        >>> logits = torch.zeros(3, 4, 5)
        >>> labels = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100], [1, -100, -100, -100]])
        >>> losses_of_records(logits, labels, shift=True)  # log(5), and 0 where no next token is
        tensor([1.6094, 1.6094, 0.0000])
        >>> losses_of_records(logits, labels, shift=True, tokens_per_record=3)
        tensor([1.6094, 0.5365, 0.0000])
    """
    instance("logits", logits, Tensor, of="losses_of_records")
    instance("labels", labels, Tensor, of="losses_of_records")
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            "losses_of_records(logits, labels) needs shapes (n, T, classes) and (n, T), not "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}."
        )
    ignored = whole("ignore_index", ignore_index, -(2**63), of="losses_of_records")
    if flag("shift", shift, of="losses_of_records"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_tokens = F.cross_entropy(
        precise.transpose(1, 2), labels, ignore_index=ignored, reduction="none"
    )
    total = of_tokens.sum(1)
    if tokens_per_record is not None:
        return total / positive("tokens_per_record", tokens_per_record, of="losses_of_records")
    return total / (labels != ignored).sum(1).clamp(min=1)
