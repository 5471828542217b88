"""Whole numbers that a model names itself: how many classes there are, and which number is padding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_dp.isolation.class_numbers import ClassNumbers
from lightning_dp.isolation.kinds import SyntheticKind, Values, exchange_rows, parts_of
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.synthetic import take_rows

__all__ = ["last_numbers", "padding_numbers"]

_PADDING = re.compile(r"ignore|pad|void|blank|missing|unlabel|mask_(id|token|index|value)")
_SIZES = re.compile(
    r"(out|num|n)_(features|channels|embeddings|class(es)?|labels|tokens|categor\w*|vocab)"
    r"|(vocab|class)\w*_size|classes|vocab|block_size|max_\w*(len|position)\w*"
)
_SETTINGS = ("hparams", "config", "cfg", "args", "opt", "settings")
_TRIES = 8


def padding_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the whole numbers in attributes that are named for ignored targets or padding.

    Example:
        >>> padding_numbers(nn.Sequential(nn.Embedding(9, 2, padding_idx=3),
        ...                               nn.CrossEntropyLoss(ignore_index=-1)))
        (-1, 3)
    """
    return tuple(sorted(set(_named(module, _PADDING))))


def last_numbers(passes: Passes, pool: Any, tamest: SyntheticKind) -> tuple[int, ...]:
    """Return for each part of a batch the largest whole number tried that the model takes in it.

    Tried are those below the sizes that its layers, its settings and the shapes of the batch name;
    where a loss shows how many classes it has, none beyond the first.

    Args:
        pool: synthetic records that it takes.
        tamest: their kind.
    """
    parts = parts_of(pool)
    sizes = {*_named(passes.module, _SIZES), *(size + 1 for part in parts for size in part.shape)}
    found = []
    for place, part in enumerate(parts):
        known = tamest.of(place, part.dtype).high
        tries = sorted((size - 1 for size in sizes if size - 1 > known), reverse=True)
        fitting = [
            last for last in tries if not part.is_real and Values(last, last, 1).fit(part.dtype)
        ]
        takes = _first_taken(passes, pool, tamest, place, fitting[:_TRIES])
        found.append((0 if part.is_real else int(known)) if takes is None else takes)
    return tuple(found)


def _first_taken(
    passes: Passes, pool: Any, tamest: SyntheticKind, place: int, tries: Sequence[int]
) -> int | None:
    """Return the first number that the model takes; those that its loss has no class for are left out."""
    classes: int | None = None
    for last in tries:
        if classes is not None and last >= classes:
            continue
        kind = tamest.at(place, Values(last, last, 1))
        batch = exchange_rows(take_rows(pool, (0, 1)), [1], kind, torch.Generator().manual_seed(0))
        seen = ClassNumbers()
        try:
            with seen:
                passes.loss(batch)
        except Exception:
            classes = seen.of(batch).get(place, classes)
            continue
        return last
    return None


def _named(module: nn.Module, pattern: re.Pattern[str]) -> Iterator[int]:
    """Find whole numbers by the names of attributes, of all modules and of what holds settings."""
    for part in module.modules():
        yield from _among(vars(part), pattern)
        for name in _SETTINGS:
            settings = getattr(part, name, None)
            known = settings if isinstance(settings, Mapping) else getattr(settings, "__dict__", {})
            yield from _among(known, pattern)


def _among(attributes: Mapping[Any, Any], pattern: re.Pattern[str]) -> Iterator[int]:
    for name, value in attributes.items():
        if type(value) is int and isinstance(name, str) and pattern.search(name.lower()):
            yield value
