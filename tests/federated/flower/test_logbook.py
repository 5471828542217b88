"""What a server writes down: a summary of any facts, and files that are whole at any moment."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

import torch

from lightning_dp.federated.flower.server import Logbook, save


def test_the_summary_takes_any_facts(tmp_path):
    """Also those of a protocol of one's own, and of metrics that are no numbers."""
    book = Logbook(tmp_path)
    book.progress(0, {"accuracy": np.float32(0.5), "loss": math.nan, "bound": math.inf})
    facts = {"a": b"\xff", "b": np.float64(math.nan), "c": 10**400, 4: object(), "e": [math.inf]}
    book.introduced(3, facts)
    book.close(2, "it was enough")
    found = json.loads((tmp_path / "federation.json").read_text())
    assert found["ended"] == "it was enough"
    assert found["metrics"] == {"accuracy": 0.5, "loss": "nan", "bound": "inf"}
    assert found["clients"]["3"]["e"] == ["inf"]


def test_what_a_server_saves_is_on_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    calls = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    save({"x": torch.ones(1)}, tmp_path / "server.pt")
    Logbook(tmp_path).close(1, "it was enough")
    assert calls == ["fsync", "replace", "fsync"] * 2
    assert not list(tmp_path.glob(".*"))
