"""Checks of arguments: each refuses by name, and returns the plain Python value.

Equal values become the same value, however they were given: ``1``, ``1.0`` and ``np.float64(1)``
are one clip norm, ``3``, ``3.0`` and ``np.int64(3)`` one number of steps. What only looks like a
number is refused: truth values, strings, ``Decimal``, arrays and tensors (also of one element).
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, SupportsFloat, TypeVar, cast


class Check(Protocol):
    """Returns the plain value of an argument, or raises ValueError naming it."""

    def __call__(self, name: str, value: object, *, of: str | None = None) -> Any: ...


def number(name: str, value: object, *, of: str | None = None) -> float:
    """Return a real number as a float. NaN and infinity pass: the bounds of the caller refuse them.

    Args:
        name: of the argument.
        value: what was given.
        of: the class or function that it was given to, where the name alone is not enough.

    Example:
        >>> number("max_grad_norm", 1)
        1.0
        >>> number("max_grad_norm", "1")
        Traceback (most recent call last):
        ValueError: max_grad_norm='1' must be a real number: an int or a float, not a str.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(cast(SupportsFloat, value))
        except OverflowError:
            raise ValueError(f"{shown(name, value, of)} is too large for a float.") from None
    raise ValueError(
        f"{shown(name, value, of)} must be a real number: an int or a float, not a "
        f"{type(value).__name__}."
    )


class NumberCheck(Protocol):
    """Returns the plain value of a number, or raises ValueError naming it."""

    def __call__(self, name: str, value: object, *, of: str | None = None) -> float: ...


def _number(holds: Callable[[float], bool], words: str) -> NumberCheck:
    """Return a check that a condition holds for a number."""

    def checked(name: str, value: object, *, of: str | None = None) -> float:
        result = value if type(value) is float else number(name, value, of=of)
        if not holds(result):
            raise ValueError(f"{shown(name, value, of)} must be {words}.")
        return result

    return checked


positive = _number(lambda x: 0 < x < math.inf, "finite and greater than 0")
not_negative = _number(lambda x: 0 <= x < math.inf, "finite and at least 0")
finite = _number(math.isfinite, "a finite number")
above_0 = _number(lambda x: x > 0, "greater than 0")  # a clip norm, which may be infinite
probability = _number(lambda x: 0 < x < 1, "between 0 and 1")


def between(interval: str) -> NumberCheck:
    """Return a check that a number is in an interval, written as in mathematics.

    Example:
        >>> between("(0, 1]")("sample_rate", 1.5)
        Traceback (most recent call last):
        ValueError: sample_rate=1.5 must be in (0, 1].
    """
    low, high = (float(end) for end in interval[1:-1].split(","))

    def holds(x: float) -> bool:
        is_above = x >= low if interval[0] == "[" else x > low
        return is_above and (x <= high if interval[-1] == "]" else x < high)

    return _number(holds, f"in {interval}")


def one_of(choices: Sequence[str]) -> Check:
    """Return a check that an argument is one of some words."""

    def checked(name: str, value: object, *, of: str | None = None) -> str:
        if not (isinstance(value, str) and value in choices):
            words = ", ".join(map(repr, choices))
            raise ValueError(f"{shown(name, value, of)} must be one of {words}.")
        return value

    return checked


def one_line(name: str, value: object, *, of: str | None = None) -> str:
    """Return a text of one printable line, without spaces around it: a user's own words."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(name, value, of)} must be a string.")
    if not (text := value.strip()).isprintable() or not text:
        raise ValueError(f"{shown(name, value, of)} must be one line of text.")
    return text


def explained(check: Check, why: str) -> Check:
    """Return a check whose message goes on with a reason, or a cure."""

    def checked(name: str, value: object, *, of: str | None = None) -> Any:
        try:
            return check(name, value, of=of)
        except ValueError as error:
            raise ValueError(f"{error} {why}") from None

    return checked


def whole(
    name: str, value: object, least: int = 1, most: float = math.inf, *, of: str | None = None
) -> int:
    """Return a whole number from ``least`` to ``most`` as an int; 3.0 is one, 2.5 is not.

    Example:
        >>> whole("steps", 3.0, 1)
        3
        >>> whole("steps", True, 1, of="Cosine")
        Traceback (most recent call last):
        ValueError: Cosine(steps=True) must be a whole number of at least 1.
    """
    result = _integer(value)
    if result is None or not least <= result <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{shown(name, value, of)} must be a whole number {bounds}.")
    return result


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and float(value).is_integer():
        return int(float(value))
    return None


def whole_from_0(name: str, value: object, *, of: str | None = None) -> int:
    """Return a whole number of at least 0."""
    return whole(name, value, 0, of=of)


def seed(name: str, value: object, *, of: str | None = None) -> int:
    """Return a whole number that fits into 64 bits."""
    return whole(name, value, 0, 2**64 - 1, of=of)


def flag(name: str, value: object, *, of: str | None = None) -> bool:
    """Return True or False; 1, "no" and None are neither."""
    if not isinstance(value, bool):
        raise ValueError(f"{shown(name, value, of)} must be True or False.")
    return value


_Kind = TypeVar("_Kind")


def instance(name: str, value: object, kind: type[_Kind], *, of: str | None = None) -> _Kind:
    """Return an object of a class, or raise TypeError.

    Example:
        >>> instance("module", 3, dict)
        Traceback (most recent call last):
        TypeError: module=3 must be a dict.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{shown(name, value, of)} must be {_article(kind)}.{_call_of(value)}")
    return value


def _article(kind: type) -> str:
    name = kind.__name__
    if name.startswith("Abstract"):
        return f"an object derived from {name}"
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _call_of(value: object) -> str:
    return f" Write {value.__name__}(...)." if isinstance(value, type) else ""


def listed(name: str, value: object, what: str, *, of: str | None = None) -> tuple[Any, ...]:
    """Return the items of a list, or of whatever else has them in an order; else raise TypeError.

    Example:
        >>> listed("sizes", "abc", "numbers")
        Traceback (most recent call last):
        TypeError: sizes='abc' must be a list of numbers.
    """
    if not isinstance(value, str | bytes | Mapping | Set):
        try:
            return tuple(cast("Sequence[Any]", value))
        except TypeError:  # it has none, as an array without dimensions
            pass
    raise TypeError(f"{shown(name, value, of)} must be a list of {what}.")


def optional(check: Check) -> Check:
    """Return a check that lets None pass."""

    def checked(name: str, value: object, *, of: str | None = None) -> Any:
        return None if value is None else check(name, value, of=of)

    return checked


def normalise(config: object, check: Check, *names: str, of: str | None = None) -> None:
    """Replace fields of a frozen dataclass by their checked values; for ``__post_init__`` alone."""
    for name in names:
        object.__setattr__(config, name, check(name, getattr(config, name), of=of))


def shown(name: str, value: object, of: str | None) -> str:
    """Return the argument as it was written: ``steps=-1``, or ``Cosine(steps=-1)``."""
    is_plain = isinstance(value, numbers.Real) and not isinstance(value, bool)
    text = f"{name}={value if is_plain else reprlib.repr(value)}"
    return text if of is None else f"{of}({text})"
