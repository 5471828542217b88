"""Estimators ask the data a question, and turn the noised answer into a gradient estimate.

The base of all, DP-SGD's own, what several of them share, and the only caller of their ask and tell.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._refusals import RefusedRun
from lightning_dp._validate import above_0, between, flag, normalise, whole
from lightning_dp._world import HeldParts
from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.functional import flatten, length, number_of_entries

__all__ = [
    "AbstractEstimator",
    "Driver",
    "MeanGradient",
    "Traits",
    "distance",
    "entries",
    "share_of_noise",
]


def _always_1(step: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Traits:
    """The facts about an estimator's steps that are known in advance, for the plan of noise and batches.

    Args:
        period: the number of steps after which the kinds of steps repeat.
        relative_noise: multiplies the noise schedule's multiplier at step t; > 0.
        relative_rate: multiplies the sampling rate at step t (the product is at most 1); >= 1.
        queries_per_step: the most queries that a step asks on its one batch; see
            :func:`share_of_noise`.
        longest_silence: the most steps in a row that may ask nothing; infinite if that is not
            known. It bounds how far steps that nobody recorded can be in the plan.
        uses_hessian: queries have terms with a direction, which not every engine can answer.
        estimates_gradient: what a step releases, and estimates, is a gradient. If not,
            post-processing and schedules that look at released gradients are refused.
        is_entrywise: each entry of the estimate is made from that entry of the releases alone, and
            queries are made of points and of lengths (:func:`distance`); so it works on sharded
            parameters, of which each process has some entries.
        asks_one_gradient: all queries are for the gradients at the present parameters alone.
        clip_norms: those fixed in advance. An infinite one is refused with noise, before a fit.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> Traits(period=10, relative_rate=lambda step: 2.0 if step % 10 == 0 else 1.0).period
        10
    """

    period: int = 1
    relative_noise: Callable[[int], float] = _always_1
    relative_rate: Callable[[int], float] = _always_1
    queries_per_step: int = 1
    longest_silence: float = math.inf
    uses_hessian: bool = False
    estimates_gradient: bool = True
    is_entrywise: bool = False
    asks_one_gradient: bool = False
    clip_norms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        normalise(self, whole, "period", "queries_per_step", of="Traits")
        normalise(self, between("[0, inf]"), "longest_silence", of="Traits")
        flags = ("uses_hessian", "estimates_gradient", "is_entrywise", "asks_one_gradient")
        normalise(self, flag, *flags, of="Traits")


class AbstractEstimator(ABC):
    """Public in, public out: an estimator never sees data, so it cannot break the guarantee.

    Implementations are frozen dataclasses that hold configuration. The state is made by
    :meth:`init`, handed to each call, and returned by :meth:`tell`; the mechanism saves it.

    An estimator whose steps are not all alike, or that asks more than one query for the gradient
    in a step, says so in its :attr:`traits`.
    """

    @property
    def traits(self) -> Traits:
        """The facts about the steps that are known in advance."""
        return Traits()

    def check(self, optimizer: Optimizer) -> None:  # noqa: B027 (most can use any optimizer)
        """Refuse an optimizer, or parameters in it, that the estimate is not made for.

        Called before a fit, when nothing has been charged.

        Raises:
            ValueError: naming the cause and the cure.
        """

    def memory(self, step: int) -> float | None:
        """Return the weight a of the estimate before in that of step t: a v_(t-1) + release.

        None where estimates are made otherwise, and the noise in them is not known in advance.
        """
        return None

    @abstractmethod
    def init(self, params: Sequence[Tensor]) -> State:
        """Return the state before the first step. ``params``: the trainable parameters."""

    @abstractmethod
    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query | None:
        """Return the query of step t, with at least the planned ``noise_multiplier``.

        None asks nothing: nothing is charged, and :meth:`tell` is given zeros without noise.

        Where :meth:`tell` gave no estimate, this is called again with the state that it gave, for
        the next query on the same batch. All queries of a step together must have at least the
        planned noise.
        """

    def recall(self, query: Query, step: int, part: int) -> State | None:
        """Return a state in which :meth:`ask` asks this query, if any does; None if no state can be told.

        For a client of a federation: it has seen no answers but its own, and asks for itself what
        a server may ask at step t, in its query number ``part``, about the points (and along the
        directions) that it was sent. An estimator that gives None is held to the noise and to
        numbers of ordinary size only.

        Args:
            query: of step t, with its points written out; the first one is x_t.
        """
        return None

    @abstractmethod
    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor | None, State]:
        """Return the gradient estimate and the next state.

        Args:
            released: the noised sum divided by the expected batch size, flat of length d (or of
                the query's coordinates), with the standard deviation of the noise in it.

        Returns:
            a flat vector of length d that the optimizer uses as the gradient, and the new state
            (``state`` itself is not changed). None instead of the vector asks for a further query
            on the same batch.
        """


@dataclass(frozen=True)
class MeanGradient(AbstractEstimator):
    r"""(Σ_i clip_C(g_i(x_t)) + N(0, z²C² I)) / B, B the expected batch size.

    The gradient estimate of DP-SGD (Abadi et al. 2016, arXiv:1607.00133, Algorithm 1), with the
    expected instead of the realised batch size.

    Args:
        max_grad_norm: C > 0, the clip norm of one record's gradient. Infinite only together with
            ``noise_multiplier=0``.

    Raises:
        ValueError: if ``max_grad_norm`` is not greater than 0.

    Example:
        >>> query = MeanGradient(max_grad_norm=0.5).ask({}, [], step=0, noise_multiplier=1.0)
        >>> query.clip_norm, query.noise_multiplier
        (0.5, 1.0)
    """

    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, above_0, "max_grad_norm")

    @property
    def traits(self) -> Traits:
        norms = (self.max_grad_norm,)
        return Traits(
            longest_silence=0, is_entrywise=True, asks_one_gradient=True, clip_norms=norms
        )

    def memory(self, step: int) -> float:
        return 0.0

    def init(self, params: Sequence[Tensor]) -> State:
        return {}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        return _gradient(self.max_grad_norm, noise_multiplier)

    def recall(self, query: Query, step: int, part: int) -> State:
        return {}

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        return released.value, state


@functools.lru_cache(maxsize=16)
def _gradient(clip_norm: float, noise_multiplier: float) -> Query:
    return Query((Term(),), clip_norm, noise_multiplier)


@dataclass(frozen=True)
class Driver:
    """An estimator, its state, and how far it is.

    It sees queries and releases only, and never changes: :meth:`tell` returns the driver to go on
    with. A step that breaks off is begun again from the driver that it began with.

    Args:
        estimator: asks, and is told.
        state: the estimator's.
        step: t of the step that is next, or that was begun.
        part: queries of this step that were answered.

    Example:
        >>> import torch
        >>> from lightning_dp.estimators import MeanGradient
        >>> params = [torch.zeros(2)]
        >>> driver = Driver.begin(MeanGradient(), params)
        >>> driver.ask(params, noise_multiplier=1.0).clip_norm
        1.0
        >>> estimate, driver = driver.tell(params, Release(torch.tensor([1.0, 2.0]), 1.0))
        >>> estimate.tolist(), driver.step
        ([1.0, 2.0], 1)
    """

    estimator: AbstractEstimator
    state: State = field(repr=False)
    step: int = 0
    part: int = 0

    @classmethod
    def begin(cls, estimator: AbstractEstimator, params: Sequence[Tensor]) -> Driver:
        """Return the driver before the first step."""
        return cls(estimator, estimator.init(params))

    def ask(
        self,
        params: Sequence[Tensor],
        noise_multiplier: float,
        agree: Callable[[Query | None], Query | None] = lambda query: query,
    ) -> Query | None:
        """Return the next query; None, at the first part of a step only, if nothing is asked.

        Args:
            params: the trainable parameters.
            noise_multiplier: z that the step was planned with, or charged with.
            agree: makes the query the same on all processes of a job.

        Raises:
            RuntimeError: if a step that has begun has neither a further query nor an estimate.
        """
        if self.part and not self.part < (queries := self.estimator.traits.queries_per_step):
            raise RefusedRun(
                f"{self.estimator} made no estimate after {self.part} queries at step {self.step}, but "
                f"declares queries_per_step={queries}.",
                topic="out-of-order",
            )
        query = agree(self.estimator.ask(self.state, params, self.step, noise_multiplier))
        if query is None and self.part:
            raise RefusedRun(
                f"{self.estimator} asks nothing at step {self.step}, and has no estimate.",
                topic="out-of-order",
            )
        return query

    def tell(self, params: Sequence[Tensor], released: Release) -> tuple[Tensor | None, Driver]:
        """Hand over the noised mean.

        Returns:
            the gradient estimate, or None if a further query is to be asked on the same batch; and
            the driver to go on with.
        """
        estimate, state = self.estimator.tell(self.state, params, self.step, released)
        step, part = (self.step, self.part + 1) if estimate is None else (self.step + 1, 0)
        return estimate, Driver(self.estimator, state, step, part)


def share_of_noise(noise_multiplier: float, queries: int) -> float:
    """Return z_s of each of n like queries on one batch that together are one with multiplier z.

    n z_s^-2 = z^-2, so z_s = z √n; and a hair more, so that rounding never puts the composition
    below z.

    Example:
        >>> round(share_of_noise(1.5, queries=4), 9)
        3.0
    """
    return noise_multiplier * math.sqrt(queries) * (1.0 + 1e-14 * (queries > 1))


def entries(params: Sequence[Tensor]) -> int:
    """Return d, the number of all entries, wherever they are."""
    if isinstance(params, HeldParts):
        return params.entries
    return number_of_entries(params)


def distance(params: Sequence[Tensor], point: Tensor) -> float:
    """‖x - point‖, x the parameters as one flat vector.

    Where each process holds a part of them, it is that of all parts together.

    Raises:
        RuntimeError: if it is not finite: no difference of gradients could be bounded by it.
    """
    norm = float(length(flatten(params).sub_(point), params))
    if not math.isfinite(norm):
        raise RefusedRun(
            "The parameters are no longer finite, so a difference of gradients has no bound: "
            "training has diverged. Lower the learning rate, diff_norm, or restart_every "
            "(Diff2.recommend() proposes values).",
            topic="diverged",
        )
    return norm
