"""The source of noise: normal draws from the operating system's entropy."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

__all__ = ["NoiseSource", "random_generator"]


_STREAMS = 2  # generators, each with its thread
# Values that are drawn and added at once: they stay in the cache, and torch works on so few without
# further threads.
_BLOCK = 3 << 13
_ON_DEVICE = 1 << 24
_WORTH_A_THREAD = 1 << 15  # values; fewer are drawn before a thread has begun
_AHEAD = 42 * _BLOCK  # values that wait at most, 8 MiB, whatever the size of the model


def random_generator(seed: int | None, *stream: int) -> np.random.Generator:
    """A separate generator, seeded with 128 bits from the operating system.

    It never touches NumPy's, torch's or Python's global generators, so ``seed_everything`` cannot
    make it predictable. With a ``seed`` (tests only) it is a function of seed and ``stream``.
    """
    entropy = secrets.randbits(128) if seed is None else [seed, *stream]
    return np.random.Generator(np.random.PCG64DXSM(entropy))


class _Stream:
    """Every second block of a vector's noise, from one generator.

    Args:
        place: which of them, from 0.
        rank: of the process.
    """

    def __init__(self, seed: int | None, place: int, rank: int) -> None:
        self._place, self._generator = place, random_generator(seed, 0, place, rank)
        self._ahead: list[Tensor] = []

    def _blocks(self, size: int) -> Iterator[slice]:
        for start in range(self._place * _BLOCK, size, _STREAMS * _BLOCK):
            yield slice(start, min(start + _BLOCK, size))

    def _draw(self, block: slice) -> Tensor:
        return normal_values(self._generator, block.stop - block.start)

    def draw_ahead(self, size: int) -> None:
        """Draw the first blocks of the noise of such a vector."""
        first = islice(self._blocks(size), _AHEAD // (_STREAMS * _BLOCK))
        self._ahead = [self._draw(block) for block in first]

    def add_blocks(self, vector: Tensor, std: float) -> None:
        """Add the noise of its blocks."""
        ahead, self._ahead = self._ahead[::-1], []
        for block in self._blocks(len(vector)):
            noise, part = ahead.pop() if ahead else self._draw(block), vector[block]
            torch.add(part, noise, alpha=std, out=part)  # in the noise's precision, rounded once

    def forget(self) -> None:
        """Throw away what was drawn ahead."""
        self._ahead = []


def normal_values(generator: np.random.Generator, size: int) -> Tensor:
    """Return independent N(0, 1) values in float64, by the method of Box and Muller.

    (√(-2 ln u) cos 2πv, √(-2 ln u) sin 2πv) are two of them for u and v uniform, here in steps of
    2^-53. Each of these functions is vectorised, where a method that rejects goes value by value.
    """
    pairs = (size + 1) // 2
    uniform = torch.from_numpy(generator.random(2 * pairs))
    lengths, angles = uniform[:pairs], uniform[pairs:]
    lengths.neg_().add_(1.0).log_().mul_(-2.0).sqrt_()  # of 1 - u, which is never 0
    angles.mul_(2 * math.pi)
    cosines = torch.cos(angles).mul_(lengths)
    angles.sin_().mul_(lengths)
    lengths.copy_(cosines)
    return uniform[:size]


class NoiseSource:
    """Independent normal values from the operating system's entropy, added to vectors.

    Drawn in float64 on the CPU, by two generators. On another device the device's own counter-based
    generator draws float32, keyed once with 63 bits from the operating system. The state is never
    saved.

    Args:
        seed: for tests only.
        rank: of the process; with a seed, each draws other values.
    """

    def __init__(self, seed: int | None = None, rank: int = 0) -> None:
        self._seed, self._rank = seed, rank
        self._streams = [_Stream(seed, place, rank) for place in range(_STREAMS)]
        self._device: torch.Generator | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._ahead: list[Future[None]] = []  # being drawn
        self._size = 0  # of the vector that they are for

    def prepare(self, size: int, device: torch.device) -> None:
        """Begin to draw the noise of a vector in the background, as much of it as may wait."""
        if device.type != "cpu" or size < _WORTH_A_THREAD or self._ahead:
            return
        self._size = size
        self._ahead = self._on_workers(lambda stream: stream.draw_ahead(size))

    def add_normal(self, vector: Tensor, std: float) -> None:
        """Add ``std`` times independent N(0, 1) values to a flat vector, in place."""
        if vector.device.type != "cpu":
            self._add_on_device(vector, std)
            return
        ahead, self._ahead = self._ahead, []
        for each in ahead:
            each.result()
        if self._size != len(vector):  # drawn for another one: nothing is used twice
            self._forget()
        if len(vector) < _WORTH_A_THREAD:
            for stream in self._streams:
                stream.add_blocks(vector, std)
            return
        for each in self._on_workers(lambda stream: stream.add_blocks(vector, std)):
            each.result()

    def _on_workers(self, work: Callable[[_Stream], None]) -> list[Future[None]]:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(_STREAMS, "noise")
        return [self._workers.submit(work, stream) for stream in self._streams]

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
