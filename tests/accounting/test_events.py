"""Events: their pairs, what they refuse, and how they are written down."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dp.accounting import ZCDP, ApproximateDP, Gaussian, PoissonGaussian
from lightning_dp.accounting.events import PoissonRound, Voided, event_from_dict

noises = st.floats(0.0, 1e300)
rates = st.floats(0.0, 1.0, exclude_min=True)
relations = st.sampled_from(["add_remove", "replace_one"])
words = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
events = st.one_of(
    st.builds(Gaussian, noises),
    st.builds(PoissonGaussian, noises, rates),
    st.builds(PoissonRound, st.lists(noises, min_size=1, max_size=5).map(tuple), rates),
    st.builds(
        ApproximateDP, st.floats(0, 1e9), st.floats(0, 1, exclude_max=True), relations, words
    ),
    st.builds(ZCDP, st.floats(0, 1e9), relations, words),
    st.builds(Voided, st.text()),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(events)
def test_an_event_survives_json_as_plain_python(event):
    written = event.to_dict()
    assert {type(value) for value in written.values()} <= {str, float, list}
    assert event_from_dict(json.loads(json.dumps(written))) == event
    for field in written:
        with pytest.raises(ValueError, match=r"unknown event|lacks the field"):
            event_from_dict({key: value for key, value in written.items() if key != field})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-200, 1e150), min_size=1, max_size=6), rates)
def test_a_round_is_one_gaussian_amplified_once(multipliers, rate):
    z, q = PoissonRound(tuple(multipliers), rate).pair
    log_squares = [-2 * math.log(each) for each in multipliers]
    top = max(log_squares)
    total = top + math.log(math.fsum(math.exp(each - top) for each in log_squares))
    assert q == rate and math.log(z) == pytest.approx(-total / 2, abs=1e-9)
    assert PoissonRound((*multipliers, 0.0), rate).pair == (0.0, rate)


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf, "1", None, True])
def test_an_illegal_noise_multiplier_is_refused(z):
    for make in (
        Gaussian,
        lambda z: PoissonGaussian(z, 0.1),
        lambda z: PoissonRound((1.0, z), 0.1),
    ):
        with pytest.raises(ValueError, match="noise_multiplier"):
            make(z)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.0001, math.nan, "0.1"])
def test_an_illegal_sample_rate_is_refused(q):
    for make in (lambda q: PoissonGaussian(1.0, q), lambda q: PoissonRound((1.0,), q)):
        with pytest.raises(ValueError, match="sample_rate"):
            make(q)


def approximate(epsilon, delta=0.0, relation="add_remove", what="a table"):
    return ApproximateDP(epsilon, delta, relation=relation, what=what)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        *((lambda z=z: PoissonRound(z, 0.1), "must be a list of numbers") for z in ((), 1.0, "1")),
        (lambda: approximate(math.nan), "epsilon=nan"),
        (lambda: approximate(math.inf), "epsilon=inf"),
        (lambda: approximate(-0.1), "epsilon=-0.1"),
        (lambda: approximate(1.0, 1.0), "delta=1.0"),
        (lambda: approximate(1.0, math.nan), "delta=nan"),
        (lambda: approximate(0.1, what="two\nlines"), "one line"),
        (lambda: ZCDP(math.nan, "add_remove", "x"), "rho=nan"),
        (lambda: ZCDP(-1.0, "add_remove", "x"), "rho=-1.0"),
        (lambda: ZCDP(0.1, "bounded", "x"), "relation='bounded'"),
        (lambda: ZCDP(0.1, "add_remove", " "), "what=' '"),
    ],
)
def test_illegal_fields_are_refused_by_name(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("d", "message"),
    [
        (None, "dictionary"),
        ({"event": "Laplace"}, "unknown event"),
        ({"event": "RepeatAndSelect"}, "lightning-dp 0.1 and 0.2 only"),
        ({"event": "Gaussian", "noise_multiplier": 1.0, "extra": 1}, "unknown field .extra"),
        ({"event": "Gaussian", "noise_multiplier": "x"}, "real number"),
        ({"event": "Gaussian", "noise_multiplier": math.nan}, "finite"),
        ({"event": "PoissonGaussian", "noise_multiplier": 1.0, "sample_rate": 2}, "sample_rate"),
        ({"event": "PoissonRound", "noise_multipliers": 1.0, "sample_rate": 0.1}, "list of num"),
    ],
)
def test_a_malformed_dictionary_is_refused(d, message):
    with pytest.raises(ValueError, match=message):
        event_from_dict(d)
