"""Parts of a configuration as data: what counts as the same, and what a difference is called."""

from __future__ import annotations

import enum
import io
import itertools
import json
import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dp import (
    Diff2,
    Exponential,
    MeanGradient,
    Momentum,
)
from lightning_dp.config import check_same, config_dict
from lightning_dp.schedules import FromInfluence


@dataclass(frozen=True)
class Mine:
    """A part that a user wrote: nobody normalises its numbers."""

    rate: Any = 1.0
    inner: Any = None
    seen: list[int] = field(default_factory=list, compare=False)


class Plain:
    """A part that is no dataclass."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


class Colour(enum.Enum):
    RED = 1


def function() -> None:
    """A function with a name."""


def same(before: object, now: object) -> bool:
    """Return True if a run of the one can be resumed as the other, through a file."""
    file = io.BytesIO()
    torch.save(config_dict(before), file)
    file.seek(0)
    try:
        check_same({"part": torch.load(file, weights_only=True)}, {"part": now})
    except ValueError as error:
        assert "part differs from the checkpoint's: it was" in str(error)
        return False
    return True


def name_of(value: Any) -> str:
    """The kind of a value: two processes must call a test the same."""
    return getattr(value, "__name__", type(value).__name__)


ONE = [1, 1.0, np.int64(1), np.float64(1), np.float32(1), np.asarray(1), torch.tensor(1.0)]


def test_one_is_one_however_it_was_given():
    for before, now in itertools.product(ONE, ONE):
        assert same(Mine(before), Mine(now))
        assert same(Mine([before, {"k": before}]), Mine((now, {"k": now})))
        assert not same(Mine(before), Mine(2 * now))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, "text", math.nan, math.inf, Fraction(1, 3), Path("there"), Colour.RED),
        *({3: "three"}, {1, 2}, np.arange(3), torch.ones(2, 2), torch.float64, math.sqrt, function),
        *(Diff2(3), Exponential(0.5), FromInfluence((1.0, 2.0)), Mine(inner=Mine()), Plain(0.5)),
    ],
    ids=name_of,
)
def test_a_value_equals_itself_in_another_process_and_nothing_else(value):
    assert repr(json.loads(json.dumps(config_dict(value)))) == repr(config_dict(value))
    assert same(value, value)
    assert same(Mine(value), Mine(value))
    assert not same(Mine(value), Mine("another"))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (Diff2(3), Diff2(4)),
        (MeanGradient(0.5), Momentum(0.5)),
        (Mine(rate=1), Mine(inner=1)),
        ([Momentum(0.5)], []),
        ([Momentum(0.5), Momentum(0.6)], [Momentum(0.6), Momentum(0.5)]),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (Plain(0.5), Plain(0.6)),
        (Plain(0.5).__init__, Plain(0.6).__init__),
    ],
    ids=name_of,
)
def test_other_values_are_noticed(before, now):
    assert not same(before, now)


def test_a_field_that_a_later_version_added_had_its_default():
    old = {"class": "Mine", "rate": 2.0}
    check_same({"part": old}, {"part": Mine(2)})
    check_same({"part": [old]}, {"part": (Mine(2),)})
    with pytest.raises(ValueError, match=r"it was Mine\(rate=2\.0\), now Mine\(rate=2, inner=3\)"):
        check_same({"part": old}, {"part": Mine(2, inner=3)})


def test_a_field_without_a_default_cannot_be_made_up():
    assert config_dict(Diff2(3))["restart_every"] == 3
    old = {k: v for k, v in config_dict(Diff2(3)).items() if k != "restart_every"}
    with pytest.raises(ValueError, match="part differs"):
        check_same({"part": old}, {"part": Diff2(3)})


@pytest.mark.parametrize(
    ("before", "match"),
    [
        (
            {"part": {"class": "Mine", "speed": 2}},
            r"speed=2 in Mine, a field that this version lacks",
        ),
        (
            {"part": config_dict(Mine()), "other": "x"},
            r"other='x' in its configuration, a field that this",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(before, match):
    with pytest.raises(ValueError, match=match):
        check_same(before, {"part": Mine()})
