r"""The source of noise and batches: generators that the operating system's entropy seeds or keys.

By default they are NumPy's PCG64DXSM, seeded with 128 bits: fast, statistically sound, and not
cryptographic. With ``secure_noise=True`` every bit is that of AES-256 in counter mode, and what is
released is rounded to a grid.

**Why a grid** (Mironov 2012, "On significance of the least significant bits for differential privacy").
A float32 sum S plus float32 noise N is a multiple of the coarser unit of both, so that the low bits of
S + N tell which S it was: near 0 most numbers can be the result for S = 0 and not for S = 3/4. The secure
source adds up in float64, over all processes, and rounds to

.. math:: \Lambda \left\lfloor \frac{S + N}{\Lambda} \right\rceil,
    \qquad \Lambda = 2^{\lfloor \log_2 zC \rfloor - 20}.

- Rounding is post-processing: the event is that of the same Gaussian, with the same z. It moves a
  value by at most 2^-21 of the noise.
- N is √(-2 ln u) cos 2πv for u and v in steps of 2^-52. For each v the u that lead to a point of the grid
  are an interval, so its probability is off by at most 2^-52, and every point within 8 zC of S is
  reached: none tells an S from another by being out of reach.
- Summing several draws, as Opacus' secure mode does (Holohan and Braghin 2021, arXiv:2107.10138),
  hides how each was made; it leaves the units of a float32 addition, and costs as many draws.

Not claimed: that finite precision has exactly the ε of the ideal mechanism (the bound above, over all
values of all steps, is no δ to speak of), or anything of the time that drawing takes.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dp._refusals import RefusedRun, RefusedSetting

__all__ = ["CipherStream", "CorrelatedSource", "NoiseSource", "random_generator"]


_STREAMS = 2  # generators, each for its part of a vector
# Values that are drawn at once: they stay in the cache, and torch works on so few without further
# threads.
_BLOCK = 3 << 13
_ON_DEVICE = 1 << 24
_FEW = 3  # times that a block is enough for: then it is drawn whole
_WORTH_A_THREAD = 1 << 15  # values; fewer are drawn before a thread has begun
_GRID = 20  # binary digits of the noise that a secure source releases


def random_generator(seed: int | None, *stream: int, secure: bool = False) -> np.random.Generator:
    """A separate generator: PCG64DXSM, seeded with 128 bits from the operating system.

    It never touches NumPy's, torch's or Python's global generators, so ``seed_everything`` cannot
    make it predictable. With a ``seed`` (tests only) it is a function of seed and ``stream``; a
    ``secure`` one has the bits of a :class:`CipherStream`.
    """
    if secure:
        return np.random.Generator(CipherStream())  # type: ignore[arg-type]
    entropy = secrets.randbits(128) if seed is None else [seed, *stream]
    return np.random.Generator(np.random.PCG64DXSM(entropy))


_WORD = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
_HALF = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)
_REAL = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)
_CAPSULE = ctypes.PYFUNCTYPE(
    ctypes.py_object, *[ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
)(("PyCapsule_New", ctypes.pythonapi))
_NAME = b"BitGenerator"


class _BitGenerator(ctypes.Structure):
    """NumPy's ``bitgen_t``, through which its generators ask for bits."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("next_uint64", _WORD),
        ("next_uint32", _HALF),
        ("next_double", _REAL),
        ("next_raw", _WORD),
    )


