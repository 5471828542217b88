"""Every public door refuses what only looks like a number, by the argument's name, before anything."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from tests.arguments.federated_doors import FEDERATED
from tests.arguments.training_doors import TRAINING

DOORS = [*TRAINING, *FEDERATED]  # public callables, each with good arguments
every_door = pytest.mark.parametrize(
    ("call", "good"), DOORS, ids=lambda each: getattr(each, "__qualname__", "")
)
# What takes a number that is checked in a test of its own, or that a user does not choose.
ELSEWHERE = {
    "epsilon_text.epsilon",  # also nan and inf
    *("audit.num_canaries", "audit.confidence", "recover_journal.unrecorded_steps"),
    *("DPAdamW.lr", "DPAdamW.eps", "DPAdamW.weight_decay"),  # by torch
    *("DifferentialPrivacy.private_optimizer", "PrivacyConfig.private_optimizer"),  # also a path
    # earlier names of the arguments of Checks
    *("DifferentialPrivacy.isolation_probe", "DifferentialPrivacy.loss_graph_check"),
    *("DifferentialPrivacy.spot_checks", "PrivacyConfig.isolation_probe"),
    *("PrivacyConfig.loss_graph_check", "PrivacyConfig.spot_checks"),
    *("Trial.number", "Suggestion.seconds", "Suggestion.records_per_second"),  # results
}


def numbers_of(call: Callable[..., Any]) -> dict[str, set[str]]:
    """The kinds of the arguments that are annotated as numbers, flags among them."""
    kinds = {
        name: {"float", "int", "bool"} & set(str(each.annotation).replace(" ", "").split("|"))
        for name, each in inspect.signature(call).parameters.items()
    }
    name = getattr(call, "__qualname__", "")
    return {
        each: kind for each, kind in kinds.items() if kind and f"{name}.{each}" not in ELSEWHERE
    }


def wrong(kinds: set[str], good: Any) -> Iterator[Any]:
    """Values that look like a number of these kinds to Python, and are none."""
    if kinds == {"bool"}:
        yield from (1, 0, "yes", None, np.bool_(True))
        return
    yield from (True, str(good), Decimal(str(good)), np.array(good), torch.tensor(good), [good], 1j)
    yield from (np.bool_(True), math.nan, b"1", {}, object())
    if "float" not in kinds:
        yield 2.5


def is_refused(call: Callable[..., Any], good: dict[str, Any], name: str, value: Any) -> bool:
    try:
        call(**{**good, name: value})
    except (ValueError, TypeError) as error:
        return re.search(rf"\b{name}\b", str(error)) is not None
    return False


@every_door
def test_what_is_no_number_is_refused_by_its_arguments_name(call, good):
    tried = [
        (name, value)
        for name, kinds in numbers_of(call).items()
        if isinstance(good.get(name), int | float)
        for value in wrong(kinds, good[name])
    ]
    assert tried and [each for each in tried if not is_refused(call, good, *each)] == []


@every_door
def test_equal_numbers_of_other_libraries_are_taken(call, good):
    kinds = numbers_of(call)

    def other(name: str, value: Any) -> Any:
        if name not in kinds or not isinstance(value, int | float) or isinstance(value, bool):
            return value
        return np.int64(value) if isinstance(value, int) else np.float64(value)

    call(**{name: other(name, value) for name, value in good.items()})


# -- the table is complete -----------------------------------------------------------------------

PACKAGES = [
    *("", ".callbacks", ".accounting", ".metrics", ".plotting", ".audit", ".federated"),
    *(".plan", ".search", ".report"),
]


def public_numbers() -> Iterator[str]:
    for package in PACKAGES:
        module = importlib.import_module(f"lightning_dp{package}")
        for name in module.__all__:
            thing = getattr(module, name)
            is_made = inspect.isclass(thing) and not inspect.isabstract(thing)
            is_made = is_made and not issubclass(thing, Exception)
            if is_made or inspect.isfunction(thing):
                yield from (f"{name}.{argument}" for argument in numbers_of(thing))


def test_every_number_that_a_public_name_takes_is_in_the_table():
    tried = {f"{call.__qualname__}.{name}" for call, good in DOORS for name in good}
    asked = {name for name in public_numbers() if not name.startswith("PrivacyReport.")}  # a result
    assert sorted(asked - tried - ELSEWHERE) == []
