"""Two real processes (gloo) through Lightning's own launcher."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import CubicNewton, FullBatch
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.events import PoissonGaussian
from lightning_dp.callbacks import DifferentialPrivacy

JOBS = Path(__file__).parent / "jobs.py"
FAILING = Path(__file__).parent / "failing_jobs.py"
Ranks = list[dict[str, Any]]


def launch(folder: Path, *scenarios: str, jobs: Path = JOBS) -> subprocess.CompletedProcess[str]:
    """Run scenarios in one two-process job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    distributed = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "RANK"}
    inherited = {name: value for name, value in os.environ.items() if name not in distributed}
    try:
        return subprocess.run(
            [sys.executable, jobs, folder, *scenarios],
            env={**inherited, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200 * (1 + len(scenarios)),  # one takes about 10 s of processor time
        )
    except subprocess.TimeoutExpired as late:
        done = sorted(path.stem for path in folder.glob("*.pt"))
        pytest.fail(f"Not done after {late.timeout} s, but for {done}: {late.stderr}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where every scenario that ends well, and is asked for, has left its results."""
    folder = tmp_path_factory.mktemp("job")
    scenarios = ["plain", "clipped", "noise", "sparse", "resumed"]
    if any(each.get_closest_marker("slow") for each in request.session.items):
        scenarios += ["ghost", "diff2", "cubic", "calibrated", "alone"]
    done = launch(folder, *scenarios)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def results(job: Path, scenario: str) -> Ranks:
    return [torch.load(job / f"{scenario}-{rank}.pt", weights_only=True) for rank in (0, 1)]


def records(n: int) -> tuple[Tensor, Tensor]:
    """The data of jobs.py, made again."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 3
    return torch.randn(n, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6), y


def network(flat: Tensor) -> nn.Sequential:
    """The network of jobs.py, with these weights."""
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    nn.utils.vector_to_parameters(flat[: 6 * 4 + 4 + 4 * 3 + 3].clone(), net.parameters())
    return net


def of_net(model: dict[str, Any]) -> Tensor:
    """The network's weights at the start, out of everything that the model holds."""
    frozen = 20  # a parameter that sits on the module comes first
    return model["at_start"][frozen:]


def sgd(net: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)


def flat(net: nn.Sequential) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach()


# -- weights ---------------------------------------------------------------------------------


def test_ranks_start_from_the_weights_and_buffers_of_rank_0(job: Path) -> None:
    lead, other = results(job, "plain")
    assert not torch.equal(lead["before"], other["before"])
    assert torch.equal(lead["at_start"], lead["before"])
    assert torch.equal(other["at_start"], lead["before"])


@pytest.mark.parametrize(
    "scenario",
    ["plain", "clipped", "sparse"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("calibrated", "alone")],
)
def test_ranks_end_with_equal_weights(job: Path, scenario: str) -> None:
    lead, other = results(job, scenario)
    assert torch.equal(lead["flat"], other["flat"])
    assert torch.isfinite(lead["flat"]).all()


def test_no_noise_and_no_clipping_is_plain_training_in_one_process(job: Path) -> None:
    lead, _ = results(job, "plain")
    x, y = records(51)
    net = network(of_net(lead))
    optimizer = sgd(net)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(lead["flat"], flat(net), rtol=0, atol=1e-6)
    assert (lead["flat"] - of_net(lead)[:43]).norm() > 0.5
    assert lead["steps"] == 5


@pytest.mark.slow
def test_records_that_run_alone_make_the_same_steps(job: Path) -> None:
    lead, other = results(job, "alone")
    torch.testing.assert_close(lead["one_by_one"], lead["auto"], rtol=0, atol=1e-6)
    assert lead["loss"] == other["loss"] > 0


def test_there_is_no_ddp_wrapper(job: Path) -> None:
    for result in results(job, "plain"):
        assert (result["strategy"], result["wrapped"]) == ("PrivateDDPStrategy", "Model")


# -- batches ---------------------------------------------------------------------------------


def steps_of(result: dict[str, Any]) -> list[list[int]]:
    """The records that a rank used, step by step."""
    steps: list[list[int]] = [[] for _ in range(result["steps"])]
    for step, indices in result["chunks"]:
        steps[step] += indices
    return steps


@pytest.mark.parametrize("scenario", ["clipped", pytest.param("ghost", marks=pytest.mark.slow)])
def test_clipped_step_equals_a_loop_over_the_union_of_the_ranks_records(
    job: Path, scenario: str
) -> None:
    lead, other = results(job, scenario)
    assert lead["engine"].startswith("ghost" if scenario == "ghost" else "layers")
    x, y = records(60)
    net = network(of_net(lead))
    optimizer = sgd(net)
    expected_batch_size = 3 * 2 * 2  # batch_size, accumulate, ranks
    norms: list[float] = []
    for mine, theirs in zip(steps_of(lead), steps_of(other), strict=True):
        total = torch.zeros(43)
        for i in mine + theirs:
            net.zero_grad()
            nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
            gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
            norms.append(gradient.norm().item())
            total += gradient * min(1.0, 1.4 / norms[-1])
        nn.utils.vector_to_parameters(
            total / expected_batch_size, gradients := [p.clone() for p in net.parameters()]
        )
        for param, gradient in zip(net.parameters(), gradients, strict=True):
            param.grad = gradient.detach()
        optimizer.step()
    torch.testing.assert_close(lead["flat"], flat(net), rtol=0, atol=1e-5)
    clipped = sum(norm > 1.4 for norm in norms)
    assert 10 < clipped < len(norms) - 10  # the bound reaches some records and not others
    assert (lead["flat"] - of_net(lead)[:43]).norm() > 0.2


@pytest.mark.slow
def test_differences_equal_a_loop_over_all_records_in_one_process(job: Path) -> None:
    lead, other = results(job, "diff2")
    x, y = records(51)
    net = network(of_net(lead))

    def gradients(point: Tensor) -> Tensor:
        twin = network(point)
        rows = []
        for i in range(len(x)):
            twin.zero_grad()
            nn.functional.cross_entropy(twin(x[i : i + 1]), y[i : i + 1]).backward()
            rows.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
        return torch.stack(rows)

    optimizer, before, v = sgd(net), flat(net).clone(), torch.zeros(43)
    for step in range(7):
        now = flat(net).clone()
        rows, bound, start = gradients(now), 1.2, torch.zeros(43)
        if step % 3:
            rows, bound, start = rows - gradients(before), 0.4 * float((now - before).norm()), v
        v = start + (rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 51
        pieces = torch.split(v, [param.numel() for param in net.parameters()])
        for param, piece in zip(net.parameters(), pieces, strict=True):
            param.grad = piece.view_as(param)
        before = now
        optimizer.step()
    torch.testing.assert_close(lead["flat"], flat(net), rtol=0, atol=1e-5)
    assert torch.equal(lead["flat"], other["flat"]) and torch.equal(lead["noisy"], other["noisy"])
    assert (lead["flat"] - of_net(lead)[:43]).norm() > 0.2


@pytest.mark.slow
def test_both_kinds_of_steps_are_charged_with_the_noise_of_their_own(job: Path) -> None:
    for result in results(job, "diff2"):
        ratio = math.sqrt((3 - 1) / (1.25 - 1))
        assert result["charged"] == [(0.5, 0.2, 4), (pytest.approx(0.5 * ratio), 0.2, 6)]


class Alone(L.LightningModule):
    """What two ranks train in jobs.py, in one process."""

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
def test_rounds_on_two_ranks_equal_rounds_in_one_process(
    job: Path, make_trainer: Callable[..., L.Trainer], form: str
) -> None:
    lead, other = (result[form] for result in results(job, "cubic"))
    model = Alone(of_net(lead))
    newton = CubicNewton(1.5, 1.0, 3, 1.2, 0.4, keep=40, box=2.0, fresh_batches=form == "fresh")
    privacy = DifferentialPrivacy(
        target_delta=1e-5, noise_multiplier=0.0, estimator=newton, sampling=FullBatch()
    )
    trainer = make_trainer(max_epochs=6, callbacks=[privacy])
    trainer.fit(model, DataLoader(TensorDataset(*records(51)), batch_size=8))
    torch.testing.assert_close(lead["flat"], flat(model.net), rtol=0, atol=1e-5)
    assert torch.equal(lead["flat"], other["flat"])
    assert (lead["flat"] - of_net(lead)[:43]).norm() > 0.2


@pytest.mark.slow
def test_rounds_with_empty_chunks_stay_in_step_and_are_charged_once(job: Path) -> None:
    lead, other = results(job, "cubic")
    assert torch.equal(lead["noisy"], other["noisy"])
    assert lead["empty"] + other["empty"] > 1  # 10 on average
    assert lead["charged"] == other["charged"] == [(0.5, 0.1, 10)]


@pytest.mark.parametrize(("scenario", "n"), [("clipped", 60), ("sparse", 400)])
def test_each_record_is_used_at_most_once_per_step_by_the_rank_that_owns_it(
    job: Path, scenario: str, n: int
) -> None:
    used: Counter[int] = Counter()
    for rank, result in enumerate(results(job, scenario)):
        for step in steps_of(result):
            assert len(set(step)) == len(step)
            assert all(index % 2 == rank for index in step)
            used.update(step)
    assert set(used) <= set(range(n)) and len(used) > n / 4


def test_sampling_rate_counts_all_ranks(job: Path) -> None:
    for result in results(job, "clipped"):
        assert result["sample_rates"] == [3 * 2 * 2 / 60]
    for result in results(job, "sparse"):
        assert result["sample_rates"] == [1 * 2 * 2 / 400]


def test_number_of_records_is_binomial_over_all_ranks(job: Path) -> None:
    lead, other = results(job, "sparse")
    drawn = sum(len(step) for result in (lead, other) for step in steps_of(result))
    trials = 400 * lead["steps"]
    assert stats.binomtest(drawn, trials, 4 / 400).pvalue > 1e-6
    assert stats.binomtest(drawn, trials, 2 / 400).pvalue < 1e-6
    assert stats.binomtest(drawn, trials, 8 / 400).pvalue < 1e-6


# -- noise -----------------------------------------------------------------------------------


def test_noise_is_drawn_once_over_the_world(job: Path) -> None:
    lead, other = results(job, "noise")
    assert torch.equal(lead["moved"], other["moved"])
    expected_batch_size = 5 * 2
    released = (lead["moved"] * expected_batch_size).double().numpy()
    noise_std = 2.0 * 0.5
    assert stats.kstest(released, stats.norm(scale=noise_std).cdf).pvalue > 1e-4
    for wrong in (math.sqrt(2), 1 / math.sqrt(2), 2, 1 / 2):
        assert stats.kstest(released, stats.norm(scale=wrong * noise_std).cdf).pvalue < 1e-6


# -- steps, budget, journal ------------------------------------------------------------------


def test_ranks_that_are_often_empty_make_equal_steps(job: Path) -> None:
    lead, other = results(job, "sparse")
    assert len(lead["chunks"]) == len(other["chunks"]) == 2 * lead["steps"]
    for result in (lead, other):
        empty = sum(not indices for _, indices in result["chunks"])
        assert 0.1 < empty / len(result["chunks"]) < 0.7
    assert math.isfinite(lead["loss"]) and lead["loss"] == other["loss"]


def test_budget_stops_both_ranks_before_the_same_step(job: Path) -> None:
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
def test_calibrated_noise_is_the_same_on_both_ranks_and_uses_up_the_budget(job: Path) -> None:
    lead, other = results(job, "calibrated")
    assert lead["noise_multiplier"] == other["noise_multiplier"] > 0.3
    assert lead["steps"] == other["steps"] == lead["global_step"] == other["global_step"] == 10
    event = PoissonGaussian(lead["noise_multiplier"], 12 / 60)
    by_hand = PLDAccountant().epsilon([(event, 10)], 1e-5, "add_remove")
    assert 2.95 < by_hand <= 3.0
    assert lead["epsilon"] == other["epsilon"] == pytest.approx(by_hand, rel=1e-9)


def test_only_rank_0_writes_a_journal_and_a_report(job: Path) -> None:
    assert [result["has_journal"] for result in results(job, "sparse")] == [True, False]
    assert [result["reports"] for result in results(job, "sparse")] == [1, 0]


def test_charge_is_on_the_disk_before_any_rank_uses_the_batch(job: Path) -> None:
    for result in results(job, "sparse"):
        assert len(result["ahead"]) == len(result["chunks"])
        assert set(result["ahead"]) == {1}


# -- resume ----------------------------------------------------------------------------------


def test_resume_in_the_middle_of_an_epoch_equals_the_uninterrupted_run(job: Path) -> None:
    lead, other = results(job, "resumed")
    whole = lead["whole"]
    for name, at in [("resumed", 5), ("again", 7)]:
        assert torch.equal(lead[name]["flat"], other[name]["flat"])
        torch.testing.assert_close(lead[name]["flat"], whole["flat"], rtol=0, atol=1e-6)
        left = whole["global_step"] - at
        assert lead[name]["chunks"] == other[name]["chunks"] == 2 * left
        assert lead[name]["global_step"] == other[name]["global_step"] == whole["global_step"]


def test_ledgers_of_both_ranks_hold_all_runs_of_the_journal(job: Path) -> None:
    lead, other = results(job, "resumed")
    total = lead["whole"]["global_step"]
    assert lead["whole"]["steps"] == total > 8
    for name, steps in [("resumed", total + total - 5), ("again", 3 * total - 5 - 7)]:
        assert lead[name]["steps"] == other[name]["steps"] == steps


# -- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("lengths", "Rank 1 has a training set of 61 records, rank 0 one of 60"),
        pytest.param("no_journal", "is missing (also in", marks=pytest.mark.slow),
    ],
)
def test_error_of_one_rank_ends_the_job_before_any_step(
    tmp_path: Path, scenario: str, message: str
) -> None:
    done = launch(tmp_path, scenario, jobs=FAILING)
    assert done.returncode != 0
    assert message in done.stderr
    for rank in (0, 1):
        path = tmp_path / scenario / f"chunks-{rank}.pt"
        assert not path.exists() or torch.load(path) == 0  # a rank that was killed wrote nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("voided", "Skips gave no gradient"),
        ("voided_apart", "the ranks diverged"),
        ("edited", "is not what was released"),
        ("mixed", "found by a spot check"),
    ],
)
def test_what_one_rank_finds_in_its_records_ends_both_ranks(
    tmp_path: Path, scenario: str, message: str
) -> None:
    done = launch(tmp_path, scenario, jobs=FAILING)
    assert done.returncode == 0, done.stderr[-5000:]

    for result in results(tmp_path, scenario):
        assert message in result["error"]
        assert result["epsilon"] == math.inf
        assert result["steps"] <= 4
    (journal,) = tmp_path.rglob("*.journal")
    assert message in journal.read_text()
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_an_edit_of_the_first_step_on_one_rank_refuses_the_model_on_both(tmp_path: Path) -> None:
    done = launch(tmp_path, "edited_at_once", jobs=FAILING)
    assert done.returncode == 0, done.stderr[-5000:]

    for result in results(tmp_path, "edited_at_once"):
        assert "is not what was released" in result["error"]
        assert result["steps"] == 1
        assert result["epsilon"] < math.inf
