"""The cost of several ledgers together: of a folder's documents, and of a run and its neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lightning_dp._refusals import text_of
from lightning_dp.accounting.base import Relation, epsilon_text
from lightning_dp.accounting.journal import Charges, JournalContent, JournalError, federations_in
from lightning_dp.accounting.ledger import Neighbours, neighbours, union
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.report.content import Total
from lightning_dp.report.files import CheckedDocument
from lightning_dp.run import PrivateRun

__all__ = ["at_end", "at_start", "total", "with_whole_plan"]


def total(
    checked: Sequence[CheckedDocument],
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
        checked: the documents, with the charges of their journals.
        journals: ledger id and charges of those without a document.
        delta: δ; by default the documents' smallest one.
        relation: for journals by themselves.

    Returns:
        None if there are fewer than two ledgers, or no δ is known.
    """
    ledgers: dict[str, Charges] = {}
    budgets: dict[str, tuple[float, float]] = {}
    for each in checked:
        ledgers.setdefault(each.document.ledger_id, Charges()).merge(each.charges)
        report = each.document.report
        if report is not None and report.claims_budget:
            budgets[report.ledger_id] = (each.epsilon, report.delta)
    for ledger_id, runs in journals:
        if runs and not federations_in(runs):
            ledgers.setdefault(ledger_id, Charges()).merge(runs)
    deltas = [each.document.delta for each in checked] if delta is None else [delta]
    if len(ledgers) < 2 or not deltas:
        return None
    relations = {relation, *(each.document.relation for each in checked)}
    stated: tuple[Relation, ...] = ("replace_one", "zero_out", "add_remove")
    under = next(each for each in stated if each in relations)  # which says something of all
    seeded = {each.document.ledger_id for each in checked if each.document.seeded}
    apart = seeded | {name for name, runs in ledgers.items() if not has_guarantee(runs)}
    fixed = Charges()
    for name in ledgers.keys() - budgets.keys() - apart:
        fixed.merge(ledgers[name])  # of a run in two ledgers, the longer record
    epsilon = PLDAccountant().epsilon(fixed.history(), min(deltas), under) + sum(
        budget for name, (budget, _) in budgets.items() if name not in apart
    )
    return Total(
        ledgers=len(ledgers),
        steps=sum(runs.steps for runs in ledgers.values()),
        epsilon=math.inf if apart else epsilon,
        delta=min(deltas) + sum(its_own for _, its_own in budgets.values()),
        relation=under,
        seeded=tuple(sorted(seeded)),
        apart=tuple(sorted(apart)),
        epsilon_of_others=epsilon if apart else None,
    )


def has_guarantee(charges: Charges) -> bool:
    """Return False if one of the charges promises nothing: it had no noise, or was voided."""
    has_noise = (event.pair[0] > 0 for event, _ in charges.history() if event.is_gaussian)
    return charges.voided is None and all(has_noise)


# -- a run and the other journals of its folder: for its first and its last line -----------------


def at_start(found: Neighbours, folder: Path | None, run: PrivateRun) -> str:
    """Return the line about other journals in the folder, before the first step."""
    lines = [f"privacy: {_many(found)} in {folder}."]
    counted, left_out = _divided(found, folder, run)
    if counted:
        try:
            lines.append(f"If of the same records: {with_whole_plan(union(counted), run)}")
        except JournalError as error:
            lines.append(f"They cannot be added up: {text_of(error)}")
    return " ".join([*lines, *left_out])


def with_whole_plan(others: Charges, run: PrivateRun) -> str:
    """Return the sentence about others' charges, together with the whole plan of this run."""
    at, spent = _at(run), _not_of(run, others).history()
    try:
        epsilon = run.epsilon_beside(spent)
        if epsilon is not None:
            together = epsilon_text(epsilon)
            return f"Together with the whole plan of this run that is ε = {together} {at}."
        config = run.config
        alone = PLDAccountant().epsilon(spent, config.target_delta, config.relation)
        return f"That spent ε = {epsilon_text(alone)} {at} already, to which this run adds."
    except ValueError as error:  # a guarantee under another relation
        return f"What that costs together is unknown: {text_of(error)}"


def at_end(run: PrivateRun) -> str | None:
    """Return the line about the cost of all journals of the folder, after a fit; None if alone."""
    path = run.ledger.journal_path
    if path is None:
        return None
    found = neighbours(path.parent, run.ledger.id, frozenset())
    if not found.count:
        return None
    lines = [f"privacy: {_many(found)} in {path.parent}."]
    counted, left_out = _divided(found, path.parent, run)
    if counted:
        lines = [f"privacy: with {_many(found)} in {path.parent}"]
        try:
            lines.append(f"(if of the same records): {_total(_not_of(run, union(counted)), run)}")
        except (JournalError, ValueError) as error:
            lines.append(f"the sum is unknown: {text_of(error)}")
    return " ".join([*lines, *left_out])


def _total(others: Charges, run: PrivateRun) -> str:
    """Return ε of all together; noise chosen at run time adds its whole budget to the others'."""
    config, spent = run.config, others.history()
    if run.is_adaptive:
        alone = PLDAccountant().epsilon(spent, config.target_delta, config.relation)
        sums = epsilon_text(alone + run.epsilon), 2 * config.target_delta
    else:
        history = [*spent, *run.ledger.history()]
        whole = PLDAccountant().epsilon(history, config.target_delta, config.relation)
        sums = epsilon_text(whole), config.target_delta
    return f"ε = {sums[0]} at δ = {sums[1]:g} ({config.relation})."


def _not_of(run: PrivateRun, others: Charges) -> Charges:
    """Return the others' charges without those that this run's ledger counts itself."""
    own = run.ledger.runs
    return Charges(
        {name: each for name, each in others.items() if others.length(name) > own.length(name)}
    )


def _many(found: Neighbours) -> str:
    return "another journal" if found.count == 1 else f"{found.count} other journals"


def _divided(
    found: Neighbours, folder: Path | None, run: PrivateRun
) -> tuple[list[JournalContent], list[str]]:
    """Return the journals of the sum, and sentences about the others."""
    same = [each for each in found.written if _may_share_records(each, run)]
    counted = [each for each in same if has_guarantee(each.runs)]
    lines = []
    if others := len(found.written) - len(same):
        lines.append(
            f"Not in the sum: {others} of other data (another name, or number of records)."
        )
    if without := len(same) - len(counted):
        lines.append(
            f"Not in the sum: {without} without noise, which must stay secret: ε would be inf."
        )
    if found.unread:
        lines.append(
            f"{found.unread} of them are too long to be added up now; python -m "
            f"lightning_dp.report {folder} --delta {run.config.target_delta:g} does it."
        )
    if found.damaged:
        lines.append(f"Damaged: {', '.join(path.name for path in found.damaged[:5])}.")
    return counted, lines


def _may_share_records(journal: JournalContent, run: PrivateRun) -> bool:
    """Compare the user's names of the data sets, or without both names the numbers of records."""
    if run.batches is None or not journal.data:
        return True
    about = run.config.about
    own_name, own_number = None if about is None else about.data_set, run.batches.num_records
    return any(
        number == own_number if name is None or own_name is None else name == own_name
        for number, name in journal.data
    )


def _at(run: PrivateRun) -> str:
    return f"at δ = {run.config.target_delta:g} ({run.config.relation})"
