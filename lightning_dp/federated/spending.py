"""The whole plan of a run and its budget, declared to a client before the first round."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property

from lightning_dp._validate import normalise, whole
from lightning_dp.accounting import Relation
from lightning_dp.federated.release_budget import Events, check_budget
from lightning_dp.federated.release_file import check_name

__all__ = ["Spending"]


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

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same plan and budget."""
        plan = [[event.to_dict() for event in self.events(i)] for i in range(self.rounds)]
        budget = [self.run, str(self.target_epsilon), self.target_delta, self.relation, plan]
        return hashlib.sha256(json.dumps(budget, sort_keys=True).encode()).hexdigest()
