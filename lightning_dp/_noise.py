"""The source of noise: normal draws from the operating system's entropy."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_dp._refusals import RefusedRun

__all__ = ["CorrelatedSource", "NoiseSource", "random_generator"]


_STREAMS = 2  # generators, each for its part of a vector
# Values that are drawn at once: they stay in the cache, and torch works on so few without further
# threads.
_BLOCK = 3 << 13
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


def _add(block: Tensor, noise: Tensor, std: float) -> None:
    block.add_(noise.to(block.dtype), alpha=std)


def _write(block: Tensor, noise: Tensor, std: float) -> None:
    torch.mul(noise, std, out=block)


_Put: TypeAlias = Callable[[Tensor, Tensor, float], None]
_Correlate: TypeAlias = Callable[[Tensor, list[Tensor]], list[Tensor]]


class _Stream:
    """The noise of one part of a vector, from one generator; threads may ask for it in turn."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._room = torch.empty(0)  # of one block, and for half of one
        self._unused = 0  # values at its beginning
        self._lock = Lock()

    def draw_into(self, put: _Put, part: Tensor, std: float) -> None:
        """Draw noise for entries, and put it there."""
        with self._lock:
            for block in torch.split(part, _BLOCK):
                put(block, self._draw(len(block)), std)
            if self._unused <= 1:  # the room is kept for the values in it
                self._room, self._unused = torch.empty(0), 0

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

    def has_background(self, size: int, device: torch.device) -> bool:
        """Tell whether noise of a vector is drawn in threads."""
        return device.type == "cpu" and size >= _WORTH_A_THREAD

    def add_normal(self, vector: Tensor, std: float) -> None:
        """Add ``std`` times independent N(0, 1) values to a flat vector, in place."""
        self._begin_to(_add, vector, std)()

    def begin_normal(self, vector: Tensor, std: float) -> Callable[[], None]:
        """Begin to write them over a flat vector, in threads where there is :meth:`has_background`.

        Returns:
            What ends it. Before that nobody may touch the vector.
        """
        return self._begin_to(_write, vector, std)

    def _begin_to(self, put: _Put, vector: Tensor, std: float) -> Callable[[], None]:
        if self.has_background(len(vector), vector.device):
            return self._in_threads(put, vector, std)
        return partial(self._at_once, put, vector, std)

    def _at_once(self, put: _Put, vector: Tensor, std: float) -> None:
        self._leave_fork()
        if vector.device.type == "cpu":
            self._streams[0].draw_into(put, vector, std)
        else:
            self._draw_on_device(put, vector, std)

    def _in_threads(self, put: _Put, vector: Tensor, std: float) -> Callable[[], None]:
        self._leave_fork()
        process = self._process
        works = [
            partial(stream.draw_into, put, part, std)
            for stream, part in zip(self._streams, _parts(vector), strict=True)
        ]
        begun = [(self._on_worker(work), work) for work in works]

        def finish() -> None:
            if process != os.getpid():  # the parent's threads draw for the parent
                return self._in_threads(put, vector, std)()
            for each, work in reversed(begun):  # the first is what a thread has come to
                if each.cancel():  # no thread has
                    work()
                else:
                    each.result()

        return finish

    def _leave_fork(self) -> None:
        """Begin again in a process that was forked: it has the states of its parent, and no threads."""
        if self._process != os.getpid():
            self._begin()

    def _on_worker(self, work: Callable[[], None]) -> Future[None]:
        if self._workers is None:
            # The training has a core to itself.
            count = max(1, min(_STREAMS, (os.cpu_count() or 1) - 1))
            self._workers = ThreadPoolExecutor(count, "noise")
        return self._workers.submit(work)

    def _draw_on_device(self, put: _Put, vector: Tensor, std: float) -> None:
        device = vector.device
        if self._device is None or self._device.device != device:
            key = random_generator(self._seed, 0, _STREAMS, self._rank).integers(2**63)
            self._device = torch.Generator(device).manual_seed(int(key))
        for part in torch.split(vector, _ON_DEVICE):
            put(part, torch.randn(len(part), device=device, generator=self._device), std)

    def close(self) -> None:
        """Let the threads go that drew noise, with what they had begun."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)

    def __reduce__(self) -> tuple[type[NoiseSource], tuple[Any, ...]]:
        """Pickle and copy as a new source: two with one state would draw the same noise."""
        return NoiseSource, (self._seed, self._rank)


class CorrelatedSource(NoiseSource):
    """Noise of one block of steps, in which each vector depends on those before: see ``noise.py``.

    What is remembered is in this process alone, of the entries that it draws for, and ends with the
    block: a copy, or a pickle, begins a new one.

    Args:
        correlate: makes a fresh vector the next one, in place, with what it remembered; returns what
            is to be remembered.
        column_norm: ‖c‖.
        seed, rank: as for :class:`NoiseSource`.
    """

    def __init__(
        self, correlate: _Correlate, column_norm: float, seed: int | None = None, rank: int = 0
    ) -> None:
        super().__init__(seed, rank)
        self._correlate, self._column_norm = correlate, column_norm
        self._past: list[Tensor] = []
        self._std: float | None = None

    def _begin_to(self, put: _Put, vector: Tensor, std: float) -> Callable[[], None]:
        if self._std not in (None, std):
            raise RefusedRun(
                f"The noise of a step has standard deviation {std}, and that of the steps before "
                f"{self._std}: noise that remembers cancels only if z and the clip norm stay as they "
                "are. Use noise=IndependentNoise().",
                topic="out-of-order",
            )
        self._std = std
        fresh = vector if put is _write else torch.empty_like(vector)
        finish = super()._begin_to(_write, fresh, std * self._column_norm)

        def finished() -> None:
            self._leave_fork()
            finish()
            self._past = self._correlate(fresh, self._past)
            if put is _add:
                vector.add_(fresh)

        return finished

    def _leave_fork(self) -> None:
        if self._process != os.getpid():
            raise RefusedRun(
                "This process was forked from one whose noise remembers: both would go on with the same "
                "past. Let the child leave training to its parent.",
                topic="batches-and-steps",
            )

    def close(self) -> None:
        super().close()
        self._past = []

    def __reduce__(self) -> tuple[type[NoiseSource], tuple[Any, ...]]:
        return CorrelatedSource, (self._correlate, self._column_norm, self._seed, self._rank)


def _parts(vector: Tensor) -> list[Tensor]:
    """Divide a vector among the streams."""
    bounds = [len(vector) * k // _STREAMS for k in range(_STREAMS + 1)]
    return [vector[start:stop] for start, stop in pairwise(bounds)]
