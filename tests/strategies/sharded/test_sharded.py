"""Sharded parameters (FSDP2) in real processes (gloo), through Lightning's ModelParallelStrategy."""

from __future__ import annotations

import importlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.accounting.journal import read_journal
from tests.older_torch import fsdp_on_cpu

pytestmark = fsdp_on_cpu

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # what the processes import, too
small = importlib.import_module("sharded_fit")
MODELS = importlib.import_module("sharded_models").MODELS
Normed = importlib.import_module("sharded_models").Normed
sys.path.remove(str(HERE))

CLIP_NORM, MULTIPLIER = 0.05, 2.0
HALF = ("half", "autocast")
DIFFERENCES = ("diff2", "storm")
BY_HAND = tuple(f"by hand{how}" for how in ("", ", unprobed", ", records"))
ONLY_TWO = (
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
)
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
    return subprocess.run(
        [sys.executable, HERE / "jobs.py", folder, str(processes), *scenarios],
        env={**inherited, **GIVE_BACK, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run(folder: Path, processes: int, *scenarios: str) -> None:
    done = launch(folder, processes, *scenarios)
    assert done.returncode == 0, done.stderr[-5000:]


def results(folder: Path, processes: int, scenario: str) -> list[dict[str, Any]]:
    files = [folder / f"{scenario}-{processes}-{rank}.pt" for rank in range(processes)]
    return [torch.load(file, weights_only=True) for file in files]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have left what they saw."""
    folder = tmp_path_factory.mktemp("job")
    run(folder, 2, *MODELS, *ONLY_TWO)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of four, of which one has no record."""
    folder = tmp_path_factory.mktemp("four")
    run(folder, 4, *MODELS, "half", "trained")
    return folder


def clipped_sum(name: str, *, weight: float = 0.0) -> Tensor:
    """The sum over records, one by one in a whole model, of clipped g(x) - weight g(0.9 x)."""
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
        total += part * min(1.0, CLIP_NORM / float(part.norm()))
    return total


def plainly_trained(*, half: bool = False, make: Callable[[], nn.Module] = small.chain) -> Tensor:
    """Twenty steps of a whole model on all records, without privacy."""
    net = small.Small(make).net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    x, y = small.records().tensors
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def check_sums(folder: Path, processes: int, name: str) -> None:
    want, apart = clipped_sum(name), clipped_sum(name, weight=0.5)
    for each in results(folder, processes, name):
        torch.testing.assert_close(each["clipped"], want, rtol=0, atol=1e-6)
        torch.testing.assert_close(each["difference"], apart, rtol=0, atol=1e-6)
        assert each["all"] == len(want)
    assert float(want.norm()) > 2 * CLIP_NORM


@pytest.mark.parametrize("name", list(MODELS))
def test_clipped_sums_are_those_of_one_process(job: Path, name: str) -> None:
    check_sums(job, 2, name)
    held = [each["held"] for each in results(job, 2, name)]
    assert sum(held) == len(clipped_sum(name)) > max(held)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_at_another_point_is_there_while_it_is_and_back_afterwards(
    job: Path, name: str
) -> None:
    make, records = MODELS[name]
    net = make()
    here = net(records())
    with torch.no_grad():
        for param in net.parameters():
            if param.requires_grad:
                param.mul_(0.9)
    for each in results(job, 2, name):
        torch.testing.assert_close(each["there"], net(records()))
        torch.testing.assert_close(each["here"], here)


@pytest.mark.parametrize("scenario", ["kept", "let go"])
def test_it_does_not_matter_when_gathered_parameters_are_let_go(job: Path, scenario: str) -> None:
    want, apart = clipped_sum("tied"), clipped_sum("tied", weight=0.5)
    for each in results(job, 2, scenario):
        torch.testing.assert_close(each["clipped"], want, rtol=0, atol=1e-6)
        torch.testing.assert_close(each["difference"], apart, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_four_processes_of_which_one_has_no_record_give_the_same_sums(
    four: Path, name: str
) -> None:
    check_sums(four, 4, name)


@pytest.mark.parametrize("scenario", HALF)
def test_a_pass_in_half_precision_gives_sums_of_float32(job: Path, scenario: str) -> None:
    want = clipped_sum("mlp")
    for each in results(job, 2, scenario):
        assert each["clipped"].dtype == torch.float32
        assert float((each["clipped"] - want).norm()) < 0.02 * float(want.norm())


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_noise_has_its_variance_once_and_is_independent_between_processes(
    request: pytest.FixtureRequest, processes: int
) -> None:
    folder = request.getfixturevalue("job" if processes == 2 else "four")
    lead, *others = results(folder, processes, "wide")
    noise = lead["noise"].double() / (MULTIPLIER * CLIP_NORM)
    error = math.sqrt(2 / len(noise))
    assert abs(float(noise.var()) - 1) < 5 * error
    assert all(torch.equal(each["noise"], lead["noise"]) for each in others)
    shares = noise.view(processes, -1)  # rows of the only weight, sharded in equal parts
    apart = torch.corrcoef(shares) - torch.eye(processes)
    assert float(apart.abs().max()) < 5 / math.sqrt(shares.shape[1])
    assert len(noise.unique()) > 0.99 * len(noise)


@pytest.mark.parametrize("scenario", ["trained", "checked", "ghost"])
def test_without_noise_and_clipping_it_is_plain_training_of_a_whole_model(
    job: Path, scenario: str
) -> None:
    want = plainly_trained()
    for each in results(job, 2, scenario):
        assert each["steps"] == 20
        torch.testing.assert_close(each["weights"], want, rtol=0, atol=2e-5)
        assert ("do not go into shards" in each["report"]) == (scenario == "ghost")


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
def test_weights_that_are_used_outside_of_their_layer_are_refused(
    job: Path, scenario: str, message: str
) -> None:
    """The engine of layers alone knows shards; with the probe or without, no process goes on."""
    for each in results(job, 2, scenario):
        assert message in each["message"]
        assert "one_by_one" not in each["message"]


def test_a_module_that_computes_with_its_own_weights_trains_as_a_whole_one(job: Path) -> None:
    for each in results(job, 2, "normed"):
        torch.testing.assert_close(each["weights"], plainly_trained(make=Normed), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_estimators_of_differences_train_on_shards_as_on_whole_parameters(
    job: Path, name: str
) -> None:
    # Differences that are not clipped add up to the gradient.
    for each in results(job, 2, f"whole {name}"):
        torch.testing.assert_close(each["weights"], plainly_trained(), rtol=0, atol=2e-4)
    (want, _), found = (results(job, 2, f"{kind} {name}") for kind in ("ddp", "clipped"))
    assert float((want["weights"] - plainly_trained()).norm()) > 0.1
    for each in found:
        torch.testing.assert_close(each["weights"], want["weights"], rtol=0, atol=2e-4)


def test_bf16_mixed_trains_as_a_whole_model_with_it(job: Path) -> None:
    begin = nn.utils.parameters_to_vector(small.Small().net.parameters()).detach()
    want = plainly_trained(half=True)
    moved = float((want - begin).norm())
    for each in results(job, 2, "mixed"):
        assert float((each["weights"] - want).norm()) < 0.02 * moved
    assert float((want - plainly_trained()).norm()) > 1e-4 * moved


def test_columns_in_any_order_of_processes_give_the_sums_of_one(job: Path) -> None:
    want = clipped_sum("even")
    for each in results(job, 2, "in_columns"):
        torch.testing.assert_close(each["clipped"], want, rtol=0, atol=1e-6)


def test_a_mesh_of_fewer_processes_is_refused_by_name_before_any_charge(job: Path) -> None:
    for each in results(job, 2, "apart"):
        assert re.search(
            r"\['net\.blocks\.2\.weight', .* are sharded over 1 of 2 processes.*mesh=self\.device",
            each["message"],
        )
    assert not list((job / "apart").rglob("*.journal"))


@pytest.mark.slow
def test_four_processes_train_the_same(four: Path) -> None:
    for each in results(four, 4, "trained"):
        torch.testing.assert_close(each["weights"], plainly_trained(), rtol=0, atol=2e-5)


def check_resumed(folder: Path, processes: int, before: dict[str, Any]) -> None:
    found = results(folder, processes, "resumed")
    assert sum(len(each["average"]) for each in found) == len(before["weights"])
    for each in found:
        assert torch.equal(each["begin"], before["weights"])
        assert torch.equal(each["weights"], found[0]["weights"])
        assert each["epsilon"] > before["epsilon"]
        assert each["steps"] == 6


def test_a_run_goes_on_from_its_folder_of_shards(job: Path) -> None:
    check_resumed(job, 2, results(job, 2, "saved")[0])
    done = subprocess.run(
        [sys.executable, "-m", "lightning_dp.report", job / "run/last.ckpt"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "6 steps" in done.stdout or "4 steps" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["saved", "consolidated"])
def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path: Path, scenario: str) -> None:
    run(tmp_path, 2, scenario)
    before = results(tmp_path, 2, scenario)[0]
    for processes in (4, 1):
        here = tmp_path / str(processes)
        here.mkdir()
        os.symlink(tmp_path / "run", here / "run")
        done = launch(here, processes, "resumed")
        assert done.returncode == 0, done.stderr[-5000:]
        found = results(here, processes, "resumed")
        assert sum(len(each["average"]) for each in found) == len(before["weights"])
        for each in found:
            assert torch.equal(each["begin"], before["weights"])
            assert torch.equal(each["weights"], found[0]["weights"])
            assert each["epsilon"] > before["epsilon"]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_process_that_dies_leaves_the_ledger_ahead_by_one_step_at_most(
    tmp_path: Path, how: str, rank: int, shards: int
) -> None:
    done = launch(tmp_path, 2, f"{how}-{rank}-{shards}")
    if how == "killed" and rank == 0:
        assert done.returncode == -signal.SIGKILL
    else:
        assert done.returncode != 0
    (journal,) = tmp_path.rglob("*.journal")
    made = int((tmp_path / f"steps-{rank}").read_text())
    assert made == 2
    assert made <= read_journal(journal)[1].total <= made + 1


@pytest.mark.slow
def test_the_peak_of_a_process_falls_with_their_number(tmp_path: Path) -> None:
    peaks = []
    for processes in (1, 2, 4):
        run(tmp_path, processes, "peak")
        found = results(tmp_path, processes, "peak")
        peaks.append(max(each["peak"] for each in found))
    # Of 24 million weights: 504, 305 and 189 MiB when this was written.
    assert peaks[1] < 0.7 * peaks[0]
    assert peaks[2] < 0.7 * peaks[1]
