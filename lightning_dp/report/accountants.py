"""From what a report says about its accountant to the accountant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dp.accounting import (
    AbstractAccountant,
    PLDAccountant,
    StreamingRDPAccountant,
)

__all__ = ["accountant_named"]

_KNOWN: tuple[type[AbstractAccountant], ...] = (
    PLDAccountant,
    StreamingRDPAccountant,
)


def accountant_named(name: str, settings: Mapping[str, Any]) -> AbstractAccountant | None:
    """The accountant of this package with that name and these settings; None for any other.

    Example:
        >>> accountant_named("PLD", {"rtol": 0.001})
        PLDAccountant(rtol=0.001, spacing=0.04)
    """
    for kind in _KNOWN:
        if kind().name == name:
            try:
                return kind(**settings)
            except (TypeError, ValueError):
                return None
    return None
