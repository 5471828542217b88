"""Rows that an index, a mask or a sorting chose, and whose they are: experts, orders, packed steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.gradients.layouts import Layout, layouts_after, name_of_function
from lightning_dp.gradients.scattered import (
    NOBODY,
    Place,
    Scattered,
    is_lost,
    owners_of,
    regular,
)

__all__ = ["places_after_choice"]

# Their outputs are entries of the first argument.
_CHOOSING = {
    *("__getitem__", "index_select", "select", "narrow", "gather", "take_along_dim", "flip"),
    *("fliplr", "flipud", "roll", "unbind", "split", "split_with_sizes", "chunk", "tensor_split"),
    *("masked_select", "_pack_padded_sequence", "_pad_packed_sequence"),
}
_JOINING = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "row_stack", "dstack"}
_ADDING = {"index_add_", "index_add", "scatter_add_", "scatter_add"}
_SORTING = {"sort", "argsort", "topk"}  # the last output says what stands where
# Write entries of one tensor into another: the position of that argument.
_SOURCES = {
    **dict.fromkeys(("__setitem__", "index_put_", "index_put"), 2),
    **dict.fromkeys(("masked_scatter_", "masked_scatter"), 2),
    **dict.fromkeys(("index_copy_", "index_copy", *_ADDING), 3),
}


def places_after_choice(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    places: Sequence[tuple[Tensor, Place]],
    outputs: Sequence[Tensor],
    n: int,
) -> list[Place | None] | None:
    """Return whose entries a function chose, by running it on their numbers.

    Args:
        function: was called with ``args`` and ``kwargs``.
        places: the tensors among them that hold records, and where.
        outputs: all its tensors.
        n: the number of records.

    Returns:
        For each output the place of its records, None where they are in no single dimension; None for
        a function that does not choose, or not among records, or by their places alone.
    """
    known = {id(tensor): place for tensor, place in places}
    if n < 2 and not any(isinstance(place, Scattered) for _, place in places):
        rows = [(tensor, place) for tensor, place in places if isinstance(place, Layout)]
        if None not in layouts_after(function, args, kwargs, rows, outputs, n):
            return None  # any place is right, and these are those of all other batches
    if name_of_function(function) in _SORTING and (place := known.get(id(args[0]))) is not None:
        if is_lost(place):
            return [NOBODY] * len(outputs)
        return _sorted(args[0], place, outputs, n)
    replaced = _replaced(name_of_function(function), args, known)
    if replaced is None:
        return None
    tensors, hint = replaced
    if any(is_lost(known[id(each)]) for each in tensors if id(each) in known):
        return [NOBODY] * len(outputs)
    codes, owners = _codes(tensors, known, n)
    with torch.no_grad():
        found = _run_on_codes(function, args, kwargs, codes, owners)
    by_place = name_of_function(function) in _CHOOSING and not _by_records(args, known)
    is_in_order = isinstance(known.get(id(args[0])), Layout)  # not steps of packed sequences
    if n > 1 and by_place and is_in_order and not _keeps_all(found, owners):
        return None  # which records are left out depends on how many others there are
    chosen: list[Place | None] = [
        NOBODY if each is None else _place_of(each, owners, hint, n) or NOBODY
        for each in found[: len(outputs)]
    ]
    return [*chosen, *[None] * (len(outputs) - len(chosen))]  # sizes of steps, say


def _by_records(args: tuple[Any, ...], known: Mapping[int, Place]) -> bool:
    """Tell whether what is chosen was computed from records, and does not follow from places alone."""
    return any(id(each) in known for each in _flat(list(args[1:])) if isinstance(each, Tensor))


def _keeps_all(found: Sequence[Tensor | None], owners: Tensor) -> bool:
    """Tell whether one output has entries of every record."""
    if len(found) != 1 or found[0] is None:
        return False
    return bool(torch.isin(owners[:-1], owners[found[0]]).all())


def _sorted(
    tensor: Tensor, place: Place, outputs: Sequence[Tensor], n: int
) -> list[Place | None] | None:
    """Return the order of records that were sorted by one number each."""
    if tensor.dim() != 1 or place.dim != 0:
        return None
    owners = owners_of(place, n, tensor.device)[outputs[-1]]
    return [regular(Scattered(0, owners), n)] * len(outputs)


def _replaced(
    name: str, args: tuple[Any, ...], known: Mapping[int, Place]
) -> tuple[list[Tensor], int | None] | None:
    """Return the tensors whose entries are chosen, joined or written, and the likely dimension."""
    if not args:
        return None
    if name in _JOINING and isinstance(args[0], list | tuple):
        joined = [each for each in args[0] if isinstance(each, Tensor)]
        if any(isinstance(known.get(id(each)), Scattered) for each in joined):
            return joined, 0
        return None
    if not isinstance(args[0], Tensor):
        return None
    place = known.get(id(args[0]))
    if name in _SOURCES:
        return _written(args, _SOURCES[name], known)
    if name not in _CHOOSING or place is None:
        return None
    if name == "__getitem__" and not _touches(args[1], args[0].dim(), place):
        return None
    return [args[0]], place.dim


def _written(
    args: tuple[Any, ...], place: int, known: Mapping[int, Place]
) -> tuple[list[Tensor], int | None] | None:

    source = args[place] if len(args) > place else None
    if not isinstance(source, Tensor) or id(source) not in known:
        return None
    return [args[0], source], known[id(source)].dim


def _touches(index: Any, dims: int, place: Place) -> bool:
    """Tell whether an index chooses among the entries of the dimension of the records."""
    if place.dim is None:
        return True
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims_of(each) for each in items)
    at = 0
    for each in items:
        if each is Ellipsis:
            at += dims - used
            continue
        width = _dims_of(each)
        if width and at <= place.dim < at + width:
            return not (isinstance(each, slice) and each == slice(None))
        at += width
    return False


def _dims_of(item: Any) -> int:
    """Return how many dimensions an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _codes(
    tensors: Sequence[Tensor], known: Mapping[int, Place], n: int
) -> tuple[dict[int, Tensor], Tensor]:
    """Return a number for each entry of the dimension of the records, and whose each number is.

    Numbers of constants are -1, which is the last one in the table.
    """
    codes: dict[int, Tensor] = {}
    tables, start = [], 0
    for each in tensors:
        place = known.get(id(each))
        if place is None:
            codes[id(each)] = torch.full((), -1, device=each.device).expand(each.shape)
            continue
        owners = owners_of(place, n, each.device)
        numbers = torch.arange(start, start + len(owners), device=each.device)
        start += len(owners)
        tables.append(owners)
        shape = [1] * each.dim()
        if place.dim is not None:
            shape[place.dim] = len(owners)
        codes[id(each)] = numbers.view(shape).expand(each.shape)
    tables.append(torch.full((1,), -1, device=tables[0].device))
    return codes, torch.cat(tables)


