"""The source of noise: normal draws from the operating system's entropy."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["NoiseSource", "random_generator"]


_Sliced = TypeVar("_Sliced", Tensor, range)

_STREAMS = 2  # generators, each for its part of a vector
# Values that are drawn at once: they stay in the cache, and torch works on so few without further
# threads.
_BLOCK = 3 << 13
_AHEAD = 42 * _BLOCK  # values that wait at most, 4 MiB of float32, whatever the size of the model
_ON_DEVICE = 1 << 24
_FEW = 3  # times that a block is enough for: then it is drawn whole
_WORTH_A_THREAD = 1 << 15  # values; fewer are drawn before a thread has begun


def random_generator(seed: int | None, *stream: int) -> np.random.Generator:
    """A separate generator, seeded with 128 bits from the operating system.

    It never touches NumPy's, torch's or Python's global generators, so ``seed_everything`` cannot
    make it predictable. With a ``seed`` (tests only) it is a function of seed and ``stream``.
    """
    entropy = secrets.randbits(128) if seed is None else [seed, *stream]
    return np.random.Generator(np.random.PCG64DXSM(entropy))


class _Stream:
    """The noise of one part of a vector, from one generator, in memory that is used again."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._ahead, self._waiting = torch.empty(0), 0  # where values wait, and how many
        self._room = torch.empty(0)  # of one block, and for half of one
        self._unused = 0  # values at its beginning

    def _draw(self, size: int) -> Tensor:
        """Return so many values, a block at most, until the next call; each value is returned once."""
        if size > self._unused:
            # The calls cost more than a few values, so few are drawn for several times.
            self._fill(_BLOCK if _FEW * size <= _BLOCK else size + size % 2)
        self._unused -= size
        return self._room[self._unused : self._unused + size]

    def _fill(self, size: int) -> None:
        if not len(self._room):
            self._room = torch.empty(_BLOCK + _BLOCK // 2, dtype=torch.float64)
        self._unused = 0  # if the filling is interrupted, what stands there is no noise
        fill_normal(self._generator, self._room[:size], self._room[_BLOCK : _BLOCK + size // 2])
        self._unused = size

    def draw_ahead(self, size: int, dtype: torch.dtype) -> None:
        """Draw the first values of the noise of a part of such a size."""
        size = min(size, _AHEAD // _STREAMS)
        if len(self._ahead) != size or self._ahead.dtype != dtype:
            self._ahead = torch.empty(size, dtype=dtype)
        for block in torch.split(self._ahead, _BLOCK):
            block.copy_(self._draw(len(block)))
        self._waiting = size

    def add_what_waits(self, part: Tensor, std: float) -> Tensor:
        """Add what was drawn ahead to the first entries of its part; return those that are left."""
        waiting, self._waiting = self._waiting, 0
        if waiting:
            part[:waiting].add_(self._ahead, alpha=std)
        return part[waiting:]

    def add_to(self, part: Tensor, std: float) -> None:
        """Draw noise for entries, and add it."""
        for block in torch.split(part, _BLOCK):
            block.add_(self._draw(len(block)).to(block.dtype), alpha=std)

    def forget(self) -> None:
        """Throw away what was drawn ahead."""
        self._waiting = 0


def fill_normal(generator: np.random.Generator, values: Tensor, room: Tensor) -> None:
    """Fill a float64 vector with independent N(0, 1) values, by the method of Box and Muller.

    (√(-2 ln u) cos 2πv, √(-2 ln u) sin 2πv) are two of them for u and v uniform, here in steps of
    2^-53. Each of these functions is vectorised, where a method that rejects goes value by value.

    Args:
        generator: of the uniform numbers.
        values: of even length, to be written to.
        room: half as long; what it holds is lost.
    """
    generator.random(out=values.numpy())
    lengths, angles = values.chunk(2)
    torch.sub(1.0, lengths, out=lengths).log_().mul_(-2.0).sqrt_()  # of 1 - u, which is never 0
    torch.cos(angles.mul_(2 * math.pi), out=room)
    angles.sin_().mul_(lengths)
    lengths.mul_(room)


class NoiseSource:
    """Independent normal values from the operating system's entropy, added to vectors.

    Drawn in float64 on the CPU, by two generators, and rounded to the vector's type. On another
    device the device's own counter-based generator draws float32, keyed once with 63 bits from the
    operating system. The state is never saved.

    Args:
        seed: for tests only.
        rank: of the process; with a seed, each draws other values.
    """

    def __init__(self, seed: int | None = None, rank: int = 0) -> None:
        self._seed, self._rank = seed, rank
        self._begin()

    def _begin(self) -> None:
        """Begin with generators of this process."""
        self._process = os.getpid()
        self._streams = [
            _Stream(random_generator(self._seed, 0, place, self._rank)) for place in range(_STREAMS)
        ]
        self._device: torch.Generator | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._ahead: list[Future[None]] = []  # being drawn, one for each stream
        self._vector: tuple[int, torch.dtype] | None = None  # what they are for: length and type

    def prepare(self, size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Begin to draw the noise of a vector in the background, as much of it as may wait."""
        self._leave_fork()
        if device.type != "cpu" or size < _WORTH_A_THREAD or self._ahead:
            return
        self._vector = size, dtype
        self._ahead = [
            self._on_worker(stream.draw_ahead, len(part), dtype)
            for stream, part in zip(self._streams, _parts(range(size)), strict=True)
        ]

    def add_normal(self, vector: Tensor, std: float) -> None:
        """Add ``std`` times independent N(0, 1) values to a flat vector, in place."""
        self._leave_fork()
        if vector.device.type != "cpu":
            self._add_on_device(vector, std)
            return
        ahead, self._ahead = self._ahead, []
        for each in ahead:
            if not each.cancel():  # one that no thread has begun is drawn below
                each.result()
        if self._vector != (len(vector), vector.dtype):  # drawn for another one
            self._forget()
        if len(vector) < _WORTH_A_THREAD:
            self._streams[0].add_to(vector, std)
            return
        pairs = zip(self._streams, _parts(vector), strict=True)
        left = [(stream, stream.add_what_waits(part, std)) for stream, part in pairs]
        left = [(stream, part) for stream, part in left if len(part)]
        adding = [self._on_worker(stream.add_to, part, std) for stream, part in left[1:]]
        for stream, part in left[:1]:
            stream.add_to(part, std)
        for each in adding:
            each.result()

    def _leave_fork(self) -> None:
        """Begin again in a process that was forked: it has the states of its parent, and no threads."""
        if self._process != os.getpid():
            self._begin()

    def _on_worker(self, work: Callable[..., None], *args: Any) -> Future[None]:
        if self._workers is None:
            # The training has a core to itself.
            self._workers = ThreadPoolExecutor(
                max(1, min(_STREAMS, (os.cpu_count() or 1) - 1)), "noise"
            )
        return self._workers.submit(work, *args)

    def _add_on_device(self, vector: Tensor, std: float) -> None:
        device = vector.device
        if self._device is None or self._device.device != device:
            key = random_generator(self._seed, 0, _STREAMS, self._rank).integers(2**63)
            self._device = torch.Generator(device).manual_seed(int(key))
        for part in torch.split(vector, _ON_DEVICE):
            noise = torch.randn(len(part), device=device, generator=self._device)
            part.add_(noise, alpha=std)

    def _forget(self) -> None:
        for stream in self._streams:
            stream.forget()

    def close(self) -> None:
        """Forget what was drawn ahead, and let the threads go that drew it."""
        workers, self._workers, self._ahead = self._workers, None, []
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)
        self._forget()

    def __reduce__(self) -> tuple[type[NoiseSource], tuple[int | None, int]]:
        """Pickle and copy as a new source: two with one state would draw the same noise."""
        return NoiseSource, (self._seed, self._rank)


def _parts(vector: _Sliced) -> list[_Sliced]:
    """Divide a vector, or the range of its places, among the streams."""
    bounds = [len(vector) * k // _STREAMS for k in range(_STREAMS + 1)]
    return [vector[start:stop] for start, stop in pairwise(bounds)]
