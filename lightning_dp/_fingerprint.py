"""Fingerprints of tensors' bits: what tells whether anything was written, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["fingerprint"]

# Bytes worked on at once: two buffers of this size fit into a core's cache. On a device, a block only
# bounds the memory. Blocks are of one size on all devices, so that fingerprints are the same.
_BLOCK = 2**19
_MULTIPLIER = 6364136223846793005  # odd: tells apart blocks that change places


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    r"""Return a hash of the bits of some tensors, one after the other, on their device.

    :math:`\sum_i w_i\, (b_i \oplus (b_i \gg 31)) \bmod 2^{64}`, with b the bits taken 64 at a time
    and fixed random odd weights w.

    - It depends on bits alone: not on the device, on an order of summation, or on how the entries
      are divided among tensors.
    - Any change alters it, except with probability about 2⁻³²; of shapes and dtypes it knows nothing.
    - It needs memory for a block of entries, no copy; no device is waited for.

    Args:
        tensors: dense, of any shapes and dtypes, on one device.

    Returns:
        A scalar of dtype int64.

    Example:
        >>> weight = torch.ones(3)
        >>> before = fingerprint([weight])
        >>> weight[1] += 1e-7
        >>> bool(fingerprint([weight]) == before)
        False
        >>> bool(fingerprint([weight[:2], weight[2:]]) == fingerprint([weight]))
        True
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    total = buffer = None
    for block in _blocks(tensors):
        words = _words(block)
        if buffer is None:  # of the first block, which none exceeds
            buffer = torch.empty_like(words)
        # An odd weight takes a difference of the lowest bits into the highest ones, never back; the
        # shift takes the sign there first, which could cancel.
        mixed = torch.bitwise_right_shift(words, 31, out=buffer[: len(words)])
        mixed.bitwise_xor_(words).mul_(_weights(device)[: len(words)])
        total = mixed.sum() if total is None else total * _MULTIPLIER + mixed.sum()
    return torch.zeros((), dtype=torch.int64, device=device) if total is None else total


def _blocks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of all tensors in blocks of one size; the last one may be shorter."""
    parts: list[Tensor] = []
    room = _BLOCK
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        # One entry out of a longer vector is contiguous with any stride.
        rest = flat.as_strided((len(flat),), (1,)).view(torch.uint8)
        while len(rest) >= room:
            yield _joined([*parts, rest[:room]])
            rest, parts, room = rest[room:], [], _BLOCK
        parts.append(rest)
        room -= len(rest)
    if room < _BLOCK:
        yield _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _words(block: Tensor) -> Tensor:
    """Return bytes 8 at a time, as integers; zeros fill up the last one."""
    if (left := len(block) % 8) != 0:
        block = torch.cat([block, block.new_zeros(8 - left)])
    elif block.storage_offset() % 8:
        block = block.clone()
    return block.view(torch.int64)


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    """Return odd weights: an odd number times a difference of bits is not 0 modulo 2⁶⁴."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (_BLOCK // 8,), generator=generator) * 2 + 1
    return weights.to(device)
