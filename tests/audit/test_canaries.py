"""On correct code the lower bound is below ε and near it; every planted fault is above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import _noise
from lightning_dp.audit.canaries import AuditReport, audit
from lightning_dp.boundary import BoundedSum, Query, Release, add_noise, bounded_sum
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.estimators import Diff2, Storm
from lightning_dp.gradients import RecordPasses, Replay
from lightning_dp.gradients.passes import passes_of
from lightning_dp.sampling import FullBatch, Poisson
from lightning_dp.schedules import Exponential
from tests.zoo import Model

MECHANISM = "lightning_dp.mechanism"
PASSES = "lightning_dp.gradients.passes"


@pytest.fixture
def run_audit(blobs) -> Callable[..., AuditReport]:
    """An audit of a small network on 240 records."""

    def run(
        *,
        steps: int = 20,
        canaries: int = 300,
        batch_size: int = 24,
        accumulate: int = 1,
        noise_multiplier: float | None = 1.0,
        **privacy: Any,
    ) -> AuditReport:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 3))
        dp = DifferentialPrivacy(noise_multiplier=noise_multiplier, target_delta=1e-5, **privacy)
        report = audit(
            Model(net, F.cross_entropy),
            DataLoader(blobs, batch_size=batch_size, shuffle=True),
            dp.config,
            trainer={
                "max_steps": steps,
                "max_epochs": 1000,
                "accelerator": "cpu",
                "accumulate_grad_batches": accumulate,
            },
            num_canaries=canaries,
        )
        assert report.steps == steps
        assert dp.steps == 0  # charged elsewhere
        return report

    return run


FULL = {"sampling": FullBatch(), "batch_size": 240}


def assert_near(report: AuditReport, part: float) -> None:
    """A fresh draw of canaries each time: 5 % of the runs may be above ε, by little."""
    assert part * report.epsilon <= report.white_box <= 1.1 * report.epsilon
    assert report.one_run <= report.epsilon
    assert "the claim" in str(report)


@pytest.mark.parametrize(
    "settings",
    [FULL, {"batch_size": 120}, {"batch_size": 30, "accumulate": 4}],
    ids=["full", "poisson", "chunks"],
)
def test_correct_code_is_found_nearly_as_private_as_claimed(settings, run_audit):
    assert_near(run_audit(**settings), 0.4)


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": Diff2(restart_every=3, max_grad_norm=1.0, diff_norm=1.0)},
        {"estimator": Storm(momentum=0.9, max_grad_norm=1.0, diff_norm=1.0)},
        {"noise_schedule": Exponential(rate=0.02)},
        {"engine": "hooks"},
        {"engine": "records"},
    ],
    ids=["diff2", "storm", "schedule", "hooks", "records"],
)
def test_it_audits_every_kind_of_step(settings, run_audit):
    assert_near(run_audit(**FULL, **settings), 0.4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FULL, {}], ids=["full", "q=0.1"])
def test_at_full_size_the_bound_is_more_than_half_of_epsilon(settings, run_audit):
    reports = [run_audit(steps=100, canaries=1000, **settings) for _ in range(5)]

    assert sum(report.is_violated for report in reports) <= 1
    for report in reports:
        assert_near(report, 0.5)


def test_no_noise_is_caught(run_audit, monkeypatch):
    def silent(total: BoundedSum, z: float, *_: Any) -> Release:
        return Release(total.value, z * total.clip_norm)

    monkeypatch.setattr(f"{MECHANISM}.add_noise", silent)

    assert run_audit().is_violated


@pytest.mark.parametrize("settings", [FULL, {"batch_size": 120}], ids=["full", "poisson"])
def test_half_of_the_noise_is_caught(settings, run_audit, monkeypatch):
    def half(total: BoundedSum, z: float, *others: Any) -> Release:
        return add_noise(total, z / 2, *others)

    monkeypatch.setattr(f"{MECHANISM}.add_noise", half)
    report = run_audit(**settings)

    assert report.is_violated
    assert 0.4 < report.noise_scale < 0.7


def test_no_clipping_is_caught(run_audit, monkeypatch):
    def unbounded(gradients: Any, clip_norm: float, *_: Any) -> BoundedSum:
        return BoundedSum(gradients.weighted_sum(torch.ones(gradients.count)), clip_norm)

    monkeypatch.setattr(f"{PASSES}.bounded_sum", unbounded)

    assert run_audit().is_violated


def test_clipping_the_average_is_caught(run_audit, monkeypatch):
    def clip_after(gradients: Any, clip_norm: float, *_: Any) -> BoundedSum:
        n = gradients.count
        mean = gradients.weighted_sum(torch.ones(n)) / n
        return BoundedSum(mean * (clip_norm / mean.norm()).clamp(max=1) * n, clip_norm)

    monkeypatch.setattr(f"{PASSES}.bounded_sum", clip_after)

    assert run_audit(batch_size=120).is_violated


def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record once in an epoch of ten batches, booked as Poisson batches."""
    waiting: list[Any] = []

    def draw(self: Poisson, size: int, rate: float, rng: np.random.Generator) -> Any:
        if not waiting:
            waiting.extend(np.array_split(rng.permutation(size), round(1 / rate)))
        return waiting.pop()

    monkeypatch.setattr(Poisson, "draw", draw)


