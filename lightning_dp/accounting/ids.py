"""Names of ledgers, checked before they become names of files."""

from __future__ import annotations

import re
import secrets

__all__ = ["is_journal_name", "is_ledger_id", "new_id"]

_ID = re.compile(r"[0-9a-f]{16}")


def new_id() -> str:
    """Return the name of a new ledger or run, unlike any other."""
    return secrets.token_hex(8)


def is_ledger_id(value: object) -> bool:
    """Whether this is a name that :func:`new_id` gives: no path, no pattern, nothing else.

    Example:
        >>> is_ledger_id(new_id()), is_ledger_id("../../evil")
        (True, False)
    """
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def is_journal_name(name: str) -> bool:
    """Whether a file of this name can be the journal of a ledger."""
    return name.endswith(".journal") and is_ledger_id(name.removesuffix(".journal"))
