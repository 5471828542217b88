"""kill -9 at any moment: the ledger is 0 or 1 steps ahead of the optimizer, never behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.journal import JournalError, read_journal
from tests.strategies.resume.killed_runs import Round, run
from tests.zoo import flat

PLANNED = 12
TARGET = 3.0

# place in a step -> how far the ledger is ahead of the optimizer's log when the process dies there
AHEAD = {
    "before charge": 0,
    "charged": 1,
    "training_step": 1,
    "backward": 1,
    "optimizer before closure": 1,
    "optimizer after closure": 1,
    "optimizer done": 0,
    "batch end": 0,
    "saving": 0,
}
ROUNDS: dict[str, dict[str, Any]] = {
    **{place: {"place": place, "step": 6} for place in AHEAD if place != "charged"},
    "charged": {"place": "charged", "step": 5},
    "backward, accumulating": {"place": "backward", "step": 5, "accumulate": 2},
    "every step saved": {"place": "training_step", "step": 9, "save_every": 1},
    **{f"random {i}": {"place": "random"} for i in range(2)},
}


# kills in the seventh step, of batches that depend on each other
BLOCKS: dict[str, dict[str, Any]] = {
    "in turns": {"place": "optimizer after closure", "step": 6, "sampling": "in turns"},
    "allocated": {"place": "training_step", "step": 6, "sampling": "allocated", "epochs": 2},
    "in order": {"place": "charged", "step": 6, "sampling": "in order", "epochs": 2},
}


# Of places close to each other one is killed by default.
RARE = {
    "charged",
    "optimizer done",
    "every step saved",
    "before charge",
    "backward",
    "optimizer before closure",
    "batch end",
    "random 0",
    "random 1",
}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in ROUNDS]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """All rounds that are asked for, one after the other."""
    folder = tmp_path_factory.mktemp("rounds")
    asked = [getattr(each, "callspec", None) for each in request.session.items]
    names = [each.params.get("name") for each in asked if each is not None]
    chosen = {name: what for name, what in ROUNDS.items() if name in names}
    blocks = [each.params.get("block") for each in asked if each is not None]
    chosen |= {name: what for name, what in BLOCKS.items() if name in blocks}
    for name, what in {**chosen, "disk full": {"place": "disk full", "step": 7}}.items():
        run(Round(str(folder / name), **what))
    return folder


def charges(path: Path) -> int:
    return read_journal(path)[1].total


def optimizer_steps(path: Path) -> int:
    return path.read_text().count("\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_ledger_is_ahead_by_a_step_at_most_and_its_resume_charges_everything(rounds, name):
    folder, place = rounds / name, ROUNDS[name]["place"]
    if place != "random":
        assert (folder / "ended_by").read_text() == "9"
    at_kill = charges(folder / "journal_after_kill")
    made_before = optimizer_steps(folder / "optimizer_after_kill.log")
    ahead = at_kill - made_before
    assert ahead == AHEAD[place] if place != "random" else ahead in (0, 1)
    assert at_kill >= 2

    resumed = json.loads((folder / "resumed.json").read_text())
    journal = Path(resumed["journal"])
    made_after = optimizer_steps(folder / "optimizer.log") - made_before
    assert resumed["steps"] == charges(journal) == at_kill + made_after
    events = [pair for run in read_journal(journal)[1].values() for pair in run]
    by_hand = PLDAccountant().epsilon(events, 1e-5, "add_remove")
    assert resumed["epsilon"] == pytest.approx(by_hand, rel=1e-9)
    assert resumed["epsilon"] <= TARGET
    # The rest of the plan gets the noise that reaches its end, with what the lost steps were charged.
    planned = PLANNED // ROUNDS[name].get("accumulate", 1)
    if at_kill == planned:
        assert resumed["steps"] == planned  # all was spent
        return
    assert resumed["global_step"] == planned
    lost = resumed["steps"] - planned
    assert 0 <= lost <= 4
    assert resumed["epsilon"] > 0.99 * TARGET
    assert (resumed["noise_multiplier"] > 1.0001 * events[0][0].noise_multiplier) == (lost > 0)
    assert ("the moment of a crash" in resumed["not_covered"]) == (lost > 0)


def test_checkpoints_of_a_killed_run_can_be_loaded(rounds):
    for path in rounds.rglob("*.ckpt"):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("block", "steps"),
    [
        ("in turns", [4, 4, 4, 2]),
        pytest.param("allocated", [12, 12, 6], marks=pytest.mark.slow),
        pytest.param("in order", [12, 12, 6], marks=pytest.mark.slow),
    ],
)
def test_a_kill_has_paid_for_the_block_and_the_rest_is_planned_for_what_is_left(
    rounds, block, steps
):
    """The checkpoint is of step 6, in the middle of a block, and the kill is in the next step."""
    folder = rounds / block
    resumed = json.loads((folder / "resumed.json").read_text())
    assert optimizer_steps(folder / "optimizer_after_kill.log") == 6
    events = [pair for run in read_journal(Path(resumed["journal"]))[1].values() for pair in run]
    assert [event.steps for event, n in events for _ in range(n)] == steps
    assert resumed["global_step"] == sum(steps) - (6 if steps[0] == 12 else 2)  # to the planned end
    relation = "zero_out" if block == "in order" else "add_remove"
    assert resumed["epsilon"] == PLDAccountant().epsilon(events, 1e-5, relation)
    assert 0.98 * TARGET < resumed["epsilon"] <= TARGET
    assert "the moment of a crash" in resumed["not_covered"]
    # Old noise would stop early: what is left affords less of it than the rest takes.
    assert resumed["noise_multiplier"] > 1.05 * events[0][0].noise_multiplier


def test_disk_that_is_full_ends_training_before_data_is_used(rounds):
    folder = rounds / "disk full"
    first = json.loads((folder / "first.json").read_text())
    assert re.match(r"JournalDiskError: .*\[Errno 27\] File too large.*ledger_dir", first["error"])
    assert first["error while cleaning up"] == "None"
    # Steps 0 to 6 were made; the charge of step 7 could not be written, and it was not made.
    assert optimizer_steps(folder / "optimizer_after_kill.log") == first["global_step"] == 7
    assert first["steps"] == 7
    assert first["error of a new fit"] is None


def test_resume_after_a_full_disk_cuts_the_torn_line(rounds):
    folder = rounds / "disk full"
    resumed = json.loads((folder / "resumed.json").read_text())
    lost = 1  # made after the checkpoint of step 6
    assert resumed["steps"] == charges(Path(resumed["journal"])) == PLANNED + lost
    assert optimizer_steps(folder / "optimizer.log") == PLANNED + lost


# -- a charge that cannot be written ends training before the data of its step is used -----------------


def test_journal_that_is_deleted_during_the_run_ends_it_and_is_missed_at_resume(
    fit, save_at, tmp_path
):
    class Delete(L.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:
                next((tmp_path / "privacy").glob("*.journal")).unlink()

    started: list[int] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            started.append(arguments[-1])

    with pytest.raises(JournalError, match=r"is gone .* while this run charges it"):
        fit(callbacks=(save_at(tmp_path / "a.ckpt", 0, 3), Delete(), Watch()), max_steps=6)
    assert len(started) == 4 + 1  # the fifth batch began, and was refused
    with pytest.raises(JournalError, match="is missing"):
        fit(tmp_path / "a.ckpt")


def test_failing_fsync_reaches_the_user_before_training_step(fit, tmp_path, monkeypatch):
    used = []

    class Counting(fit.classifier):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            used.append(batch_idx)
            return super().training_step(batch, batch_idx)

    class Break(L.Callback):
        """From the fourth step on the disk does not answer."""

        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:
                self.weights, self.module = flat(module), module
                monkeypatch.setattr("os.fsync", self.fail)

        @staticmethod
        def fail(_: int) -> None:
            raise OSError(5, "Input/output error")

    fit.classifier = Counting
    broken = Break()
    with pytest.raises(OSError, match="Input/output error"):
        fit(callbacks=(broken,))
    assert used == [0, 1, 2]
    assert torch.equal(flat(broken.module), broken.weights)
