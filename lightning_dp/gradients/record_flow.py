"""The records that a value in an autograd graph depends on: rows, one record, or a mixture of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from lightning_dp.gradients.base import ALONE, UnsupportedModelError

__all__ = [
    "MOVED",
    "NOTHING",
    "ROWS",
    "CoupledLossError",
    "Flow",
    "Given",
    "Meeting",
    "Mixed",
    "OneRecord",
    "SomeRows",
    "kind_of",
    "name_of",
    "signed",
]


class CoupledLossError(UnsupportedModelError):
    """The loss mixes records by more than sums with constant coefficients."""


@dataclass(frozen=True, eq=False)
class _Named:
    name: str

    def __repr__(self) -> str:
        return self.name


NOTHING = _Named("NOTHING")  # of the records: a function of parameters alone
ROWS = _Named("ROWS")  # of each record its own; or undecided
MOVED = _Named("MOVED")  # rows that stand at the places of other records (roll, flip)


@dataclass(frozen=True)
class Mixed:
    """A sum of functions of one record each, with constant coefficients.

    Args:
        maker: the node that took the sum.
    """

    maker: Any


@dataclass(frozen=True)
class OneRecord:
    """A function of the record in one place."""

    place: int


@dataclass(frozen=True)
class SomeRows:
    """Rows of some of the records.

    Args:
        size: of the dimension in which they stand; None if that is not known, and whose they are.
        is_chosen: True if values of the data may have chosen them, so that their number tells.
    """

    size: int | None = None
    is_chosen: bool = False


Flow: TypeAlias = _Named | Mixed | OneRecord | SomeRows


class Given(NamedTuple):
    """One differentiable input of a graph node: what it holds, and its shape."""

    flow: Flow
    shape: torch.Size

    @property
    def is_rows(self) -> bool:
        return self.flow is ROWS or self.flow is MOVED


_BASE = re.compile(r"Backward[s\d]*(_copy)?$")  # nodes of a backward pass have the word twice


@cache
def _without_end(name: str) -> str:
    return _BASE.sub("", name)


def name_of(kind: type) -> str:
    """Return the name of what a type of node differentiates."""
    return _without_end(kind.__name__)


def kind_of(node: Any) -> str:
    """Return the name of what a node differentiates."""
    return name_of(type(node))


def signed(number: int) -> int:
    """Return a number that torch shows without its sign."""
    return number - 2**64 if number >= 2**63 else number


class Meeting:
    """A node of the graph, with what meets there.

    Args:
        node: the node.
        inputs: one for each input; None for a tensor that has no gradient (data, constants).
        n: the number of records.
    """

    def __init__(self, node: Any, inputs: Sequence[Given | None], n: int) -> None:
        self.node, self.inputs, self.n = node, inputs, n
        self.given = [e for e in inputs if e is not None and e.flow is not NOTHING]
        """The inputs that hold something of the records."""
        mixtures = [each.flow for each in self.given if isinstance(each.flow, Mixed)]
        self.mixture = mixtures[0] if mixtures else None
        """The first input that is a mixture; it stays one through linear nodes."""

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the first output."""
        shape: torch.Size = self.node._input_metadata[0].shape
        return shape

    def places(self, shape: Sequence[int]) -> list[int]:
        """Return the dimensions that may be those of the rows: several rows a record are folded."""
        return [d for d, size in enumerate(shape) if size and size % self.n == 0]

    def place(self, shape: Sequence[int]) -> int | None:
        """Return the dimension of the rows, if only one can be."""
        found = self.places(shape)
        return found[0] if len(found) == 1 else None

    def place_in(self, given: Given) -> int | None:
        """Return the dimension of an input's rows, if only one can be."""
        if isinstance(given.flow, OneRecord):
            return None
        if isinstance(given.flow, SomeRows):
            size = given.flow.size
            found = [d for d, each in enumerate(given.shape) if each == size]
            return found[0] if len(found) == 1 and size and size > 1 else None
        return self.place(given.shape)

    def record_place(self, given: Given) -> int | None:
        """Return the dimension in which each entry is one record, if only one can be."""
        place = self.place_in(given)
        return place if place is not None and given.shape[place] == self.n else None

    @cached_property
    def has_rows(self) -> bool:
        """True if the output may have rows."""
        return bool(self.places(self.shape))

    def saved(self, name: str) -> Any:
        """Return what the node keeps under this name (no tensor); None if nothing."""
        return getattr(self.node, f"_saved_{name}", None)

    @cached_property
    def dims(self) -> tuple[int, ...] | None:
        """The dimensions over which the node goes; None for all of them."""
        dims = self.saved("dim")
        if dims is None:
            return None
        rank = max(1, len(self.given[0].shape))
        return tuple(signed(d) % rank for d in ((dims,) if isinstance(dims, int) else dims)) or None

    @property
    def dim(self) -> int:
        """The one dimension along which the node goes."""
        return self.dims[0] if self.dims else 0

    def goes_over(self, given: Given) -> bool:
        """Tell whether a reduction is surely one over rows of several records."""
        flow, place = given.flow, self.place_in(given)
        if isinstance(flow, OneRecord):
            return False
        if isinstance(flow, SomeRows):
            return place is not None and (self.dims is None or place in self.dims)
        if self.dims is None:
            return math.prod(self.shape) == 1 and math.prod(given.shape) >= self.n
        if place is not None:
            return place in self.dims
        return bool(self.places(given.shape)) and not self.has_rows

    def goes_along(self) -> bool:
        """Tell whether what keeps the shape surely goes along several records."""
        return any(self.place_in(each) in (self.dims or ()) for each in self.given)

    # -- refusals --------------------------------------------------------------------------

    def refuse_mixture(self) -> None:
        """Refuse a mixture among the inputs, where the node is not linear."""
        if self.mixture is None:
            return
        raise CoupledLossError(
            f"The loss takes {words(self.node)} of what {words(self.mixture.maker)} makes of several "
            "records, so that records change each other's gradients. Take it of each record's own "
            "value (reduction='none'), and then the mean over the records, with nothing but sums "
            f"and constant factors after it. {ALONE}",
            topic="coupled-loss",
        )

    def refuse_over_records(self) -> NoReturn:
        """Refuse a node that brings several records together by more than sums."""
        raise CoupledLossError(
            f"The loss takes {words(self.node)} over several records, which is more than their sum, "
            "so that records change each other's gradients. Take it within each record, over the "
            "other dimensions, and then the mean over the records; leave out terms between records. "
            f"{ALONE}",
            topic="coupled-loss",
        )

    def refuse_number(self) -> NoReturn:
        """Refuse a mean over as many rows as the data choose."""
        raise CoupledLossError(
            f"The loss takes {words(self.node)} over rows that a mask or an index chose, so that it "
            "divides by a number that all records decide. Multiply each row's loss by the mask "
            f"instead, and take the mean over all rows: (losses * mask).mean(). {ALONE}",
            topic="coupled-loss",
        )


def words(node: Any) -> str:
    """Return a node's name as the user would call it, and as the graph does."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind_of(node)).lower()
    return f"{snake} ({type(node).__name__})"
