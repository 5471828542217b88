"""What an estimator is: it asks, and turns the noised answer into a gradient estimate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.boundary import Query, Release, State

__all__ = ["AbstractEstimator", "share_of_noise"]


class AbstractEstimator(ABC):
    """Public in, public out: an estimator never sees data, so it cannot break the guarantee.

    Implementations are frozen dataclasses that hold configuration. The state is made by
    :meth:`init`, handed to each call, and returned by :meth:`tell`; the mechanism saves it.

    An estimator whose steps are not all alike says so in advance, as functions of the step: the
    noise is planned, and the batches are drawn, by :meth:`relative_noise` and
    :meth:`relative_rate`, which repeat after :attr:`period` steps.
    """

    @property
    def period(self) -> int:
        """The number of steps after which the kinds of steps repeat."""
        return 1

    def relative_noise(self, step: int) -> float:
        """What multiplies the noise schedule's multiplier at step t; > 0."""
        return 1.0

    def relative_rate(self, step: int) -> float:
        """What multiplies the sampling rate at step t (the product is at most 1); >= 1."""
        return 1.0

    @property
    def queries_per_step(self) -> int:
        """How many queries a step may ask on its one batch; see :func:`share_of_noise`."""
        return 1

    @property
    def longest_silence(self) -> float:
        """The most steps in a row that may ask nothing; infinite if that is not known.

        It bounds how far steps that nobody recorded can be in the plan.
        """
        return math.inf

    @property
    def uses_hessian(self) -> bool:
        """Whether queries have terms with a direction, which not every engine can answer."""
        return False

    @property
    def estimates_gradient(self) -> bool:
        """Whether what a step releases, and estimates, is a gradient.

        If not, post-processing and schedules that look at released gradients are refused.
        """
        return True

    def check(self, optimizer: Optimizer) -> None:  # noqa: B027 (most can use any optimizer)
        """Refuse an optimizer, or parameters in it, that the estimate is not made for.

        Called before a fit, when nothing has been charged.

        Raises:
            ValueError: naming the cause and the cure.
        """

    @abstractmethod
    def init(self, params: Sequence[Tensor]) -> State:
        """The state before the first step. ``params``: the trainable parameters."""

    @abstractmethod
    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query | None:
        """The query of step t, with at least the planned ``noise_multiplier``.

        None asks nothing: nothing is charged, and :meth:`tell` is given zeros without noise.

        Where :meth:`tell` gave no estimate, this is called again with the state that it gave, for
        the next query on the same batch. All queries of a step together must have at least the
        planned noise.
        """

    def recall(self, query: Query, step: int, part: int) -> State | None:
        """A state in which :meth:`ask` asks this query, if any does; None if no state can be told.

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
        """The gradient estimate and the next state.

        Args:
            released: the noised sum divided by the expected batch size, flat of length d (or of
                the query's coordinates), with the standard deviation of the noise in it.

        Returns:
            a flat vector of length d that the optimizer uses as the gradient, and the new state
            (``state`` itself is not changed). None instead of the vector asks for a further query
            on the same batch.
        """


def share_of_noise(noise_multiplier: float, queries: int) -> float:
    """z_s of each of n alike queries on one batch that together are one with multiplier z.

    z √n, and a hair more, so that rounding never puts the composition below z.

    Example:
        >>> round(share_of_noise(1.5, queries=4), 9)
        3.0
    """
    return noise_multiplier * math.sqrt(queries) * (1.0 + 1e-14 * (queries > 1))
