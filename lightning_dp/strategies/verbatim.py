"""Records of the batch, bit for bit, in what a checkpoint is about to publish."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dp._shards import held_here
from lightning_dp.isolation.synthetic import leaves_of

__all__ = ["LatestBatches"]

_DISTINCT = 8  # numbers in a row that nothing else has by chance: no masks, no padding
_KEPT = 16 << 20  # bytes of a batch that are kept until the next one
_OBJECTS = 100_000  # in a checkpoint that are looked into

_FOUND = (
    "A checkpoint would hold records of the batch as they are, in {} (a queue or a cache that a hook "
    "fills, what on_save_checkpoint adds, data among the hyper-parameters). ε covers weights, not "
    "copies of records: keep none in buffers, in what is saved, or in save_hyperparameters(), which "
    "takes ignore=[...]."
)


class LatestBatches:
    """Looks for the records of the latest two batches in a checkpoint.

    Of two, since a callback that saves comes before the module's own hook for the end of a batch.

    Compared are rows of real numbers of which enough are distinct, bit for bit: what is found is a
    record. What was computed from records is not found here.
    """

    def __init__(self) -> None:
        self._rows: deque[list[Tensor]] = deque(maxlen=2)

    def see(self, batch: Any) -> None:
        """Remember a batch, or its first records if it is large."""
        rows = [
            leaf if leaf.nbytes <= _KEPT else leaf[: len(leaf) * _KEPT // leaf.nbytes].clone()
            for leaf in leaves_of(batch)
            if leaf.is_floating_point()
            and leaf.dim() > 1
            and leaf.numel() >= _DISTINCT * max(1, len(leaf))
        ]
        self._rows.append(rows)

    def fault(self, checkpoint: Mapping[str, Any]) -> str | None:
        """Return why a checkpoint may not be saved, naming its entries; None if it may."""
        sought = [(rows.shape[1:], _distinct(rows)) for batch in self._rows for rows in batch]
        found: dict[str, None] = {}
        for name, tensor in _entries(checkpoint):
            for shape, rows in sought:
                if tensor.shape[-len(shape) :] == shape and _holds(tensor, rows):
                    found[name] = None
        return _FOUND.format(", ".join(list(found)[:5])) if found else None


def _distinct(rows: Tensor) -> Tensor:
    """Return the rows, flat, that have enough distinct finite numbers."""
    flat = rows.detach().flatten(1)
    ordered = flat.sort(dim=1).values
    jumps = (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
    return flat[(jumps + 1 >= _DISTINCT) & flat.isfinite().all(dim=1)]


def _holds(tensor: Tensor, rows: Tensor) -> bool:
    """Tell whether one of the rows is in a tensor; only those whose first number is are compared."""
    there = tensor.detach().reshape(-1, rows.shape[1])
    rows = rows.to(there)
    candidates = rows[torch.isin(rows[:, 0], there[:, 0])]
    return any(bool((there == row).all(dim=1).any()) for row in candidates)


def _entries(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of real numbers with the entries that they are in.

    Deeper keys may be data, and are no names; those of a state_dict are names of tensors.
    """
    for key, value in checkpoint.items():
        if key == "state_dict":
            for name, tensor in value.items():
                yield from ((f"the buffer or weight {name!r}", each) for each in _tensors(tensor))
        else:
            yield from ((f"checkpoint[{key!r}]", each) for each in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield tensors, arrays and lists of real numbers in nested containers and objects."""
    known: set[int] = set()
    work = deque([value])
    while work and len(known) < _OBJECTS:
        value = work.popleft()
        if isinstance(value, Tensor):
            (value,) = held_here([value])
            if value.is_floating_point() and value.layout == torch.strided and value.dim():
                yield value
        elif isinstance(value, np.ndarray):
            if value.dtype.kind == "f":
                yield torch.tensor(value)
        elif id(value) not in known:
            known.add(id(value))
            if isinstance(value, list | tuple) and value and set(map(type, value)) == {float}:
                yield torch.tensor(value)
            else:
                work.extend(_parts(value))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | deque | set):
        return list(value)
    return list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []
