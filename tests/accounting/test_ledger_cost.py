"""What many distinct events cost."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_dp import Diff2
from lightning_dp._world import World
from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.journal import Journal, read_journal
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.callbacks import PrivacyLogger
from lightning_dp.config import PrivacyConfig
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan
from lightning_dp.schedules import Exponential


def seconds_to_keep(steps: int, folder: Path) -> float:
    """Processor time to charge, write, read and merge that many distinct events."""
    events = [PoissonGaussian(1.0 + i * 1e-6, 0.01) for i in range(steps)]
    start = time.process_time()
    ledger = Ledger()
    ledger.begin("run-1", None)
    for event in events:
        ledger.charge(event)
    journal = Journal(folder / f"{steps}.journal", ledger.id)
    journal.extend({"run-1": [(event, 1) for event in events]})
    journal.close()
    runs = read_journal(journal.path)[1]
    runs.merge(runs)
    assert runs["run-1"] == [(event, 1) for event in events]
    assert len(ledger.history()) == ledger.steps == steps
    return time.process_time() - start


def test_ten_thousand_distinct_events_cost_time_in_proportion(tmp_path):
    small = min(seconds_to_keep(1_000, tmp_path / f"{i}") for i in range(3))
    large = min(seconds_to_keep(10_000, tmp_path / f"{i}") for i in range(2))
    assert large < 40 * small  # a quadratic cost would be 100 times


class Counting(Ledger):
    """A ledger that counts how often somebody wants all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def history(self):
        self.looks += 1
        return super().history()

    @property
    def runs(self):
        self.looks += 1
        return super().runs

    def state_dict(self):
        self.looks += 1
        return super().state_dict()


def steps_of_a_run(steps: int, folder: Path, **options) -> tuple[list[float], list[int]]:
    """Processor time, and looks at the whole ledger, of each step of a run without a Trainer."""
    config = PrivacyConfig(target_delta=1e-5, **options)
    run = PrivateRun(config)
    ledger = run.ledger = Counting()
    run.use_batches(BatchPlan(1000, 0.01, 1, 100))
    run.start(steps, World(), folder)
    trainer = SimpleNamespace(
        log_every_n_steps=50, callback_metrics={}, progress_bar_metrics={}, loggers=[]
    )
    logger = PrivacyLogger()
    logger.on_privacy_start(trainer, run, folder)
    params, seconds, looks = [torch.zeros(2)], [], []
    for step in range(steps):
        start, before = time.thread_time(), ledger.looks
        assert not run.exhausted
        assert run.rate(step) == 0.01
        assert run.mechanism is not None
        run.mechanism.ask(params)
        run.mechanism.tell(params)
        assert not run.is_over_early or step == steps - 1
        logger.on_privacy_step(trainer, run)
        seconds.append(time.thread_time() - start)
        looks.append(ledger.looks - before)
    run.stop()
    assert len(ledger.history()) >= steps // 7  # Diff2 asks nothing where the model stands still
    return seconds, looks


@pytest.mark.parametrize(
    "options",
    [
        {"noise_multiplier": 5.0},
        {"noise_multiplier": 5.0, "target_epsilon": 8.0},
        {"noise_multiplier": 5.0, "estimator": Diff2(restart_every=7)},
    ],
    ids=["no budget", "budget", "diff2"],
)
def test_a_step_does_not_look_at_the_whole_ledger(tmp_path, options):
    schedule = Exponential(rate=1e-5)
    _, looks = steps_of_a_run(500, tmp_path, noise_schedule=schedule, **options)
    assert sum(looks) <= 12  # for the stretches of the curve of epsilon, which grow
    assert sum(looks[300:]) <= 1


@pytest.mark.slow
def test_the_last_thousand_of_twenty_thousand_distinct_steps_are_as_fast_as_the_first(tmp_path):
    options = {"noise_multiplier": 5.0, "noise_schedule": Exponential(rate=1e-6)}
    seconds, looks = steps_of_a_run(20_000, tmp_path, **options)
    usual = [sorted(part)[len(part) // 2] for part in (seconds[:1000], seconds[-1000:])]
    assert usual[1] <= 1.5 * usual[0]  # flat, but for what else the machine does
    assert sum(looks) <= 15
    assert sum(looks[-1000:]) == 0
