"""The source of noise: normal draws from the operating system's entropy."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

__all__ = ["NoiseSource", "random_generator"]


_WORTH_A_THREAD = 1 << 15  # values; fewer are drawn before a thread has begun


def random_generator(seed: int | None, *stream: int) -> np.random.Generator:
    """A separate generator, seeded with 128 bits from the operating system.

    It never touches NumPy's, torch's or Python's global generators, so ``seed_everything`` cannot
    make it predictable. With a ``seed`` (tests only) it is a function of seed and ``stream``.
    """
    entropy = secrets.randbits(128) if seed is None else [seed, *stream]
    return np.random.Generator(np.random.PCG64DXSM(entropy))


class NoiseSource:
    """Standard normal vectors from the operating system's entropy.

    float64 on the CPU. On another device the device's own counter-based generator draws float32,
    keyed once with 63 bits from the operating system. The state is never saved.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._cpu = random_generator(seed, 0)
        self._device: torch.Generator | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._ahead: Future[Tensor] | None = None

    def prepare(self, size: int, device: torch.device) -> None:
        """Begin to draw what :meth:`normal` will be asked for, in the background."""
        if device.type != "cpu" or size < _WORTH_A_THREAD or self._ahead is not None:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "noise")
        self._ahead = self._worker.submit(self._draw, size)

    def close(self) -> None:
        """Forget what was drawn ahead, and let the thread go that drew it."""
        worker, self._worker, self._ahead = self._worker, None, None
        if worker is not None:
            worker.shutdown(wait=False)

    def __reduce__(self) -> tuple[type[NoiseSource], tuple[int | None]]:
        """Pickle and copy as a new source: two with one state would draw the same noise."""
        return NoiseSource, (self._seed,)

    def _draw(self, size: int) -> Tensor:
        return torch.from_numpy(self._cpu.standard_normal(size))

    def normal(self, size: int, device: torch.device) -> Tensor:
        """``size`` independent N(0, 1) values on ``device``."""
        if device.type == "cpu":
            ahead, self._ahead = self._ahead, None
            if ahead is not None and len(vector := ahead.result()) == size:
                return vector
            return self._draw(size)
        if self._device is None:
            key = secrets.randbits(63) if self._seed is None else self._seed
            self._device = torch.Generator(device).manual_seed(key)
        return torch.randn(size, device=device, generator=self._device)
