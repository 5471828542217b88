"""Per-sample gradients of a parameter as a bilinear form: a layer's input times what came back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp._precision import has_float64, in_float64
from lightning_dp.functional import as_rows, factor_norms, squared_row_norms
from lightning_dp.gradients.base import UnsupportedModelError

__all__ = [
    "PRODUCTS",
    "SLICE_BYTES",
    "AbstractFolding",
    "AbstractForm",
    "Folded",
    "Owned",
    "Rows",
    "Scaled",
    "Use",
    "Uses",
    "above_rounding",
    "above_what_vanishes",
    "joined_positions",
    "joined_rows",
    "sum_in_float64",
    "sum_of_products",
    "uses_of_records",
]


class AbstractFolding(ABC):
    """Brings the rows of each record together, in tensors of N rows."""

    records: int
    """n, how many there are."""

    @abstractmethod
    def apart(self, rows: Tensor) -> Tensor:
        """Return shape (n, f, ...) for shape (N, ...), f the most rows that a record has, and at least 1.

        Where a record has fewer, zeros follow.

        Raises:
            UnsupportedModelError: if N is another number of rows.
        """

    @abstractmethod
    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum over the rows of each record: shape (n, ...) for shape (N, ...).

        Raises:
            UnsupportedModelError: if N is another number of rows.
        """


@dataclass(frozen=True)
class Folded(AbstractFolding):
    """Equal numbers of rows: the one with index (o · n + i) · inner + k belongs to record i.

    Args:
        records: n, their number.
        outer: how many values o takes: 1 where the rows of a record follow each other, f for
            ``x.transpose(0, 1).flatten(0, 1)``, where the records of a frame do.
        inner: how many values k takes.

    Example:
        >>> import torch
        >>> Folded(2, outer=1, inner=3).apart(torch.arange(6)).tolist()
        [[0, 1, 2], [3, 4, 5]]
        >>> Folded(2, outer=3, inner=1).apart(torch.arange(6)).tolist()
        [[0, 2, 4], [1, 3, 5]]
    """

    records: int
    outer: int = 1
    inner: int = 1

    def apart(self, rows: Tensor) -> Tensor:
        parts = self._split(rows)
        if self.outer == 1:
            return parts[0]
        return parts.transpose(0, 1).flatten(1, 2)

    def sums(self, rows: Tensor) -> Tensor:
        return self._split(rows).sum((0, 2))

    def _split(self, rows: Tensor) -> Tensor:
        sizes = self.outer, self.records, self.inner
        _check_rows(rows, self.outer * self.records * self.inner)
        return rows.reshape(*sizes, *rows.shape[1:])


@dataclass(frozen=True, eq=False)
class Owned(AbstractFolding):
    """Rows with an owner each, as many of a record as it has.

    Args:
        records: n, their number.
        owners: shape (N,), whole numbers from 0 to n - 1.

    Example:
        >>> import torch
        >>> owned = Owned(3, torch.tensor([0, 2, 0]))
        >>> owned.apart(torch.tensor([5, 6, 7])).tolist()
        [[5, 7], [0, 0], [6, 0]]
        >>> owned.sums(torch.tensor([5, 6, 7])).tolist()
        [12, 0, 6]
    """

    records: int
    owners: Tensor

    def apart(self, rows: Tensor) -> Tensor:
        _check_rows(rows, len(self.owners))
        owners = self.owners.to(rows.device)
        order = owners.argsort(stable=True)
        counts = owners.bincount(minlength=self.records)
        most = max(1, int(counts.max()) if len(counts) else 0)
        sorted_owners = owners[order]
        start = counts.cumsum(0) - counts
        own_place = owners.new_ones(len(owners)).cumsum(0) - 1 - start[sorted_owners]
        padded = rows.new_zeros(self.records * most, *rows.shape[1:])
        padded.index_copy_(0, sorted_owners * most + own_place, rows[order])
        return padded.view(self.records, most, *rows.shape[1:])

    def sums(self, rows: Tensor) -> Tensor:
        _check_rows(rows, len(self.owners))
        total = rows.new_zeros(self.records, *rows.shape[1:])
        return total.index_add_(0, self.owners.to(rows.device), rows)


def _check_rows(rows: Tensor, expected: int) -> None:
    if len(rows) != expected:
        raise UnsupportedModelError(
            "was called with another number of rows than its records are known to have. Keep the "
            "rows of every record together: leave none out by what is in them.",
            topic="rows-and-records",
        )


