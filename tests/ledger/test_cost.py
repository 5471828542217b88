"""What many distinct events cost."""

from __future__ import annotations

import time
from pathlib import Path

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.journal import Journal, longer_run, read_journal
from lightning_dp.accounting.ledger import Ledger


def seconds_to_keep(steps: int, folder: Path) -> float:
    """Processor time to charge, write, read and merge that many distinct events."""
    events = [PoissonGaussian(1.0 + i * 1e-6, 0.01) for i in range(steps)]
    start = time.process_time()
    ledger = Ledger()
    ledger.begin("run-1", None)
    for event in events:
        ledger.charge(event)
    journal = Journal(folder / f"{steps}.journal", ledger.id)
    journal.extend({"run-1": [(event, 1) for event in events]})
    journal.close()
    runs = read_journal(journal.path)[1]
    assert longer_run("run-1", runs["run-1"], runs["run-1"]) == [(event, 1) for event in events]
    assert len(ledger.history()) == ledger.steps == steps
    return time.process_time() - start


def test_twenty_thousand_distinct_events_cost_time_in_proportion(tmp_path):
    small = min(seconds_to_keep(2_000, tmp_path / f"{i}") for i in range(3))
    large = min(seconds_to_keep(20_000, tmp_path / f"{i}") for i in range(2))
    assert large < 40 * small  # a quadratic cost would be 100 times
