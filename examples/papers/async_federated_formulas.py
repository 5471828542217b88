"""Parameter choices of the asynchronous paper, for comparison with the accountant's ε."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.accounting.base import Relation
from lightning_dp.federated.asynchronous import PolynomialSizes, rounds_for

_HALF = (math.sqrt(3) - 1) / 2


def paper_higher_order(r0: float, sigma: float) -> tuple[float, float, float]:
    """(r, u0, u1) of equation (14), van Dijk et al. (2020).

    u0 = 2 √(r0 σ) / (σ - r0), u1 = e u0 / σ and r = 8 r0 (1/(1 - u0) + e³ σ^-3 / (1 - u1)) exp(3/σ²).

    Raises:
        ValueError: unless 0 < r0 <= 1/e, and u0 and u1 are below 1.

    Example:
        >>> import math
        >>> [round(x, 6) for x in paper_higher_order(1 / math.e, sigma=8.0)]
        [5.746045, 0.449555, 0.152752]
    """
    if not 0 < r0 <= 1 / math.e:
        raise ValueError(f"r0={r0} must be in (0, 1/e].")
    u0, u1 = _series(r0, sigma)
    if not (0 < u0 < 1 and 0 < u1 < 1):
        raise ValueError(
            f"sigma={sigma} is too small for r0={r0}: u0={u0}, u1={u1} must be below 1."
        )
    return 8 * r0 * _bracket(u0, u1, sigma), u0, u1


def paper_r0(sigma: float) -> float:
    """r0(σ): the fixed point at the end of Supplemental Material D.3.1 (printed there: 0.0110 for
    σ = 3, 0.0202 for 5, 0.0247 for 8).

    Args:
        sigma: σ >= 1.137.

    Raises:
        ValueError: for a smaller σ.

    Example:
        >>> [round(paper_r0(sigma), 4) for sigma in (3.0, 5.0, 8.0)]
        [0.011, 0.0203, 0.0248]
    """
    if not 1.137 <= sigma < math.inf:
        raise ValueError(f"sigma={sigma} must be at least 1.137.")
    shape = _HALF * 2 / 3
    r0 = 0.0
    for _ in range(10_000):
        following = shape * (1 - r0 / sigma) ** 2 / (8 * _bracket(*_series(r0, sigma), sigma))
        following = (r0 + following) / 2  # the plain iteration swings around the same point
        if abs(following - r0) <= 1e-15:
            break
        r0 = following
    return r0


@dataclass(frozen=True)
class PaperSelection:
    """Parameters by Theorem D.3 with p = 1, sizes that grow in a straight line, for one client.

    Args:
        initial_size: s_0.
        num_records: N of the client.
        sigma: σ.
        epsilon: ε that the theorem is to promise.
        epochs: K / N.
        r0: r0.
        rate, offset: q and m of s_i = ⌈N q (i + m)⌉.
        rounds: T ≈ √(2 K / (N q)).
        by_k_star: whether K <= K* decides q (else K <= K⁻ does).
    """

    initial_size: int
    num_records: int
    sigma: float
    epsilon: float
    epochs: float
    r0: float
    rate: float
    offset: float
    rounds: int
    by_k_star: bool

    @property
    def ratio(self) -> float:
        """γ = m / T; the theorem is for small ones."""
        return self.offset / self.rounds

    @property
    def budget(self) -> float:
        """The largest √(2 ln(1/δ) / ε) that σ suffices for, by the theorem."""
        factor = (1 + self.ratio) ** 5 / math.sqrt(1 - self.r0 / self.sigma)
        return float(self.sigma / factor)

    @property
    def delta(self) -> float:
        """δ that the theorem promises at ε."""
        return math.exp(-self.epsilon * self.budget**2 / 2)

    @property
    def sizes(self) -> PolynomialSizes:
        """s_i as the paper rounds it, s_0 + ⌈N q i⌉."""
        return PolynomialSizes(self.num_records * self.rate, self.initial_size)

    @property
    def rounds_needed(self) -> int:
        """Rounds of these sizes until K gradients, fewer than T, which is an approximation."""
        return rounds_for(self.sizes, self.epochs * self.num_records)


def paper_selection(
    initial_size: int,
    num_records: int,
    *,
    sigma: float,
    epsilon: float,
    epochs: float,
    r0: float | None = None,
    refinements: int = 2,
) -> PaperSelection:
    """Supplemental Material D.3.2: q from K <= K⁻ and K <= K*, then m and T.

    For comparison only: what it promises is far from what the noise gives, see
    :func:`true_epsilon`.

    Args:
        initial_size: s_0 >= 1.
        num_records: N of the client.
        sigma: σ.
        epsilon: ε.
        epochs: K / N > 0.
        r0: default :func:`paper_r0`; the paper also takes 1/e.
        refinements: how often γ = m/T of one choice is put into K⁻ for the next one.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> import math
        >>> chosen = paper_selection(
        ...     16, 10_000, sigma=8.0, epsilon=1.0, epochs=2.5, r0=1 / math.e
        ... )
        >>> chosen.rounds, round(chosen.offset, 3), f"{chosen.delta:.2g}", chosen.rounds_needed
        (195, 12.106, '5.5e-08', 183)
    """
    for name, value in (
        ("initial_size", initial_size),
        ("num_records", num_records),
        ("epsilon", epsilon),
        ("epochs", epochs),
    ):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be finite and greater than 0.")
    r0 = paper_r0(sigma) if r0 is None else r0
    paper_higher_order(r0, sigma)  # checks both
    star = (r0 / sigma) ** 2 / (2 * epochs)
    gamma = 0.0
    for _ in range(refinements + 1):
        minus = _b(r0, sigma, gamma) * epsilon ** (2 / 3) / epochs
        rate = min(star, minus**3)
        offset = initial_size / (num_records * rate)
        rounds = math.ceil(math.sqrt(2 * epochs / rate))
        if rate == star:
            break
        gamma = offset / rounds
    numbers = (initial_size, num_records, sigma, epsilon, epochs, r0)
    return PaperSelection(*numbers, rate, offset, rounds, by_k_star=rate == star)


def true_epsilon(
    selection: PaperSelection, delta: float, relation: Relation = "add_remove"
) -> float:
    """ε of the rounds that the paper's choice makes, by the accountant, with Poisson batches.

    Example:
        >>> import math
        >>> chosen = paper_selection(
        ...     16, 10_000, sigma=8.0, epsilon=1.0, epochs=2.5, r0=1 / math.e
        ... )
        >>> round(true_epsilon(chosen, 5.5e-8), 3)  # the theorem says 1
        0.115
    """
    sizes, n = selection.sizes, selection.num_records
    events = [
        (PoissonGaussian(selection.sigma, sizes(i) / n), 1) for i in range(selection.rounds_needed)
    ]
    return PLDAccountant().epsilon(events, delta, relation)


def _series(r0: float, sigma: float) -> tuple[float, float]:
    u0 = 2 * math.sqrt(r0 * sigma) / (sigma - r0)
    return u0, math.e * u0 / sigma


def _bracket(u0: float, u1: float, sigma: float) -> float:
    return (1 / (1 - u0) + math.e**3 / sigma**3 / (1 - u1)) * math.exp(3 / sigma**2)


def _b(r0: float, sigma: float, gamma: float) -> float:
    """B(1, r0, σ) of Theorem D.3, from its A(1, r0, σ); α = r0/σ."""
    r, alpha = paper_higher_order(r0, sigma)[0], r0 / sigma
    inner = r * 9 / 4 * (1 + gamma) ** 9 / (1 - alpha) ** 2
    a = 2 ** (-1 / 3) * inner ** (2 / 3)
    x = 3 * r * (1 + gamma) ** 2 / (1 - alpha) ** 2
    return float(a * (1 + gamma) ** (-14 / 3) * (2 / ((x + 1) ** 2 - 1)) ** (2 / 3))
