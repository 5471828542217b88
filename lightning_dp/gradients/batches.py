"""Batches: where in them the samples are, whose the rows of a layer are, and what is made of them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_dp._refusals import UnsupportedModelError
from lightning_dp._validate import whole_from_0

__all__ = [
    "DEFAULT_LAYOUT",
    "UNKNOWN_LAYOUT",
    "Layout",
    "RowOwners",
    "SampleBatch",
    "SampleRows",
    "Singles",
    "call_training_step",
    "folding_in_force",
    "is_differentiable",
    "is_image",
    "joined",
    "leaves",
    "loss_in",
    "map_leaves",
    "rows_of_records",
    "whole_batch",
    "with_loss",
]

_LEAVES = frozenset((Tensor, int, float, bool, str, type(None)))
_LISTS = frozenset((list, tuple))
_DEPTH = 6  # of objects inside objects that are looked into for a tensor

Leaf: TypeAlias = Any


@dataclass(frozen=True)
class Layout:
    """Says which leaves of a batch hold one entry for each sample.

    Args:
        holds_samples: of each leaf, in their order: True if its first dimension is that of the
            samples, False if all samples share it, None if neither: then no sample can be taken out.
            () where ``torch.utils.data.default_collate`` made the batch: it puts the samples into the
            first dimension of every tensor, and of every list of texts.
    """

    holds_samples: tuple[bool | None, ...] = ()

    @classmethod
    def of(cls, two: Any, three: Any) -> Layout:
        """Return the layout of batches of which one has 2 samples and one has 3.

        What has one value in both is shared by all samples; what differs in another way than by its
        length is made from several of them, so that none can be taken out.

        Example:
            >>> import torch
            >>> def collate(samples):
            ...     return {"x": torch.stack(samples), "names": ["a"] * len(samples), "k": 2.0}
            >>> Layout.of(*(collate([torch.zeros(2)] * n) for n in (2, 3))).holds_samples
            (True, True, False)
        """
        leaves_of_both = leaves(two, rows=True), leaves(three, rows=True)
        if len(leaves_of_both[0]) != len(leaves_of_both[1]):
            return UNKNOWN_LAYOUT
        return cls(tuple(_is_of_samples(*pair) for pair in zip(*leaves_of_both, strict=True)))


DEFAULT_LAYOUT = Layout()
UNKNOWN_LAYOUT = Layout((None,))


def _is_of_samples(of_two: Leaf, of_three: Leaf) -> bool | None:
    if (_length(of_two), _length(of_three)) == (2, 3):
        return True
    if isinstance(of_two, Tensor | np.ndarray):
        is_same = type(of_two) is type(of_three) and of_two.shape == of_three.shape
        return False if is_same and bool((of_two == of_three).all()) else None
    return False if of_two == of_three else None


class Singles(tuple[Any, ...]):
    """Batches of one sample each, in the place of a batch of them all."""

    __slots__ = ()


@dataclass(frozen=True)
class SampleBatch:
    """A batch of n samples.

    Args:
        value: as ``training_step`` takes it.
        size: how many samples it has.
        layout: where in it the samples are.
        owners: the units to which the samples belong; None if each is a unit.
    """

    value: Any
    size: int
    layout: Layout = DEFAULT_LAYOUT
    owners: RowOwners | None = None

    def check(self) -> None:
        """Refuse a batch of which some part has no entry for each sample."""
        known = self.layout.holds_samples
        if known and len(known) != len(self._leaves):
            raise UnsupportedModelError(_OTHER_LEAVES, topic="rows-and-records")
        for leaf, holds in zip(self._leaves, self._holds, strict=True):
            if holds is None or (holds and _length(leaf) != self.size):
                raise UnsupportedModelError(_NO_ENTRY, topic="rows-and-records")

    @cached_property
    def _leaves(self) -> list[Leaf]:
        return leaves(self.value, rows=True)

    @cached_property
    def _holds(self) -> tuple[bool | None, ...]:
        return self.layout.holds_samples or tuple(map(_is_collated, self._leaves))

    def of(self, samples: Tensor) -> SampleBatch:
        """Return the batch of some of the samples, by their places."""
        places: list[int] | None = None

        def some(leaf: Leaf) -> Leaf:
            nonlocal places
            if isinstance(leaf, Tensor):
                return leaf[samples.to(leaf.device)]
            if isinstance(leaf, np.ndarray):
                return leaf[samples.numpy()]
            places = samples.tolist() if places is None else places
            return type(leaf)([leaf[place] for place in places])

        owners = None if self.owners is None else self.owners.of(samples)
        return SampleBatch(self.map(some), len(samples), self.layout, owners)

    @property
    def singles(self) -> Sequence[Any]:
        """Batches of one sample, or of one unit's samples; refused as in :meth:`check`."""
        if isinstance(self.value, Singles):
            return self.value
        if self.size < 2:
            return [self.value]
        self.check()
        if self.owners is not None:
            return [self.of(places).value for places in self.owners.places()]
        return [self.of(torch.tensor([place])).value for place in range(self.size)]

    def map(self, of_samples: Callable[[Leaf], Leaf]) -> Any:
        """Return the value in new containers, with the leaves that hold samples replaced."""
        holds = iter(self._holds)
        return map_leaves(
            self.value, lambda leaf: of_samples(leaf) if next(holds) else leaf, rows=True
        )

    def copied(self) -> SampleBatch:
        """Return the batch with copies of the tensors, which may be changed in place."""
        own = self.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
        return SampleBatch(own, self.size, self.layout, self.owners)

    @property
    def versions(self) -> list[int]:
        """The version counters of the tensors, which count changes in place."""
        return [leaf._version for leaf in self._leaves if isinstance(leaf, Tensor)]

    @property
    def is_all_rows(self) -> bool:
        """True if it is made of tensors with a row for each sample, and nothing else."""
        return all(self._holds) and all(isinstance(leaf, Tensor) for leaf in self._leaves)

    @property
    def others(self) -> list[Sequence[Any]]:
        """Lists of texts, numbers and objects with an entry for each sample."""
        return [
            leaf
            for leaf, holds in zip(self._leaves, self._holds, strict=True)
            if holds and not isinstance(leaf, Tensor)
        ]


