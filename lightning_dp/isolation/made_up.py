"""Synthetic samples with the types, shapes and dtypes of a user's."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["NoSyntheticSample", "SampleMaker", "lengths_in", "size_of"]

_WORDS = ("one", "two", "six", "ten", "cat", "dog", "sun", "sea", "red", "sky")  # of one length
_NO_NUMBERS = "OSUMmV"  # kinds of arrays


class NoSyntheticSample(ValueError):
    """A sample holds something that cannot be imitated; the message names its type."""


@dataclass(frozen=True)
class SampleMaker:
    """Makes samples like one of the data set, of which no number is read.

    Real numbers are uniform in (0, 1), whole ones are below ``classes``, truth values, texts and
    images are made up. What is none of these (None, a path, an object without numbers) is kept as
    it is.

    Args:
        like: the sample.
        classes: whole numbers are below this.
    """

    like: Any = field(repr=False)
    classes: int = 8

    def make(self, i: int, lengths: Mapping[int, int] | None = None) -> Any:
        """Return the i-th sample; the same one for the same arguments.

        Args:
            i: its number, at least 0.
            lengths: other lengths of first dimensions and lists, instead of those in the keys.
        """
        generator = torch.Generator().manual_seed(1 + i)
        return _Maker(generator, i, lengths or {}, self.classes).part(self.like)


def lengths_in(sample: Any) -> set[int]:
    """Return the lengths of a sample's arrays and lists of numbers in their first dimension."""
    shapes = [shape for _, shape in _arrays(sample)]
    return {shape[0] for shape in shapes if shape and shape[0] > 1}


def size_of(sample: Any) -> int:
    """Return the number of bytes in a sample's arrays, about."""
    return sum(width * math.prod(shape) for width, shape in _arrays(sample))


def _arrays(part: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield bytes of an entry, and the shape, of all arrays and lists of numbers."""
    if isinstance(part, Tensor | np.ndarray):
        yield part.itemsize, tuple(part.shape)
    elif _is_list_of_numbers(part):
        yield 8, (len(part),)
    elif _is_image(part):
        yield 4, tuple(part.size)
    elif is_container(part):
        yield from (each for held in _parts(part) for each in _arrays(held))


def _parts(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return [container[key] for key in container]
    return list(container if isinstance(container, list | tuple) else vars(container).values())


@dataclass(frozen=True)
class _Maker:
    generator: torch.Generator
    i: int
    lengths: Mapping[int, int]
    classes: int

    def part(self, like: Any) -> Any:
        """Make something of the same type and structure."""
        if isinstance(like, Tensor):
            return self._tensor(like)
        if isinstance(like, np.ndarray):
            return like if like.dtype.kind in _NO_NUMBERS else self._array(like)
        if isinstance(like, bool | int | float | complex | np.number | np.bool_):
            return self._number(like)
        if isinstance(like, str | bytes):
            return self._text(like)
        if _is_image(like):
            return self._image(like)
        if _is_list_of_numbers(like):
            size = self.lengths.get(len(like), len(like))
            made = self._values(_dtype_of(like[0]), (size,)).tolist()
            return type(like)(type(like[0])(each) for each in made)
        if is_container(like):
            return _rebuilt(like, self.part)
        return like

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            return shape
        size = self.lengths.get(shape[0], shape[0]) if shape[0] > 1 else shape[0]
        return (size, *shape[1:])

    def _tensor(self, like: Tensor) -> Tensor:
        if like.layout != torch.strided or like.is_nested or like.is_quantized:
            raise NoSyntheticSample("a sample holds a tensor that is not dense")
        shape = self._shape(tuple(like.shape))
        made = self._values(like.dtype, shape).to(like.device)
        return made if type(like) is Tensor else made.as_subclass(type(like))

    def _array(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        kind = {"b": torch.bool, "f": torch.float64, "c": torch.complex128}
        dtype = kind.get(like.dtype.kind, torch.int64)
        made: np.ndarray[Any, Any] = self._values(dtype, self._shape(like.shape)).numpy()
        return made.astype(like.dtype)

    def _number(self, like: Any) -> Any:
        return type(like)(self._values(_dtype_of(like), ()).item())

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if dtype.is_floating_point:
            return self._real(shape).to(dtype)
        if dtype.is_complex:
            return torch.complex(self._real(shape), self._real(shape)).to(dtype)
        if not shape:
            return torch.tensor(self.i % (2 if dtype == torch.bool else self.classes)).to(dtype)
        below = 2 if dtype == torch.bool else self.classes
        made = torch.randint(below, shape, generator=self.generator)
        made.view(-1)[:1] = min(1, below - 1)  # no mask is empty
        return made.to(dtype)

    def _real(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def _text(self, like: str | bytes) -> Any:
        words = [_WORDS[(self.i + 3 * k) % len(_WORDS)] for k in range(2)]
        text = " ".join(words)
        return text.encode() if isinstance(like, bytes) else type(like)(text)

    def _image(self, like: Any) -> Any:
        images = sys.modules["PIL.Image"]
        new = images.new(like.mode, like.size)
        if like.mode in ("I", "F"):
            new.putdata([self.i + k % 7 for k in range(like.size[0] * like.size[1])])
            return new
        size = len(new.tobytes())
        content = torch.randint(256, (size,), generator=self.generator).to(torch.uint8)
        new.frombytes(bytes(content.numpy()))
        return new


def _is_image(part: Any) -> bool:
    images: Any = sys.modules.get("PIL.Image")
    return images is not None and isinstance(part, images.Image)


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, bool | np.bool_):
        return torch.bool
    if isinstance(number, int | np.integer):
        return torch.int64
    return torch.float64 if isinstance(number, float | np.floating) else torch.complex128


def _is_list_of_numbers(part: Any) -> bool:
    if not isinstance(part, list | tuple) or hasattr(part, "_fields") or not part:
        return False
    return all(isinstance(each, int | float | np.number) for each in part)


def is_container(part: Any) -> bool:
    """Tell whether a part of a sample or batch holds others: in a dict, list, tuple or user's object."""
    if isinstance(part, Mapping | list | tuple):
        return True
    if isinstance(part, type) or not hasattr(part, "__dict__"):
        return False
    return dataclasses.is_dataclass(part) or any(
        isinstance(each, Tensor | np.ndarray) or _is_image(each) for each in vars(part).values()
    )


def _rebuilt(part: Any, of_part: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with each thing in it replaced."""
    if isinstance(part, Mapping):
        new = copy.copy(part)
        for key in list(part):
            new[key] = of_part(part[key])  # type: ignore[index]
        return new
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(of_part(each) for each in part))
    if isinstance(part, list | tuple):
        return type(part)(of_part(each) for each in part)
    new = copy.copy(part)
    for name, value in vars(part).items():
        object.__setattr__(new, name, of_part(value))
    return new
