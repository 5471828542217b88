"""Ledgers with charges in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.ledger import Ledger


class Books:
    """Makes ledgers, and looks into them."""

    @staticmethod
    def ledger_with(directory: Path | None, *events: AbstractEvent, run: str = "run-1") -> Ledger:
        """A ledger whose run is under way, with these charges."""
        ledger = Ledger()
        ledger.begin(run, directory)
        for event in events:
            ledger.charge(event)
        return ledger

    @staticmethod
    def ended(ledger: Ledger) -> Ledger:
        ledger.end()
        return ledger

    @staticmethod
    def restored(state: dict[str, Any], directory: Path) -> Ledger:
        ledger = Ledger()
        ledger.restore(state, directory)
        return ledger

    @staticmethod
    def journal_of(ledger: Ledger) -> Path:
        assert ledger.journal_path is not None
        return ledger.journal_path

    @staticmethod
    def counts(ledger: Ledger) -> dict[AbstractEvent, int]:
        return dict(ledger.history())

    @staticmethod
    def steps_in(path: Path) -> int:
        return read_journal(path)[1].total


@pytest.fixture
def books() -> type[Books]:
    return Books
