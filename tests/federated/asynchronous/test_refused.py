"""What server and client of asynchronous SGD refuse."""

from __future__ import annotations

import math

import pytest

from lightning_dp.federated import AsyncClient, AsyncServer, ClientPrivacy
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message, MessageError


def test_another_configuration_is_refused_by_name(small):
    state = AsyncServer("trial", small.plan(), small.start(), 3).state_dict()
    with pytest.raises(ValueError, match=r"num_clients differs.* it was 3, now 2"):
        AsyncServer("trial", small.plan(), small.start(), 2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"plan differs.*lag=1.*now.*lag=2"):
        AsyncServer("trial", small.plan(lag=2), small.start(), 3).load_state_dict(state)


def test_what_was_not_asked_is_refused(small):
    server = AsyncServer("trial", small.plan(lag=9), small.start(), 2)
    wrong = Message("update", {"round": 1, "counter": 0}, {"update": small.start()}).to_bytes()
    with pytest.raises(MessageError, match="round 1, which it was not asked for"):
        server.receive(0, wrong)
    short = Message("update", {"round": 0, "counter": 0}, {"update": small.start()[:2]}).to_bytes()
    with pytest.raises(MessageError, match="not a vector of 4"):
        server.receive(0, short)
    with pytest.raises(MessageError, match="another protocol"):
        server.receive(0, Message("x", {"round": 0}).to_bytes())
    assert server.applied == [0, 0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"share": 10.0}, "This client has|this client has"),
        ({"share": math.nan}, "share=nan"),
        ({"local_steps": "diminishing1"}, "moves the model inside a round"),
        ({"local_steps": "often"}, "local_steps='often'"),
        ({"ledger": None}, "ledger=None"),
    ],
)
def test_bad_clients_are_refused(small, log_cosh, tmp_path, changes, match):
    ledger = changes.pop("ledger", ReleaseLedger(tmp_path, "client"))
    with pytest.raises(ValueError, match=match):
        privacy = ClientPrivacy(1.0, 2.0, math.inf)
        AsyncClient(log_cosh(30), small.plan(), privacy, ledger, run="r", **changes)
    assert not list(tmp_path.iterdir())
