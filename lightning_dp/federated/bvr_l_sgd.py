"""BVR-L-SGD: what one worker does between two rounds of DIFF2."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_dp._validate import between, normalise, not_negative, positive, whole
from lightning_dp.accounting.events import AbstractEvent, History
from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.estimators.base import distance
from lightning_dp.estimators.diff2 import Diff2
from lightning_dp.sampling import Poisson

__all__ = ["BVRLSGD"]


@dataclass(frozen=True)
class BVRLSGD:
    r"""The local routine of DIFF2-BVR-L-SGD, in place of one step of gradient descent.

    From the server's x_0 and v_1 (:class:`~lightning_dp.Diff2` over all workers):
    x_1 = x_0 - η v_1, and then, on the records of one worker only, for k = 2, ..., K,

        v_k = v_(k-1) + (Σ_i clip_C(g_i(x_(k-1)) - g_i(x_(k-2))) + noise) / b,
        C = C3 ‖x_(k-1) - x_(k-2)‖,    x_k = x_(k-1) - η v_k.

    Workers take turns: round r = 1, 2, ... is that of worker r mod P. The sum is over a fresh
    Poisson batch of expected size b = q n_p, and every x_k is released.

    A state machine without data: ``ask`` for what the worker must answer, ``tell`` it the release.
    The state is of plain types.

    Murata and Suzuki, DIFF2 (2023), Algorithm 4, with Poisson batches instead of fixed-size ones.

    Args:
        learning_rate: η > 0.
        local_steps: K >= 1; K = 1 is gradient descent.
        diff_norm: C3 > 0.
        noise_multiplier: z3 >= 0: noise of standard deviation z3 C on the worker's sum.
        sample_rate: q in (0, 1], of the worker's own records.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> import torch
        >>> routine = BVRLSGD(0.5, local_steps=2, diff_norm=1.0, noise_multiplier=3.0, sample_rate=0.1)
        >>> state = routine.start(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
        >>> query = routine.ask(state)
        >>> query.clip_norm, [term.weight for term in query.terms]
        (1.0, [1.0, -1.0])
        >>> state = routine.tell(state, Release(torch.tensor([0.0, 1.0]), noise_std=0.1))
        >>> routine.ask(state) is None, state["x"]
        (True, tensor([-1.0000,  0.5000]))
    """

    learning_rate: float
    local_steps: int
    diff_norm: float
    noise_multiplier: float
    sample_rate: float

    def __post_init__(self) -> None:
        normalise(self, positive, "learning_rate", "diff_norm")
        normalise(self, whole, "local_steps")
        normalise(self, not_negative, "noise_multiplier")
        normalise(self, between("(0, 1]"), "sample_rate")

    # -- one round of one worker -----------------------------------------------------------

    def start(self, x: Tensor, v: Tensor) -> State:
        """Return the state after the server's estimate ``v`` at ``x`` was applied; both flat."""
        return {"k": 1, "before": x, "x": x - self.learning_rate * v, "v": v}

    def ask(self, state: State) -> Query | None:
        """Return the query at x_(k-1) to the worker; None when the round is over.

        A step that would compare a point with itself is over at once: v would not change, so
        neither would anything after it.
        """
        if state["k"] >= self.local_steps:
            return None
        radius = self.diff_norm * distance([state["x"]], state["before"])
        if radius == 0:
            return None
        terms = (Term(1.0, state["x"]), Term(-1.0, state["before"]))
        return Query(terms, radius, self.noise_multiplier)

    def tell(self, state: State, released: Release) -> State:
        """Return the next state.

        Args:
            released: the noised sum divided by the expected batch size b.
        """
        v = state["v"] + released.value
        x = state["x"] - self.learning_rate * v
        return {"k": state["k"] + 1, "before": state["x"], "x": x, "v": v}

    # -- what it costs ---------------------------------------------------------------------

    @property
    def event(self) -> AbstractEvent:
        """The privacy event of one local step, for a record of the worker in turn."""
        return Poisson().event(self.noise_multiplier, self.sample_rate)

    @staticmethod
    def worker_in_turn(round_number: int, workers: int) -> int:
        """Return the worker, 0, ..., P - 1, that runs round r = 1, 2, ..."""
        return round_number % workers

    def history(
        self, diff2: Diff2, noise_multiplier: float, rounds: int, worker: int, workers: int
    ) -> History:
        """Return all events of one record of a worker in a run from round 1.

        The server asks about all records in every round; the worker's own steps are added in the
        rounds that are its turn.

        Args:
            diff2: the server's estimator, on full batches.
            noise_multiplier: z of its restarts, on the sum over all workers.
            rounds: R, their number.
            worker: whose records, 0, ..., P - 1.
            workers: P, their number.
        """
        worker = whole("worker", worker, 0, workers - 1)
        steps = [noise_multiplier * diff2.relative_noise(t) for t in range(rounds)]
        counts: dict[AbstractEvent, int] = {}
        for z in steps:
            event = Poisson().event(z, 1.0)
            counts[event] = counts.get(event, 0) + 1
        turns = sum(self.worker_in_turn(r, workers) == worker for r in range(1, rounds + 1))
        if own := turns * (self.local_steps - 1):
            counts[self.event] = counts.get(self.event, 0) + own
        return list(counts.items())
