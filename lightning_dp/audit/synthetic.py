"""Batches with the shapes and dtypes of the user's, and none of the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["NoSyntheticBatch", "leaves_of", "replace_leaf", "synthetic_pool", "take_rows"]

_SEED = 20_230_515  # any; the values mean nothing


class NoSyntheticBatch(ValueError):
    """The batch holds something that cannot be imitated from shapes and dtypes."""


def leaves_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order in which they are found."""
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def _map_leaves(batch: Any, function: Callable[[int, Tensor], Tensor]) -> Any:
    """The same structure with each tensor replaced; the function is given its place, too."""
    place = iter(range(len(leaves_of(batch))))
    return apply_to_collection(batch, Tensor, lambda leaf: function(next(place), leaf))


def replace_leaf(batch: Any, place: int, value: Tensor) -> Any:
    """The same batch with another tensor at one place."""
    return _map_leaves(batch, lambda at, leaf: value if at == place else leaf)


def take_rows(pool: Any, rows: Sequence[int]) -> Any:
    """The batch of some of the records of a pool, in this order."""
    index = torch.tensor(list(rows), dtype=torch.int64)
    return _map_leaves(pool, lambda _, leaf: leaf[index])


def synthetic_pool(batch: Any, records: int, classes: int) -> Any:
    """So many records like those of a batch: made from its shapes, dtypes and nesting alone.

    No value of the batch is read, so this also works for a model whose data is private. Real numbers
    are uniform in (0, 1): legal as pixels, probabilities, and arguments of a logarithm. Whole
    numbers with one entry per record are class numbers below ``classes``; with several they are
    0 or 1, which every vocabulary and every mask knows, and never all 0. Record i and record
    i + records/2 differ in every tensor.

    Args:
        batch: tensors with one row per record, in dicts, lists, tuples or dataclasses.
        records: rows to make, an even number.
        classes: at least 2.

    Raises:
        NoSyntheticBatch: if the batch holds anything else; the message names types only.
    """
    _refuse_other_leaves(batch)
    rows = {len(leaf) if leaf.dim() else 0 for leaf in leaves_of(batch)}
    if len(rows) != 1 or 0 in rows:
        raise NoSyntheticBatch("the batch has tensors without one row for each record")
    generator = torch.Generator().manual_seed(_SEED)
    return _map_leaves(batch, lambda _, leaf: _imitate(leaf, records, classes, generator))


def _imitate(leaf: Tensor, records: int, classes: int, generator: torch.Generator) -> Tensor:
    shape = (records, *leaf.shape[1:])
    if leaf.is_floating_point():
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        return torch.rand(shape, generator=generator, dtype=dtype).clamp_(min=1e-3)
    if leaf.is_complex():
        return torch.randn(shape, generator=generator, dtype=leaf.dtype)
    if leaf.dim() == 1:
        half = records // 2
        first = torch.arange(half) % classes
        return torch.cat([first, (first + half) % classes]).to(leaf.dtype)
    values = torch.randint(2, shape, generator=generator)
    values[records // 2 :] = 1 - values[: records // 2]
    if leaf[0].numel() > 1:
        values.flatten(1)[:, 0] = 1
    return values.to(leaf.dtype)


def _refuse_other_leaves(batch: Any) -> None:
    others: set[str] = set()

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            others.add(type(leaf).__name__)
        return leaf

    apply_to_collection(batch, (Tensor, *_PLAIN), note)
    if others or not leaves_of(batch):
        raise NoSyntheticBatch(f"the batch holds {', '.join(sorted(others)) or 'no tensor'}")


_PLAIN = (str, bytes, bool, int, float, complex)