_NO_ENTRY = (
    "A part of the batch has no entry for each record in its first dimension (nodes of all graphs in one "
    "matrix, say), so that no record can be taken out of it. Let the collate_fn put the records into "
    "the first dimension of every tensor, or name the rows' records with rows_of_records."
)
_OTHER_LEAVES = (
    "Batches of the collate_fn hold more parts, or fewer, with the records that are in them."
)


def _length(leaf: Leaf) -> int | None:
    """Return the size of the first dimension; None if there is none."""
    if isinstance(leaf, Tensor | np.ndarray):
        return len(leaf) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list | tuple) else None


def _is_collated(leaf: Leaf) -> bool | None:
    """Return what ``default_collate`` makes of a leaf; arguments that are no batch are shared."""
    if isinstance(leaf, Tensor):
        return True if leaf.ndim else None
    if isinstance(leaf, list | tuple) and leaf:
        return True if all(isinstance(each, str | bytes) for each in leaf) else None
    return None if isinstance(leaf, np.ndarray) else False


# -- nesting --------------------------------------------------------------------------------------


def map_leaves(batch: Any, function: Callable[[Any], Any], *, rows: bool = False) -> Any:
    """Return the same nesting in new containers, with leaves replaced; ``rows`` as in :func:`leaves`."""
    if rows and _is_row(batch):
        return function(batch)
    if isinstance(batch, Mapping):
        new = copy.copy(batch)
        for key in batch:
            new[key] = map_leaves(batch[key], function, rows=rows)  # type: ignore[index]
        return new
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(each, function, rows=rows) for each in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_leaves(each, function, rows=rows) for each in batch)
    if _is_object_of_parts(batch):
        new = copy.copy(batch)
        for name, value in vars(batch).items():  # also of a frozen dataclass: it is ours
            object.__setattr__(new, name, map_leaves(value, function, rows=rows))
        return new
    return function(batch)


def leaves(batch: Any, *, rows: bool = False) -> list[Leaf]:
    """Return the leaves in order; with ``rows`` a list without containers or tensors in it is one leaf.

    Example:
        >>> leaves({"x": [1.0, "a"], "y": ()})
        [1.0, 'a']
        >>> leaves({"x": [1.0, "a"], "y": 2}, rows=True)
        [[1.0, 'a'], 2]
    """
    # Most parts are tensors, numbers or plain lists, which is quick to find at every step.
    is_leaf = type(batch) in _LEAVES or (rows and _is_row(batch))
    if is_leaf or (inside := _parts(batch)) is None:
        return [batch]
    return [leaf for part in inside for leaf in leaves(part, rows=rows)]


def _is_row(part: Any) -> bool:
    if type(part) not in _LISTS or not part:
        return False
    return not any(
        isinstance(each, Tensor | np.ndarray) or _parts(each) is not None for each in part
    )


def _parts(batch: Any) -> Sequence[Any] | None:
    """Return what a container holds; None for a leaf."""
    if type(batch) in _LISTS:
        return cast("list[Any] | tuple[Any, ...]", batch)
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return batch
    return list(vars(batch).values()) if _is_object_of_parts(batch) else None


