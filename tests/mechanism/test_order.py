"""Ask, charge, answer, noise, tell, post-process: in this order and no other."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import BoundedSum


class RecordingLedger(Ledger):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def charge(self, event: Any) -> None:
        super().charge(event)
        self.calls.append("charge")


class RecordingNoise(NoiseSource):
    def __init__(self, calls: list[str]) -> None:
        super().__init__(seed=0)
        self.calls = calls

    def add_normal(self, vector: Tensor, std: float) -> None:
        self.calls.append("noise")
        super().add_normal(vector, std)


def test_a_step_asks_charges_answers_noises_tells_and_postprocesses_in_this_order(trial):
    calls: list[str] = []
    mechanism = trial.make(
        estimator=trial.Asking(calls),
        postprocessing=(trial.Doubled(calls), trial.Doubled(calls)),
        ledger=RecordingLedger(calls),
        noise=RecordingNoise(calls),
    )
    for number in range(2):
        mechanism.ask(trial.params)
        calls.append("answer")
        mechanism.answer(BoundedSum(torch.ones(trial.size), 1.0))
        mechanism.tell(trial.params)
        assert mechanism.step == number + 1

    one_step = ["charge", "answer", "noise", "tell", "post-process 6", "post-process 6"]
    assert calls == ["init", "ask 0", *one_step, "ask 1", *one_step]


def test_the_step_is_charged_on_the_disk_before_ask_returns(tmp_path, trial):
    mechanism = trial.make(noise_multiplier=1.5, directory=tmp_path)
    for number in (1, 2, 3):
        mechanism.ask(trial.params)
        assert mechanism.ledger.journal_path is not None
        runs = read_journal(mechanism.ledger.journal_path)[1]
        assert runs == {"run-1": [(PoissonGaussian(1.5, trial.rate), number)]}
        mechanism.tell(trial.params)
    mechanism.ledger.end()


def test_a_charge_that_fails_prevents_the_query(tmp_path, trial):
    resource = pytest.importorskip("resource")
    mechanism = trial.make(directory=tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            mechanism.ask(trial.params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)

    assert mechanism.query is None
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before answer\(\)"):
        mechanism.answer(BoundedSum(torch.ones(trial.size), 1.0))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before tell\(\)"):
        mechanism.tell(trial.params)


def test_a_step_cannot_be_answered_or_told_twice(trial):
    mechanism = trial.make()
    trial.step(mechanism, torch.ones(trial.size))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before answer\(\)"):
        mechanism.answer(BoundedSum(torch.ones(trial.size), 1.0))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before tell\(\)"):
        mechanism.tell(trial.params)


def test_a_step_that_was_not_finished_is_charged_and_its_answers_are_forgotten(trial):
    mechanism = trial.make(noise_multiplier=0.0)
    mechanism.ask(trial.params)
    mechanism.answer(BoundedSum(torch.full((trial.size,), 1e6), 1.0))

    estimate = trial.step(mechanism, torch.ones(trial.size))

    assert torch.equal(estimate, torch.ones(trial.size) / trial.batch_size)
    assert mechanism.ledger.steps == 2
    assert mechanism.step == 1


def test_a_dropped_step_stays_charged(trial):
    mechanism = trial.make()
    mechanism.ask(trial.params)
    mechanism.drop()
    assert mechanism.query is None
    assert mechanism.ledger.steps == 1
    with pytest.raises(RuntimeError, match="No step was begun"):
        mechanism.tell(trial.params)