# Gradients that are not kept for all records from the norms to the sum are made slice by slice.
SLICE_BYTES = 4 << 20
PRODUCTS = 1 << 22  # inner products between positions that are in memory at once


# Terms of an inner product below float32's least number become zero. With factors of ordinary norms,
# or divided by their largest entries, all that vanishes so is less than this times the product of their
# norms, and above_what_vanishes takes no squared norm to be less.
_HIDDEN = 1e-9
_ORDINARY = (1e-5, 1e9)

# Rounding errors of an inner product, relative to the norms, stay below this many units.
_ROUNDING = 32
_SUMMED = 256  # entries that are added in float32 where there is no float64


def above_rounding(squares: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ‖Σ_s a_s‖² of each record, and not less than rounding may hide.

    Terms that cancel leave errors of the size of (Σ_s ‖a_s‖)², and a norm that came out too small
    would let a record through that is longer than its bound.

    Args:
        squares: as computed from inner products, float64.
        lengths: Σ_s ‖a_s‖.
        dtype: of the inner products.
    """
    return torch.maximum(squares, _ROUNDING * torch.finfo(dtype).eps * lengths.square())


@dataclass(frozen=True)
class Scaled:
    """A factor of inner products, with each record's part over a unit so that they stay in range.

    Args:
        tensor: records first, over the units.
        units: float64, shape (n,); on the host if the device has no float64.
        norms: of the records' parts as they were, as the units.
    """

    tensor: Tensor
    units: Tensor
    norms: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Scaled:
        """Divide each record's part by its largest entry; by 1 where all products stay in range."""
        if tensor.device.type == "cpu" and len(tensor):  # elsewhere, a look waits for the device
            norms = torch.linalg.vector_norm(as_rows(tensor), dim=1)
            least, most = (float(each) for each in norms.aminmax())
            if _ORDINARY[0] < least and most < _ORDINARY[1]:
                wide = norms.double()
                return cls(tensor, torch.ones_like(wide), wide)
        norms = factor_norms(tensor)
        largest = as_rows(tensor).abs().amax(1).clamp_(min=torch.finfo(tensor.dtype).tiny)
        return cls(tensor / largest.view(-1, *[1] * (tensor.dim() - 1)), in_float64(largest), norms)


def sum_of_products(products: Tensor) -> Tensor:
    """Return ‖Σ_s a_s‖² of each record from its (T, T) inner products, by :func:`above_rounding`.

    Float32 products, summed in float64: the products in float64 would double the work.
    """
    lengths = sum_in_float64(products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt())
    return above_rounding(sum_in_float64(products.flatten(1)), lengths, products.dtype)


def sum_in_float64(rows: Tensor) -> Tensor:
    """Return the sum of each row; on a device without float64 by float32 sums of a few of its entries.

    Those are off by less than what :func:`above_rounding` allows for.
    """
    if has_float64(rows.device.type):
        return rows.sum(1, dtype=torch.float64)
    parts = torch.split(rows, _SUMMED, dim=1)
    return in_float64(torch.stack([part.sum(1) for part in parts], dim=1)).sum(1)


def above_what_vanishes(squares: Tensor, *factors: Scaled) -> Tensor:
    """Return squared norms, and not less than what may have vanished in inner products of the factors."""
    least = reduce(torch.mul, (each.norms for each in factors))
    return torch.maximum(squares, (_HIDDEN * least).square_())


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

    def writes_out(self, v: Tensor, u: Tensor) -> bool:
        """True if :meth:`put` knows how to write these gradients into given memory."""
        return False

    def keeps_memory(self) -> bool:
        """True if the memory of such gradients is worth keeping from step to step."""
        return True

    def put(self, v: Tensor, u: Tensor, out: Tensor) -> Use:
        """Write the gradients of all records, and return them as a use of the parameter.

        Args:
            v: as in :meth:`rows`.
            u: as in :meth:`rows`.
            out: flat memory, of as many entries as they have.
        """
        raise NotImplementedError

    def put_and_square(self, v: Tensor, u: Tensor, out: Tensor) -> tuple[Use, Tensor]:
        """Do the same, and return their squared norms too."""
        use = self.put(v, u, out)
        squares = use.form.squared_norms([use], may_keep=False)
        assert squares is not None
        return use, squares

    def prefers_rows(self, v: Tensor, u: Tensor) -> bool:
        """True if making the rows, which make norms and sum quick, saves time; by shapes alone."""
        return False

    @abstractmethod
    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_i weights_i f(v_i, u_i), of the parameter's shape or flat, without making the rows."""

    def add_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, onto: Tensor) -> None:
        """Add it to a flat vector, which may be of another precision."""
        onto.add_(self.weighted_sum(v, u, weights).reshape(-1))

    def put_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, into: Tensor) -> None:
        """Put it into a flat vector, whatever stands there."""
        self.add_weighted_sum(v, u, weights, into.zero_())

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

    def of_records(self, use: Use, folding: AbstractFolding) -> list[Use]:
        """Return the sum over the rows of each record, as uses of n records.

        By default one use for each row of a record, as if the layer had been called once for each.

        Args:
            use: of this form, of N rows.
            folding: tells which rows are whose.
        """
        v, u = folding.apart(use.v), folding.apart(use.u)
        return [Use(self, v[:, k], u[:, k]) for k in range(u.shape[1])]

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
        """Return f(v_i, u_i) of each record at some places of the flat parameter: shape (n, k).

        Args:
            shape: of the parameter.
            places: k of them.
        """
        size = max(1, SLICE_BYTES // (4 * shape.numel()))
        parts = zip(torch.split(v, size), torch.split(u, size), strict=True)
        return torch.cat([_at(self.rows(*part), places) for part in parts])

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

    def without(self, left_out: Tensor) -> Use:
        """Return the same with zeros for the records of which this is true, whatever they hold."""
        u = _zeroed(self.u, left_out)
        return replace(self, u=u, v=u if self.v is self.u else _zeroed(self.v, left_out))


def _zeroed(tensor: Tensor, records: Tensor) -> Tensor:
    if not tensor.is_floating_point():  # rows of a table, of which nothing is added
        return tensor
    return tensor.masked_fill(records.view(-1, *[1] * (tensor.dim() - 1)), 0.0)


def joined_positions(uses: Sequence[Use]) -> Use:
    """Return uses of one form, of (n, T, ...) tensors, as one use with the positions of all."""
    if len(uses) == 1:
        return uses[0]
    v, u = (torch.cat(parts, dim=1) for parts in zip(*((c.v, c.u) for c in uses), strict=True))
    return replace(uses[0], v=v, u=u)


def joined_rows(use: Use, folding: AbstractFolding) -> Use:
    """Return a use of (N, T, ...) tensors as one of (n, f·T, ...): positions of all rows of a record."""
    return replace(use, v=folding.apart(use.v).flatten(1, 2), u=folding.apart(use.u).flatten(1, 2))


# Every parameter of a layer, with its use in one call of the layer.
Uses: TypeAlias = list[tuple[Tensor | None, Use]]


def uses_of_records(uses: Uses, folding: AbstractFolding) -> Uses:
    """Return what a rule gave for N rows as uses of the n records to which they belong."""
    return [(param, part) for param, use in uses for part in use.form.of_records(use, folding)]


@dataclass(frozen=True)
class Rows(AbstractForm):
    """The gradients u_i themselves, of shape (n, *parameter shape); v is not used."""

    @classmethod
    def use(cls, u: Tensor) -> Use:
        """Return a use of which the gradients are known: of a bias, say."""
        return cls()._use(u)

    def _use(self, u: Tensor) -> Use:
        return Use(self, u, u)

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        return u

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        return weights @ as_rows(u)

    def add_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, onto: Tensor) -> None:
        if onto.dtype == u.dtype:
            onto.addmv_(as_rows(u).T, weights)  # no vector of the parameter's size
        else:
            super().add_weighted_sum(v, u, weights, onto)

    def put_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, into: Tensor) -> None:
        if into.dtype == u.dtype:
            torch.mv(as_rows(u).T, weights, out=into)
        else:
            super().put_weighted_sum(v, u, weights, into)

    def both(self, here: Use, there: Use) -> list[Use]:
        return [self._use(here.u + there.u)]

    def joined(self, uses: Sequence[Use]) -> list[Use]:
        return [self._use(reduce(torch.add, (use.u for use in uses)))]

    def of_records(self, use: Use, folding: AbstractFolding) -> list[Use]:
        return [self._use(folding.sums(use.u))]

    def along(
        self,
        v: tuple[Tensor, Tensor | None],
        u: tuple[Tensor, Tensor | None],
        weights: tuple[float, float],
    ) -> list[Use]:
        return [self._use(use.u) for use in super().along((v[0], None), u, weights)]

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        return _at(self.rows(v, u), places)

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return squared_row_norms(u).sqrt()

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        (use,) = uses
        return squared_row_norms(use.u)


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
