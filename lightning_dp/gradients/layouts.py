"""The place of the records in a tensor, followed through the functions of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["Layout", "by_shape", "layouts_after", "name_of_function", "reshaped"]


@dataclass(frozen=True)
class Layout:
    """The place of n records in a tensor: a dimension of outer · n · inner entries.

    The entry with index ``(o * n + i) * inner + k`` belongs to record i.

    Args:
        dim: the dimension, counted from the first.
        outer: how often all records come one after another (frames first, then records).
        inner: how many entries a record has in each of these runs (records first, then frames).

    Example:
        >>> frames = torch.arange(6).view(2, 3)  # of two records
        >>> Layout(0, inner=3).records_first(frames.flatten(), 2)
        tensor([[0, 1, 2],
                [3, 4, 5]])
        >>> Layout(0, outer=3).records_first(frames.T.flatten(), 2)
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """

    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def rows(self) -> int:
        """The number of entries that a record has in the dimension."""
        return self.outer * self.inner

    def fits(self, tensor: Tensor, n: int) -> bool:
        """Tell whether a tensor can hold n records in this way."""
        return self.dim < tensor.dim() and tensor.shape[self.dim] == self.rows * n

    def records_first(self, tensor: Tensor, n: int) -> Tensor:
        """Return shape (n, …): each record's part as a tensor of as many dimensions as before."""
        if self.dim == 0 and self.rows == 1:
            return tensor.unsqueeze(1)
        sizes = (self.outer, n, self.inner)
        split: Tensor = tensor.unflatten(self.dim, sizes)  # type: ignore[no-untyped-call]
        return split.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)

    def in_whole(self, parts: Tensor) -> Tensor:
        """Return what a function of the whole tensor has for each record, zero outside of its part.

        Args:
            parts: shape (n, …), as :meth:`records_first` returns it.

        Returns:
            shape (n, *shape of the whole tensor).

        Example:
            >>> parts = torch.tensor([[1, 2], [3, 4]])  # two frames of two records
            >>> Layout(0, outer=2).in_whole(parts)
            tensor([[1, 0, 2, 0],
                    [0, 3, 0, 4]])
        """
        n, place = len(parts), self.dim + 1
        split: Tensor = parts.unflatten(place, (self.outer, self.inner))  # type: ignore[no-untyped-call]
        sizes = list(split.shape)
        whole = parts.new_zeros(*sizes[: place + 1], n, *sizes[place + 1 :])
        each = torch.arange(n, device=parts.device)
        whole.movedim(place + 1, 1)[each, each] = split
        return whole.flatten(place, place + 2)

    def rows_first(self, tensor: Tensor, n: int) -> Tensor:
        """Return shape (n · rows, …): each record's rows one after another, in the first dimension."""
        if self.dim == 0 and self.outer == 1:
            return tensor
        return self.records_first(tensor, n).movedim(self.dim + 1, 1).flatten(0, 1)


