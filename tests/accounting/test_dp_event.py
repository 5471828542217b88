"""ε of a history by dp-accounting's own accountants, of the event that it becomes there."""

from __future__ import annotations

import pytest
from dp_accounting.pld import PLDAccountant as TheirPLD
from dp_accounting.rdp import RdpAccountant as TheirRDP

from lightning_dp.accounting import (
    ZCDP,
    ApproximateDP,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    to_dp_event,
)
from lightning_dp.accounting.events import (
    CyclicRound,
    FixedOrderPass,
    PoissonRound,
    RandomAllocationEpoch,
    TruncatedGaussian,
    Voided,
)

STEPS = [
    (PoissonGaussian(1.1, 0.02), 300),
    (Gaussian(9.0), 2),
    (PoissonRound((4.0, 3.0), 0.1), 5),
    (CyclicRound(2.0, 0.08, 8), 10),
]
COUNTED = ZCDP(0.01, relation="add_remove", what="a table")


def test_their_accountants_find_the_same_epsilon():
    theirs = TheirPLD(value_discretization_interval=1e-3).compose(to_dp_event(STEPS))
    assert theirs.get_epsilon(1e-5) == pytest.approx(PLDAccountant().epsilon(STEPS, 1e-5), rel=2e-3)
    history = [*STEPS, (COUNTED, 3)]
    ours = StreamingRDPAccountant().epsilon(history, 1e-5)
    # Their orders are fewer.
    assert TheirRDP().compose(to_dp_event(history)).get_epsilon(1e-5) == pytest.approx(
        ours, rel=2e-2
    )


@pytest.mark.parametrize(
    "event",
    [
        ApproximateDP(0.5, 1e-7, relation="add_remove", what="a table"),
        FixedOrderPass(1.0, steps=4),
        RandomAllocationEpoch(1.0, batches=100, steps=4),
        TruncatedGaussian(1.0, 0.1, limit=15, num_records=100),
        Voided("coupled"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_that_they_do_not_have_is_refused(event):
    with pytest.raises(
        TypeError, match=f"history={type(event).__name__}: dp-accounting has no event"
    ):
        to_dp_event([(event, 1)])


@pytest.mark.parametrize("count", [-3, 0.5, True])
def test_what_is_no_history_is_refused(count):
    with pytest.raises(ValueError, match=f"count={count}"):
        to_dp_event([(Gaussian(1.0), count)])


def test_zcdp_under_another_relation_is_refused():
    tables = ZCDP(0.1, relation="replace_one", what="tables")
    with pytest.raises(ValueError, match="holds for replacing a record only"):
        to_dp_event([(tables, 1)])
