"""Numbers as JSON and checkpoints know them; infinity is the text "inf"."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["number", "plain"]


def plain(value: Any) -> Any:
    """Dictionaries, lists, texts and numbers only.

    Example:
        >>> plain({"epsilon": float("inf"), "path": ("a", 1.5)})
        {'epsilon': 'inf', 'path': ['a', 1.5]}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):  # also np.float64, which spoils a checkpoint
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def number(value: object, name: str) -> float:
    """The inverse for one number.

    Raises:
        ValueError: naming ``name``, if it is no number or "nan".

    Example:
        >>> number("inf", "epsilon"), number(2, "delta")
        (inf, 2.0)
    """
    if value in ("inf", "-inf"):
        return float(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name}={value!r} must be a number, or 'inf'.")
    return float(value)
