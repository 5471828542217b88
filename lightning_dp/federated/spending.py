"""The whole plan of a run and its budget, declared to a client before the first round."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lightning_dp._validate import normalise, number, probability, whole
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.declared_in_advance import OneOrderAccountant, order_of_budget
from lightning_dp.accounting.events import AbstractEvent, History, counted
from lightning_dp.accounting.guards import GDPGuard
from lightning_dp.accounting.rdp import total_divergence
from lightning_dp.accounting.release_file import check_name
from lightning_dp.accounting.steps import Steps

__all__ = ["Events", "Spending", "affordable_rounds", "check_budget", "fits_beside"]

Events: TypeAlias = Callable[[int], Sequence[AbstractEvent]]
Budget: TypeAlias = tuple[float, float, Relation]


@dataclass(frozen=True)
class Spending:
    """The queries of a run to one client and the budget, declared before its first round.

    Args:
        run: a name that no other federation over the same data has.
        rounds: how many rounds the run has at most.
        events: what round i asks of this client's records: one event, or several that are charged
            together. A round that is not asked is not charged.
        target_epsilon: the budget of the data set, over all its runs; ``math.inf`` for none.
        target_delta: in (0, 1); the δ of the budget and of the ε that is reported.
        relation: the neighbouring relation of both.
        retain: for how many rounds, the latest one included, releases are kept to be sent again.

    Raises:
        ValueError: naming the argument that is out of its range.
    """

    run: str
    rounds: int
    events: Events = field(repr=False)
    target_epsilon: float
    target_delta: float
    relation: Relation = "add_remove"
    retain: int = 1

    def __post_init__(self) -> None:
        normalise(self, whole, "retain", "rounds")
        check_name("run", self.run, "a name that no other federation has")
        check_budget(self.target_epsilon, self.target_delta, self.relation)
        normalise(self, number, "target_epsilon", "target_delta")

    @cached_property
    def fingerprint(self) -> str:
        """A text that is the same for the same plan and budget, and for no other."""
        plan = [[event.to_dict() for event in self.events(i)] for i in range(self.rounds)]
        budget = [self.run, str(self.target_epsilon), self.target_delta, self.relation, plan]
        return hashlib.sha256(json.dumps(budget, sort_keys=True).encode()).hexdigest()


def check_budget(target_epsilon: float, target_delta: float, relation: Relation) -> None:
    """Raise ValueError for a budget out of range; an infinite ε is one that somebody chose."""
    if target_epsilon is None or not number("target_epsilon", target_epsilon) > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon} must be greater than 0: the most that may ever be "
            "spent on the data set, by all runs; math.inf for no limit."
        )
    probability("target_delta", target_delta)
    check_relation(relation)


def affordable_rounds(events: Events, rounds: int, budget: Budget, spent: History) -> int:
    """Return the number of rounds that fit if no other run spends meanwhile."""
    if math.isinf(budget[0]):
        return rounds
    plan = [events(i) for i in range(rounds)]
    charges = [event for each in plan for event in each]
    whole = counted([*spent, *((event, 1) for event in charges)])
    if PLDAccountant().epsilon(whole, *budget[1:]) <= budget[0]:
        return rounds
    fitting = affordable_steps(lambda n: charges[n], len(charges), *budget, spent=spent)
    count = 0
    for i, each in enumerate(plan):
        count += len(each)
        if count > fitting:
            return i
    return rounds


def fits_beside(charges: Sequence[AbstractEvent], budget: Budget, spent: History) -> bool:
    """Tell whether a round fits where several runs take turns, in an undeclared order.

    The order may depend on what was released, so a plan's ε would not hold for it. These do:

    - if all charges are alike, only their number matters: the accountant's ε;
    - full batches: the sum of 1/z², as :class:`~lightning_dp.accounting.guards.GDPGuard` keeps it;
    - else one Rényi order, as :class:`~lightning_dp.accounting.guards.RDPGuard` has it, that
      depends on the budget alone. It costs some percent of the budget.
    """
    epsilon, delta, relation = budget
    if math.isinf(epsilon) or not charges:
        return True
    whole = counted([*spent, *((event, 1) for event in charges)])
    if len(whole) == 1:  # whoever asks next, it is the same event once more
        return PLDAccountant().epsilon(whole, delta, relation) <= epsilon
    if any(event.pair[0] == 0 for event, _ in whole):
        return False  # a release without noise fits into no finite ε
    guard = GDPGuard(epsilon, delta, relation, [])
    if all(event.pair[1] == 1 for event, _ in whole):
        # Gaussians, also chosen adaptively, are one with 1/z² = Σ 1/z_i², as long as it stays
        # below μ² of the budget.
        factor = check_relation(relation)
        return math.fsum(n * (factor / e.pair[0]) ** 2 for e, n in whole) <= guard.mu**2
    # Divergences of one order add up over adaptive rounds. The order is fixed by the budget: one
    # chosen afterwards would depend on what was released.
    order = order_of_budget(epsilon, delta)
    pairs = np.array([event.pair for event, _ in whole])
    steps = Steps(pairs[:, 0], pairs[:, 1], np.array([float(n) for _, n in whole]))
    divergence = float(total_divergence(steps, relation, np.array([order]))[0])
    return divergence + OneOrderAccountant(order).penalty(delta) <= epsilon
