r"""Correlated noise: later steps subtract parts of the noise of earlier ones.

A **block** is a run of steps with one noise source. From independent normal vectors n_0, n_1, ... it
makes

.. math:: y = \|c\| \, C^{-1} n,

C lower triangular with 1, c_1, c_2, ... down each column, ‖c‖ the length of a column, and step t adds
z · clip norm · y_t to its sum x_t of clipped gradients. C is known, so x + z·clip·y tells as much as
C x + z·clip·‖c‖ n: Gaussian noise on C x. Let a record take part in steps t_1 < t_2 < ... of the block.
Without it row t of C x moves by at most a_t = Σ_j abs(C_(t, t_j)) clip norms, whatever was released
before (its vector in each step has at most that norm; rows of C add them up). So step t, given all
before it, is a Gaussian release with sensitivity a_t, and the block is μ-GDP with

.. math:: μ^2 = \sum_t a_t^2 / (z \|c\|)^2

(Denisov et al. 2022, arXiv:2202.08312, Theorem 2.1; Choquette-Choo et al. 2022, arXiv:2211.06530,
Theorem 1). Where the columns of its steps share no row, that is 1/z² for each of them.

What is gained: sums of y over many steps, which SGD adds up, grow less than those of n.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lightning_dp._refusals import RefusedRun
from lightning_dp._validate import (
    between,
    finite,
    listed,
    normalise,
    optional,
    whole,
)

__all__ = [
    "AbstractNoise",
    "BandedNoise",
    "IndependentNoise",
    "LambdaCGD",
    "Workload",
]

_LATE = 1024  # a step from which on noise is as it will be
_ENOUGH = 256  # steps that coefficients are optimised for: those of longer trainings hardly differ


class AbstractNoise(ABC):
    """The matrix C of a block, by which the noise of a step depends on that of earlier ones.

    Implementations are frozen dataclasses of public numbers. The vectors that are remembered are as
    secret as the records: they are never saved, and a run that is resumed begins a new block.
    ``Release.noise_std`` is that of fresh noise, z·C / B; a step has :attr:`growth` times as much.
    """

    @property
    @abstractmethod
    def bands(self) -> float:
        """Steps a record must be apart for its columns of C to share no row; may be infinite."""

    @property
    @abstractmethod
    def column_norm(self) -> float:
        """‖c‖, the norm of the longest column of C."""

    @abstractmethod
    def cost(self, use: int, separation: int) -> float:
        r"""Return what one more use of a record adds to (μ z)², if all of them are so many steps apart.

        With g = Σ_j abs(C) e_{j·separation}, the sum of the columns of uses 0, 1, ..., this is the sum of
        g_t² / ‖c‖² over the steps t of pass ``use`` (``separation`` steps each). The first n of them
        add up to the squared sensitivity of the first n passes, for all ways to take part that are
        at least so far apart.

        Args:
            use: 0 is the first one.
            separation: steps from one use to the next.
        """

    @abstractmethod
    def inverse(self, steps: int) -> NDArray[np.float64]:
        """Return the first column of C^-1 of so many steps."""

    @property
    def growth(self) -> float:
        """The noise of a late step over z·C, the standard deviation of an entry of y_t."""
        return self.column_norm * float(np.linalg.norm(self.inverse(_LATE)))

    def error(self, steps: int, workload: Workload | None = None) -> float:
        """Return the root mean square of the noise in all iterates of T steps, ‖c‖ ‖A C^-1‖ / √T.

        In units of z times clip norm times learning rate; a falling learning rate is not looked at.

        Example:
            >>> round(IndependentNoise().error(3), 4) == round(((1 + 2 + 3) / 3) ** 0.5, 4)
            True
        """
        growth = (Workload() if workload is None else workload).growth(np.arange(steps))
        column = np.convolve(growth, self.inverse(steps))[:steps]
        left = np.arange(steps, 0, -1)
        return self.column_norm * math.sqrt(float(left @ column**2) / steps)

    def for_steps(self, steps: float) -> AbstractNoise:
        """Return the noise with its coefficients, of a block of so many steps; may be infinite."""
        return self

    @abstractmethod
    def correlate(self, fresh: Tensor, past: list[Tensor]) -> list[Tensor]:
        """Make z_t into y_t / ‖c‖ in place, and return what is to be remembered, the latest first."""


@dataclass(frozen=True)
class IndependentNoise(AbstractNoise):
    """Fresh noise at every step, and nothing remembered: C is the identity. What DP-SGD does.

    In a fixed order, where a record takes part in E passes, that is √E/z-GDP.

    Example:
        >>> IndependentNoise().bands, IndependentNoise().cost(use=3, separation=10)
        (1, 1.0)
    """

    @property
    def bands(self) -> float:
        return 1

    @property
    def column_norm(self) -> float:
        return 1.0

    def cost(self, use: int, separation: int) -> float:
        return 1.0

    def inverse(self, steps: int) -> NDArray[np.float64]:
        return _impulse(steps)

    def correlate(self, fresh: Tensor, past: list[Tensor]) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Workload:
    """The iterates that an optimizer makes of gradients, in public numbers, for which noise is optimised.

    x_t = Σ_(s <= t) η_s (1 - β^(t-s+1)) / (1 - β) g_s: SGD with momentum β and learning rates η that
    fall geometrically, η_(T-1) = ``final_rate`` · η_0.

    Args:
        momentum: β in [0, 1).
        final_rate: in (0, 1].

    Example:
        >>> Workload(momentum=0.5).matrix(3).tolist()
        [[1.0, 0.0, 0.0], [1.5, 1.0, 0.0], [1.75, 1.5, 1.0]]
    """

    momentum: float = 0.0
    final_rate: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, between("[0, 1)"), "momentum", of="Workload")
        normalise(self, between("(0, 1]"), "final_rate", of="Workload")

    def matrix(self, steps: int) -> NDArray[np.float64]:
        """Return A, (steps, steps) and lower triangular: iterates in terms of gradients."""
        ages = np.arange(steps)[:, None] - np.arange(steps)
        rates = self.final_rate ** (np.arange(steps) / max(1, steps - 1))
        return np.where(ages >= 0, self.growth(np.maximum(ages, 0)) * rates, 0.0)

    def growth(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what is in an iterate of gradients of these ages, at a constant learning rate."""
        return np.asarray((1 - self.momentum ** (ages + 1.0)) / (1 - self.momentum), np.float64)


