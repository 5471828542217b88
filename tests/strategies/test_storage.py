"""The privacy journal is in a folder of this machine, the same during a fit, or the fit is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_dp.accounting.journal import JournalDiskError
from tests.zoo import private


class Elsewhere(L.Callback):
    """Changes the working directory after three batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3:
            self.folder.mkdir(exist_ok=True)
            os.chdir(self.folder)


@pytest.fixture
def fit(classifier, mlp, loader, make_trainer):
    def run(
        ledger_dir: Any = None, callbacks: Any = (), ckpt_path: Any = None, **trainer: Any
    ) -> Any:
        privacy = private(ledger_dir=ledger_dir)
        made = make_trainer(**{"max_steps": 6, "callbacks": [privacy, *callbacks], **trainer})
        made.fit(classifier(mlp()), loader, ckpt_path=ckpt_path)
        return privacy, made

    return run


def journals(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.journal"))


@pytest.mark.parametrize(
    "root", ["memory://runs", "s3://bucket/runs", os.fsdecode(b"/tmp/runs-\xff")]
)
def test_a_root_that_is_no_local_folder_is_refused_with_the_cure(fit, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"default_root_dir='.*DifferentialPrivacy\(ledger_dir="):
        fit(default_root_dir=root)
    assert list(tmp_path.iterdir()) == []
    privacy, trainer = fit(tmp_path / "ledgers", default_root_dir=root)
    assert privacy.steps == trainer.global_step == 6
    assert [path.parent for path in journals(tmp_path)] == [tmp_path / "ledgers"]


@pytest.mark.parametrize(
    "folder", ["s3://bucket/privacy", "file:///tmp/x", os.fsdecode(b"/tmp/\xff")]
)
def test_a_ledger_dir_that_is_no_local_folder_is_refused_at_once(folder):
    with pytest.raises(ValueError, match="ledger_dir="):
        private(ledger_dir=folder)


def test_the_home_folder_has_its_tilde(fit, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    fit("~/ledgers")
    fit(default_root_dir="~/runs")
    assert [path.parent for path in journals(tmp_path)] == [
        tmp_path / "home" / "ledgers",
        tmp_path / "home" / "runs" / "privacy",
    ]


@pytest.mark.parametrize("name", ["with space", "naïve-Überprüfung-隐私", "two\nlines", "[*?]"])
def test_a_folder_of_any_name_trains_saves_and_resumes(fit, tmp_path, name):
    privacy, trainer = fit(tmp_path / name)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again, _ = fit(tmp_path / name, ckpt_path=tmp_path / "a.ckpt", max_steps=9)
    assert (privacy.steps, again.steps) == (6, 9)
    assert len(journals(tmp_path)) == 1


@pytest.mark.parametrize("options", [{"ledger_dir": "ledgers"}, {"default_root_dir": "ledgers"}])
def test_a_relative_folder_stays_where_it_was_when_the_fit_began(
    fit, tmp_path, monkeypatch, options
):
    monkeypatch.chdir(tmp_path)
    privacy, trainer = fit(callbacks=[Elsewhere(tmp_path / "other")], **options)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (journal,) = journals(tmp_path)
    assert tmp_path / "ledgers" in journal.parents
    assert privacy.report().journal == str(journal)
    assert fit(ckpt_path=tmp_path / "a.ckpt", max_steps=9, **options)[0].steps == 9
    assert len(journals(tmp_path)) == 1


def test_a_file_in_the_place_of_the_folder_is_refused_before_any_batch(fit, tmp_path):
    (tmp_path / "ledgers").write_text("")
    with pytest.raises(JournalDiskError, match=r"ledgers.*ledger_dir"):
        fit(tmp_path / "ledgers")


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_journal_lock_and_report_are_for_their_owner_alone(fit, tmp_path):
    before = os.umask(0)
    try:
        fit(tmp_path / "ledgers")
    finally:
        os.umask(before)
    found = sorted((tmp_path / "ledgers").iterdir())
    assert {path.suffix for path in found} == {".journal", ".lock", ".json", ".md"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert stat.S_IMODE((tmp_path / "ledgers").stat().st_mode) == 0o700
