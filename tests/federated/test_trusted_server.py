"""Two real processes (gloo) that share a model through a server that both trust."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from lightning_dp import PrivacyConfig
from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.estimators import CubicNewton
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.messages import Message
from lightning_dp.federated.trusted_server import TrustedServer
from lightning_dp.functional import flatten, unflatten

JOBS = Path(__file__).parent / "ranks.py"
SIZES = (40, 25)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks have left what they saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    scenarios = ("spoilt", "unlike", "diff2", "heard", "noise", "budget", "poisson")
    ranks = [
        subprocess.Popen(
            [sys.executable, JOBS, folder, *scenarios],
            env={
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return folder


def results(job: Path, scenario: str) -> list[dict[str, Any]]:
    return [torch.load(job / f"{scenario}-{rank}.pt", weights_only=True) for rank in (0, 1)]


def all_records() -> list[tuple[Tensor, Tensor]]:
    """The records of both ranks, made again."""
    found = []
    for rank, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(10 + rank)
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        found += [(x[i], torch.tensor(i % 3)) for i in range(size)]
    return found


def gradient(point: Tensor, record: tuple[Tensor, Tensor]) -> Tensor:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for param, value in zip(
        net.parameters(), unflatten(point, list(net.parameters())), strict=True
    ):
        param.data = value
    loss = nn.functional.cross_entropy(net(record[0].unsqueeze(0)), record[1].unsqueeze(0))
    return flatten(torch.autograd.grad(loss, list(net.parameters())))


def clip(vector: Tensor, norm: float) -> Tensor:
    return vector * min(1.0, norm / float(vector.norm()))


def test_without_noise_it_is_diff2_of_the_paper_over_the_union_of_the_records(job):
    lead, _ = results(job, "diff2")
    x, before, v, velocity = lead["before"], None, None, 0.0
    for r in range(7):
        if r % 3 == 0:
            v = sum(clip(gradient(x, record), 0.5) for record in all_records()) / sum(SIZES)
        else:
            radius = 0.4 * float((x - before).norm())
            parts = [clip(gradient(x, z) - gradient(before, z), radius) for z in all_records()]
            v = v + sum(parts) / sum(SIZES)
        before, velocity = x, 0.5 * velocity + v
        x = x - 0.5 * velocity

    torch.testing.assert_close(lead["after"], x, rtol=0, atol=1e-12)
    assert float((x - lead["before"]).norm()) > 0.3


@pytest.mark.parametrize("scenario", ["diff2", "heard", "noise", "budget", "poisson"])
def test_all_ranks_end_with_one_model_and_one_epsilon(job, scenario):
    lead, other = results(job, scenario)

    assert torch.equal(lead["after"], other["after"])
    assert lead["epsilon"] == other["epsilon"]
    assert not torch.equal(lead["after"], lead["before"])


def read(heard: list[Tensor]) -> list[Tensor]:
    """What was heard, and the vectors in rank 0's messages."""
    messages = [
        Message.from_bytes(each.numpy().tobytes()) for each in heard if each.dtype == torch.uint8
    ]
    assert messages
    return [*heard, *(vector for message in messages for vector in message.tensors.values())]


def test_a_rank_hears_no_sum_without_noise_but_its_own(job):
    lead, other = results(job, "heard")
    assert len(lead["sums"]) == len(other["sums"]) == 3
    for mine, theirs in zip(other["sums"], lead["sums"], strict=True):
        total = mine + theirs
        for heard in read(other["heard"]):
            if heard.shape != total.shape:
                continue
            for secret in (theirs, total, total / sum(SIZES)):
                assert not torch.allclose(heard, secret, rtol=1e-3)
    assert any(heard.shape == other["before"].shape for heard in read(other["heard"]))
    # The same search finds them where they may be: on the server.
    assert any(torch.equal(heard, other["sums"][0]) for heard in lead["heard"])


def test_the_noise_is_drawn_once_and_is_z_times_the_clip_norm(job):
    lead, _ = results(job, "noise")
    noise = (lead["before"] - lead["after"]).double() / 0.5 * sum(SIZES)  # undo rate and mean

    assert len(noise) == 20_000
    assert stats.kstest(noise.numpy(), stats.norm(scale=3.0 * 2.0).cdf).pvalue > 0.01
    for wrong in (math.sqrt(2), 2.0, 0.5):  # once per rank, or one of two ranks
        assert stats.kstest(noise.numpy(), stats.norm(scale=6.0 * wrong).cdf).pvalue < 1e-6


def test_the_budget_stops_all_ranks_before_the_step_that_exceeds_it(job):
    lead, other = results(job, "budget")
    accountant = PLDAccountant()

    assert lead["epsilon"] == accountant.epsilon([(Gaussian(3.0), lead["steps"])], 1e-5) <= 2.0
    assert accountant.epsilon([(Gaussian(3.0), lead["steps"] + 1)], 1e-5) > 2.0
    assert len(lead["sums"]) == len(other["sums"]) == lead["steps"]
    assert lead["reason"] == "privacy budget reached"


def test_poisson_batches_are_charged_also_when_they_are_empty(job):
    lead, other = results(job, "poisson")

    event = PoissonGaussian(1.0, 0.02)
    assert lead["steps"] == 20
    assert lead["epsilon"] == PLDAccountant().epsilon([(event, 20)], 1e-5)
    assert any(not part.any() for part in [*lead["sums"], *other["sums"]])


def test_a_sum_that_is_not_finite_is_refused_on_every_rank(job):
    """In the last round, too; and the ranks can go on with something else."""
    lead, other = results(job, "spoilt")
    assert "voided: the sum of rank 1 is not finite" in lead["error"]
    assert "voided: rank 0 has refused the sum" in other["error"]


def test_ranks_with_unlike_models_are_refused_before_a_charge(job):
    for result in results(job, "unlike"):
        assert result["error"].startswith(
            "RefusedSetting: Rank 1 trains 20000 numbers of torch.float32"
        )
    assert not list((job / "unlike").rglob("*.journal"))


def test_rank_0_keeps_the_journal(job):
    assert len(list((job / "heard" / "rank-0" / "privacy").glob("*.journal"))) == 1
    assert not (job / "heard" / "rank-1").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_rate": 0.0}, "sample_rate=0.0"),
        ({"sample_rate": math.nan}, "sample_rate=nan"),
        ({"unit": "client"}, "unit='client'"),
        ({"frozen": True}, "not over exactly the trained parameters"),
        ({"estimator": CubicNewton(0.1, 1.0, inner_steps=2)}, "several queries on one batch"),
        ({}, "init_process_group"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_shared(
    classifier, mlp, blobs, change, message
):
    module = classifier(mlp())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if change.pop("frozen", False):
        module.net[0].requires_grad_(False)
    local = LocalRecords(module, blobs, unit=change.pop("unit", "record"))
    estimator = change.pop("estimator", None)
    privacy = PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0, estimator=estimator)

    with pytest.raises((ValueError, RuntimeError), match=message):
        TrustedServer(local, optimizer, privacy, **change)
