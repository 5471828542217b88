"""Real processes (gloo) through Lightning's own launchers: whole parameters on each, and shards."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import toeplitz
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import CubicNewton, FullBatch, IndependentNoise
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.events import (
    CyclicRound,
    FixedOrderPass,
    PoissonGaussian,
    RandomAllocationEpoch,
    TruncatedGaussian,
)
from lightning_dp.accounting.journal import read_journal
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report.__main__ import main as report_command
from tests.older_torch import fsdp_on_cpu
from tests.strategies.processes.sharded_jobs import (
    BLOCKS,
    MODELS,
    RECORDS,
    STEPS,
    Normed,
    Small,
    chain,
)
from tests.zoo import clipped, flat, gradient_rows, records

ROOT = Path(__file__).parents[3]
ON_TWO = ["plain", "clipped", "by_record", "adaptive", "users", "noise", "secure", "correlated"]
ON_TWO += ["ordered", "sparse", "resumed"]
RARELY = ["ghost", "diff2", "cubic", "calibrated", "alone"]
LENGTHS = "Rank 1 has a training set of 61 records, rank 0 one of 60"
# glibc's settings: freed memory goes back to the system, so that peaks are those of tensors.
GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}


def launch(folder: Path, processes: int, *scenarios: str) -> subprocess.CompletedProcess[str]:
    """Run scenarios in one job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    distributed = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "RANK"}
    inherited = {name: value for name, value in os.environ.items() if name not in distributed}
    job = ["-m", "tests.strategies.processes.jobs", folder, str(processes), *scenarios]
    try:
        return subprocess.run(
            [sys.executable, *job],
            cwd=ROOT,
            env={**inherited, **GIVE_BACK, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200 + 20 * len(scenarios),
        )
    except subprocess.TimeoutExpired as late:
        done = sorted(path.stem for path in folder.glob("*.pt"))
        pytest.fail(f"Not done after {late.timeout} s, but for {done}: {late.stderr}")


def run(folder: Path, processes: int, *scenarios: str) -> Path:
    done = launch(folder, processes, *scenarios)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder in which two processes have left what they saw in every scenario asked for."""
    asks_rarely = any(each.get_closest_marker("slow") for each in request.session.items)
    scenarios, sharded = [*ON_TWO], [*MODELS, *SHARDED]
    if asks_rarely:
        scenarios += RARELY
        sharded += [f"block {name}" for name in BLOCKS]
    if not fsdp_on_cpu.args[0]:
        scenarios += [f"sharded {name}" for name in sharded]
    folder = tmp_path_factory.mktemp("job")
    done = launch(folder, 2, *scenarios, "lengths")  # which ends the job
    assert done.returncode != 0 and LENGTHS in done.stderr, done.stderr[-5000:]
    return folder


def results(folder: Path, scenario: str, processes: int = 2) -> list[dict[str, Any]]:
    files = [folder / f"{scenario}-{processes}-{rank}.pt" for rank in range(processes)]
    return [torch.load(file, weights_only=True) for file in files]


def network(weights: Tensor) -> nn.Sequential:
    """The network of jobs.py, with these weights."""
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    nn.utils.vector_to_parameters(weights[: 6 * 4 + 4 + 4 * 3 + 3].clone(), net.parameters())
    return net


def of_net(model: dict[str, Any]) -> Tensor:
    """The network's weights at the start, out of everything that the model holds."""
    frozen = 20  # a parameter that sits on the module comes first
    return model["at_start"][frozen:]


def sgd(net: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)


def descend(net: nn.Module, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    """One step along this gradient."""
    pieces = gradient.split([param.numel() for param in net.parameters()])
    for param, piece in zip(net.parameters(), pieces, strict=True):
        param.grad = piece.detach().view_as(param)
    optimizer.step()


def check_equal(result: list[dict[str, Any]], want: Tensor, least: float, atol: float) -> None:
    """Both ranks have these weights, which are some way from the start."""
    lead, other = result
    torch.testing.assert_close(lead["flat"], want, rtol=0, atol=atol)
    assert torch.equal(lead["flat"], other["flat"])
    assert (lead["flat"] - of_net(lead)[:43]).norm() > least


# -- weights ---------------------------------------------------------------------------------


def test_ranks_start_from_the_weights_and_buffers_of_rank_0(job):
    lead, other = results(job, "plain")
    assert not torch.equal(lead["before"], other["before"])
    assert torch.equal(lead["at_start"], lead["before"])
    assert torch.equal(other["at_start"], lead["before"])


@pytest.mark.parametrize(
    "scenario",
    ["plain", "clipped", "adaptive", "sparse"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("calibrated", "alone")],
)
def test_ranks_end_with_equal_weights(job, scenario):
    lead, other = results(job, scenario)
    assert torch.equal(lead["flat"], other["flat"])
    assert torch.isfinite(lead["flat"]).all()


def test_no_noise_and_no_clipping_is_plain_training_in_one_process(job):
    lead, other = results(job, "plain")
    x, y = records(51)
    net = network(of_net(lead))
    optimizer = sgd(net)
    for _ in range(5):
        descend(net, optimizer, gradient_rows(net, x, y).mean(0))
    check_equal([lead, other], flat(net), 0.5, 1e-6)
    assert lead["steps"] == 5


@pytest.mark.slow
def test_records_that_run_alone_make_the_same_steps(job):
    lead, other = results(job, "alone")
    torch.testing.assert_close(lead["one_by_one"], lead["auto"], rtol=0, atol=1e-6)
    assert lead["loss"] == other["loss"] > 0


def test_there_is_no_ddp_wrapper(job):
    for result in results(job, "plain"):
        assert (result["strategy"], result["wrapped"]) == ("PrivateDDPStrategy", "Model")


# -- batches ---------------------------------------------------------------------------------


def steps_of(result: dict[str, Any]) -> list[list[int]]:
    """The records that a rank used, step by step."""
    steps: list[list[int]] = [[] for _ in range(result["steps"])]
    for step, indices in result["chunks"]:
        steps[step] += indices
    return steps


def test_a_user_is_on_one_rank_and_clipped_once(job):
    lead, other = results(job, "users")
    assert torch.equal(lead["flat"], other["flat"])
    owners, (x, y) = torch.tensor(lead["owners"]), records(51)
    users = owners.unique()
    seen = [
        {lead["owners"][row] for _, rows in each["chunks"] for row in rows}
        for each in (lead, other)
    ]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(users.tolist())
    assert lead["records"] == len(users)
    net = network(of_net(lead))
    optimizer = sgd(net)
    for _ in range(2):
        rows = gradient_rows(net, x, y)
        means = torch.stack([rows[owners == user].mean(0) for user in users])
        assert 0 < (means.norm(dim=1) < 0.8).sum() < len(users)
        descend(net, optimizer, clipped(means, 0.8) / len(users))
    torch.testing.assert_close(lead["flat"], flat(net), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("scenario", "engine"),
    [
        ("clipped", "layers"),
        ("by_record", "records"),
        pytest.param("ghost", "ghost", marks=pytest.mark.slow),
    ],
)
def test_clipped_step_equals_a_loop_over_the_union_of_the_ranks_records(job, scenario, engine):
    lead, other = results(job, scenario)
    assert lead["engine"].startswith(engine)
    x, y = records(60)
    net = network(of_net(lead))
    optimizer = sgd(net)
    expected_batch_size = 3 * 2 * 2  # batch_size, accumulate, ranks
    norms: list[float] = []
    for mine, theirs in zip(steps_of(lead), steps_of(other), strict=True):
        rows = gradient_rows(net, x[mine + theirs], y[mine + theirs])
        norms += rows.norm(dim=1).tolist()
        descend(net, optimizer, clipped(rows, 1.4) / expected_batch_size)
    check_equal([lead, other], flat(net), 0.2, 1e-5)
    reached = sum(norm > 1.4 for norm in norms)
    assert 10 < reached < len(norms) - 10  # the bound reaches some records and not others


def test_ranks_agree_on_a_clip_norm_that_moves_by_one_noised_count(job):
    lead, other = results(job, "adaptive")
    assert lead["clip_norms"] == other["clip_norms"] and len(set(lead["clip_norms"])) == 20
    assert lead["epsilon"] == other["epsilon"]
    assert lead["epsilon"] == PLDAccountant().epsilon([(PoissonGaussian(1.0, 0.2), 20)], 1e-5)
    before = 1.0
    for share, clip_norm in zip(lead["shares"], lead["clip_norms"], strict=True):
        before *= math.exp(-0.3 * (1 - share - 0.5))
        assert clip_norm == pytest.approx(before, rel=1e-9)


@pytest.mark.slow
def test_differences_equal_a_loop_over_all_records_in_one_process(job):
    lead, other = results(job, "diff2")
    x, y = records(51)
    net = network(of_net(lead))

    optimizer, before, v = sgd(net), flat(net), torch.zeros(43)
    for step in range(7):
        now = flat(net)
        rows, bound, start = gradient_rows(net, x, y), 1.2, torch.zeros(43)
        if step % 3:
            rows = rows - gradient_rows(network(before), x, y)
            bound, start = 0.4 * float((now - before).norm()), v
        v = start + clipped(rows, bound) / 51
        before = now
        descend(net, optimizer, v)
    check_equal([lead, other], flat(net), 0.2, 1e-5)
    assert torch.equal(lead["noisy"], other["noisy"])


@pytest.mark.slow
def test_both_kinds_of_steps_are_charged_with_the_noise_of_their_own(job):
    for result in results(job, "diff2"):
        ratio = math.sqrt((3 - 1) / (1.25 - 1))
        assert result["charged"] == [(0.5, 0.2, 4), (pytest.approx(0.5 * ratio), 0.2, 6)]


class Alone(L.LightningModule):
    """The model that two ranks train in jobs.py, for one process."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.net = network(start[:43])
        self.unused = nn.Linear(2, 2)
        nn.utils.vector_to_parameters(start[43:49].clone(), self.unused.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["round", "fresh"])
def test_rounds_on_two_ranks_equal_rounds_in_one_process(job, make_trainer, form):
    lead, other = (result[form] for result in results(job, "cubic"))
    model = Alone(of_net(lead))
    newton = CubicNewton(1.5, 1.0, 3, 1.2, 0.4, keep=40, box=2.0, fresh_batches=form == "fresh")
    privacy = DifferentialPrivacy(
        target_delta=1e-5, noise_multiplier=0.0, estimator=newton, sampling=FullBatch()
    )
    trainer = make_trainer(max_epochs=6, callbacks=[privacy])
    trainer.fit(model, DataLoader(TensorDataset(*records(51)), batch_size=8))
    check_equal([lead, other], flat(model.net), 0.2, 1e-5)


@pytest.mark.slow
def test_rounds_with_empty_chunks_stay_in_step_and_are_charged_once(job):
    lead, other = results(job, "cubic")
    assert torch.equal(lead["noisy"], other["noisy"])
    assert lead["empty"] + other["empty"] > 1  # 10 on average
    assert lead["charged"] == other["charged"] == [(0.5, 0.1, 10)]


@pytest.mark.parametrize(("scenario", "n"), [("clipped", 60), ("sparse", 400)])
def test_each_record_is_used_at_most_once_per_step_by_the_rank_that_owns_it(job, scenario, n):
    used: Counter[int] = Counter()
    for rank, result in enumerate(results(job, scenario)):
        for step in steps_of(result):
            assert len(set(step)) == len(step)
            assert all(index % 2 == rank for index in step)
            used.update(step)
    assert set(used) <= set(range(n)) and len(used) > n / 4


def test_sampling_rate_counts_all_ranks(job):
    for result in results(job, "clipped"):
        assert [rate for _, rate, _ in result["charged"]] == [3 * 2 * 2 / 60]
    for result in results(job, "sparse"):
        assert [rate for _, rate, _ in result["charged"]] == [1 * 2 * 2 / 400]


def test_number_of_records_is_binomial_over_all_ranks(job):
    lead, other = results(job, "sparse")
    drawn = sum(len(step) for result in (lead, other) for step in steps_of(result))
    trials = 400 * lead["steps"]
    assert stats.binomtest(drawn, trials, 4 / 400).pvalue > 1e-6
    assert stats.binomtest(drawn, trials, 2 / 400).pvalue < 1e-6
    assert stats.binomtest(drawn, trials, 8 / 400).pvalue < 1e-6


# -- noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["noise", "secure"])
def test_noise_is_drawn_once_over_the_world(job, scenario):
    lead, other = results(job, scenario)
    assert torch.equal(lead["moved"], other["moved"])
    expected_batch_size = 5 * 2
    released = (lead["moved"] * expected_batch_size).double().numpy()
    noise_std = 2.0 * 0.5
    assert stats.kstest(released, stats.norm(scale=noise_std).cdf).pvalue > 1e-4
    for wrong in (math.sqrt(2), 1 / math.sqrt(2), 2, 1 / 2):
        assert stats.kstest(released, stats.norm(scale=wrong * noise_std).cdf).pvalue < 1e-6
    of_ranks = released.reshape(2, -1)
    assert abs(np.corrcoef(of_ranks)[0, 1]) < 5 / math.sqrt(of_ranks.shape[1])


def test_noise_that_remembers_is_undone_by_its_matrix_over_both_shares(job):
    """Each rank remembers its own share, and no part of a record comes back too soon."""
    lead, other = results(job, "correlated")
    assert torch.equal(lead["moved"], other["moved"])
    assert (lead["steps"], lead["charges"], lead["past"], other["past"]) == (12, 3, [], [])
    coefficients = np.array([1.0, 0.7, 0.4, 0.1])
    c = toeplitz(np.pad(coefficients, (0, 8)), np.zeros(12))
    released = lead["moved"].numpy() * 4  # B, at learning rate 1
    fresh = c @ released / np.linalg.norm(coefficients)
    assert stats.kstest(fresh.ravel(), stats.norm(scale=2.0 * 0.5).cdf).pvalue > 1e-4
    between = np.corrcoef(fresh)[np.triu_indices(12, 1)]
    assert np.abs(between).max() < 6 / math.sqrt(fresh.shape[1])
    for result in (lead, other):
        steps: dict[int, int] = {}
        for step, batch in enumerate(result["seen"]):
            for record in batch:
                assert step - steps.get(record, -9) >= 4
                steps[record] = step
    assert not set(sum(lead["seen"], [])) & set(sum(other["seen"], []))  # noqa: RUF017


def test_a_fixed_order_on_two_ranks_is_that_of_one_process(job):
    lead, other = results(job, "ordered")
    assert torch.equal(lead["flat"], other["flat"])
    x, y = records(51)
    net = network(of_net(lead))
    optimizer = sgd(net)
    for _ in range(3):
        for start in range(0, 51, 16):
            optimizer.zero_grad()
            batch = slice(start, start + 16)
            (nn.functional.cross_entropy(net(x[batch]), y[batch], reduction="sum") / 16).backward()
            optimizer.step()
    torch.testing.assert_close(lead["flat"], flat(net), rtol=0, atol=2e-6)
    orders = [[index for _, index in result["chunks"]] for result in (lead, other)]
    assert all(order[:4] == order[4:8] == order[8:] for order in orders)
    assert sorted(record for order in orders for batch in order[:4] for record in batch) == [
        *range(51)
    ]


# -- steps, budget, journal ------------------------------------------------------------------


def test_ranks_that_are_often_empty_make_equal_steps(job):
    lead, other = results(job, "sparse")
    assert len(lead["chunks"]) == len(other["chunks"]) == 2 * lead["steps"]
    for result in (lead, other):
        empty = sum(not indices for _, indices in result["chunks"])
        assert 0.1 < empty / len(result["chunks"]) < 0.7
    assert math.isfinite(lead["loss"]) and lead["loss"] == other["loss"]


def test_budget_stops_both_ranks_before_the_same_step(job):
    lead, other = results(job, "sparse")
    steps = lead["steps"]
    assert steps == other["steps"] == lead["global_step"] == other["global_step"]
    assert 10 < steps < 90  # min_steps does not override the budget
    event = PoissonGaussian(1.0, 4 / 400)
    accountant = PLDAccountant()
    assert accountant.epsilon([(event, steps)], 1e-5, "add_remove") <= 0.6
    assert accountant.epsilon([(event, steps + 1)], 1e-5, "add_remove") > 0.6
    assert lead["epsilon"] == other["epsilon"] <= 0.6
    for result in (lead, other):
        assert "privacy budget reached" in result["stop_reason"]


@pytest.mark.slow
def test_calibrated_noise_is_the_same_on_both_ranks_and_uses_up_the_budget(job):
    lead, other = results(job, "calibrated")
    assert lead["noise_multiplier"] == other["noise_multiplier"] > 0.3
    assert lead["steps"] == other["steps"] == lead["global_step"] == other["global_step"] == 10
    event = PoissonGaussian(lead["noise_multiplier"], 12 / 60)
    by_hand = PLDAccountant().epsilon([(event, 10)], 1e-5, "add_remove")
    assert 2.95 < by_hand <= 3.0
    assert lead["epsilon"] == other["epsilon"] == pytest.approx(by_hand, rel=1e-9)


def test_only_rank_0_writes_a_journal_and_a_report(job):
    assert [result["has_journal"] for result in results(job, "sparse")] == [True, False]
    assert [result["reports"] for result in results(job, "sparse")] == [1, 0]


def test_charge_is_on_the_disk_before_any_rank_uses_the_batch(job):
    for result in results(job, "sparse"):
        assert len(result["ahead"]) == len(result["chunks"])
        assert set(result["ahead"]) == {1}


# -- resume ----------------------------------------------------------------------------------


def test_resume_in_the_middle_of_an_epoch_equals_the_uninterrupted_run(job):
    lead, other = results(job, "resumed")
    whole = lead["whole"]
    for name, at in [("resumed", 5), ("again", 7)]:
        assert torch.equal(lead[name]["flat"], other[name]["flat"])
        torch.testing.assert_close(lead[name]["flat"], whole["flat"], rtol=0, atol=1e-6)
        left = whole["global_step"] - at
        assert lead[name]["chunks"] == other[name]["chunks"] == 2 * left
        assert lead[name]["global_step"] == other[name]["global_step"] == whole["global_step"]


def test_ledgers_of_both_ranks_hold_all_runs_of_the_journal(job):
    lead, other = results(job, "resumed")
    total = lead["whole"]["global_step"]
    assert lead["whole"]["steps"] == total > 8
    for name, steps in [("resumed", total + total - 5), ("again", 3 * total - 5 - 7)]:
        assert lead[name]["steps"] == other[name]["steps"] == steps


# -- refused ---------------------------------------------------------------------------------


def check_no_step(folder: Path) -> None:
    for rank in (0, 1):
        path = folder / f"chunks-{rank}.pt"
        assert not path.exists() or torch.load(path) == 0  # a rank that was killed wrote nothing


def test_error_of_one_rank_ends_the_job_before_any_step(job):
    check_no_step(job / "lengths")


@pytest.mark.slow
def test_a_journal_that_rank_0_misses_ends_the_job_before_any_step(tmp_path):
    done = launch(tmp_path, 2, "no_journal")
    assert done.returncode != 0
    assert "is missing (also in" in done.stderr
    check_no_step(tmp_path / "no_journal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("voided", "Skips gave no gradient"),
        ("voided_apart", "the ranks diverged"),
        ("edited", "is not what was released"),
        ("mixed", "exchanged for others"),
    ],
)
def test_what_one_rank_finds_in_its_records_ends_both_ranks(tmp_path, scenario, message):
    run(tmp_path, 2, scenario)
    for result in results(tmp_path, scenario):
        assert message in result["error"]
        assert result["epsilon"] == math.inf
        assert result["steps"] <= 4
    (journal,) = tmp_path.rglob("*.journal")
    assert message in journal.read_text()
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_an_edit_of_the_first_step_on_one_rank_refuses_the_model_on_both(tmp_path):
    run(tmp_path, 2, "edited_at_once")
    for result in results(tmp_path, "edited_at_once"):
        assert "is not what was released" in result["error"]
        assert result["steps"] == 1
        assert result["epsilon"] < math.inf


# -- shards ----------------------------------------------------------------------------------

CLIP_NORM, MULTIPLIER = 0.05, 2.0
HALF = ("half", "autocast")
DIFFERENCES = ("diff2", "storm")
BY_HAND = tuple(f"by hand{how}" for how in ("", ", unprobed", ", records"))
SHARDED = (
    *(f"{kind} {name}" for name in DIFFERENCES for kind in ("whole", "clipped", "ddp")),
    *HALF,
    "in_columns",
    "kept",
    "let go",
    "trained",
    "mixed",
    "checked",
    *BY_HAND,
    "normed",
    "ghost",
    "saved",
    "resumed",
    "apart",
    "in order",
)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of four, of which one has no record."""
    return shard(tmp_path_factory.mktemp("four"), 4, *MODELS, "half", "trained")


def shard(folder: Path, processes: int, *scenarios: str) -> Path:
    return run(folder, processes, *(f"sharded {name}" for name in scenarios))


def sharded(folder: Path, scenario: str, processes: int = 2) -> list[dict[str, Any]]:
    return results(folder, f"sharded {scenario}", processes)


def clipped_sum(name: str, *, weight: float = 0.0, groups: bool = False) -> Tensor:
    """The sum over records, one by one in a whole model, of clipped g(x) - weight g(0.9 x).

    With groups, parameters in even places are clipped at 0.6 C by themselves, and others at 0.8 C.
    """
    make, records = MODELS[name]
    net, x = make(), records()
    params = [param for param in net.parameters() if param.requires_grad]
    total = torch.zeros(sum(param.numel() for param in params))

    def gradients(of: list[Tensor]) -> list[Tensor]:
        nn.utils.vector_to_parameters(torch.cat([each.flatten() for each in of]), params)
        found = [
            torch.autograd.grad(net(x[i : i + 1]).square().mean(), params) for i in range(len(x))
        ]
        return [torch.cat([each.flatten() for each in every]) for every in found]

    here = [param.detach().clone() for param in params]
    for there, gradient in zip(
        gradients([0.9 * each for each in here]), gradients(here), strict=True
    ):
        part = gradient - weight * there
        if not groups:
            total += part * min(1.0, CLIP_NORM / float(part.norm()))
            continue
        own = torch.cat([torch.full((each.numel(),), i % 2) for i, each in enumerate(here)])
        for group, share in enumerate((0.6, 0.8)):
            mine = part * (own == group)
            total += mine * min(1.0, share * CLIP_NORM / float(mine.norm() + 1e-30))
    return total


def plainly_trained(*, half: bool = False, make: Callable[[], nn.Module] = chain) -> Tensor:
    """The steps of a whole model on all records, without privacy."""
    net = Small(make).net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    x, y = records(51)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def check_sums(folder: Path, processes: int, name: str) -> None:
    want, apart = clipped_sum(name), clipped_sum(name, weight=0.5)
    of_groups = clipped_sum(name, groups=True)
    for each in sharded(folder, name, processes):
        torch.testing.assert_close(each["clipped"], want, rtol=0, atol=1e-6)
        torch.testing.assert_close(each["difference"], apart, rtol=0, atol=1e-6)
        torch.testing.assert_close(each["groups"], of_groups, rtol=0, atol=1e-6)
        assert each["all"] == len(want)
    assert float(want.norm()) > 2 * CLIP_NORM


@pytest.mark.parametrize("name", list(MODELS))
@fsdp_on_cpu
def test_clipped_sums_are_those_of_one_process(job, name):
    check_sums(job, 2, name)
    held = [each["held"] for each in sharded(job, name)]
    assert sum(held) == len(clipped_sum(name)) > max(held)


@pytest.mark.parametrize("name", list(MODELS))
@fsdp_on_cpu
def test_a_model_at_another_point_is_there_while_it_is_and_back_afterwards(job, name):
    make, records = MODELS[name]
    net = make()
    here = net(records())
    with torch.no_grad():
        for param in net.parameters():
            if param.requires_grad:
                param.mul_(0.9)
    for each in sharded(job, name):
        torch.testing.assert_close(each["there"], net(records()))
        torch.testing.assert_close(each["here"], here)


@pytest.mark.parametrize("scenario", ["kept", "let go"])
@fsdp_on_cpu
def test_it_does_not_matter_when_gathered_parameters_are_let_go(job, scenario):
    want, apart = clipped_sum("tied"), clipped_sum("tied", weight=0.5)
    for each in sharded(job, scenario):
        torch.testing.assert_close(each["clipped"], want, rtol=0, atol=1e-6)
        torch.testing.assert_close(each["difference"], apart, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
@fsdp_on_cpu
def test_four_processes_of_which_one_has_no_record_give_the_same_sums(four, name):
    check_sums(four, 4, name)


@pytest.mark.parametrize("scenario", HALF)
@fsdp_on_cpu
def test_a_pass_in_half_precision_gives_sums_of_float32(job, scenario):
    want = clipped_sum("mlp")
    for each in sharded(job, scenario):
        assert each["clipped"].dtype == torch.float32
        assert float((each["clipped"] - want).norm()) < 0.02 * float(want.norm())


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@fsdp_on_cpu
def test_noise_has_its_variance_once_and_is_independent_between_processes(request, processes):
    folder = request.getfixturevalue("job" if processes == 2 else "four")
    lead, *others = sharded(folder, "wide", processes)
    noise = lead["noise"].double() / (MULTIPLIER * CLIP_NORM)
    error = math.sqrt(2 / len(noise))
    assert abs(float(noise.var()) - 1) < 5 * error
    assert all(torch.equal(each["noise"], lead["noise"]) for each in others)
    shares = noise.view(processes, -1)  # rows of the only weight, sharded in equal parts
    apart = torch.corrcoef(shares) - torch.eye(processes)
    assert float(apart.abs().max()) < 5 / math.sqrt(shares.shape[1])
    assert len(noise.unique()) > 0.99 * len(noise)


@pytest.mark.parametrize("scenario", ["trained", "checked", "ghost"])
@fsdp_on_cpu
def test_without_noise_and_clipping_it_is_plain_training_of_a_whole_model(job, scenario):
    want = plainly_trained()
    for each in sharded(job, scenario):
        assert each["steps"] == STEPS
        torch.testing.assert_close(each["weights"], want, rtol=0, atol=2e-5)
        assert ("do not go into shards" in each["report"]) == (scenario == "ghost")


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
@fsdp_on_cpu
def test_batches_and_noise_of_a_block_over_shards(job, name):
    """Each process draws its records and the noise of its shards, and remembers that alone."""
    lead, other = sharded(job, f"block {name}")
    assert torch.equal(lead["moved"], other["moved"]) and lead["past"] == other["past"] == []
    noise = BLOCKS[name].get("noise", IndependentNoise())
    expected_batch_size = RECORDS / 4 if name == "allocated" else 14
    released = -lead["moved"].numpy() * expected_batch_size
    inverse = toeplitz(noise.inverse(12), np.zeros(12))
    fresh = np.linalg.solve(inverse, released) / noise.column_norm
    assert stats.kstest(fresh.ravel(), stats.norm(scale=2.0 * 0.5).cdf).pvalue > 1e-4
    between = np.corrcoef(fresh)[np.triu_indices(12, 1)]
    assert np.abs(between).max() < 6 / math.sqrt(fresh.shape[1])
    assert not {*itertools.chain.from_iterable(lead["seen"])} & {
        *itertools.chain.from_iterable(other["seen"])
    }
    seen = [[*mine, *theirs] for mine, theirs in zip(lead["seen"], other["seen"], strict=True)]
    steps = {record: [t for t in range(12) if record in seen[t]] for record in range(RECORDS)}
    if name == "cyclic":
        assert all(len({t % 3 for t in taken}) <= 1 for taken in steps.values())
    elif name == "limited":
        assert max(len(batch) for each in (lead, other) for batch in each["seen"]) <= 10
    else:
        assert all([t // 4 for t in taken] == [0, 1, 2] for taken in steps.values())
    rate = 14 / RECORDS
    want = {
        "cyclic": [CyclicRound(2.0, 3 * rate, 3)] * 4,
        "allocated": [RandomAllocationEpoch(2.0, 4, 4)] * 3,
        "fixed": [FixedOrderPass(2.0 / math.sqrt(noise.cost(k, 4)), 4) for k in range(3)],
        "limited": [TruncatedGaussian(2.0, rate, 10, 26)] * 12,
    }[name]
    assert lead["events"] == [event.to_dict() for event in want]


@fsdp_on_cpu
def test_a_fixed_order_over_shards_is_that_of_one_process(job):
    model, (x, y) = Small(), records(RECORDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(12):
        batch = slice(14 * (step % 4), 14 * (step % 4) + 14)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.net(x[batch]), y[batch], reduction="sum")
        (loss / 14).backward()
        optimizer.step()
    for each in sharded(job, "in order"):
        torch.testing.assert_close(each["weights"], flat(model), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("scenario", "message"),
    list(
        zip(
            BY_HAND,
            ("'net.down.", "is used outside of its layer: 'net.down.", "sharded"),
            strict=True,
        )
    ),
)
@fsdp_on_cpu
def test_weights_that_are_used_outside_of_their_layer_are_refused(job, scenario, message):
    """The engine of layers alone knows shards; with the probe or without, no process goes on."""
    for each in sharded(job, scenario):
        assert message in each["message"]
        assert "one_by_one" not in each["message"]


@fsdp_on_cpu
def test_a_module_that_computes_with_its_own_weights_trains_as_a_whole_one(job):
    for each in sharded(job, "normed"):
        torch.testing.assert_close(each["weights"], plainly_trained(make=Normed), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", DIFFERENCES)
@fsdp_on_cpu
def test_estimators_of_differences_train_on_shards_as_on_whole_parameters(
    job: Path, name: str
) -> None:
    # Differences that are not clipped add up to the gradient.
    for each in sharded(job, f"whole {name}"):
        torch.testing.assert_close(each["weights"], plainly_trained(), rtol=0, atol=2e-4)
    (want, _), found = (sharded(job, f"{kind} {name}") for kind in ("ddp", "clipped"))
    assert float((want["weights"] - plainly_trained()).norm()) > 0.1
    for each in found:
        torch.testing.assert_close(each["weights"], want["weights"], rtol=0, atol=2e-4)


@fsdp_on_cpu
def test_bf16_mixed_trains_as_a_whole_model_with_it(job):
    begin = nn.utils.parameters_to_vector(Small().net.parameters()).detach()
    want = plainly_trained(half=True)
    moved = float((want - begin).norm())
    for each in sharded(job, "mixed"):
        assert float((each["weights"] - want).norm()) < 0.02 * moved
    assert float((want - plainly_trained()).norm()) > 1e-4 * moved


@fsdp_on_cpu
def test_columns_in_any_order_of_processes_give_the_sums_of_one(job):
    want = clipped_sum("even")
    for each in sharded(job, "in_columns"):
        torch.testing.assert_close(each["clipped"], want, rtol=0, atol=1e-6)


@fsdp_on_cpu
def test_a_mesh_of_fewer_processes_is_refused_by_name_before_any_charge(job):
    for each in sharded(job, "apart"):
        assert re.search(
            r"\['net\.blocks\.2\.weight', .* are sharded over 1 of 2 processes.*mesh=self\.device",
            each["message"],
        )
    assert not list((job / "apart").rglob("*.journal"))


@pytest.mark.slow
@fsdp_on_cpu
def test_four_processes_train_the_same(four):
    for each in sharded(four, "trained", 4):
        torch.testing.assert_close(each["weights"], plainly_trained(), rtol=0, atol=2e-5)


def check_resumed(folder: Path, processes: int, before: dict[str, Any]) -> list[dict[str, Any]]:
    found = sharded(folder, "resumed", processes)
    assert sum(len(each["average"]) for each in found) == len(before["weights"])
    for each in found:
        assert torch.equal(each["begin"], before["weights"])
        assert torch.equal(each["weights"], found[0]["weights"])
        assert each["epsilon"] > before["epsilon"]
    return found


@fsdp_on_cpu
def test_a_run_goes_on_from_its_folder_of_shards(job, capsys):
    found = check_resumed(job, 2, sharded(job, "saved")[0])
    assert all(each["steps"] == 6 for each in found)
    assert report_command([str(job / "run/last.ckpt")]) == 0
    assert re.search("[46] steps", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["saved", "consolidated"])
@fsdp_on_cpu
def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path, scenario):
    shard(tmp_path, 2, scenario)
    before = sharded(tmp_path, scenario)[0]
    for processes in (4, 1):
        here = tmp_path / str(processes)
        here.mkdir()
        os.symlink(tmp_path / "run", here / "run")
        shard(here, processes, "resumed")
        check_resumed(here, processes, before)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["killed", "raised"])
@fsdp_on_cpu
def test_a_process_that_dies_leaves_the_ledger_ahead_by_one_step_at_most(
    tmp_path, how, rank, shards
):
    done = launch(tmp_path, 2, f"sharded {how}-{rank}-{shards}")
    if how == "killed" and rank == 0:
        assert done.returncode == -signal.SIGKILL
    else:
        assert done.returncode != 0
    (journal,) = tmp_path.rglob("*.journal")
    made = int((tmp_path / f"steps-{rank}").read_text())
    assert made == 2
    assert made <= read_journal(journal)[1].total <= made + 1


@pytest.mark.slow
@fsdp_on_cpu
def test_the_peak_of_a_process_falls_with_their_number(tmp_path):
    peaks = []
    for processes in (1, 2, 4):
        shard(tmp_path, processes, "peak")
        found = sharded(tmp_path, "peak", processes)
        peaks.append(max(each["peak"] for each in found))
    # Of 24 million weights: 504, 305 and 189 MiB when this was written.
    assert peaks[1] < 0.7 * peaks[0]
    assert peaks[2] < 0.7 * peaks[1]
