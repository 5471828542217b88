"""The processes that share a step, and the shards of parameters (FSDP2) that each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "HeldParts",
    "World",
    "as_shard",
    "gathered",
    "held_here",
    "is_sharded",
    "scattered",
    "sum_into_shard",
]


def _only_this(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class World:
    """The processes that share one step.

    Args:
        rank: this process, 0 <= rank < size. Rank 0 writes the ledger.
        size: number of processes.
        all_reduce: sums a flat vector over all processes and gives each the total.
        broadcast: gives every process what rank 0 passed.
        is_sharded: flat vectors hold this process's part of the parameters (FSDP2), and a sum over
            records is added up over all processes as it is made. If not, each process has them whole.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _only_this
    broadcast: Callable[[Any], Any] = _only_this
    is_sharded: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"World(rank={self.rank}, size={self.size}): need 0 <= rank < size.")

    @property
    def is_lead(self) -> bool:
        """True on the one process that writes the ledger."""
        return self.rank == 0

    def share(self, size: int) -> slice:
        """Return the entries of a vector of length ``size`` that this process draws noise for.

        Each entry is in the share of one process, and shares differ by one entry at most. A vector of
        sharded parameters is this process's alone.

        Example:
            >>> [World(rank, 3).share(8) for rank in range(3)]
            [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        if self.is_sharded:
            return slice(0, size)
        return slice(self.rank * size // self.size, (self.rank + 1) * size // self.size)


# -- shards, as plain tensors of what is held here -----------------------------------------------


_WHOLE = frozenset((Tensor, nn.Parameter))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``, of which others hold parts.

    Example:
        >>> is_sharded(torch.zeros(3))
        False
    """
    # Without an import that takes a second; and first without a search in vain.
    return type(tensor) not in _WHOLE and hasattr(tensor, "to_local")


class HeldParts(list[Tensor]):
    """The parts that this process holds of tensors that are sharded over the same processes.

    Args:
        tensors: the whole ones, one of them at least.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(_here(tensor) for tensor in tensors)
        first: Any = next(tensor for tensor in tensors if is_sharded(tensor))
        self._mesh = first.device_mesh
        self.entries = sum(tensor.numel() for tensor in tensors)  # of the whole ones

    def added_up(self, number: Tensor) -> Tensor:
        """Return the sum over all processes of a number that each has of its parts; all call it together.

        Each gets the same bits.
        """
        total = number.detach().clone()
        torch.distributed.all_reduce(total, group=self._mesh.get_group())
        return total


def held_here(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this process' part of each tensor, in the same memory: all of it, or its shard.

    Of shards these are :class:`HeldParts`.

    Example:
        >>> whole = torch.zeros(3)
        >>> held_here([whole])[0] is whole
        True
    """
    if _WHOLE.issuperset(map(type, tensors)):  # as nearly always
        return list(tensors)
    return HeldParts(tensors) if any(map(is_sharded, tensors)) else list(tensors)


def _here(tensor: Any) -> Tensor:
    if not is_sharded(tensor):
        here: Tensor = tensor
    else:
        here = tensor.detach().to_local()
    return here


def as_shard(part: Tensor, param: Tensor) -> Tensor:
    """Return a part of this process as the shard of a tensor that is laid out as ``param``.

    Args:
        part: in the shape of what is held here of ``param``; its memory is used.
        param: whole, or sharded.
    """
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor

    like: Any = param
    shard: Tensor = DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return shard


def sum_into_shard(whole: Tensor, part: Tensor, param: Tensor) -> None:
    """Add the sum of ``whole`` over all processes to a shard of it; all of them call it together.

    The part goes into the sum, so that what it holds already (noise) is in it wherever the total is.

    Args:
        whole: this process's summand, in the shape of ``param``; it is written to.
        part: flat, what is held here; it gets itself plus the sum of its entries.
        param: says how it is sharded: in one dimension, over all processes.
    """
    from torch.distributed.tensor import DTensor, Partial

    like: Any = param
    (placement,), mesh = like.placements, like.device_mesh
    rows = whole.chunk(mesh.size(), placement.dim)
    if (rank := mesh.get_local_rank()) < len(rows):
        rows[rank].add_(part.view_as(rows[rank]))
    summed: Any = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    part.copy_(summed.redistribute(placements=like.placements).to_local().reshape(-1))


def gathered(state: Any, params: Sequence[Tensor]) -> Any:
    """Return a state with whole flat vectors in the places of those of shards; all processes call it.

    Args:
        state: nested dicts and lists.
        params: the trained parameters. A vector with an entry for each that is held here is one of them.
    """
    held = held_here(params)
    size = sum(each.numel() for each in held)

    def whole(vector: Tensor) -> Tensor:
        parts = torch.split(vector, [each.numel() for each in held])
        each_whole = (
            as_shard(part.view(here.shape), param)
            for part, here, param in zip(parts, held, params, strict=True)
        )
        return torch.cat([_full(each).reshape(-1).cpu() for each in each_whole])

    return _mapped(state, lambda vector: whole(vector) if _is_flat(vector, size) else vector)


def scattered(state: Any, params: Sequence[Tensor]) -> Any:
    """Return a state of :func:`gathered` with the parts of this process."""
    size = sum(param.numel() for param in params)

    def part(vector: Tensor) -> Tensor:
        wholes = torch.split(vector, [param.numel() for param in params])
        return torch.cat([_part(w.view(p.shape), p) for w, p in zip(wholes, params, strict=True)])

    return _mapped(state, lambda vector: part(vector) if _is_flat(vector, size) else vector)


def _is_flat(vector: Tensor, size: int) -> bool:
    return vector.shape == (size,)


def _full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def _part(whole: Tensor, param: Any) -> Tensor:
    """Return this process's part of a whole parameter, flat."""
    if not is_sharded(param):
        return whole.reshape(-1)
    rows = whole.chunk(param.device_mesh.size(), param.placements[0].dim)
    rank = param.device_mesh.get_local_rank()
    return rows[rank].reshape(-1) if rank < len(rows) else whole.new_zeros(0)


def _mapped(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        return {key: _mapped(value, change) for key, value in state.items()}
    return [_mapped(value, change) for value in state] if isinstance(state, list) else state