def _run_on_codes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    codes: Mapping[int, Tensor],
    owners: Tensor,
) -> list[Tensor | None]:
    """Return the numbers of the entries of each output; None where entries of several records meet."""

    def number(each: Any) -> Any:
        if isinstance(each, list | tuple):
            return [number(one) for one in each]
        return codes.get(id(each), each) if isinstance(each, Tensor) else each

    name = name_of_function(function)
    if name in _ADDING:
        return [_added(name, args, codes, owners)]
    if name in _SOURCES:
        if kwargs.get("accumulate") or any(each is True for each in args[3:]):
            return [None]
        target = codes[id(args[0])].clone()
        others = [number(each) if isinstance(each, Tensor) else each for each in args[1:]]
        writes = name if name.endswith("_") else f"{name}_"
        getattr(target, writes)(*others, **kwargs)
        return [target]
    if name in _JOINING:
        return [function(number(args[0]), *args[1:], **kwargs)]
    first = codes[id(args[0])]
    if name in ("_pack_padded_sequence", "_pad_packed_sequence"):
        first = first.flatten(2 if name == "_pack_padded_sequence" else 1)[..., :1].contiguous()
    if name == "_pad_packed_sequence":
        return [function(first, args[1], args[2], -1, *args[4:])[0]]
    result = function(first, *args[1:], **kwargs)
    if name == "_pack_padded_sequence":
        return [result[0]]  # and the sizes of its steps
    return [each for each in _flat(result) if isinstance(each, Tensor)]


def _added(
    name: str, args: tuple[Any, ...], codes: Mapping[int, Tensor], owners: Tensor
) -> Tensor | None:
    """Return numbers of entries to which others were added; None where they belong to others."""
    target, source = owners[codes[id(args[0])]], owners[codes[id(args[3])]]
    dim, index = args[1:3]
    if not name.startswith("scatter"):
        shape = [1] * source.dim()
        shape[dim] = -1
        index = index.view(shape).expand_as(source)
    largest = target.scatter_reduce(dim, index, source, "amax")
    none = len(owners)  # where a constant stands, it may be anybody's
    onto, given = (each.masked_fill(each < 0, none) for each in (target, source))
    smallest = onto.scatter_reduce(dim, index, given, "amin")
    if bool(((largest != smallest) & (largest >= 0)).any()):
        return None
    return _numbers_of(largest, owners)


def _numbers_of(found: Tensor, owners: Tensor) -> Tensor:
    """Return a number that stands for each owner in the table."""
    first = torch.full((int(owners.max()) + 2,), len(owners) - 1, device=owners.device)
    first[owners[:-1]] = torch.arange(len(owners) - 1, device=owners.device)
    first[-1] = len(owners) - 1
    return first[found]


def _place_of(codes: Tensor, owners: Tensor, hint: int | None, n: int) -> Place | None:
    """Return the dimension along which the numbers differ, and whose its entries are."""
    if not codes.numel():
        empty = [dim for dim, size in enumerate(codes.shape) if not size]
        dim = hint if hint in empty else empty[0]
        return Scattered(dim, owners[:0])
    if int(owners[codes].amax()) < 0 and hint is not None and hint < codes.dim():
        return Scattered(hint, owners[-1:].expand(codes.shape[hint]))  # nothing but constants yet
    for values in (codes, owners[codes]):
        largest = values.amax()
        if bool((values == largest).all()):
            first = values.flatten()[:1]
            owner = owners[first] if values is codes else first
            return regular(Scattered(_single(values, hint), owner), n)
        for dim in _long_dims(values, hint):
            others = [d for d in range(values.dim()) if d != dim]
            along = values.amax(others, keepdim=True) if others else values
            if bool(((values == along) | (values < 0)).all()):
                chosen = along.flatten()
                found = owners[chosen] if values is codes else chosen
                return regular(Scattered(dim, found), n)
    return None


def _single(values: Tensor, hint: int | None) -> int | None:
    """Return a dimension of one entry for what belongs to one record alone."""
    single = [dim for dim, size in enumerate(values.shape) if size == 1]
    return hint if hint in single else next(iter(single), None)


def _long_dims(values: Tensor, hint: int | None) -> Iterator[int]:
    dims = [dim for dim, size in enumerate(values.shape) if size > 1]
    yield from sorted(dims, key=lambda dim: dim != hint)


def _flat(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [part for each in result for part in _flat(each)]
    return [result]
