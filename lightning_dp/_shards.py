"""Parameters of which each process holds a part (FSDP2), as plain tensors of what is here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["as_shard", "held_here", "is_sharded", "sum_into_shard"]


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor is a ``DTensor``, of which others hold parts.

    Example:
        >>> is_sharded(torch.zeros(3))
        False
    """
    return hasattr(tensor, "to_local")  # without an import that takes a second


def held_here(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this process holds of each tensor, in the same memory: all of it, or its shard.

    Example:
        >>> whole = torch.zeros(3)
        >>> held_here([whole])[0] is whole
        True
    """
    return [_here(tensor) for tensor in tensors]


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
