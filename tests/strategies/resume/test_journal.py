"""The journal: where it is, and that every run ever made counts in it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.events import PoissonGaussian
from lightning_dp.accounting.journal import JournalDiskError, JournalError, read_journal
from tests.zoo import flat, private

# -- a checkpoint rolls back the model, never the ledger -----------------------------------------


@pytest.fixture
def old(fit: Any, save_at: Any, tmp_path: Path) -> Any:
    """A run of 24 steps whose checkpoint was saved after 6."""
    return fit(callbacks=(save_at(tmp_path / "old.ckpt", 0, 5),))


def epsilon_of(steps: int) -> float:
    return PLDAccountant().epsilon([(PoissonGaussian(1.0, 4 / 48), steps)], 1e-5, "add_remove")


def journals(folder: Path) -> list[Path]:
    return list(folder.rglob("*.journal"))


@pytest.mark.parametrize("same_callback", [pytest.param(True, marks=pytest.mark.slow), False])
def test_older_checkpoint_in_the_same_process_never_shrinks_the_ledger(
    fit, old, tmp_path, same_callback
):
    privacy, seen = old.privacy if same_callback else private(), []
    watch = L.Callback()
    watch.on_train_start = lambda *_: seen.append((privacy.steps, privacy.epsilon))
    watch.on_train_batch_start = watch.on_train_start
    resumed = fit(tmp_path / "old.ckpt", privacy=privacy, callbacks=(watch,))
    assert resumed.probe.optimizer_steps == 18
    assert resumed.privacy.steps == 24 + 18
    assert seen == sorted(seen) and seen[0] == (24, pytest.approx(epsilon_of(24), rel=1e-9))
    assert resumed.privacy.epsilon == pytest.approx(epsilon_of(42), rel=1e-9)


def test_checkpoints_of_two_branches_know_each_other(fit, old, tmp_path):
    for name, steps in [("a", 10), ("b", 13)]:
        branch = fit(tmp_path / "old.ckpt", max_epochs=-1, max_steps=steps)
        branch.trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    # a.ckpt was written before b ran, and does not contain it; the journal does.
    again = fit(tmp_path / "a.ckpt", max_epochs=-1, max_steps=12)
    assert again.privacy.steps == 24 + 4 + 7 + 2


def test_resume_appends_to_the_same_journal_which_holds_exactly_the_ledger(fit, old, tmp_path):
    (journal,) = journals(tmp_path)
    charges = journal.read_bytes().count(b'\n["')
    resumed = fit(tmp_path / "old.ckpt", default_root_dir=tmp_path / "elsewhere")
    assert journals(tmp_path) == [journal] == [resumed.ledger.journal_path]
    assert journal.read_bytes().count(b'\n["') == charges + resumed.probe.optimizer_steps
    _, runs = read_journal(journal)
    written = [(event, count) for charges in runs.values() for event, count in charges]
    assert len(runs) == 2 and sum(count for _, count in written) == 42
    in_file = PLDAccountant().epsilon(written, 1e-5, "add_remove")
    assert in_file == pytest.approx(resumed.privacy.epsilon, rel=1e-9)


def test_ledgers_of_two_callbacks_merge(fit, old, tmp_path):
    other = fit(max_steps=3, default_root_dir=tmp_path / "other")
    resumed = fit(tmp_path / "old.ckpt", privacy=other.privacy, max_steps=8)
    assert resumed.privacy.steps == 24 + 3 + 2
    _, runs = read_journal(resumed.ledger.journal_path)
    assert sum(count for charges in runs.values() for _, count in charges) == 29


def test_budget_counts_what_was_made_after_the_checkpoint(fit, old, tmp_path):
    target = epsilon_of(30) * 1.0001
    resumed = fit(tmp_path / "old.ckpt", privacy={"target_epsilon": target})
    assert resumed.probe.optimizer_steps == 6  # 18 are left of the plan, 6 of the budget
    assert resumed.privacy.epsilon <= target < epsilon_of(31)


HOLD = """
import sys, time
from pathlib import Path
from lightning_dp.accounting.journal import Journal, read_journal
path = Path(sys.argv[1])
journal = Journal(path, read_journal(path)[0])
print("held", flush=True)
time.sleep(60)
"""


def test_resume_is_refused_while_another_process_holds_the_journal(fit, old, tmp_path):
    command = [sys.executable, "-c", HOLD, str(old.ledger.journal_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            probe = type(old.probe)()
            with pytest.raises(JournalError, match="in use by another run"):
                fit(tmp_path / "old.ckpt", callbacks=(probe,))
            assert probe.training_steps == 0
        finally:
            holder.kill()
    # The lock of a process that was killed is free again.
    assert fit(tmp_path / "old.ckpt", max_steps=7).privacy.steps == 25


# -- a folder of this machine, the same during a fit, or the fit is refused ----------------------


@pytest.fixture
def fit_in(classifier, mlp, loader, make_trainer):
    def run(
        ledger_dir: Any = None, callbacks: Any = (), ckpt_path: Any = None, **trainer: Any
    ) -> Any:
        privacy = private(ledger_dir=ledger_dir)
        made = make_trainer(**{"max_steps": 6, "callbacks": [privacy, *callbacks], **trainer})
        made.fit(classifier(mlp()), loader, ckpt_path=ckpt_path)
        return privacy, made

    return run


def test_a_folder_that_is_not_local_is_refused_with_the_cure(fit_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="ledger_dir="):
        private(ledger_dir="s3://bucket/privacy")
    with pytest.raises(ValueError, match=r"default_root_dir='.*DifferentialPrivacy\(ledger_dir="):
        fit_in(default_root_dir="s3://bucket/runs")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_any_name_trains_saves_and_resumes(fit_in, tmp_path):
    name = "two\nlines [*?] 隐私"
    privacy, trainer = fit_in(tmp_path / name)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again, _ = fit_in(tmp_path / name, ckpt_path=tmp_path / "a.ckpt", max_steps=9)
    assert (privacy.steps, again.steps) == (6, 9)
    assert len(journals(tmp_path)) == 1


@pytest.mark.parametrize("options", [{"ledger_dir": "ledgers"}, {"default_root_dir": "ledgers"}])
def test_a_relative_folder_stays_where_it_was_when_the_fit_began(
    fit_in, tmp_path, monkeypatch, options, at_each_step
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    moves = at_each_step(lambda *_: os.chdir(tmp_path / "other"))
    privacy, trainer = fit_in(callbacks=[moves], **options)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (journal,) = journals(tmp_path)
    assert tmp_path / "ledgers" in journal.parents
    assert privacy.report().journal == str(journal)
    assert fit_in(ckpt_path=tmp_path / "a.ckpt", max_steps=9, **options)[0].steps == 9
    assert len(journals(tmp_path)) == 1


@pytest.mark.parametrize("below", [".", "a"])
def test_a_file_in_the_place_of_the_folder_is_refused_before_any_batch(fit_in, tmp_path, below):
    started, weights, watch = [], [], L.Callback()
    watch.on_fit_start = lambda trainer, module: weights.extend([flat(module), module])
    watch.on_train_batch_start = lambda *arguments: started.append(arguments[-1])
    (tmp_path / "ledgers").write_text("")
    with pytest.raises(JournalDiskError, match=r"ledgers.*ledger_dir"):
        fit_in(tmp_path / "ledgers" / below, callbacks=[watch])
    assert not started and torch.equal(weights[0], flat(weights[1]))


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_journal_lock_and_report_are_for_their_owner_alone(fit_in, tmp_path):
    before = os.umask(0)
    try:
        fit_in(tmp_path / "ledgers")
    finally:
        os.umask(before)
    found = sorted((tmp_path / "ledgers").iterdir())
    assert {path.suffix for path in found} == {".journal", ".lock", ".json", ".md"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert stat.S_IMODE((tmp_path / "ledgers").stat().st_mode) == 0o700
