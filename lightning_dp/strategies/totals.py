"""The cost of a run and the other journals of its folder together: for its first and its last line."""

from __future__ import annotations

from pathlib import Path

from lightning_dp._refusals import text_of
from lightning_dp.accounting.base import epsilon_text
from lightning_dp.accounting.journal import Charges, JournalContent, JournalError
from lightning_dp.accounting.ledger import Neighbours, neighbours, union
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.report.files import has_guarantee
from lightning_dp.run import PrivateRun

__all__ = ["at_end", "at_start", "with_whole_plan"]


def at_start(found: Neighbours, folder: Path | None, run: PrivateRun) -> str:
    """Return the line about other journals in the folder, before the first step."""
    lines = [f"privacy: {_many(found)} in {folder}."]
    if counted := _counted(found, run):
        try:
            lines.append(f"If of the same records: {with_whole_plan(union(counted), run)}")
        except JournalError as error:
            lines.append(f"They cannot be added up: {text_of(error)}")
    return " ".join([*lines, *_left_out(found, folder, run)])


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
    if counted := _counted(found, run):
        lines = [f"privacy: with {_many(found)} in {path.parent}"]
        try:
            lines.append(f"(if of the same records): {_total(_not_of(run, union(counted)), run)}")
        except (JournalError, ValueError) as error:
            lines.append(f"the sum is unknown: {text_of(error)}")
    return " ".join([*lines, *_left_out(found, path.parent, run)])


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


def _counted(found: Neighbours, run: PrivateRun) -> list[JournalContent]:
    """Return the journals of the sum: with noise, and not of other data."""
    return [
        each for each in found.written if has_guarantee(each.runs) and _may_share_records(each, run)
    ]


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


def _left_out(found: Neighbours, folder: Path | None, run: PrivateRun) -> list[str]:
    """Return sentences about the journals that are not in the sum."""
    lines = []
    others = [each for each in found.written if not _may_share_records(each, run)]
    if others:
        lines.append(
            f"Not in the sum: {len(others)} of other data (another name, or number of records)."
        )
    without = sum(not has_guarantee(each.runs) for each in found.written if each not in others)
    if without:
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
    return lines


def _at(run: PrivateRun) -> str:
    return f"at δ = {run.config.target_delta:g} ({run.config.relation})"
