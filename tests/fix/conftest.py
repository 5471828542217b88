"""Lines that ``fix`` says, read in tests."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def said(caplog, monkeypatch) -> Callable[[], str]:
    """Return the lines since the last call."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        caplog.set_level(logging.INFO, logger=name)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)

    def text() -> str:
        found = "\n".join(each.getMessage() for each in caplog.records)
        caplog.clear()
        return found

    return text