@dataclass(frozen=True)
class BandedNoise(AbstractNoise):
    r"""y_t = z_t - Σ_(0 < j < b) c_j y_(t-j): C has b bands, so b - 1 vectors are remembered.

    A record that takes part at steps at least b apart has columns without a common row, each of length
    ‖c‖. With :class:`~lightning_dp.CyclicPoisson` of b or more parts, b steps are therefore one
    Gaussian release with multiplier z on one Poisson sample of rate b·q (Choquette-Choo et al. 2023,
    arXiv:2306.08153, Theorem 4). With :class:`~lightning_dp.FixedOrder` nothing is amplified,
    and E passes of at least b steps are √E/z-GDP, as the coefficients fall.

    Each process remembers the entries that it noises; together they take b - 1 times the memory of the
    trained parameters.

    Args:
        bands: b >= 1, as many steps as noise is remembered; 1 is independent noise.
        workload: what the coefficients are optimised for: they minimise ‖c‖ ‖A C^-1‖ (Frobenius), the
            root mean square of the noise in all iterates.
        coefficients: c_0 = 1, c_1, ..., c_(b-1), instead of optimised ones.

    Raises:
        ValueError: naming the argument.

    Example:
        >>> noise = BandedNoise(3, coefficients=(1.0, 0.5, 0.375))
        >>> noise.bands, round(noise.column_norm, 4)
        (3, 1.1792)
    """

    bands: int = 8
    workload: Workload = field(default_factory=Workload)
    coefficients: Sequence[float] | None = None

    def __post_init__(self) -> None:
        normalise(self, whole, "bands")
        normalise(self, optional(_numbers), "coefficients")
        if not isinstance(self.workload, Workload):
            raise TypeError(f"workload={self.workload!r} must be a Workload, such as Workload().")
        c = self.coefficients
        if c is not None and (len(c) != self.bands or c[0] != 1):
            raise ValueError(
                f"coefficients={c!r} must be c_0 = 1 and bands - 1 = {self.bands - 1} more numbers."
            )

    @property
    def column_norm(self) -> float:
        return float(np.linalg.norm(self._column))

    @property
    def _column(self) -> NDArray[np.float64]:
        if self.coefficients is None:
            if self.bands == 1:
                return np.ones(1)
            raise RefusedRun(
                "BandedNoise has coefficients once the number of steps is known: for_steps().",
                topic="out-of-order",
            )
        return np.array(self.coefficients, dtype=float)

    def cost(self, use: int, separation: int) -> float:
        c = np.abs(self._column)
        # What falls is at its worst if all uses are as close as they may be (Kalinin and Lampert
        # 2024, arXiv:2405.13763, Theorem 2); where c does not, this bounds it from above.
        falling = np.maximum.accumulate(c[::-1])[::-1]
        passes = -(-self.bands // separation)
        rows = np.zeros(passes * separation)
        rows[: self.bands] = falling
        overlaid = rows.reshape(passes, separation)[: min(use, passes - 1) + 1].sum(0)
        return float(overlaid @ overlaid) / self.column_norm**2

    def inverse(self, steps: int) -> NDArray[np.float64]:
        from scipy.signal import lfilter  # takes half a second

        column: NDArray[np.float64] = lfilter([1.0], self._column, _impulse(steps))
        return column

    def for_steps(self, steps: float) -> BandedNoise:
        if self.coefficients is not None:
            return self
        length = int(min(max(steps, self.bands), max(4 * self.bands, _ENOUGH)))
        return replace(self, coefficients=_optimised(self.bands, length, self.workload))

    def correlate(self, fresh: Tensor, past: list[Tensor]) -> list[Tensor]:
        for c, earlier in zip(self._column[1:].tolist(), past, strict=False):
            fresh.sub_(earlier, alpha=c)
        return [fresh.clone(), *past][: self.bands - 1]


@dataclass(frozen=True)
class LambdaCGD(AbstractNoise):
    r"""y_t = z_t - λ z_(t-1): of each draw a part is taken away one step later, so one is remembered.

    C has the coefficients 1, λ, λ², ... For :class:`~lightning_dp.FixedOrder`: columns are never
    without a common row, and with passes of s steps the passes 0, 1, ... of a record add

    .. math:: (μ z)^2 \mathrel{+}= \Big(\frac{1 - λ^{s (e+1)}}{1 - λ^s}\Big)^2 (1 - λ^{2s}).

    Source: λ-CGD, arXiv:2601.22334.

    Args:
        lam: λ in [0, 1); 0 is independent noise. 0.9 to 0.98 suit passes of 30 to 120 steps.

    Raises:
        ValueError: if ``lam`` is out of range or NaN.

    Example:
        >>> LambdaCGD(0.6).column_norm
        1.25
    """

    lam: float = 0.95

    def __post_init__(self) -> None:
        normalise(self, between("[0, 1)"), "lam")

    @property
    def bands(self) -> float:
        return math.inf if self.lam else 1

    @property
    def column_norm(self) -> float:
        return 1 / math.sqrt(1 - self.lam**2)

    def cost(self, use: int, separation: int) -> float:
        fading = self.lam**separation
        return ((1 - fading ** (use + 1)) / (1 - fading)) ** 2 * (1 - fading**2)

    def inverse(self, steps: int) -> NDArray[np.float64]:
        return _impulse(steps) - self.lam * _impulse(steps, 1)

    def correlate(self, fresh: Tensor, past: list[Tensor]) -> list[Tensor]:
        drawn = fresh.clone()
        if past:
            fresh.sub_(past[0], alpha=self.lam)
        return [drawn]


def _impulse(steps: int, at: int = 0) -> NDArray[np.float64]:
    return np.asarray(np.arange(steps) == at, dtype=np.float64)


def _numbers(name: str, value: object, *, of: str | None = None) -> tuple[float, ...]:
    return tuple(finite(name, each, of=of) for each in listed(name, value, "numbers", of=of))


@lru_cache(maxsize=64)
def _optimised(bands: int, steps: int, workload: Workload) -> tuple[float, ...]:
    """Return the c that minimises ‖c‖ ‖A C^-1‖, from that of the square root of the prefix sums."""
    matrix = torch.tensor(workload.matrix(steps))
    ages = torch.arange(steps)[:, None] - torch.arange(steps)
    is_banded = (ages >= 0) & (ages < bands)
    ages.clamp_(0, bands - 1)

    def excess(free: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        c = torch.tensor(np.concatenate([[1.0], free]), requires_grad=True)
        toeplitz = torch.where(is_banded, c[ages], 0.0)
        error = torch.linalg.solve_triangular(toeplitz, matrix, upper=False, left=False)
        loss = c.square().sum().log() + error.square().sum().log()
        loss.backward()
        assert c.grad is not None
        return float(loss.detach()), c.grad[1:].numpy().copy()

    k = np.arange(1, bands)
    start: NDArray[np.float64] = np.cumprod(
        (2 * k - 1) / (2 * k), dtype=np.float64
    )  # (1 - x)^(-1/2)
    found = minimize(
        excess, start, jac=True, method="L-BFGS-B", options={"maxiter": 50, "ftol": 1e-6}
    )
    best = found.x if found.fun < excess(start)[0] else start
    return (1.0, *(float(c) for c in best))