class CipherStream:
    """The key stream of AES-256 in counter mode: a bit generator for NumPy, and uniform numbers.

    Args:
        key: 32 bytes and the first counter's 16, from the operating system by default.

    Raises:
        ValueError: if the package ``cryptography`` is not installed.

    Example:
        >>> stream = CipherStream()
        >>> drawn = np.random.Generator(stream).choice(1000, 20, replace=False)
        >>> len(set(drawn.tolist()))
        20
    """

    def __init__(self, key: bytes | None = None) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise RefusedSetting(
                "secure_noise=True takes its bits from the package cryptography, which is not "
                "installed: pip install 'lightning-dp[secure]'.",
                topic="secure-noise",
            ) from None
        key = secrets.token_bytes(48) if key is None else key
        mode = modes.CTR(key[32:])
        self._encrypt = Cipher(algorithms.AES(key[:32]), mode).encryptor().update_into
        self._zeros, self._room = b"", np.empty(0, dtype=np.uint8)
        self.lock = Lock()
        words = self._words()
        self._interface = _BitGenerator(
            None,
            _WORD(lambda _: next(words)),
            _HALF(lambda _: next(words) >> 32),
            _REAL(lambda _: (next(words) >> 11) * 2.0**-53),
            _WORD(lambda _: next(words)),
        )
        self.capsule = _CAPSULE(ctypes.addressof(self._interface), _NAME, None)

    def bits(self, size: int) -> NDArray[np.uint64]:
        """Return ``size`` words of the stream, valid until the next call."""
        if 8 * size > len(self._zeros):
            self._zeros, self._room = bytes(8 * size), np.empty(8 * size + 16, dtype=np.uint8)
        self._encrypt(memoryview(self._zeros)[: 8 * size], self._room.data)
        return self._room[: 8 * size].view(np.uint64)

    def random(self, *, out: NDArray[np.float64]) -> None:
        """Fill an array with uniform numbers of [0, 1), in steps of 2^-52."""
        words = out.view(np.uint64)
        np.right_shift(self.bits(len(out)), 12, out=words)
        words |= np.uint64(0x3FF << 52)  # a number in [1, 2) with these digits
        out -= 1.0

    def _words(self) -> Iterator[int]:
        while True:
            yield from self.bits(512).tolist()


class _Uniform(Protocol):
    def random(self, *, out: NDArray[np.float64]) -> Any: ...


def _add(block: Tensor, noise: Tensor, std: float) -> None:
    block.add_(noise.to(block), alpha=std)


def _write(block: Tensor, noise: Tensor, std: float) -> None:
    torch.mul(noise, std, out=block)


_Put: TypeAlias = Callable[[Tensor, Tensor, float], None]
_Correlate: TypeAlias = Callable[[Tensor, list[Tensor]], list[Tensor]]


class _Stream:
    """The noise of one part of a vector, from one generator; threads may ask for it in turn."""

    def __init__(self, generator: _Uniform) -> None:
        self._generator = generator
        self._room = torch.empty(0)  # of one block, and for half of one
        self._unused = 0  # values at its beginning
        self._lock = Lock()

    def draw_into(self, put: _Put, part: Tensor, std: float) -> None:
        """Draw noise for entries, and put it there."""
        with self._lock:
            for start in range(0, len(part), _BLOCK):
                block = part[start : start + _BLOCK]
                put(block, self._draw(len(block)), std)
            if self._unused <= 1:  # the room is kept for the values in it
                self._room, self._unused = torch.empty(0), 0

    def _draw(self, size: int) -> Tensor:
        """Return ``size`` values, at most a block, valid until the next call; each is returned once."""
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


