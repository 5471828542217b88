"""The one warning category of this package; its tests turn it into an error."""

from __future__ import annotations

import warnings

__all__ = ["PrivacyWarning", "warn"]


class PrivacyWarning(UserWarning):
    """Something is allowed but probably not what was meant."""


def warn(message: str) -> None:
    """Issue a :class:`PrivacyWarning`, attributed to the caller's caller."""
    warnings.warn(message, PrivacyWarning, stacklevel=3)
