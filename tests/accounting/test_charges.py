"""Ledgers that meet are united: they only grow."""

from __future__ import annotations

import pytest

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.charges import Charges, JournalError

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)


def test_a_resumed_ledger_knows_what_the_journal_knows_beyond_the_checkpoint(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A, A)
    state = ledger.state_dict()
    ledger.charge(B)  # after the checkpoint, before the crash
    ledger.end()

    assert books.counts(books.restored(state, tmp_path)) == {A: 2, B: 1}


def test_two_runs_resumed_from_one_state_both_count(tmp_path, books):
    first = books.ended(books.ledger_with(tmp_path, A, A))
    state = first.state_dict()
    states = []
    for run in ("left", "right"):
        ledger = books.restored(state, tmp_path)
        ledger.begin(run, tmp_path)
        ledger.charge(B)
        ledger.end()
        states.append(ledger.state_dict())

    merged = books.restored(states[0], tmp_path)
    merged.restore(states[1], tmp_path)

    assert merged.steps == 4
    assert books.counts(merged) == {A: 2, B: 2}


def test_an_older_state_never_shrinks_a_newer_ledger(tmp_path, books):
    ledger = books.ledger_with(tmp_path, A, A)
    older = ledger.state_dict()
    ledger.charge(A)
    ledger.charge(B)
    ledger.end()

    ledger.restore(older, tmp_path)

    assert books.counts(ledger) == {A: 3, B: 1}


def test_an_older_state_without_a_journal_never_shrinks_a_newer_ledger(tmp_path, books):
    ledger = books.ledger_with(None, A, A)
    older = ledger.state_dict()
    ledger.charge(B)
    ledger.restore(older, tmp_path)
    assert books.counts(ledger) == {A: 2, B: 1}


@pytest.mark.parametrize(
    ("ours", "theirs", "union"),
    [
        ([], [(A, 1)], [(A, 1)]),
        ([(A, 2)], [(A, 5)], [(A, 5)]),
        ([(A, 2)], [(A, 2), (B, 1)], [(A, 2), (B, 1)]),
        ([(A, 2), (B, 1)], [(A, 2), (B, 3), (A, 1)], [(A, 2), (B, 3), (A, 1)]),
        ([(A, 2), (B, 1)], [(A, 2), (B, 1)], [(A, 2), (B, 1)]),
        ([(A, 2)], [(B, 2)], None),
        ([(A, 1), (B, 1)], [(A, 5)], None),
        ([(A, 3)], [(A, 2), (B, 2)], None),
        ([(A, 1), (B, 1), (A, 1)], [(A, 1), (B, 4)], None),
        ([(A, 1), (B, 1)], [(A, 2)], None),
    ],
)
def test_the_union_of_two_records_of_a_run_is_the_longer_one_if_the_other_begins_it(
    ours, theirs, union
):
    for pair in ((ours, theirs), (theirs, ours)):
        known, other = (Charges({"x": charges}) for charges in pair)
        if union is None:
            with pytest.raises(JournalError, match="Two records of run x contradict"):
                known.knows_more("x", other)
            with pytest.raises(JournalError, match="Two records of run x contradict"):
                known.merge(other)
            assert known == {"x": pair[0]}
        else:
            assert known.knows_more("x", other) == (pair[0] == union != pair[1])
            known.merge(other)
            assert known == {"x": union}
            assert known.steps == known.total == known.length("x") == sum(n for _, n in union)


def test_one_run_with_contradictory_content_is_refused(tmp_path, books):
    state = books.ended(books.ledger_with(None, A, A)).state_dict()
    other = books.ledger_with(None, B, B)
    with pytest.raises(JournalError, match="Two records of run run-1 contradict each other"):
        other.restore(state, tmp_path)


def test_the_other_processes_mirror_the_lead(books):
    lead = books.ledger_with(None, A, B)
    other = books.ledger_with(None, A, run="something of its own")
    other.mirror(lead.state_dict())
    assert books.counts(other) == {A: 1, B: 1}
    assert other.id == lead.id