# Of no other function does an output of the input's shape hold the records elsewhere.
_MOVING = {
    *("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "H"),
    *(
        "mH",
        "adjoint",
        "rot90",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "einsum",
        "tensordot",
    ),
    *("matmul", "bmm", "mm", "__matmul__", "__rmatmul__"),
}
_RESHAPING = {
    *("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "squeeze"),
    *("squeeze_", "unsqueeze", "unsqueeze_", "atleast_2d", "atleast_3d"),
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_MANY = 1_000_003  # a number of records that no other size is a multiple of


def name_of_function(function: Callable[..., Any]) -> str:
    """Return the name that a function of torch is known by; of a property the property's."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return str(getattr(function.__self__, "__name__", name)) if name == "__get__" else name  # type: ignore[attr-defined]


def reshaped(layout: Layout, before: Sequence[int], after: Sequence[int], n: int) -> Layout | None:
    """Return the place of the records after a reshape; None if they are in no single dimension.

    Entries keep their order, so that left · n · right entries stay as many: those before a record's
    first one, and those between one record's and the next one's.

    Example:
        >>> reshaped(Layout(0), (4, 3, 8), (12, 8), n=4)
        Layout(dim=0, outer=1, inner=3)
        >>> reshaped(Layout(1), (3, 4, 8), (12, 8), n=4)
        Layout(dim=0, outer=3, inner=1)
    """
    left = math.prod(before[: layout.dim]) * layout.outer
    right = math.prod(before[layout.dim + 1 :]) * layout.inner
    for dim in range(len(after)):
        ahead, behind = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if ahead and behind and not left % ahead and not right % behind:
            found = Layout(dim, left // ahead, right // behind)
            if found.rows * n == after[dim]:
                return found
    return None


def layouts_after(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layouts: Sequence[tuple[Tensor, Layout]],
    outputs: Sequence[Tensor],
    n: int,
) -> list[Layout | None]:
    """Return for each output of a function where it holds the records; None where that is not known.

    Args:
        function: was called with ``args`` and ``kwargs``.
        layouts: the tensors among them that hold records, and where.
        outputs: all its tensors.
        n: the number of records.
    """
    name = name_of_function(function)
    tensor, layout = layouts[0]
    if name in _RESHAPING:
        return [reshaped(layout, tensor.shape, each.shape, n) for each in outputs]
    if name in _RECURRENT and layout.dim < 2 and not _is_packed(args):
        return [
            layout,
            *(replace(layout, dim=1) for _ in outputs[1:]),
        ]  # layers or directions first
    if len(layouts) == 1 and name not in _MOVING and len(outputs) == 1:
        if outputs[0].shape == tensor.shape:
            return [layout]
        if name in ("repeat", "tile", "repeat_interleave", "expand"):
            return [_repeated(name, layout, tensor, outputs[0])]
    joined = _joined(args, kwargs, layouts) if name in ("cat", "concat", "concatenate") else None
    if joined is not None:
        return [joined if joined.fits(outputs[0], n) else None]
    found = _remembered(function, args, kwargs, layouts)
    if found is None or len(found) != len(outputs):
        return [by_shape(layouts, each) for each in outputs]
    if found == [None] and (numbers := _record_numbers(args, n)) is not None:
        found = _with_many(function, args, kwargs, [*layouts, (numbers, Layout())]) or found
    pairs = zip(found, outputs, strict=True)
    return [place if place is not None and place.fits(each, n) else None for place, each in pairs]


def _is_packed(args: Sequence[Any]) -> bool:
    """Tell whether a recurrent function was called with packed sequences: sizes of steps come second."""
    states = args[1] if len(args) > 1 else None
    return isinstance(states, Tensor) and states.dim() == 1


def _repeated(name: str, layout: Layout, before: Tensor, after: Tensor) -> Layout | None:
    place = layout.dim + after.dim() - before.dim()
    times, rest = divmod(after.shape[place], before.shape[layout.dim]) if place >= 0 else (0, 1)
    if rest or after.dim() < before.dim():
        return None
    moved = replace(layout, dim=place)
    if times == 1:
        return moved
    if name == "repeat_interleave":
        return replace(moved, inner=layout.inner * times)
    return replace(moved, outer=layout.outer * times)


def _joined(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layouts: Sequence[tuple[Tensor, Layout]],
) -> Layout | None:
    """Return the place of records that are joined along their own dimension, one batch after another."""
    tensors = args[0] if args else kwargs.get("tensors", ())
    along = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    place = layouts[0][1]
    if len(tensors) != len(layouts) or not isinstance(along, int):
        return None
    if along % max(1, layouts[0][0].dim()) != place.dim:
        return None
    if any((each.dim, each.inner) != (place.dim, place.inner) for _, each in layouts):
        return None
    return replace(place, outer=sum(each.outer for _, each in layouts))


def _with_many(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layouts: Sequence[tuple[Tensor, Layout]],
) -> list[Layout | None] | None:
    """Run a function on shapes alone, with so many records that their place can be told by its size.

    None if that is not possible: sizes are among the arguments, or a constant has one row a record.
    """
    places = {id(tensor): layout for tensor, layout in layouts}

    def shape_alone(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return torch.device("meta") if isinstance(each, torch.device) else each
        sizes = list(each.shape)
        if (layout := places.get(id(each))) is not None:
            sizes[layout.dim] = layout.rows * _MANY
        return torch.empty(sizes, dtype=each.dtype, device="meta")

    try:
        with torch.no_grad():
            result = function(*tree_map(shape_alone, args), **tree_map(shape_alone, dict(kwargs)))
    except Exception:
        return None
    results = [each for each in _flat(result) if isinstance(each, Tensor)]
    return [_place_of_many([layout for _, layout in layouts], each.shape) for each in results]


_known: dict[Any, list[Layout | None] | None] = {}  # what functions do to shapes does not change
_KNOWN = 1 << 14


def _remembered(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layouts: Sequence[tuple[Tensor, Layout]],
) -> list[Layout | None] | None:
    """Return the answer of :func:`_with_many`, of which the number of records is no part."""
    places = {id(tensor): layout for tensor, layout in layouts}
    key = function, _key(args, places), _key(kwargs, places)
    try:
        if key in _known:
            return _known[key]
    except TypeError:  # an argument that cannot be hashed
        return _with_many(function, args, kwargs, layouts)
    if len(_known) >= _KNOWN:
        _known.clear()
    _known[key] = found = _with_many(function, args, kwargs, layouts)
    return found


def _key(value: Any, places: Mapping[int, Layout]) -> Any:
    if isinstance(value, Tensor):
        layout = places.get(id(value))
        sizes = list(value.shape)
        if layout is not None:
            sizes[layout.dim] = -1
        return layout, tuple(sizes), value.dtype
    if isinstance(value, list | tuple):
        return (type(value), *(_key(each, places) for each in value))
    if isinstance(value, Mapping):
        return tuple((name, _key(each, places)) for name, each in value.items())
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    return type(value), value


def _record_numbers(args: tuple[Any, ...], n: int) -> Tensor | None:
    """Return the index 0 … n-1 in ``x[torch.arange(n), places]``, which counts the records."""
    index = args[1] if len(args) > 1 and isinstance(args[1], tuple) else ()
    first = index[0] if index else None
    if not isinstance(first, Tensor) or first.shape != (n,) or first.is_floating_point():
        return None
    return first if torch.equal(first, torch.arange(n, device=first.device)) else None


def _place_of_many(layouts: Sequence[Layout], shape: Sequence[int]) -> Layout | None:
    dims = [dim for dim, size in enumerate(shape) if size and not size % _MANY]
    if len(dims) != 1:
        return None
    rows = shape[dims[0]] // _MANY
    kinds = {(layout.outer, layout.inner) for layout in layouts}
    if len(kinds) != 1:
        return None
    ((outer, inner),) = kinds
    if rows != outer * inner:
        return None
    return Layout(dims[0], outer, inner)


def by_shape(layouts: Sequence[tuple[Tensor, Layout]], output: Tensor) -> Layout | None:
    """Return the place that all inputs agree on, as functions that go entry by entry keep it."""
    found = set()
    for tensor, layout in layouts:
        moved = replace(layout, dim=layout.dim + output.dim() - tensor.dim())
        if moved.dim < 0 or output.shape[moved.dim] != tensor.shape[layout.dim]:
            return None
        found.add(moved)
    return found.pop() if len(found) == 1 else None


def _flat(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [part for each in result for part in _flat(each)]
    return [result]
