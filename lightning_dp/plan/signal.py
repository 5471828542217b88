r"""The signal beneath the noise of releases: its norm, its agreement over steps, and a verdict.

All is computed from releases r_t and the variance of their noise, so it costs no privacy.
With s_t the standard deviation of the noise in each of d coordinates, and ξ_t standard normal,

.. math:: r_t = g_t + s_t ξ_t,

where g_t is the mean of the clipped gradients of the batch.

**Norm.** :math:`\|r_t\|^2 - d s_t^2` is an estimate of ‖g_t‖² without bias; averaged over n steps
of small g_t its standard deviation is :math:`s^2\sqrt{2d/n}`.

**Agreement.** Let m_t be a moving average of the releases *before* step t. Then

.. math:: a_t = ⟨r_t, m_t⟩ / (s_t \|m_t\|)

is exactly standard normal, and independent of all earlier ones, if g_t = 0 (or if g_t is orthogonal
to m_t): m_t is fixed before ξ_t is drawn, and ξ_t has the same law in every direction. Sums of n of
them, over √n, are exactly standard normal too, in every dimension. With a gradient that stays the
same the mean of a_t is :math:`γ^2 w/\sqrt{γ^2 w^2 + w d}`, γ = ‖g‖/s and w the steps that m_t averages:
in a large model the noise norm is above the gradient's at every single step (γ² < d), and still the sum
over T steps is far from 0 as soon as :math:`γ^2 T` is some multiple of :math:`\sqrt{d}`.

All of it holds for any fixed choice of coordinates as well. Of models with more than 65,536
weights the average is kept of every k-th one, with k odd and 9 at most: half a byte for each weight. The
law of noise is as exact; what lasts must be up to 3 times as strong to show.

**Verdict.** The a_t are summed over the stretches of the run, pairs of neighbours, pairs of pairs and
so on up to the whole, each sum over the root of its number: all standard normal under noise alone, so
that a direction is found that lasts long, or early on, or late. The largest of the k sums then exceeds
:math:`Φ^{-1}(1 - α/k)` with probability at most α (Bonferroni's inequality).

The sign of a_t is Pflug's diagnostic of stochastic approximation ("Non-asymptotic confidence bounds
for stochastic approximation algorithms with constant step size", Monatshefte für Mathematik 110,
1990): positive while the steps are short of the optimum, negative where they jump across it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple

import torch
from scipy.special import ndtri
from torch import Tensor

from lightning_dp.boundary import Query, Release
from lightning_dp.functional import has_float64

__all__ = ["Signal", "SignalTracker", "Stretch", "Verdict", "judge"]

_MOST_STRETCHES = 64
_PENDING = 64  # releases after which numbers are fetched from the device
_ENTRIES = 1 << 16  # of the average; more of them only where that is an eighth of the model
_BLOCK = 1 << 18  # entries whose products float32 adds up without loss that matters here
_MEMORY = 3  # release s has the weight (s/t)^3 in the average at t: the last quarter counts most


@dataclass(frozen=True)
class Stretch:
    """Sums over successive releases.

    Args:
        last_step: of the plan, counted from 1.
        steps: n, how many there are.
        squared: Σ ‖r_t‖².
        noise: Σ d s_t², what noise alone would give on average.
        agreements: how many of them have an a_t: the first release of a fit has none.
        agreement: Σ a_t.
        counts: how many of them count clipped records too.
        share: Σ of the shares of clipped records that those released, each with its noise.
        share_variance: Σ of the variances of the noise in them.
    """

    last_step: int = 0
    steps: int = 0
    squared: float = 0.0
    noise: float = 0.0
    agreements: int = 0
    agreement: float = 0.0
    counts: int = 0
    share: float = 0.0
    share_variance: float = 0.0

    def plus(self, later: Stretch) -> Stretch:
        """Return the sums over both."""
        (_, *sums), (_, *more) = vars(self).values(), vars(later).values()
        last_step = max(self.last_step, later.last_step)
        return Stretch(last_step, *map(add, sums, more))

    @property
    def released_norm(self) -> float:
        """Root mean square of ‖r_t‖."""
        return math.sqrt(self.squared / self.steps) if self.steps else math.nan

    @property
    def noise_norm(self) -> float:
        """Root mean square of s_t √d."""
        return math.sqrt(self.noise / self.steps) if self.steps else math.nan

    @property
    def signal_norm(self) -> float:
        """The estimate of the root mean square of ‖g_t‖; 0 where noise hides it."""
        return (
            math.sqrt(max(0.0, self.squared - self.noise) / self.steps) if self.steps else math.nan
        )

    @property
    def signal_ratio(self) -> float:
        """The estimated norm of the gradient over that of the noise."""
        return self.signal_norm / self.noise_norm if self.noise > 0 else math.nan

    @property
    def z_score(self) -> float:
        """Σ a_t / √n, standard normal if the releases hold noise alone; NaN without any a_t."""
        return self.agreement / math.sqrt(self.agreements) if self.agreements else math.nan

    @property
    def share_clipped(self) -> tuple[float, float] | None:
        """The mean share of clipped records, and the standard deviation of its noise; None uncounted.

        Noise may carry it below 0 or above 1, and so may batches that are smaller or larger than B.
        """
        if not self.counts:
            return None
        return self.share / self.counts, math.sqrt(self.share_variance) / self.counts


@dataclass(frozen=True)
class Signal:
    """The releases of a run, in stretches of equal numbers of steps, in order.

    Args:
        stretches: at most 64.
        size: d, the entries of a release.
    """

    stretches: tuple[Stretch, ...] = ()
    size: int = 0

    @property
    def whole(self) -> Stretch:
        """The sums over all of them."""
        return self.between(0, len(self.stretches))

    def between(self, first: int, last: int) -> Stretch:
        """Return the sums over stretches ``first`` to ``last - 1``."""
        total = Stretch()
        for each in self.stretches[first:last]:
            total = total.plus(each)
        return total

    def recent(self, steps: int) -> Stretch:
        """Return the sums over the last stretches that hold at least ``steps`` steps."""
        total = Stretch()
        for each in reversed(self.stretches):
            if total.steps >= steps:
                break
            total = each.plus(total)
        return total


class _PendingRelease(NamedTuple):
    """A release whose numbers are still on the device."""

    step: int  # of the plan
    noise_std: float
    averaged: int  # releases in the average m_t
    count_std: float | None  # of the noise in the count of clipped records, if there is one
    # ‖r_t‖², then ⟨r_t, m_t⟩ and ‖r_t‖² over the entries that are followed, and the mean count.
    products: tuple[Tensor, ...]


@dataclass
class SignalTracker:
    """Sums over the releases of a run, in half a byte for each weight of a large model.

    Only answers about a gradient count: differences of gradients (between the restarts of
    :class:`~lightning_dp.Diff2`) point elsewhere. The average of releases is not saved: a resumed
    run begins a new one, which is as exact.

    Example:
        >>> from lightning_dp.boundary import Term
        >>> tracker = SignalTracker()
        >>> for step in range(100):
        ...     released = Release(torch.full((400,), 0.5) + torch.randn(400), noise_std=1.0)
        ...     tracker.observe(Query((Term(),), 1.0, 1.0), released, step)
        >>> bool(tracker.signal().whole.z_score > 5)
        True
    """

    _size: int = 0
    _stretches: list[Stretch] = field(default_factory=list)
    _width: int = 1  # steps in a stretch
    _average: Tensor | None = field(default=None, repr=False)
    _averaged: int = 0  # releases in it
    _length: float = 0.0  # its squared norm
    _pending: list[_PendingRelease] = field(default_factory=list, repr=False)

    def observe(
        self, query: Query, released: Release, step: int, count: Release | None = None
    ) -> None:
        """Add a release; its value is not kept.

        Args:
            query: its query.
            released: the noised mean, before the estimator and any post-processing.
            step: of the plan, from 0.
            count: the noised mean of 1 for each clipped record and -1 for each other, one entry.
        """
        if not (released.noise_std > 0 and _asks_gradient(query)):
            return
        value = released.value.detach()
        # Odd, as rows of weights are often of even length: all their columns are to have a part.
        stride = -(-value.numel() // max(_ENTRIES, value.numel() // 8)) | 1
        # Read once: three sums over every k-th entry would read all of the value three times.
        followed = value if stride == 1 else value[::stride].contiguous()
        if self._average is None or self._average.shape != followed.shape:
            self._flush()
            self._average, self._averaged, self._length = torch.zeros_like(followed), 0, 0.0
            self._size = value.numel()
        products = [_product(value, value), _product(followed, self._average)]
        is_part = len(followed) < len(value)
        products.append(_product(followed, followed) if is_part else products[0])
        if count is not None:
            products.append(count.value[0])
        count_std = None if count is None else count.noise_std
        self._pending.append(
            _PendingRelease(step, released.noise_std, self._averaged, count_std, tuple(products))
        )
        self._average.lerp_(followed, _weight(self._averaged))
        self._averaged += 1
        if len(self._pending) >= _PENDING:
            self._flush()

    def signal(self) -> Signal:
        """Return the sums so far."""
        self._flush()
        return Signal(tuple(self._stretches), self._size)

    def _flush(self) -> None:
        """Fetch the numbers of the latest releases from the device at once, and add them up."""
        if not self._pending:
            return
        # Of float32 and float64: what is stacked is as wide as the widest.
        fetched = iter(
            torch.stack([x for release in self._pending for x in release.products]).tolist()
        )
        for release in self._pending:
            self._add(release, *(next(fetched) for _ in release.products))
        self._pending = []

    def _add(
        self,
        release: _PendingRelease,
        squared: float,
        along: float,
        followed: float,
        count: float = 0.0,
    ) -> None:
        length, weight = self._length, _weight(release.averaged)
        self._length = (
            (1 - weight) ** 2 * length + 2 * weight * (1 - weight) * along + weight**2 * followed
        )
        if not math.isfinite(squared):
            return  # the run has diverged
        has_average = release.averaged > 0 and 0 < length < math.inf and math.isfinite(along)
        counts = release.count_std is not None
        self._append(
            Stretch(
                last_step=release.step + 1,
                steps=1,
                squared=squared,
                noise=self._size * release.noise_std**2,
                agreements=int(has_average),
                agreement=along / (release.noise_std * math.sqrt(length)) if has_average else 0.0,
                counts=int(counts),
                share=(1 + count) / 2 if counts else 0.0,
                share_variance=((release.count_std or 0.0) / 2) ** 2,
            )
        )

    def _append(self, one: Stretch) -> None:
        """Add one release to the last stretch, or begin another; too many are joined in pairs."""
        if self._stretches and self._stretches[-1].steps < self._width:
            self._stretches[-1] = self._stretches[-1].plus(one)
            return
        if len(self._stretches) == _MOST_STRETCHES:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [first.plus(second) for first, second in pairs]
            self._width *= 2
        self._stretches.append(one)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as plain types."""
        signal = self.signal()
        return {
            "size": signal.size,
            "width": self._width,
            "stretches": [list(vars(each).values()) for each in signal.stretches],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""
        self._size, self._width = int(state["size"]), int(state["width"])
        self._stretches = [Stretch(*each) for each in state["stretches"]]
        self._average, self._averaged, self._length, self._pending = None, 0, 0.0, []


def _asks_gradient(query: Query) -> bool:
    """Return whether the answer holds a gradient of all parameters, and not only differences."""
    gradients = [term.weight for term in query.terms if term.direction is None]
    return query.coordinates is None and abs(sum(gradients)) > 0


def _weight(averaged: int) -> float:
    """Return the weight of the next release in the average of ``averaged`` before it."""
    return (1 + _MEMORY) / (averaged + 1 + _MEMORY)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ⟨a, b⟩; one long sum in float32 would lose more than the noise of an average has."""
    if a.numel() <= _BLOCK:
        return torch.dot(a, b)
    blocks = zip(torch.split(a, _BLOCK), torch.split(b, _BLOCK), strict=True)
    wide = torch.float64 if has_float64(a.device.type) else torch.float32  # of a few blocks
    return torch.stack([torch.dot(x, y) for x, y in blocks]).sum(dtype=wide)


# -- verdict -----------------------------------------------------------------------------------

_ALPHA = 0.01  # of 100 runs that learn nothing, one is taken for one that does
_LEAST = 10  # agreements below which there is no verdict
_SURE = 4.0  # standard deviations of one sum that was not selected by its value
_SHARE = 0.1  # of the clearest quarter's: less agreement at the end is a remainder


@dataclass(frozen=True)
class Verdict:
    """A judgement on the releases of a run.

    Args:
        largest: of the sums, in standard deviations of noise.
        threshold: of the largest, exceeded by noise alone in one of 100 runs.
        quarters: the sums over the quarters of the run.
    """

    largest: float
    threshold: float
    quarters: tuple[float, ...]

    @property
    def learns(self) -> bool:
        """True if a direction in the releases outlasts their noise."""
        return self.largest > self.threshold

    @property
    def stops_short(self) -> bool:
        """True if the last quarter's releases clearly still point where earlier ones did."""
        last, clearest = self.quarters[-1], max(self.quarters)
        return self.learns and last > _SURE and last > _SHARE * clearest

    @property
    def jumps(self) -> bool:
        """True if the last half's releases point against earlier ones, so steps overshoot."""
        half = self.quarters[2:]
        return sum(half) / math.sqrt(len(half)) < -_SURE


def judge(signal: Signal) -> Verdict | None:
    """Judge the releases of a run; None if there are too few.

    Example:
        >>> import torch
        >>> from lightning_dp.boundary import Query, Release, Term
        >>> tracker, generator = SignalTracker(), torch.Generator().manual_seed(1)
        >>> for step in range(100):
        ...     noise = torch.randn(1000, generator=generator)
        ...     tracker.observe(Query((Term(),), 1.0, 1.0), Release(noise, noise_std=1.0), step)
        >>> judge(tracker.signal()).learns
        False
    """
    if signal.whole.agreements < _LEAST:
        return None
    sums = [each.z_score for each in _scanned(signal) if each.agreements]
    ends = [round(part * len(signal.stretches) / 4) for part in range(5)]
    quarters = (signal.between(a, b) for a, b in pairwise(ends))
    return Verdict(
        largest=max(sums),
        threshold=float(-ndtri(_ALPHA / len(sums))),
        quarters=tuple(each.z_score if each.agreements else 0.0 for each in quarters),
    )


def _scanned(signal: Signal) -> Iterator[Stretch]:
    """Yield the stretches, pairs of neighbours, pairs of pairs, up to the whole."""
    level = list(signal.stretches)
    while level:
        yield from level
        if len(level) == 1:
            return
        last = level[-1:] if len(level) % 2 else []
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [first.plus(second) for first, second in pairs] + last