def _is_object_of_parts(part: Any, depth: int = _DEPTH) -> bool:
    """Return whether it is a dataclass, or an object of a user's class that holds tensors or images."""
    if isinstance(part, Tensor | np.ndarray | nn.Module | type) or not hasattr(part, "__dict__"):
        return False
    return is_dataclass(part) or any(_holds_tensor(value, depth) for value in vars(part).values())


def _holds_tensor(part: Any, depth: int) -> bool:
    if isinstance(part, Tensor | np.ndarray) or is_image(part):
        return True
    if isinstance(part, Mapping):
        return any(_holds_tensor(each, depth) for each in part.values())
    if isinstance(part, list | tuple):
        return any(_holds_tensor(each, depth) for each in part)
    return depth > 0 and _is_object_of_parts(part, depth - 1)


def is_image(part: object) -> bool:
    """Return whether it is an image of Pillow."""
    images: Any = sys.modules.get("PIL.Image")
    return images is not None and isinstance(part, images.Image)


# -- what groups of samples gave --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleRows:
    """A value that each sample has its own of, shape (n, ...)."""

    rows: Tensor


def joined(parts: Sequence[Any], places: Sequence[Tensor]) -> Any:
    """Return arguments of several groups as those of the batch.

    A list holds an entry for each row, whatever is in it; other containers are looked into.
    """
    first = parts[0]
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts], places) for key in first}
    if isinstance(first, tuple):
        return tuple(joined(column, places) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        lists = [
            [map_leaves(each, partial(_own, i=i)) for each in part]
            for part, at in zip(parts, places, strict=True)
            for i in range(len(at))
        ]
        return [each for i in _order(places) for each in lists[i]]
    if not any(isinstance(part, SampleRows) for part in parts):
        is_number = isinstance(first, int | float | Tensor)
        if not is_number or all(_is_same(first, part) for part in parts):
            return first
    if len(parts) == 1:
        return first
    of_each = [
        row for part, at in zip(parts, places, strict=True) for row in _rows_of(part, len(at))
    ]
    ordered = [of_each[i] for i in _order(places)]
    if len({row.shape for row in ordered}) == 1:
        return SampleRows(torch.stack(ordered))
    return SampleRows(torch.cat(ordered).unsqueeze(1))


def _order(places: Sequence[Tensor]) -> list[int]:
    order: list[int] = torch.cat(list(places)).argsort().tolist()
    return order


def _rows_of(part: Any, n: int) -> Tensor:
    if isinstance(part, SampleRows):
        return part.rows
    value = torch.as_tensor(part)
    return value.expand(n, *value.shape)


def _own(value: Any, i: int) -> Any:
    return value.rows[i] if isinstance(value, SampleRows) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def whole_batch(value: Any) -> Any:
    """Return the rows of all samples: (n, b, ...) as (n · b, ...), and numbers as (n,)."""
    if not isinstance(value, SampleRows):
        return value
    return value.rows.flatten(0, 1) if value.rows.dim() > 1 else value.rows


# -- rows of records ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowOwners:
    r"""Brings the rows of each record together, as many as it has.

    Where records are units of privacy (a user's own rows, or K random views of one record), the gradient
    of unit i is the mean over its r_i rows, :math:`g_i = \frac{1}{r_i} \sum_j \nabla \ell_j`, so C
    has the meaning that it has for single records. It depends on unit i alone and is clipped last:
    adding or removing a unit moves the sum by at most C, whatever r_i is. (De et al., 2022,
    arXiv:2204.13650, for views; Charles et al., 2024, arXiv:2407.07737, for users.)

    Args:
        records: n, their number.
        owners: shape (N,), the record of each row: whole numbers from 0 to n - 1.
        shares: as :meth:`of` found them in a larger batch.

    Example:
        >>> import torch
        >>> RowOwners(3, torch.tensor([0, 2, 0]))(torch.tensor([5, 6, 7])).tolist()
        [[5, 7], [0, 0], [6, 0]]
    """

    records: int
    owners: Tensor
    shares: Tensor | None = None

    @cached_property
    def counts(self) -> Tensor:
        """The number of rows of each record, shape (n,)."""
        return self.owners.bincount(minlength=self.records)

    @cached_property
    def row_shares(self) -> Tensor:
        """Factors N / (n r_i) of the rows of unit i, shape (N,), which make means of sums times n/N."""
        if self.shares is not None:
            return self.shares
        return (len(self.owners) / (self.records * self.counts.double()))[self.owners]

    @cached_property
    def have_as_many(self) -> bool:
        """True if all units have equally many rows, so that the sums are the means."""
        return bool((self.row_shares == 1).all())

    def of(self, rows: Tensor) -> RowOwners:
        """Return the owners of some of the rows, among all n records."""
        rows = rows.to(self.owners.device)
        return RowOwners(self.records, self.owners[rows], self.row_shares[rows])

    def places(self) -> list[Tensor]:
        """Return the rows of each record."""
        return [(self.owners == record).nonzero().flatten() for record in range(self.records)]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return shape (n, f, ...) for shape (N, ...), f the most rows that a record has, at least 1.

        Where a record has fewer, zeros follow.

        Raises:
            UnsupportedModelError: if N is another number of rows.
        """
        if len(rows) != len(self.owners):
            raise UnsupportedModelError(
                "was called with another number of rows than its records have. Keep all rows of every "
                "record: choose none by its values.",
                topic="rows-and-records",
            )
        most, order, places = self._moves
        if order is None:
            return rows.view(self.records, most, *rows.shape[1:])
        padded = rows.new_zeros(self.records * most, *rows.shape[1:])
        padded.index_copy_(0, places.to(rows.device), rows[order.to(rows.device)])
        return padded.view(self.records, most, *rows.shape[1:])

    @cached_property
    def _moves(self) -> tuple[int, Tensor | None, Tensor]:
        """Return f, which rows to take, and their places among n f; no rows where all stay."""
        owners, order = self.owners.sort(stable=True)
        counts = self.counts
        most = max(1, int(counts.max()) if len(counts) else 0)
        start = counts.cumsum(0) - counts
        places = owners * most + torch.arange(len(owners), device=owners.device) - start[owners]
        is_equal = len(counts) == self.records and bool((counts == most).all())
        stays = is_equal and bool((owners == self.owners).all())
        return most, None if stays else order, places


_in_force: ContextVar[RowOwners | None] = ContextVar("rows_of_records", default=None)


@contextmanager
def rows_of_records(owners: Tensor, records: int) -> Iterator[None]:
    """Inside, row j of every trained layer's input belongs to the record ``owners[j]`` of the batch.

    For models that see all graph nodes, tokens or crops of a batch in one tensor of N rows, where a
    record may have any number of them. Without private training it does nothing. Layers that see a
    row for each record are called outside. Contexts may stand inside each other; the inner one holds.

    Args:
        owners: shape (N,), whole numbers from 0 to ``records - 1``; ``batch.batch`` of a PyTorch
            Geometric batch.
        records: n, how many records the batch has, those without any row counted too.

    Raises:
        ValueError: if ``owners`` is no tensor of one dimension with whole numbers, or ``records`` no
            whole number of at least 0.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_dp import rows_of_records
        >>> embed, head = nn.Linear(3, 4), nn.Linear(4, 2)
        >>> def forward(nodes, owners, n):  # nodes of n graphs, one after the other
        ...     with rows_of_records(owners, n):
        ...         hidden = embed(nodes).relu()
        ...     return head(hidden.new_zeros(n, 4).index_add(0, owners, hidden))
        >>> forward(torch.ones(5, 3), torch.tensor([0, 0, 0, 1, 1]), 2).shape
        torch.Size([2, 2])
    """
    where = "rows_of_records"
    is_whole = isinstance(owners, Tensor) and not (
        owners.is_floating_point() or owners.is_complex() or owners.dtype.itemsize == 0
    )
    if not is_whole or owners.dim() != 1:
        seen = type(owners).__name__
        if isinstance(owners, Tensor):  # its size may be that of a private batch
            seen = f"a tensor of {owners.dim()} dimensions and {owners.dtype}"
        raise ValueError(
            f"{where}: owners is {seen}. Give an integer tensor of shape (N,), the record of each row "
            "(batch.batch of a batch of graphs)."
        )
    count = whole_from_0("records", records, of=where)
    token = _in_force.set(RowOwners(count, owners.detach().clone()))
    try:
        yield
    finally:
        _in_force.reset(token)


def folding_in_force() -> RowOwners | None:
    """Return what the innermost :func:`rows_of_records` says; None outside of all."""
    return _in_force.get()


# -- training_step ------------------------------------------------------------------------------


def call_training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Return what ``training_step`` does, called by position.

    The number of the batch is its second argument, whatever that is called, if it takes two.
    """
    step = module.training_step
    takes_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return step(batch, batch_idx) if takes_number else step(batch)


def loss_in(output: Any) -> Any:
    """Return the loss in the output of ``training_step``: the output itself, or its entry "loss"."""
    return output.get("loss") if isinstance(output, Mapping) else output


def is_differentiable(loss: object) -> TypeGuard[Tensor]:
    """Tell whether there is anything to go back from."""
    return isinstance(loss, Tensor) and loss.requires_grad


def with_loss(output: Any, none: Tensor) -> Any:
    """Return the output of ``training_step``; where there is no loss, with ``none`` in its place."""
    if output is None:
        return none
    if isinstance(output, Mapping) and output.get("loss") is None:
        return {**output, "loss": none}
    return output
