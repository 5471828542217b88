"""Parts of a configuration as plain data, which go into checkpoints and are compared field by field.

A part such as ``Diff2(restart_every=3)`` becomes ``{"class": "Diff2", "restart_every": 3, ...}``.
Equal values are equal however they were given (``1``, ``1.0`` and ``np.float64(1)``, also in parts
that users wrote), and a field that a later version adds does not make earlier files unreadable.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import os
import types
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, SupportsFloat, TypeAlias, cast

from lightning_dp._refusals import RefusedSetting

Data: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of them

_CLASS = "class"


def config_dict(value: object) -> Data:
    """Return a value as plain data.

    Dataclasses are described by their fields that count for ``==``, other objects by their
    attributes, or by their own ``repr`` if they have one.

    Example:
        >>> from lightning_dp.schedules import Exponential
        >>> config_dict([Exponential(0.5), 3.0])
        [{'class': 'Exponential', 'rate': 0.5}, 3.0]
    """
    return _as_data(value, ())


def _as_data(value: object, within: tuple[object, ...]) -> Data:
    """Describe a value; ``within``: the objects that it is a part of."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(cast(SupportsFloat, value))
    if isinstance(value, Mapping):
        return {_key(name): _as_data(item, within) for name, item in value.items()}
    if isinstance(value, Set):
        return sorted((_as_data(item, within) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_as_data(item, within) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return _object(value, within)


def _object(value: object, within: tuple[object, ...]) -> Data:
    """Describe an object by its class and its fields, or attributes."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _definition(value)
    of: dict[str, Data] = {_CLASS: type(value).__qualname__}
    if any(value is outer for outer in within):
        return {**of, "repr": "a part that holds this one"}
    if isinstance(value, enum.Enum):
        return {**of, "name": value.name}
    if dataclasses.is_dataclass(value):
        fields = {field.name: _get(value, field) for field in _fields(value)}
        return {**of, **_as_data(fields, (*within, value))}
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # an array or a tensor
        values = config_dict(value.tolist())
        is_vector = isinstance(values, list)
        return {**of, "dtype": str(value.dtype), "values": values} if is_vector else values
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return {**of, **_as_data(vars(value), (*within, value))}
    return {**of, "repr": repr(value)}


def _definition(value: Any) -> Data:
    """Return a class, a function or a method by its name."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        return {_CLASS: "method", "name": value.__name__, "of": config_dict(owner)}
    # Functions without a proper name have an address here: they equal nothing later.
    name = f"{value.__module__}.{value.__qualname__}"
    return repr(value) if "<lambda>" in name or "<locals>" in name else name


def _key(name: object) -> str:
    return name if isinstance(name, str) else repr(config_dict(name))


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that count for ``==``."""
    return [f for f in dataclasses.fields(value) if f.compare]


def check_same(
    before: Mapping[str, Data],
    now: Mapping[str, object],
    default: Callable[[str], object] = lambda name: None,
) -> None:
    """Refuse a configuration that is not the one of a checkpoint.

    Args:
        before: of the checkpoint, described.
        now: the present one, by the names of its arguments.
        default: tells the value of an argument that the checkpoint does not have.
    """
    refuse_unknown("its configuration", before, set(now))
    for name, value in now.items():
        was = before[name] if name in before else config_dict(default(name))
        if not _is_same(was, value):
            raise RefusedSetting(
                f"{name} differs from the checkpoint's: it was {_text(was)}, now "
                f"{_text(config_dict(value))}. A private run is continued with the configuration it "
                "was started with.",
                topic="other-settings",
            )


def _is_same(was: Data, value: object) -> bool:
    """Compare field by field; a field that is absent has its default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not isinstance(was, dict) or was.get(_CLASS) != type(value).__qualname__:
            return False
        fields = _fields(value)
        refuse_unknown(type(value).__qualname__, was, {_CLASS, *(f.name for f in fields)})
        return all(
            _is_same(was[f.name] if f.name in was else config_dict(_default(f)), _get(value, f))
            for f in fields
        )
    if isinstance(value, list | tuple):
        same_length = isinstance(was, list) and len(was) == len(value)
        return same_length and all(map(_is_same, was, value))
    return _is_equal(was, config_dict(value))


def _get(value: object, field: dataclasses.Field[Any]) -> object:
    return getattr(value, field.name)


def _default(field: dataclasses.Field[Any]) -> object:
    """Return the default of a field, or a value that nothing equals."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_equal(was: Data, now: Data) -> bool:
    """Compare plain data; a number that is NaN equals itself, which ``==`` denies."""
    if isinstance(was, float) and isinstance(now, float):
        return was == now or (was != was and now != now)
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(_is_equal, was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(_is_equal(was[name], now[name]) for name in was)
    return bool(was == now)


def refuse_unknown(of: str, was: Mapping[str, Data], known: Set[str]) -> None:
    """Refuse an unknown field of a checkpoint: it may change what was spent."""
    if unknown := sorted(set(was) - known):
        raise RefusedSetting(
            f"The checkpoint has {unknown[0]}={_text(was[unknown[0]])} in {of}, a field that "
            "this version lacks. Resume it with the version of lightning_dp, and of your own classes, "
            "that wrote it.",
            topic="other-version",
        )


def _text(data: Data) -> str:
    """Return data as the call that would make it."""
    if isinstance(data, list):
        return f"({', '.join(map(_text, data))})"
    if not isinstance(data, dict):
        return repr(data)
    if set(data) == {_CLASS, "repr"}:
        return str(data["repr"])
    fields = ", ".join(f"{name}={_text(item)}" for name, item in data.items() if name != _CLASS)
    return f"{data[_CLASS]}({fields})" if _CLASS in data else f"{{{fields}}}"
