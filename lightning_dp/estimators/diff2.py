"""DIFF2: a plain private gradient now and then, private differences of gradients in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_dp._refusals import warn
from lightning_dp._validate import between, normalise, number, optional, positive, whole
from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.calibration import calibrate
from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.estimators.base import AbstractEstimator, Traits, distance, entries
from lightning_dp.functional import flatten, length

__all__ = ["Diff2", "Recommendation"]

_PAPER_SPLIT = 1.25


@dataclass(frozen=True)
class Diff2(AbstractEstimator):
    r"""v_t = (Σ_i clip_C1(g_i(x_t)) + noise) / B where t is a multiple of T, and else

    v_t = v_(t-1) + (Σ_i clip_C(g_i(x_t) - g_i(x_(t-1))) + noise) / B,  C = C2 ‖x_t - x_(t-1)‖.

    Of a smooth loss the differences are short, so the noise scaled to them is small; it adds up in
    v until the next restart. Both gradients of a difference are of the same records of the same
    batch, and v goes to the user's optimizer as the gradient (SGD gives DIFF2-GD).

    - The sensitivity of a difference step is C2 ‖x_t - x_(t-1)‖ under add/remove: a function of
      released values only, so every step is one (subsampled) Gaussian with its own multiplier.
    - If x_t = x_(t-1), nothing is asked and nothing is charged; v stays.
    - Noise feeds back: C is proportional to ‖v‖, and v contains the noise. It grows where
      the factor σ2 C2 η √(d T) exceeds 1 (σ2: the difference noise over C on the mean, η: learning
      rate); a warning says so once. :meth:`recommend` keeps it below.
    - A ``diff_norm`` that is too small is no cure: if most differences are clipped, v does not
      follow the gradient down and overshoots. Nothing warns of this kind of divergence.

    One budget pays for both kinds of steps. With the ``split`` u, and if the steps are full
    batches, the share 1/u of Σ 1/z² goes to the restarts: z_difference / z_restart =
    √((T - 1) / (u - 1)). ``noise_multiplier`` and calibration set z_restart.

    Murata and Suzuki, DIFF2: Differential Private Optimization via Gradient Differences (2023),
    Algorithms 1 to 3.

    Args:
        restart_every: T >= 1; 1 is DP-SGD.
        max_grad_norm: C1 > 0.
        diff_norm: C2 > 0, in the units of a smoothness constant (gradient per parameter length).
        split: u > 1, or "paper" (u = 1.25), or "optimal" for the least noise in v averaged over
            steps: u = 1 + (c2/C1) (T - 1) / √2, c2 = ``diff_norm`` · ``step_length``.
        step_length: for the optimal split, the expected root mean square of ‖x_t - x_(t-1)‖; a
            guess from public quantities, such as learning rate times ``max_grad_norm`` / 10.
        restart_rate: >= 1: under Poisson sampling, batches of restarts are this much larger (and so
            are their chunks, in memory). They cost about ``restart_rate`` squared as much.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> diff2 = Diff2(restart_every=20, max_grad_norm=1.0, diff_norm=3.0)
        >>> diff2.relative_noise(0), round(diff2.relative_noise(1), 3)
        (1.0, 8.718)
    """

    restart_every: int
    max_grad_norm: float = 1.0
    diff_norm: float = 1.0
    split: Literal["paper", "optimal"] | float = "paper"
    step_length: float | None = None
    restart_rate: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, whole, "restart_every")
        normalise(self, positive, "max_grad_norm", "diff_norm")
        normalise(self, between("[1, inf)"), "restart_rate")
        normalise(self, optional(number), "step_length")
        self._check_split()

    def _check_split(self) -> None:
        if self.split == "optimal":
            if self.step_length is None or not 0 < self.step_length < math.inf:
                raise ValueError(
                    f"step_length={self.step_length} must be finite and greater than 0 with "
                    "split='optimal'. Give the expected norm of the optimizer's steps, from public "
                    "numbers (about learning rate times max_grad_norm / 10)."
                )
            return
        if self.step_length is not None:
            raise ValueError(
                f"step_length={self.step_length} is used by split='optimal' only, not by "
                f"split={self.split!r}."
            )
        if self.split == "paper":
            return
        if not isinstance(self.split, str):
            normalise(self, number, "split")
        if isinstance(self.split, str) or not 1 < self.split < math.inf:
            raise ValueError(
                f"split={self.split!r} must be 'paper', 'optimal', or a finite number above 1."
            )

    @property
    def u(self) -> float:
        """The split as a number; 1/u of the budget is for the restarts."""
        if self.restart_every == 1:
            return 1.0
        if self.split == "optimal":
            assert self.step_length is not None
            # A budget R = 1/z1² + (T-1)/z2² per interval, of which 1/u is the restart's: z1² = u/R and
            # z2² = (T-1) u / ((u-1) R). After j differences the variance in v is C1² z1² + j c2² z2²,
            # on average over the interval C1² u/R + (c2² (T-1)/2) (T-1) u / ((u-1) R): least at
            # (u - 1)² = (c2/C1)² (T-1)²/2.
            relative = self.diff_norm * self.step_length / self.max_grad_norm
            return 1 + relative * (self.restart_every - 1) / math.sqrt(2)
        return _PAPER_SPLIT if isinstance(self.split, str) else self.split

    # -- what is planned -------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        return Traits(
            period=self.restart_every,
            relative_noise=self.relative_noise,
            relative_rate=self.relative_rate,
            longest_silence=self.restart_every - 1,
            is_entrywise=True,
        )

    def is_restart(self, step: int) -> bool:
        """Return whether step t starts again with a plain gradient."""
        return step % self.restart_every == 0

    def relative_noise(self, step: int) -> float:
        """Return the factor on the noise schedule's multiplier at step t."""
        return 1.0 if self.is_restart(step) else math.sqrt((self.restart_every - 1) / (self.u - 1))

    def relative_rate(self, step: int) -> float:
        """Return the factor on the sampling rate at step t."""
        return self.restart_rate if self.is_restart(step) else 1.0

    # -- one step --------------------------------------------------------------------------

    def memory(self, step: int) -> float:
        return 0.0 if self.is_restart(step) else 1.0

    def init(self, params: Sequence[Tensor]) -> State:
        return {"estimate": None, "point": None, "warned": False, "length": None}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query | None:
        if self.is_restart(step) or state["estimate"] is None:
            return Query((Term(),), self.max_grad_norm, noise_multiplier)
        clip_norm = self.diff_norm * distance(params, state["point"])
        if clip_norm == 0:
            return None
        return Query((Term(), Term(-1.0, state["point"])), clip_norm, noise_multiplier)

    def recall(self, query: Query, step: int, part: int) -> State:
        before = query.terms[-1].point
        return {"estimate": before, "point": before, "warned": True, "length": None}

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        estimate, warned, of_restart = released.value, state["warned"], state.get("length")
        if not self.is_restart(step) and state["estimate"] is not None:
            warned = warned or self._warn_of_feedback(of_restart, released, entries(params))
            estimate = state["estimate"] + released.value
        elif not warned and self.restart_every > 1:
            of_restart = float(length(estimate, params))  # the one look at the device here
        told = {"estimate": estimate, "point": flatten(params), "warned": warned}
        return estimate, {**told, "length": of_restart}

    def _warn_of_feedback(self, before: float | None, released: Release, size: int) -> bool:
        """Warn if the noise of an interval is as long as the estimate that it began with."""
        # T differences add T independent noises of d entries each: length σ √(d T).
        added = released.noise_std * math.sqrt(size * self.restart_every)
        if before is None or not added > before:
            return False
        warn(
            f"Diff2: the noise of {self.restart_every} differences has {added / before:.2g} times the "
            "norm of the estimate it is added to, and feeds back into the next ones: training may "
            "diverge. Lower restart_every, diff_norm or the learning rate, or see "
            "Diff2.recommend().",
            topic="diverged",
        )
        return True

    # -- before the run --------------------------------------------------------------------

    def feedback(
        self, learning_rate: float, *, noise_multiplier: float, batch_size: float, size: int
    ) -> float:
        """Return σ2 C2 η √(d T): the noise of an interval over the estimate; keep it below 1.

        With plain SGD a step has the length η ‖v‖, so a difference is noised by σ2 C2 η ‖v‖ in each
        of d coordinates, and T of them add up to σ2 C2 η ‖v‖ √(d T).

        Args:
            learning_rate: η of plain SGD.
            noise_multiplier: z of the difference steps; σ2 = z / B.
            batch_size: B, the expected size of their batches.
            size: d, the number of trained parameters.
        """
        sigma = noise_multiplier / batch_size
        return sigma * self.diff_norm * learning_rate * math.sqrt(size * self.restart_every)

    @classmethod
    def recommend(
        cls,
        target_epsilon: float,
        target_delta: float,
        *,
        steps: int,
        num_records: int,
        size: int,
        sample_rate: float = 1.0,
        max_grad_norm: float = 1.0,
        smoothness: float = 1.0,
        relation: Relation = "add_remove",
    ) -> Recommendation:
        """Propose T, C2 and η of Theorem 4.3, from public quantities.

        T = max(1, τ R) with τ = (G² √d / (L n ε))^(2/3), C1 = G, C2 = L, and
        η = min(1/L, 1 / (√T L σ2 √d)), which keeps :meth:`feedback` at most 1. The theorem says
        these up to constants, so take them as the place to search around: T and C1 a few times
        larger were better on the data that was tried (examples/papers/results/diff2.md).

        Args:
            target_epsilon, target_delta: the budget.
            steps: R, their number.
            num_records: n, the size of the data set.
            size: d, the number of trained parameters.
            sample_rate: q; 1 is the full batch, for which the theorem speaks.
            max_grad_norm: G, a bound on the norm of one record's gradient.
            smoothness: L, a guess of how fast one record's gradient changes.
            relation: the neighbouring relation.

        Example:
            >>> advice = Diff2.recommend(
            ...     3.0, 1e-5, steps=2000, num_records=16_512, size=101, smoothness=3.0
            ... )
            >>> advice.estimator.restart_every, round(advice.learning_rate, 3)
            (3, 0.333)
        """
        tau = max_grad_norm**2 * math.sqrt(size) / (smoothness * num_records * target_epsilon)
        interval = min(steps, max(1, round(tau ** (2 / 3) * steps)))
        estimator = cls(interval, max_grad_norm, smoothness)
        scale = calibrate(
            estimator.relative_noise, sample_rate, steps, target_epsilon, target_delta, relation
        )
        feedback = estimator.feedback(
            1 / smoothness,
            noise_multiplier=scale * estimator.relative_noise(1),
            batch_size=sample_rate * num_records,
            size=size,
        )
        learning_rate = 1 / (smoothness * max(1.0, feedback))
        return Recommendation(estimator, learning_rate, feedback * learning_rate * smoothness)


@dataclass(frozen=True)
class Recommendation:
    """Settings of :class:`Diff2` at which to begin a search.

    Args:
        estimator: with T, C1 and C2.
        learning_rate: η for plain SGD.
        feedback: :meth:`Diff2.feedback` at these.
    """

    estimator: Diff2
    learning_rate: float
    feedback: float
