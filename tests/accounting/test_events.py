"""Events: what they mean, what they refuse, how they are written down."""

import json
import math

import pytest

from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.events import PoissonRound, event_from_dict

EVENTS = [
    Gaussian(0.0),
    Gaussian(1.5),
    PoissonGaussian(0.7, 0.01),
    PoissonGaussian(3, 1),
    PoissonRound((1.0, 2.0, 3.0), 0.1),
]


@pytest.mark.parametrize("event", EVENTS)
def test_dictionary_survives_json(event):
    assert event_from_dict(json.loads(json.dumps(event.to_dict()))) == event


@pytest.mark.parametrize("event", EVENTS)
def test_dictionary_holds_plain_python(event):
    assert {type(v) for v in event.to_dict().values()} <= {str, float, list}


def test_round_is_one_gaussian_amplified_once():
    z, q = PoissonRound((3.0, 4.0), 0.2).pair
    assert z == pytest.approx((1 / 9 + 1 / 16) ** -0.5)
    assert q == 0.2


def test_round_with_a_noiseless_query_is_noiseless():
    assert PoissonRound((1.0, 0.0), 0.2).pair == (0.0, 0.2)


def test_round_of_tiny_multipliers_does_not_overflow():
    assert PoissonRound((1e-200, 1e-200), 0.2).pair[0] == pytest.approx(1e-200 / math.sqrt(2))


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf, "1", None, True])
def test_illegal_noise_multiplier_is_refused(z):
    with pytest.raises(ValueError, match="noise_multiplier"):
        Gaussian(z)
    with pytest.raises(ValueError, match="noise_multiplier"):
        PoissonGaussian(z, 0.1)
    with pytest.raises(ValueError, match="noise_multipliers"):
        PoissonRound((1.0, z), 0.1)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.0001, math.nan, "0.1"])
def test_illegal_sample_rate_is_refused(q):
    with pytest.raises(ValueError, match="sample_rate"):
        PoissonGaussian(1.0, q)
    with pytest.raises(ValueError, match="sample_rate"):
        PoissonRound((1.0,), q)


@pytest.mark.parametrize("multipliers", [(), 1.0, "1"])
def test_round_needs_a_sequence(multipliers):
    with pytest.raises(ValueError, match="non-empty sequence"):
        PoissonRound(multipliers, 0.1)


@pytest.mark.parametrize(
    ("d", "message"),
    [
        (None, "dictionary"),
        ({}, "unknown event"),
        ({"event": "Laplace"}, "unknown event"),
        ({"event": "Gaussian"}, "lacks the field .noise_multiplier"),
        ({"event": "Gaussian", "noise_multiplier": 1.0, "extra": 1}, "unknown field .extra"),
        ({"event": "Gaussian", "noise_multiplier": "x"}, "real number"),
        ({"event": "Gaussian", "noise_multiplier": math.nan}, "finite"),
        ({"event": "PoissonGaussian", "noise_multiplier": 1.0, "sample_rate": 2}, "sample_rate"),
        ({"event": "PoissonRound", "noise_multipliers": 1.0, "sample_rate": 0.1}, "sequence"),
    ],
)
def test_malformed_dictionary_is_refused(d, message):
    with pytest.raises(ValueError, match=message):
        event_from_dict(d)
