"""Per-sample gradients of a parameter as a bilinear form: a layer's input times what came back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.functional import (
    as_factor_norms,
    as_rows,
    block_norms,
    factor_norms,
    has_float64,
    in_float64,
    squared_row_norms,
    squares_of_blocks,
)

__all__ = [
    "AbstractForm",
    "Convolution",
    "Folding",
    "Lookup",
    "OuterProduct",
    "Rows",
    "Scale",
    "Use",
    "Uses",
    "hidden_by_rounding",
    "in_slices",
    "squares_of_tied",
    "uses_of_records",
]

# What is made of records for a moment only is made slice by slice: so it stays in the caches of a CPU.
_SLICE_BYTES = 4 << 20
_PRODUCT_BYTES = 16 << 20  # of inner products between positions
_DEVICE_BYTES = 64 << 20  # elsewhere a call costs more than its work

# Brings the rows of each record together: shape (N, ...) -> (n, f, ...), f the most rows that a record
# has; where one has fewer, zeros follow.
Folding: TypeAlias = Callable[[Tensor], Tensor]


def in_slices(
    function: Callable[..., Tensor], each: int, *tensors: Tensor, most: int | None = None
) -> Tensor:
    """Return the rows that a function gives for tensors with records first, of some records at a time.

    Args:
        function: of tensors like these.
        each: bytes that it takes for one record meanwhile.
        tensors: what it is called with.
        most: bytes that it may take on a CPU.
    """
    on_cpu = _SLICE_BYTES if most is None else most
    allowed = on_cpu if tensors[0].device.type == "cpu" else _DEVICE_BYTES
    size = max(1, allowed // (each or 1))
    if len(tensors[0]) <= size:
        return function(*tensors)
    parts = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
    return torch.cat([function(*part) for part in parts])


# -- forms ----------------------------------------------------------------------------------------


class AbstractForm(ABC):
    """The map from v_i and u_i to a parameter's gradient f(v_i, u_i) of record i; linear in both.

    v comes from the layer's input and u is the gradient of its output, records first in both.
    Being bilinear leaves no special cases: a parameter used several times is a sum over uses,
    and a combination of gradients at two points is one over differences,
    w f(v, u) + w' f(v', u') = f(v - v', w u) + f(v', w u + w' u'),
    which loses no digits when the points are close.
    """

    @abstractmethod
    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        """Return f(v_i, u_i) of each record: shape (n, *parameter shape)."""

    def rows_in(
        self, v: Tensor, u: Tensor, memory: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the same in memory that is used again, and squared norms where they are a by-product."""
        return self.rows(v, u), None

    def prefers_rows(self, v: Tensor, u: Tensor) -> bool:
        """True if making the rows, which make norms and sum quick, saves time; by shapes alone."""
        return False

    def factors(self, v: Tensor, u: Tensor) -> tuple[Tensor, ...] | None:
        """Return tensors whose norms multiply to that of f(v_i, u_i); None if there are none."""
        return None

    @abstractmethod
    def add_weighted_sum(
        self, use: Use, weights: Tensor, onto: Tensor, *, is_new: bool = False
    ) -> None:
        """Add Σ_i weights_i f(v_i, u_i) to a flat vector, without making the rows.

        All are of one type; what stands in a new vector counts for nothing.
        """

    def both(self, here: Use, there: Use) -> list[Use]:
        """Return f(v, u) + f(v', u') as uses that lose no digits where v and v' are close.

        What is done depends on where the tensors are, not on the values in them.
        """
        # f(v, u) + f(v', u') = f(v - v', u) + f(v', u + u'): both differences are small and exact to
        # their own digits, while f(v, u) and f(v', u') are large and cancel.
        total = replace(there, u=here.u + there.u)
        if here.v.data_ptr() == there.v.data_ptr():  # the batch itself
            return [total]
        return [replace(here, v=here.v - there.v), total]

    def joined(self, uses: Sequence[Use]) -> list[Use]:
        """Return the same sum over fewer uses, where that is no more work than each of them by itself."""
        return list(uses)

    @abstractmethod
    def of_records(self, use: Use, folding: Folding) -> Use:
        """Return a use of N rows as one of the n records, whose gradients are sums over their rows."""

    def along(
        self,
        v: tuple[Tensor, Tensor | None],
        u: tuple[Tensor, Tensor | None],
        weights: tuple[float, float],
    ) -> list[Use]:
        """Return w f + w' (the derivative of f along a direction), by the product rule.

        = f(v, w u + w' u̇) + f(v̇, w' u), the derivatives v̇ and u̇ given with v and u, or None
        where they are zero.
        """
        (value, moved), back = v, _weighted(u, weights)
        uses = [Use(self, value, back)]
        return uses if moved is None else [*uses, Use(self, moved, weights[1] * u[0])]

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        """Return f(v_i, u_i) at k places of the flat parameter, which has this shape: shape (n, k)."""
        return in_slices(lambda *vu: _at(self.rows(*vu), places), 4 * shape.numel(), v, u)

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        """Return a bound on Σ_s ‖a_s‖ where f(v_i, u_i) = Σ_s a_s is computed, float64, shape (n,)."""
        return factor_norms(v) * factor_norms(u)

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return ‖Σ_uses f(v_i, u_i)‖² of each record as float64; None where the rows are cheaper.

        Args:
            uses: as :meth:`joined` leaves them.
            may_keep: the rows, if they are made, are kept for the sum.
        """
        return None


@dataclass(frozen=True)
class Use:
    """One use of a parameter in a forward pass, with what came back for it."""

    form: AbstractForm
    v: Tensor
    u: Tensor

    @property
    def nbytes(self) -> int:
        """The memory of its tensors."""
        return self.u.nbytes + (0 if self.v is self.u else self.v.nbytes)

    def of(self, records: Tensor | slice) -> Use:
        """Return the same for some of the records."""
        return replace(self, v=self.v[records], u=self.u[records])

    def times(self, weights: Tensor) -> Use:
        """Return the same with the gradient of each record, or row, multiplied."""
        u = self.u * _as_weights(weights.to(self.u), self.u)
        return replace(self, u=u, v=u if self.v is self.u else self.v)

    def to(self, dtype: torch.dtype) -> Use:
        """Return the same with numbers of a type."""
        u = self.u.to(dtype)
        v = self.v.to(dtype) if self.v.is_floating_point() else self.v
        return replace(self, u=u, v=u if self.v is self.u else v)

    def without(self, left_out: Tensor) -> Use:
        """Return the same with zeros for the records of which this is true, whatever they hold."""
        u = _zeroed(self.u, left_out)
        return replace(self, u=u, v=u if self.v is self.u else _zeroed(self.v, left_out))


# Every parameter of a layer, with its use in one call of the layer.
Uses: TypeAlias = list[tuple[Tensor | None, Use]]


def uses_of_records(uses: Uses, folding: Folding) -> Uses:
    """Return what a rule gave for N rows as uses of the n records to which they belong."""
    return [(param, use.form.of_records(use, folding)) for param, use in uses]


def _zeroed(tensor: Tensor, records: Tensor) -> Tensor:
    if not tensor.is_floating_point():  # rows of a table, of which nothing is added
        return tensor
    return tensor.masked_fill(_as_weights(records, tensor), 0.0)


def _as_weights(of_records: Tensor, tensor: Tensor) -> Tensor:
    """Return one number for each record in the shape that is broadcast to a tensor."""
    return of_records.view(-1, *[1] * (tensor.dim() - 1))


def _at(rows: Tensor, places: Tensor) -> Tensor:
    """Return the entries of each row at some places of it, whatever their order in memory: no copy."""
    if rows.dim() < 3 or rows.is_contiguous():
        return as_rows(rows).index_select(1, places)
    at: list[Tensor | slice] = [slice(None), *torch.unravel_index(places, rows.shape[1:])]
    return rows[tuple(at)]


def _weighted(u: tuple[Tensor, Tensor | None], weights: tuple[float, float]) -> Tensor:
    """Return w u + w' u̇."""
    value, moved = u
    total = value if weights[0] == 1 else weights[0] * value
    return total if moved is None else torch.add(total, moved, alpha=weights[1])


@dataclass(frozen=True)
class Rows(AbstractForm):
    """The gradients u_i themselves, of shape (n, *parameter shape); v is not used."""

    @classmethod
    def use(cls, u: Tensor) -> Use:
        """Return a use of which the gradients are known: of a bias, say."""
        return Use(cls(), u, u)

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        return u

    def factors(self, v: Tensor, u: Tensor) -> tuple[Tensor, ...] | None:
        return (u,)

    def add_weighted_sum(
        self, use: Use, weights: Tensor, onto: Tensor, *, is_new: bool = False
    ) -> None:
        onto.addmv_(as_rows(use.u).T, weights, beta=0 if is_new else 1)

    def both(self, here: Use, there: Use) -> list[Use]:
        return [self.use(here.u + there.u)]

    def joined(self, uses: Sequence[Use]) -> list[Use]:
        return [self.use(reduce(torch.add, (use.u for use in uses)))]

    def of_records(self, use: Use, folding: Folding) -> Use:
        return self.use(folding(use.u).sum(1))

    def along(
        self,
        v: tuple[Tensor, Tensor | None],
        u: tuple[Tensor, Tensor | None],
        weights: tuple[float, float],
    ) -> list[Use]:
        return [self.use(_weighted(u, weights))]

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        return _at(u, places)

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return squared_row_norms(u).sqrt()

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        (use,) = uses
        return squared_row_norms(use.u)


# -- inner products -------------------------------------------------------------------------------

# Terms of an inner product below float32's least number become zero. With factors of ordinary norms,
# or divided by their largest entries, all that vanishes so is less than this times the product of their
# norms, and _squares_of takes no squared norm to be less.
_HIDDEN = 1e-9
_ORDINARY = (1e-5, 1e9)

# Rounding errors of an inner product of this many entries, relative to the norms, stay below half of this
# many units, also of equal entries, whose errors do not cancel: 8.5 were seen, and 390 of 40,000 at once.
_ENTRIES_AT_ONCE, _ROUNDING = 512, 20
_SUMMED = 256  # entries that are added in float32 where there is no float64


def hidden_by_rounding(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far ‖Σ_s a_s‖² may be from what its inner products add up to.

    Terms that cancel leave errors of the size of (Σ_s ‖a_s‖)², and a norm that came out too small
    would let a record through that is longer than its bound.

    Args:
        lengths: Σ_s ‖a_s‖ of each record, float64.
        dtype: of the inner products.
    """
    return _ROUNDING * torch.finfo(dtype).eps * lengths.square()


@dataclass(frozen=True)
class _Scaled:
    """A factor of inner products, with each record's part over a unit so that they stay in range."""

    tensor: Tensor  # records first, over the units
    units: Tensor  # float64, shape (n,); on the host if the device has no float64
    norms: Tensor  # of the records' parts as they were, as the units

    @classmethod
    def of(cls, tensor: Tensor) -> _Scaled:
        """Divide each record's part by its largest entry; by 1 where all products stay in range."""
        if tensor.device.type == "cpu" and len(tensor):  # elsewhere, a look waits for the device
            norms = torch.linalg.vector_norm(as_rows(tensor), dim=1)
            least, most = (float(each) for each in norms.aminmax())
            if _ORDINARY[0] < least and most < _ORDINARY[1]:
                wide = norms.double()
                return cls(tensor, torch.ones_like(wide), wide)
        largest = torch.linalg.vector_norm(as_rows(tensor), math.inf, dim=1)
        largest.clamp_(min=torch.finfo(tensor.dtype).tiny)
        scaled, units = tensor / _as_weights(largest, tensor), in_float64(largest)
        # Of entries up to 1, one of which is 1: what vanishes among their squares is of no account.
        blocks = in_float64(block_norms(as_rows(scaled)))
        norms = units * torch.linalg.vector_norm(blocks, dim=1)
        return cls(scaled, units, as_factor_norms(norms, as_rows(tensor).shape[1]))

    def products(self) -> Tensor:
        """Return the (T, T) inner products of each record's vectors, for shape (n, T, features)."""
        return _products(self.tensor)


def _products(vectors: Tensor) -> Tensor:
    """Return all inner products of each record's vectors, from those of some of the entries."""
    first, *others = (torch.bmm(p, p.mT) for p in torch.split(vectors, _ENTRIES_AT_ONCE, dim=2))
    if not others:
        return first
    wide = torch.float64 if has_float64(vectors.device.type) else vectors.dtype
    return reduce(torch.Tensor.add_, others, first.to(wide)).to(vectors.dtype)


def _sum_in_float64(rows: Tensor) -> Tensor:
    """Return the sum of each row; on a device without float64 by float32 sums of a few of its entries.

    Those are off by less than what :func:`hidden_by_rounding` allows for.
    """
    if has_float64(rows.device.type):
        return rows.sum(1, dtype=torch.float64)
    parts = torch.split(rows, _SUMMED, dim=1)
    return in_float64(torch.stack([part.sum(1) for part in parts], dim=1)).sum(1)


def _squares_of(products: Tensor, units: Tensor, norms: Tensor) -> Tensor:
    """Return ‖Σ_s a_s‖² of each record from the (T, T) inner products of the a_s, over units.

    Float32 products, summed in float64: the products in float64 would double the work. The norms are
    those of the factors that the a_s are made of, multiplied: no square is less than what may have
    vanished in their inner products.
    """
    lengths = _sum_in_float64(products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt())
    squares = _sum_in_float64(products.flatten(1)).clamp_(min=0.0)
    squares += hidden_by_rounding(lengths, products.dtype)  # terms may cancel, in whole or in part
    return torch.maximum(squares * units.square(), (_HIDDEN * norms).square_())


# -- linear layers, embeddings and norm layers ----------------------------------------------------

_CACHED_BYTES = 1 << 20
_LONG = 32  # positions from which on matrix products, not memory, are what rows cost
_SCALED_BYTES = 1 << 19


class _OfPositions(AbstractForm):
    """A sum over positions t of what v_it and u_it give, for tensors of shape (n, T, ...).

    Several uses are one with the positions of all, as are several rows of a record.
    """

    def joined(self, uses: Sequence[Use]) -> list[Use]:
        if len(uses) == 1:
            return list(uses)
        v, u = (torch.cat(parts, dim=1) for parts in zip(*((c.v, c.u) for c in uses), strict=True))
        return [Use(self, v, u)]

    def of_records(self, use: Use, folding: Folding) -> Use:
        return Use(self, folding(use.v).flatten(1, 2), folding(use.u).flatten(1, 2))

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return squared norms from inner products between positions, of some records at a time."""
        (use,) = uses
        times = use.u.shape[1]
        if times == 0:
            return use.u.new_zeros(len(use.u), dtype=torch.float64)
        return in_slices(self.squares, 4 * times**2, use.v, use.u, most=_PRODUCT_BYTES)

    @abstractmethod
    def squares(self, v: Tensor, u: Tensor) -> Tensor:
        """Return ‖f(v_i, u_i)‖² of each record from all inner products at once."""


@dataclass(frozen=True)
class OuterProduct(_OfPositions):
    """Σ_t u_it v_itᵀ for v of shape (n, T, in) and u of shape (n, T, out)."""

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        return torch.bmm(u.transpose(1, 2), v)

    def factors(self, v: Tensor, u: Tensor) -> tuple[Tensor, ...] | None:
        return (u, v) if u.shape[1] == 1 else None

    def rows_in(
        self, v: Tensor, u: Tensor, memory: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        rows = memory().view(len(u), u.shape[2], v.shape[2])
        if rows.device.type != "cpu" or rows.dtype != torch.float32 or not len(v):
            return torch.bmm(u.transpose(1, 2), v, out=rows), None
        size = max(1, _CACHED_BYTES // rows[:1].nbytes)  # looked at while they are in the cache
        parts = zip(*(torch.split(each, size) for each in (v, u, rows)), strict=True)
        made = (torch.bmm(y.transpose(1, 2), x, out=part) for x, y, part in parts)
        norms = torch.cat([block_norms(each.flatten(1)) for each in made])
        return rows, squares_of_blocks(norms, rows.flatten(1))

    def prefers_rows(self, v: Tensor, u: Tensor) -> bool:
        times, rows, columns = u.shape[1], u.shape[2], v.shape[2]
        # Of rows twice as large as v and u, inner products take less than half of the work.
        return times >= _LONG and 2 * times * (rows + columns) > rows * columns

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        times, (row, column) = v.shape[1], (places // shape[1], places % shape[1])
        if not 0 < times * len(places) <= shape.numel():
            return super().entries(v, u, shape, places)  # all of them are no more work
        total = u[:, 0].index_select(1, row).mul_(v[:, 0].index_select(1, column))
        for t in range(1, times):
            total.addcmul_(u[:, t].index_select(1, row), v[:, t].index_select(1, column))
        return total

    def add_weighted_sum(
        self, use: Use, weights: Tensor, onto: Tensor, *, is_new: bool = False
    ) -> None:
        weights, v, u = weights.view(-1, 1, 1), use.v, use.u
        if v.shape[2] < u.shape[2]:  # the narrower one takes the weights
            v = v * weights
        else:
            u = u * weights
        v, u = v.flatten(0, 1), u.flatten(0, 1)
        onto.view(u.shape[1], v.shape[1]).addmm_(u.T, v, beta=0 if is_new else 1)

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        norms = factor_norms(v.flatten(0, 1)) * factor_norms(u.flatten(0, 1))
        return norms.view(u.shape[:2]).sum(1)

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return squared norms from the T x T inner products of the vectors, if these are fewer.

        ‖Σ_s u_s v_sᵀ‖² = Σ_st (u_s · u_t)(v_s · v_t).
        """
        (use,) = uses
        u, v = use.u, use.v
        times, rows, columns = u.shape[1], u.shape[2], v.shape[2]
        if times == 1:
            return (factor_norms(u) * factor_norms(v)).square_()
        if times * (rows + columns) > 2 * rows * columns or (may_keep and self.prefers_rows(v, u)):
            return None  # the rows cost no more, and if they are kept the sum is almost free
        return super().squared_norms(uses, may_keep=may_keep)

    def squares(self, v: Tensor, u: Tensor) -> Tensor:
        a, b = _Scaled.of(u), _Scaled.of(v)
        return _squares_of(a.products() * b.products(), a.units * b.units, a.norms * b.norms)


@dataclass(frozen=True)
class Lookup(_OfPositions):
    """Row r: Σ over t with v_it = r of u_it, for v of shape (n, T) and u of shape (n, T, width).

    Norms are sums over positions s and t of equal rows of u_s · u_t: nothing of the table's size.
    """

    rows_of_table: int

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        table = u.new_zeros(len(u), self.rows_of_table, u.shape[2])
        return table.scatter_add_(1, v.unsqueeze(2).expand_as(u), u)

    def add_weighted_sum(
        self, use: Use, weights: Tensor, onto: Tensor, *, is_new: bool = False
    ) -> None:
        table = (onto.zero_() if is_new else onto).view(self.rows_of_table, -1)
        scaled = use.u * _as_weights(weights, use.u)
        table.index_add_(0, use.v.flatten(), scaled.flatten(0, 1))

    def both(self, here: Use, there: Use) -> list[Use]:
        """Count a position that looks up the same row at both points once, with the sum of its u."""
        moved = (here.v != there.v).unsqueeze(2)
        own = here.u.masked_fill(~moved, 0.0)
        return [replace(here, u=own), replace(there, u=there.u + here.u.masked_fill(moved, 0.0))]

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return factor_norms(u) * math.sqrt(u.shape[1])

    def squares(self, v: Tensor, u: Tensor) -> Tensor:
        scaled = _Scaled.of(u)
        is_other = v.unsqueeze(2) != v.unsqueeze(1)
        products = scaled.products().masked_fill_(is_other, 0.0)
        return _squares_of(products, scaled.units, scaled.norms)


def squares_of_tied(uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
    """Return squared norms for a table whose transpose is a layer, too: a language model's embedding.

    A row that is looked up is an outer product: Σ_t u_t v_tᵀ + Σ_s e_(r_s) w_sᵀ with e_r the unit
    vector of row r, and e_r · u = u_r. So there is nothing of the table's size.

    Args:
        uses: of the parameter, joined. None is returned for other uses, and where rows are cheaper.
        may_keep: as in :meth:`AbstractForm.squared_norms`.
    """
    layer, table = (
        next((use for use in uses if isinstance(use.form, form)), None)
        for form in (OuterProduct, Lookup)
    )
    if layer is None or table is None or len(uses) > 2:
        return None
    v, u, times = layer.v, layer.u, layer.u.shape[1] + table.u.shape[1]
    are_rows_cheap = times * (u.shape[2] + v.shape[2]) > 2 * u.shape[2] * v.shape[2]
    is_empty = u.numel() == 0 or table.u.numel() == 0
    if is_empty or are_rows_cheap or (may_keep and layer.form.prefers_rows(v, u)):
        return None
    tensors = v, u, table.v, table.u
    return in_slices(_squares_of_tied, 4 * times**2, *tensors, most=_PRODUCT_BYTES)


def _squares_of_tied(v: Tensor, u: Tensor, at: Tensor, w: Tensor) -> Tensor:
    a, b, c = map(_Scaled.of, (u, v, w))
    met = a.tensor.gather(2, at.unsqueeze(1).expand(-1, u.shape[1], -1))
    same = (at.unsqueeze(2) == at.unsqueeze(1)).to(met)
    rows = torch.cat([torch.cat([a.products(), met], 2), torch.cat([met.mT, same], 2)], 1)
    columns = torch.cat([b.tensor, c.tensor], 1)
    parts = a.units * b.units, c.units
    units = torch.maximum(*parts)
    counts = torch.tensor([u.shape[1], w.shape[1]], device=units.device)
    shares = torch.stack([part / units for part in parts], 1).repeat_interleave(counts, 1).to(met)
    products = rows * _products(columns) * shares.unsqueeze(2) * shares.unsqueeze(1)
    return _squares_of(products, units, a.norms * b.norms + c.norms)


@dataclass(frozen=True)
class Scale(AbstractForm):
    """Σ_t v_it u_it, entry by entry, over all dimensions that the parameter does not have.

    Args:
        sum_over: those dimensions; the first one, of the records, is not among them.
    """

    sum_over: tuple[int, ...]

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        if not self.sum_over:
            return v * u
        each = 4 * u[:1].numel()
        return in_slices(lambda a, b: (a * b).sum(self.sum_over), each, v, u, most=_SCALED_BYTES)

    def add_weighted_sum(
        self, use: Use, weights: Tensor, onto: Tensor, *, is_new: bool = False
    ) -> None:
        rows = Rows.use(self.rows(use.v, use.u))
        rows.form.add_weighted_sum(rows, weights, onto, is_new=is_new)

    def of_records(self, use: Use, folding: Folding) -> Use:
        form = Scale((1, *(dimension + 1 for dimension in self.sum_over)))
        return Use(form, folding(use.v), folding(use.u))


# -- convolutions ---------------------------------------------------------------------------------

_TOGETHER = 32  # records in one convolution: batches of every size stay fast

# Writing down what the kernel sees pays if each of its entries is used for enough output channels. The
# bound was fitted to timings of many shapes on one core; it decides about time alone.
_PATCHES_PER_CHANNEL = 640
_ENTRIES = 1 << 18  # of patches that are written down at once: they stay in the cache


@dataclass(frozen=True)
class Convolution(AbstractForm):
    """The weight gradient of a convolution of (n, in, *size) with output gradient (n, out, *size).

    Where a record has f rows, both have a second dimension for them: (n, f, in, *size).

    The records' gradients are those of one convolution with n times as many groups, one record
    after the other in the channels, or products with what the kernel sees: which of the two is decided
    by the shapes, so that all processes do the same. Norms of wide layers on small maps come
    from inner products.
    """

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        v, u = self._of_rows(v), self._of_rows(u)
        rows = u.new_empty(len(u), *self.weight_shape)
        (self._products if self._prefers_products(v, u) else self._convolutions)(v, u, rows)
        return rows

    def _prefers_products(self, v: Tensor, u: Tensor) -> bool:
        """Return whether matrix products are likely to be faster than convolutions, by shapes alone."""
        if v.device.type != "cpu" or not self._has_patches:
            return False
        patches = math.prod(self.weight_shape[1:]) * u.shape[3:].numel()
        return patches <= _PATCHES_PER_CHANNEL * self.weight_shape[0]

    def _products(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Write down what the kernel sees at each position, of some records at a time."""
        size = max(1, _ENTRIES // (math.prod(self.weight_shape[1:]) * u[:1, :, 0].numel() or 1))
        for x, y, rows in zip(*(torch.split(each, size) for each in (v, u, out)), strict=True):
            x, y = self._as_outer_product(x, y)
            torch.bmm(y.transpose(1, 2), x, out=rows.flatten(2))

    @property
    def _has_patches(self) -> bool:
        return len(self.stride) == 2 and self.groups == 1

    def _positions(self, u: Tensor) -> int:
        """Return how many output positions a record has, in all its rows."""
        return u.shape[1:].numel() // self.weight_shape[0]

    def _as_outer_product(self, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the kernel sees at each position, and what came back: those of a linear layer.

        Shapes (n, f · positions, in · kernel) and (n, f · positions, out).
        """
        v, u = self._of_rows(v), self._of_rows(u).flatten(3)
        seen = F.unfold(
            v.flatten(0, 1), self.weight_shape[2:], self.dilation, self.padding, self.stride
        )
        seen = seen.view(*v.shape[:2], *seen.shape[1:])
        x, y = (each.transpose(1, 2).flatten(2).transpose(1, 2) for each in (seen, u))
        return x, y

    def _convolutions(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Run the records as groups of a convolution, some of them at a time."""
        # (n, f, in, ...) as (f, n·in, ...): with n times as many groups no channel of one record
        # meets one of another, so the weight gradient has a block for each record.
        size = _TOGETHER if v.device.type == "cpu" else len(v) or 1  # a call costs a device more
        parts = zip(*(torch.split(each, size) for each in (v, u, out)), strict=True)
        for x, y, rows in parts:
            n = len(x)
            x, y = (part.transpose(0, 1).flatten(1, 2) for part in (x, y))
            shape = (n * self.weight_shape[0], *self.weight_shape[1:])
            rows.copy_(self._backward(x, y, shape, n * self.groups).view_as(rows))

    def add_weighted_sum(
        self, use: Use, weights: Tensor, onto: Tensor, *, is_new: bool = False
    ) -> None:
        scaled = use.u * _as_weights(weights, use.u)
        v, scaled = (self._of_rows(each).flatten(0, 1) for each in (use.v, scaled))
        total = self._backward(v, scaled, self.weight_shape, self.groups).reshape(-1)
        if is_new:
            onto.copy_(total)
        else:
            onto.add_(total)

    def of_records(self, use: Use, folding: Folding) -> Use:
        v, u = (folding(self._of_rows(each)).flatten(1, 2) for each in (use.v, use.u))
        return Use(self, v, u)

    def _of_rows(self, tensor: Tensor) -> Tensor:
        """Return shape (n, f, channels, *size), f = 1 where a record has one row."""
        has_rows = tensor.dim() == 3 + len(self.stride)
        return tensor if has_rows else tensor.unsqueeze(1)

    def _backward(self, v: Tensor, u: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        weight = v.new_empty(1).expand(shape)  # only its shape is looked at
        gradient: Tensor = torch.ops.aten.convolution_backward(
            u, v, weight, None, self.stride, self.padding, self.dilation,
            False, [0] * len(self.stride), groups, [False, True, False],
        )[1]  # fmt: skip
        return gradient

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        overlaps = math.prod(self.weight_shape[2:])  # patches that have a position
        return super().lengths(v, u) * math.sqrt(overlaps)

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return squared norms from inner products of patches and of output gradients, if these are few.

        They are those of a linear layer whose inputs are the patches, which are written down for some
        records at a time.
        """
        outputs, patch = self.weight_shape[0], math.prod(self.weight_shape[1:])
        positions = sum(self._positions(use.u) for use in uses)
        is_few = 0 < 2 * positions * (patch + outputs) <= outputs * patch
        if not (self._has_patches and is_few):
            return None

        def squares(*tensors: Tensor) -> Tensor:
            factors = map(self._as_outer_product, tensors[::2], tensors[1::2])
            v, u = (torch.cat(each, 1) for each in zip(*factors, strict=True))
            return OuterProduct().squares(v, u)

        tensors = [each for use in uses for each in (use.v, use.u)]
        return in_slices(squares, 4 * positions * max(patch, positions // 4), *tensors)
