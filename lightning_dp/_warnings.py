"""The one warning category of this package; its tests turn it into an error."""

from __future__ import annotations

import warnings

from lightning_dp._refusals import pointer

__all__ = ["PrivacyWarning", "warn"]


class PrivacyWarning(UserWarning):
    """Something is allowed but probably not what was meant."""


def warn(message: str, *, topic: str) -> None:
    """Issue a :class:`PrivacyWarning`, attributed to the caller's caller.

    Args:
        message: what is probably not meant, and the cure.
        topic: the anchor of its entry on the troubleshooting page.
    """
    warnings.warn(f"{message} {pointer(topic)}", PrivacyWarning, stacklevel=3)
