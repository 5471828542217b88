"""Events: what they mean, how they are written down, what they refuse."""

from __future__ import annotations

import json
import math

import pytest

from lightning_dp.accounting import (
    AbstractEvent,
    Gaussian,
    PoissonGaussian,
    PoissonRound,
    event_from_dict,
)

EVENTS = [
    Gaussian(0.1 + 0.2),
    Gaussian(0.0),
    PoissonGaussian(1 / 3, 1e-7),
    PoissonGaussian(2, 1),
    PoissonRound((1.0, 0.3), 0.05),
]


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_an_event_survives_json(event: AbstractEvent) -> None:
    assert event_from_dict(json.loads(json.dumps(event.to_dict()))) == event


def test_a_round_is_one_gaussian_of_all_its_queries() -> None:
    z, q = PoissonRound((3.0, 4.0), 0.1).pair
    assert (z, q) == (pytest.approx((1 / 9 + 1 / 16) ** -0.5, rel=1e-15), 0.1)
    assert PoissonRound((1e-200, 1.0), 0.1).pair[0] == 1e-200
    assert PoissonRound((0.0, 1.0), 0.1).pair[0] == 0.0


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf, -math.inf])
def test_refuses_illegal_noise(z: float) -> None:
    for make in (
        lambda: Gaussian(z),
        lambda: PoissonGaussian(z, 0.1),
        lambda: PoissonRound((1.0, z), 0.1),
    ):
        with pytest.raises(ValueError, match="finite and at least 0"):
            make()


@pytest.mark.parametrize("z", ["1", None, True, 1j, [1.0]])
def test_refuses_what_is_not_a_number(z: object) -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be a real number"):
        Gaussian(z)  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [0.0, -0.1, 1.0000001, 2.0, math.nan, math.inf])
def test_refuses_an_illegal_rate(q: float) -> None:
    with pytest.raises(ValueError, match=r"sample_rate must be in \(0, 1\]"):
        PoissonGaussian(1.0, q)
    with pytest.raises(ValueError, match=r"sample_rate must be in \(0, 1\]"):
        PoissonRound((1.0,), q)


@pytest.mark.parametrize("queries", [(), 1.0, "12"])
def test_refuses_a_round_without_queries(queries: object) -> None:
    with pytest.raises(ValueError, match="must be a non-empty sequence"):
        PoissonRound(queries, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"event": "Laplace", "noise_multiplier": 1.0}, "unknown event 'Laplace'"),
        ({"noise_multiplier": 1.0}, "unknown event None"),
        ({"event": "Gaussian"}, "needs exactly the keys"),
        ({"event": "Gaussian", "noise_multiplier": 1.0, "q": 1}, "needs exactly the keys"),
        ({"event": "Gaussian", "noise_multiplier": math.nan}, "finite and at least 0"),
        ({"event": "PoissonRound", "noise_multipliers": 1, "sample_rate": 1}, "must be a list"),
        ("Gaussian", "must be a dictionary"),
    ],
)
def test_refuses_to_read(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        event_from_dict(written)  # type: ignore[arg-type]
