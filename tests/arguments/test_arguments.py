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

from tests.arguments.door import Door
from tests.arguments.federated_doors import FEDERATED
from tests.arguments.training_doors import TRAINING

DOORS = [*TRAINING, *FEDERATED]


def lookalikes(good: Any) -> Iterator[Any]:
    """Values that Python computes with as if they were this number, and that are none."""
    yield from (str(good), Decimal(str(good)), np.array(good), torch.tensor(good), [good], 1j)
    yield from (np.bool_(True), math.nan, b"1", {}, object())


def wrong(door: Door) -> Iterator[tuple[str, Any]]:
    """Each number that a door takes, with every value that is none."""
    for name, good in door.good.items():
        if name in door.flags:
            yield from ((name, value) for value in (1, 0, "yes", None, np.bool_(True)))
        else:
            yield from ((name, value) for value in (True, *lookalikes(good)))
        if name in door.whole:
            yield name, 2.5


def is_refused(door: Door, name: str, value: Any) -> bool:
    try:
        door.call(**{**door.others, **door.good, name: value})
    except (ValueError, TypeError) as error:
        return re.search(rf"\b{name}\b", str(error)) is not None
    return False


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_what_is_no_number_is_refused_by_its_arguments_name(door):
    assert [(name, each) for name, each in wrong(door) if not is_refused(door, name, each)] == []


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_equal_numbers_of_other_libraries_are_taken(door):
    def other(name: str, value: Any) -> Any:
        if name in door.flags:
            return value
        return np.int64(value) if isinstance(value, int) else np.float64(value)

    door.call(**door.others, **{name: other(name, value) for name, value in door.good.items()})


# -- the table is complete -----------------------------------------------------------------------

PACKAGES = [
    *("", ".callbacks", ".accounting", ".metrics", ".plotting", ".audit", ".federated"),
    *(".plan", ".search", ".report"),
]
# What takes a number that is checked in a test of its own, or that a user does not choose.
ELSEWHERE = {
    "epsilon_text.epsilon",  # also nan and inf
    *("audit.num_canaries", "audit.confidence", "recover_journal.unrecorded_steps"),
    *("DifferentialPrivacy.private_optimizer", "PrivacyConfig.private_optimizer"),  # also a path
    # earlier names of the arguments of Checks
    *("DifferentialPrivacy.isolation_probe", "DifferentialPrivacy.loss_graph_check"),
    *("DifferentialPrivacy.spot_checks", "PrivacyConfig.isolation_probe"),
    *("PrivacyConfig.loss_graph_check", "PrivacyConfig.spot_checks"),
    *("Trial.number", "Suggestion.seconds", "Suggestion.records_per_second"),  # results
}


def numbers_of(thing: Callable[..., Any]) -> list[str]:
    """The arguments of a callable that are annotated as numbers, flags among them."""
    kinds = {"float", "int", "bool"}
    return [
        name
        for name, parameter in inspect.signature(thing).parameters.items()
        if kinds & set(str(parameter.annotation).replace(" ", "").split("|"))
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
    tried = {f"{door.name}.{name}" for door in DOORS for name in door.good}
    asked = {name for name in public_numbers() if not name.startswith("PrivacyReport.")}  # a result
    assert sorted(asked - tried - ELSEWHERE) == []
