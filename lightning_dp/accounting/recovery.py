"""The way out when a journal is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_dp._files import local_folder
from lightning_dp._validate import whole
from lightning_dp.accounting.event_reader import event_from_dict
from lightning_dp.accounting.events import AbstractEvent, Gaussian, PoissonGaussian
from lightning_dp.accounting.ids import new_id
from lightning_dp.accounting.journal import Journal, JournalError, history_of
from lightning_dp.accounting.ledger import privacy_in, read_state

__all__ = ["recover_journal"]

_MOST = 10_000_000  # lines


def recover_journal(
    checkpoint_path: str | Path,
    directory: str | Path,
    unrecorded_steps: int,
    costliest: AbstractEvent | None = None,
) -> Path:
    """Write a new journal from a checkpoint.

    A journal may know of steps that the checkpoint does not (those made after it was saved, also by
    other runs that were resumed from it or from an earlier one), and what is lost can only be
    bounded, not found out. So this asks for an upper bound and charges it: each of these
    steps as the costliest one that the run's plan may have come to by then. Then resume from the
    checkpoint with ``ledger_dir=directory``.

    Args:
        checkpoint_path: a checkpoint of a private run.
        directory: where to write the new journal. A damaged one must be moved away first.
        unrecorded_steps: an upper bound on the noised steps that any run of this ledger made and
            that the checkpoint does not contain.
        costliest: an event that none of these steps cost more than, where the checkpoint cannot
            tell: noise chosen at run time, a plan that went on for longer, or another fit of the
            same callback with other batches or another noise multiplier.

    Returns:
        the path of the new journal.

    Raises:
        ValueError: if ``unrecorded_steps`` is no number of steps, the checkpoint has no journal, or
            it cannot tell what a step costs at most and ``costliest`` is not given.
        JournalError: if the journal exists.

    Example:
        >>> recover_journal(  # doctest: +SKIP
        ...     "last.ckpt", "privacy", 500, costliest=PoissonGaussian(0.8, 0.01)
        ... )
    """
    lost = whole("unrecorded_steps", unrecorded_steps, 0, _MOST)
    if costliest is not None and not isinstance(costliest, AbstractEvent):
        raise ValueError(
            f"costliest={costliest!r} must be an event, such as PoissonGaussian(z, q)."
        )
    record = privacy_in(checkpoint_path)
    state = record.get("ledger")
    if not isinstance(state, dict) or state.get("journal") is None:
        raise ValueError(f"{checkpoint_path} is not a checkpoint of a private run with a journal.")
    ledger_id, recorded, runs = read_state(state)
    assert recorded is not None
    path = local_folder("directory", directory) / recorded.name
    for existing in (path, recorded):
        if existing.exists():
            raise JournalError(f"{existing} exists. If it is damaged, move it away first.")
    if lost:
        event = costliest or _costliest(record, history_of(runs), lost)
        runs[new_id()] = [(event, lost)]
    journal = Journal(path, ledger_id)
    journal.extend(runs)
    journal.close()
    return path


def _costliest(
    record: dict[str, Any], known: list[tuple[AbstractEvent, int]], lost: int
) -> AbstractEvent:
    """An event that no step costs more than, of any run that the ledger can have had."""
    bounds = record.get("costliest")
    if bounds is None:
        raise ValueError(
            "The checkpoint does not tell what a lost step costs at most (noise chosen at run time, "
            f"nothing trained yet, or an older version): give costliest=, an event that none of the "
            f"unrecorded_steps={lost} cost more than, such as costliest=PoissonGaussian(z, q)."
        )
    steps = sum(count for _, count in known) + lost
    stride, until = bounds["stride"], bounds["until"]
    if until is not None and steps > until:
        raise ValueError(
            f"unrecorded_steps={lost} after {steps - lost} is more than the plan's {until} steps of "
            "which the checkpoint tells what they cost. Give a smaller bound, or costliest=, an event "
            "that none of them cost more than."
        )
    # Each position that a run went over was charged, or is a silent one before one that was.
    latest = None if stride is None else stride * steps
    within = [event for first, event in bounds["events"] if latest is None or first < latest]
    return _no_less_than(event_from_dict(within[-1]), [event for event, _ in known])


def _no_less_than(event: AbstractEvent, known: list[AbstractEvent]) -> AbstractEvent:
    """The event, or one that also covers steps like those already made, of other plans."""
    pairs = [event.pair, *(each.pair for each in known)]
    noise, rate = min(z for z, _ in pairs), max(q for _, q in pairs)
    if event.pair == (noise, rate):
        return event
    return Gaussian(noise) if rate == 1 else PoissonGaussian(noise, rate)