def fill_normal(generator: _Uniform, values: Tensor, room: Tensor) -> None:
    """Fill a float64 vector with independent N(0, 1) values, by the method of Box and Muller.

    (√(-2 ln u) cos 2πv, √(-2 ln u) sin 2πv) are two of them for u and v uniform, in steps of 2^-53
    or 2^-52. Each of these functions is vectorised, where a method that rejects goes value by value.

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
    """Independent normal values, added to vectors.

    Drawn in float64 on the CPU, by two generators that the operating system seeds, and rounded to the
    vector's type. On another device the device's own counter-based generator draws float32, keyed once
    with 63 bits from the operating system. The state is never saved.

    Args:
        seed: for tests only.
        rank: of the process; with a seed, each draws other values.
        secure: draw from :class:`CipherStream` on the CPU, whatever the device; see the module.
    """

    def __init__(self, seed: int | None = None, rank: int = 0, *, secure: bool = False) -> None:
        self._seed, self._rank, self.is_secure = seed, rank, secure
        self._begin()

    def _begin(self) -> None:
        """Begin with generators of this process."""
        self._process = os.getpid()
        self._streams = [_Stream(self._generator(place)) for place in range(_STREAMS)]
        self._device: torch.Generator | None = None
        self._workers: ThreadPoolExecutor | None = None

    def _generator(self, place: int) -> _Uniform:
        if self.is_secure:
            return CipherStream()
        return random_generator(self._seed, 0, place, self._rank)

    def dtype(self, of: torch.dtype) -> torch.dtype:
        """Return the type in which a sum takes its noise up."""
        return torch.float64 if self.is_secure else of

    def released(self, value: Tensor, std: float) -> Tensor:
        """Return a noised sum as it may be seen: of a secure source on the grid, in float32."""
        if not self.is_secure or not std > 0:
            return value
        unit = 2.0 ** (math.floor(math.log2(std)) - _GRID)
        return value.div_(unit).round_().mul_(unit).float()

    def has_background(self, size: int, device: torch.device) -> bool:
        """Return whether noise of a vector is drawn in threads."""
        return device.type == "cpu" and size >= _WORTH_A_THREAD

    def add_normal(self, vector: Tensor, std: float) -> None:
        """Add ``std`` times independent N(0, 1) values to a flat vector, in place."""
        self._begin_to(_add, vector, std)()

    def begin_normal(self, vector: Tensor, std: float) -> Callable[[], None]:
        """Begin to write them over a flat vector, in threads where there is :meth:`has_background`.

        Returns:
            A function that ends it. The vector must not be touched before.
        """
        return self._begin_to(_write, vector, std)

    def begin_share(self, vector: Tensor, share: slice, std: float) -> Callable[[], object]:
        """Begin to write them over a share of a flat vector, and zeros over the rest."""
        for rest in (vector[: share.start], vector[share.stop :]):
            rest.zero_()
        mine = vector[share]
        return self.begin_normal(mine, std) if std > 0 else mine.zero_

    def _begin_to(self, put: _Put, vector: Tensor, std: float) -> Callable[[], None]:
        if self.has_background(len(vector), vector.device):
            return self._in_threads(put, vector, std)
        return partial(self._at_once, put, vector, std)

    def _at_once(self, put: _Put, vector: Tensor, std: float) -> None:
        self._leave_fork()
        if vector.device.type == "cpu" or self.is_secure:
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
        """Shut down the threads that draw noise, and cancel their work."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)

    def __reduce__(self) -> tuple[Callable[..., NoiseSource], tuple[Any, ...]]:
        """Pickle and copy as a new source: two with one state would draw the same noise."""
        return partial(NoiseSource, self._seed, self._rank, secure=self.is_secure), ()


class CorrelatedSource(NoiseSource):
    """Noise of one block of steps, in which each vector depends on those before: see ``noise.py``.

    What is remembered is in this process alone, of the entries that it draws for, and ends with the
    block: a copy, or a pickle, begins a new one.

    Args:
        correlate: makes a fresh vector the next one, in place, with what it remembered; returns what
            is to be remembered.
        column_norm: ‖c‖.
        seed, rank, secure: as for :class:`NoiseSource`.
    """

    def __init__(
        self,
        correlate: _Correlate,
        column_norm: float,
        seed: int | None = None,
        rank: int = 0,
        *,
        secure: bool = False,
    ) -> None:
        super().__init__(seed, rank, secure=secure)
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

    def __reduce__(self) -> tuple[Callable[..., NoiseSource], tuple[Any, ...]]:
        new = partial(CorrelatedSource, secure=self.is_secure)
        return new, (self._correlate, self._column_norm, self._seed, self._rank)


def _parts(vector: Tensor) -> list[Tensor]:
    """Divide a vector among the streams."""
    bounds = [len(vector) * k // _STREAMS for k in range(_STREAMS + 1)]
    return [vector[start:stop] for start, stop in pairwise(bounds)]