def test_shuffled_batches_booked_as_poisson_are_caught(run_audit, monkeypatch):
    settings: dict[str, Any] = {"noise_multiplier": 0.15, "steps": 10}
    correct = run_audit(**settings)
    assert correct.lower_bound <= 1.1 * correct.epsilon
    shuffled(monkeypatch)

    report = run_audit(**settings)

    assert report.is_violated
    assert report.noise_scale < 0.5


@pytest.mark.parametrize("settings", [FULL, {"batch_size": 120}], ids=["full", "poisson"])
def test_a_record_twice_in_a_batch_is_caught(settings, run_audit, monkeypatch):
    sampling = FullBatch if "sampling" in settings else Poisson
    once = sampling.draw

    def twice(self: Any, size: int, rate: float, rng: np.random.Generator) -> Any:
        drawn = once(self, size, rate, rng)
        return np.concatenate([drawn, drawn])

    monkeypatch.setattr(sampling, "draw", twice)

    assert run_audit(**settings).is_violated


@pytest.mark.parametrize(
    "settings",
    [{**FULL, "steps": 4, "noise_multiplier": 2.0}, {"batch_size": 120}],
    ids=["full", "poisson"],
)
def test_the_same_noise_at_every_step_is_caught(settings, run_audit, monkeypatch):
    def same(self: Any, vector: torch.Tensor, std: float) -> None:
        vector += std * torch.from_numpy(np.random.default_rng(0).standard_normal(len(vector)))

    monkeypatch.setattr(_noise.NoiseSource, "add_normal", same)

    assert run_audit(**settings).is_violated


def test_clipping_before_the_difference_is_caught(run_audit, monkeypatch):
    def answer(
        self: RecordPasses, query: Query, chunk: Replay, *, first: Any = None, onto: Any = None
    ) -> BoundedSum:
        total: Any = 0
        for each in passes_of(query):
            at_present = each.point is None and first is not None
            gradients = first if at_present else self._pass(chunk, each)
            total = total + each.gradient * bounded_sum(gradients, query.clip_norm).value
        return BoundedSum(total, query.clip_norm)

    settings: dict[str, Any] = {**FULL, "canaries": 600}
    settings["estimator"] = Diff2(restart_every=20, max_grad_norm=1.0, diff_norm=1.0, split=5.0)
    monkeypatch.setattr(RecordPasses, "answer", answer)

    assert run_audit(**settings).is_violated


def test_the_sampling_rate_is_that_of_the_user(blobs, monkeypatch):
    rates = []
    draw = Poisson.draw
    monkeypatch.setattr(
        Poisson, "draw", lambda self, n, q, rng: (rates.append(q), draw(self, n, q, rng))[1]
    )
    dp = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    model = Model(nn.Linear(6, 4), F.cross_entropy)

    audit(
        model,
        DataLoader(blobs, batch_size=24),
        dp.config,
        trainer={"max_steps": 2},
        num_canaries=20,
    )

    assert set(rates) == {0.1}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"confidence": 1.0}, r"confidence=1\.0"),
        ({"confidence": float("nan")}, "confidence=nan"),
        ({"num_canaries": 5}, "num_canaries=5"),
        ({"num_canaries": 100}, "num_canaries=100 must be at most.*21"),
        ({"trainer": {"max_steps": 0}}, "made no step"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match, blobs):
    dp = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    model = Model(nn.Linear(6, 3), F.cross_entropy)
    given = {"trainer": {"max_steps": 1}, "num_canaries": 20, **arguments}

    with pytest.raises(ValueError, match=match):
        audit(model, DataLoader(blobs, batch_size=24), dp.config, **given)
