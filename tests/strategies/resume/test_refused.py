"""A resume under which ε would be wrong is refused before the first step."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dp import FullBatch, Momentum
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting.journal import JournalError
from lightning_dp.schedules import Exponential


@pytest.fixture
def saved(fit: Any, save_at: Any, tmp_path: Path) -> Any:
    """A run of 10 steps whose checkpoint was saved after 6."""
    return fit(callbacks=(save_at(tmp_path / "a.ckpt", 0, 5),), max_steps=10)


def refused(
    fit: Any, saved: Any, path: Path, error: type[Exception], match: str, **options: Any
) -> None:
    """The resume raises, makes no training step, charges nothing and leaves the file alone."""
    probe = type(saved.probe)()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    journal = saved.ledger.journal_path
    written = journal.read_bytes() if journal.exists() else None
    with pytest.raises(error, match=match):
        fit(path, callbacks=(probe,), **options)
    assert probe.training_steps == 0
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert (journal.read_bytes() if journal.exists() else None) == written


def test_checkpoint_without_ledger_is_refused_with_the_cure(fit, saved, tmp_path):
    content = torch.load(tmp_path / "a.ckpt", weights_only=False)
    del content["lightning_dp"]
    torch.save(content, tmp_path / "plain.ckpt")
    match = (
        r"plain\.ckpt holds no privacy ledger.*load them into the model and fit without ckpt_path"
    )
    refused(fit, saved, tmp_path / "plain.ckpt", ValueError, match)


CHANGED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_grad_norm": 2.0}, "max_grad_norm=1.0", "max_grad_norm=2.0"),
    ({"target_delta": 1e-6}, "1e-05", "1e-06"),
    ({"relation": "replace_one"}, "add_remove", "replace_one"),
    ({"noise_schedule": Exponential(0.1)}, "Constant()", "Exponential(rate=0.1)"),
    ({"noise_multiplier": 1.1}, "1.0", "1.1"),
    ({"sampling": FullBatch()}, "Poisson()", "FullBatch()"),
    ({"postprocessing": [Momentum(0.5)]}, "()", "Momentum(beta=0.5)"),
]
OTHER_BATCHES: list[tuple[dict[str, Any], str, str]] = [
    ({"batch_size": 8}, f"sample_rate={4 / 48}", f"sample_rate={8 / 48}"),
    ({"records": 47}, "num_records=48", "num_records=47"),
    ({"accumulate_grad_batches": 2}, "chunks_per_step=1", "chunks_per_step=2"),
    ({"batch_size": 2, "accumulate_grad_batches": 2}, "chunks_per_step=1", "chunks_per_step=2"),
]


def test_changed_configuration_and_batches_are_refused_naming_both_values(fit, saved, tmp_path):
    path = tmp_path / "a.ckpt"
    for privacy, was, now in CHANGED:
        match = (
            f"differs from the checkpoint's: it was .*{re.escape(was)}.*, now .*{re.escape(now)}"
        )
        refused(fit, saved, path, ValueError, match, privacy=privacy)
    for options, was, now in OTHER_BATCHES:
        match = f"{re.escape(was)}.* before, .*{re.escape(now)}.* now"
        refused(fit, saved, path, ValueError, match, **options)


def test_changed_target_epsilon_and_learning_rate_are_allowed(fit, saved, tmp_path):
    with pytest.warns(PrivacyWarning, match="No training step was made"):
        spent = fit(tmp_path / "a.ckpt", privacy={"target_epsilon": saved.privacy.epsilon * 0.99})
    assert (spent.probe.training_steps, spent.privacy.steps) == (0, 10)
    slower = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.01)}
    resumed = fit(tmp_path / "a.ckpt", privacy={"target_epsilon": 100.0}, **slower)
    assert resumed.privacy.steps == 10 + 18
    target = resumed.privacy.epsilon * 1.03
    tighter = fit(tmp_path / "a.ckpt", privacy={"target_epsilon": target})
    assert 28 <= tighter.privacy.steps < 28 + 18
    assert tighter.privacy.epsilon <= target


def lines(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


DAMAGE: list[tuple[Callable[[bytes], bytes | None], str]] = [
    # an older copy of the file: it lost the last six of ten charges, or all
    (lambda old: b"".join(lines(old)[:5]), "lacks charges of the checkpoint.*recover_journal"),
    (lambda old: lines(old)[0], "lacks charges of the checkpoint.*recover_journal"),
    (lambda old: b"".join(lines(old)[:4] + lines(old)[5:]), "is damaged before line 5"),
    (lambda old: None, r"is missing.*ledger_dir.*recover_journal\(checkpoint_path, directory"),
]


def test_bad_journal_is_refused(fit, saved, tmp_path):
    journal = saved.ledger.journal_path
    whole = journal.read_bytes()
    for damage, match in DAMAGE:
        found = damage(whole)
        journal.unlink() if found is None else journal.write_bytes(found)
        refused(fit, saved, tmp_path / "a.ckpt", JournalError, match)


def test_moved_journal_is_found_through_ledger_dir(fit, saved, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(saved.ledger.journal_path, moved)
    refused(fit, saved, tmp_path / "a.ckpt", JournalError, "is missing")
    resumed = fit(tmp_path / "a.ckpt", privacy={"ledger_dir": str(moved)})
    assert resumed.privacy.steps == 10 + 18
    assert resumed.ledger.journal_path.parent == moved
    # A checkpoint of the resumed run knows the new place.
    resumed.trainer.save_checkpoint(tmp_path / "b.ckpt")
    again = fit(tmp_path / "b.ckpt", max_epochs=3)
    assert again.privacy.steps == 28 + 12
