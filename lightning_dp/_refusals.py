"""Errors and warnings, which end with a pointer to their entry on the troubleshooting page."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = [
    "ADDRESS",
    "PrivacyWarning",
    "Refusal",
    "RefusedRun",
    "RefusedSetting",
    "UnsupportedModelError",
    "pointer",
    "text_of",
    "warn",
]

ADDRESS: str | None = None
"""The address of the published documentation. None: there is none, and the pointer is a command."""


def pointer(topic: str) -> str:
    """Return the phrase that leads to an entry of the troubleshooting page.

    Args:
        topic: the anchor of the entry.

    Example:
        >>> pointer("batch-norm")
        'More: python -m lightning_dp.help batch-norm'
    """
    if ADDRESS is None:
        return f"More: python -m lightning_dp.help {topic}"
    return f"More: {ADDRESS}/troubleshooting.html#{topic}"


class Refusal(Exception):
    """An error whose message ends with a pointer to the troubleshooting page.

    Errors of this package inherit from it, before a class that says what kind of error it is.

    Args:
        text: the message: cause and cure.
        topic: the anchor of its entry in ``troubleshooting.md``.

    Example:
        >>> error = Refusal("Layers ['1'] normalise over the batch. Use GroupNorm.", topic="batch-norm")
        >>> str(error)[-59:]
        'Use GroupNorm. More: python -m lightning_dp.help batch-norm'
        >>> error.text
        "Layers ['1'] normalise over the batch. Use GroupNorm."
    """

    def __init__(self, text: str, *, topic: str) -> None:
        super().__init__(text)
        self.topic = topic

    @property
    def text(self) -> str:
        """The message without the pointer, to be part of another one."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.text} {pointer(self.topic)}"

    def __reduce__(self) -> tuple[Any, ...]:  # pickle calls __init__ with the text alone else
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[Refusal], args: tuple[Any, ...], attributes: dict[str, Any]) -> Refusal:
    layout: Any = kind.__base__  # of several bases the one that makes it: OSError, say
    error: Refusal = layout.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


def text_of(error: BaseException) -> str:
    """Return the message of any error without a pointer, to be part of another one."""
    return error.text if isinstance(error, Refusal) else str(error)


class RefusedSetting(Refusal, ValueError):
    """Settings that do not go together, or not with the data, the checkpoint or the budget."""


class RefusedRun(Refusal, RuntimeError):
    """Something happened during a run under which ε would not hold."""


class UnsupportedModelError(Refusal, TypeError):
    """Per-record gradients cannot be computed for this model."""

    place = ""
    """The line of the user's code, which follows from the samples: for synthetic ones only."""

    def __init__(self, text: str, *, topic: str = "unsupported-model") -> None:
        super().__init__(text, topic=topic)

    def placed(self) -> UnsupportedModelError:
        """Return it with the line of the user's code in its text."""
        text = f"{self.text} ({self.place}.)" if self.place else self.text
        return UnsupportedModelError(text, topic=self.topic)

    def plain(self) -> UnsupportedModelError:
        """Return it to be kept: without its traceback, which holds tensors."""
        return UnsupportedModelError(self.text, topic=self.topic)


class PrivacyWarning(UserWarning):
    """A setting that is allowed and probably a mistake."""


def warn(message: str, *, topic: str) -> None:
    """Issue a :class:`PrivacyWarning`, attributed to the caller's caller.

    Args:
        message: what is probably not meant, and the cure.
        topic: the anchor of its entry on the troubleshooting page.
    """
    warnings.warn(f"{message} {pointer(topic)}", PrivacyWarning, stacklevel=3)
