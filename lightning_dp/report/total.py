"""ε of several ledgers together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.charges import Charges
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.accounting.release_file import federations_in
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.checks import Checked

__all__ = ["Total", "total"]


@dataclass(frozen=True)
class Total:
    """ε of several ledgers together, if they are about the same records.

    Args:
        ledgers: how many there are.
        steps: noised steps, over all of them.
        epsilon: of the union of their events at ``delta``; infinite if one had a test seed, since
            who can repeat its noise can subtract it.
        delta: the least δ that a report in the folder states, unless one is given.
        relation: replace-one, if a report in the folder is under it.
        seeded: the ledgers that had a test seed.
    """

    ledgers: int
    steps: int
    epsilon: float
    delta: float
    relation: Relation
    seeded: tuple[str, ...] = ()

    def __str__(self) -> str:
        seeded = f"; NOT PRIVATE (a seed was set: {', '.join(self.seeded)})" if self.seeded else ""
        return (
            f"== total of {self.ledgers} ledgers, if they are about the same records: "
            f"ε = {epsilon_text(self.epsilon)} at δ = {self.delta:g} ({self.relation}), "
            f"{self.steps} steps{seeded}"
        )


def total(
    checked: Sequence[Checked],
    journals: Sequence[tuple[str, Charges]],
    delta: float | None,
    relation: Relation,
) -> Total | None:
    r"""Compose what all ledgers were charged; each run counts once.

    A ledger whose noise was chosen at run time has the ε_i of its whole budget at δ_i. It is
    added to the others' by basic composition: :math:`\epsilon + \sum_i \epsilon_i` at
    :math:`\delta + \sum_i \delta_i`.

    Journals of federated clients are left out: each is about another client's records.

    Args:
        checked: the documents, with what their journals know.
        journals: ledger id and charges of those that no document speaks of.
        delta: δ; by default the documents' smallest one.
        relation: for journals by themselves.

    Returns:
        None if there are fewer than two ledgers, or no δ is known.
    """
    known: dict[str, Charges] = {}
    budgets: dict[str, tuple[float, float]] = {}
    for each in checked:
        known.setdefault(each.document.ledger_id, Charges()).merge(each.known)
        report = each.document.report
        if report is not None and report.claims_budget:
            budgets[report.ledger_id] = (each.epsilon, report.delta)
    for ledger_id, runs in journals:
        if not federations_in(runs):
            known.setdefault(ledger_id, Charges()).merge(runs)
    deltas = [each.document.delta for each in checked] if delta is None else [delta]
    if len(known) < 2 or not deltas:
        return None
    relations = {relation, *(each.document.relation for each in checked)}
    under: Relation = "replace_one" if "replace_one" in relations else "add_remove"
    fixed = Charges()
    for name in known.keys() - budgets.keys():
        fixed.merge(known[name])  # of a run that two ledgers know, the longer record
    history = fixed.history()
    spent = PLDAccountant().epsilon(history, min(deltas), under)
    seeded = {each.document.ledger_id for each in checked if each.document.seeded}
    return Total(
        ledgers=len(known),
        steps=sum(runs.steps for runs in known.values()),
        epsilon=math.inf if seeded else spent + sum(epsilon for epsilon, _ in budgets.values()),
        seeded=tuple(sorted(seeded)),
        delta=min(deltas) + sum(its_own for _, its_own in budgets.values()),
        relation=under,
    )
