"""The report is on the disk and in every checkpoint, never among them, however the fit ended."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting import PoissonGaussian, epsilon, epsilon_text
from lightning_dp.accounting.journal import Charges, read_journal
from lightning_dp.callbacks import PrivacyReportFiles
from lightning_dp.report.files import (
    check,
    from_checkpoint,
    read_document,
    read_report,
    total,
    write_report,
)
from lightning_dp.report.run_report import fingerprints


class At(L.Callback):
    """Does something after a number of steps."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step:
            self.action()


def fail(error):
    raise error


@pytest.fixture
def said(monkeypatch):
    """The lines that fits say at their end."""
    lines = []
    monkeypatch.setattr("lightning_dp.callbacks.privacy_report_files.rank_zero_info", lines.append)
    return lines


def test_it_reads_back_as_the_run_tells_it(fit):
    fitted = fit(callbacks=(ModelCheckpoint(every_n_train_steps=5),))

    (path,) = fitted.reports
    assert path.name == f"privacy_report-{fitted.id}.json"
    assert read_report(path) == fitted.privacy.report()
    page = path.with_suffix(".md").read_text("utf-8")
    assert f"ε = {epsilon_text(fitted.privacy.epsilon)} at δ = 1e-05 (add_remove)" in page
    assert "12 × PoissonGaussian(noise_multiplier=1.5, sample_rate=0.1)" in page
    assert fitted.id in page and "clip norm max_grad_norm: 1" in page
    assert "tests on other private data (validation)" in page


def test_it_names_the_weights_that_it_speaks_of(fit, tmp_path):
    """Those at the end, without a checkpoint; and in a checkpoint those that it holds."""
    fitted = fit(
        callbacks=(ModelCheckpoint(tmp_path / "saved", every_n_train_steps=5, save_top_k=-1),)
    )
    saved = [torch.load(path, weights_only=False) for path in (tmp_path / "saved").iterdir()]
    said = [
        (each["lightning_dp"]["report"]["weights"], each["state_dict"].values()) for each in saved
    ]
    weights = fitted.trainer.lightning_module.parameters()
    for found, values in [*said, (read_report(fitted.reports[0]).weights, weights)]:
        assert found and set(found) <= set(fingerprints(values))
    assert len({found[0] for found, _ in said}) == len(said) == 2


@pytest.mark.parametrize(("where", "logs"), [(None, True), ("logs/version_0", True), ("a", False)])
def test_every_file_of_a_checkpoint_folder_is_a_checkpoint(fit, tmp_path, where, logs):
    folder = None if where is None else tmp_path / where
    saving = (
        ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, save_last=True),
        OnExceptionCheckpoint(tmp_path / "broken"),
    )
    logger = CSVLogger(tmp_path, name="logs", version="version_0") if logs else False
    fitted = fit(
        callbacks=(*saving, At(11, lambda: fail(OSError()))), logger=logger, raises=OSError
    )

    folders = (saving[0].dirpath, tmp_path / "broken")
    own = {"metrics.csv", "hparams.yaml"}  # of the logger
    files = [Path(f, name) for f in folders for name in os.listdir(f) if name not in own]
    assert len(files) == 4
    for path in files:
        assert torch.load(path, weights_only=True)["lightning_dp"]["report"]["steps"] > 0
    assert len(fitted.reports) == 1


def test_it_is_in_the_loggers_folder_unless_checkpoints_go_there(fit, tmp_path):
    saving = ModelCheckpoint(tmp_path / "logs" / "version_1")

    assert fit(max_epochs=0, max_steps=-1).reports == []  # no step was charged
    first = fit(logger=CSVLogger(tmp_path, name="logs"))
    assert [path.parent for path in first.reports] == [tmp_path / "logs" / "version_0"]
    fit(logger=CSVLogger(tmp_path, name="logs"), callbacks=(saving,))
    assert {path.parent for path in first.reports} == {
        tmp_path / "logs" / "version_0",
        tmp_path / "privacy",
    }


def test_a_fast_dev_run_charges_and_leaves_nothing(fit, said, tmp_path):
    fitted = fit(fast_dev_run=2, logger=True, callbacks=(ModelCheckpoint(tmp_path / "a"),))

    assert list(tmp_path.iterdir()) == []
    assert fitted.privacy.steps == 2 and 0 < fitted.privacy.epsilon < math.inf
    assert fitted.privacy.report().journal is None
    (line,) = said
    assert "after 2 noised steps; " in line and line.endswith("; report: none in a fast_dev_run")

    fit(privacy=fitted.privacy)  # what it spent is in the journal of the next fit
    journal = Path(fitted.privacy.report().journal)
    assert [charges[0][1] for charges in read_journal(journal)[1].values()] == [2, 12]
    assert [read_report(path).steps for path in fitted.reports] == [14]
    files = sorted(tmp_path.rglob("*"))
    fit(privacy=fitted.privacy, fast_dev_run=True)  # of a ledger that has its journal
    assert sorted(tmp_path.rglob("*")) == files
    assert read_journal(journal)[1].total == 15


def test_the_report_is_never_older_than_a_checkpoint(fit, tmp_path):
    steps = []

    class Compare(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            saved = torch.load(filepath, weights_only=True)["lightning_dp"]["report"]["steps"]
            (beside,) = (tmp_path / "privacy").glob("*.json")
            steps.append((saved, read_report(beside).steps))

    fit(callbacks=(Compare(tmp_path / "a", every_n_train_steps=5, save_top_k=-1),))

    assert steps == [(5, 5), (10, 10)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_is_written_when_training_breaks_off(fit, error, said):
    outcome = SystemExit if error is KeyboardInterrupt else error  # Lightning's way of ending it
    fitted = fit(callbacks=(At(4, lambda: fail(error())),), raises=outcome)

    (path,) = fitted.reports
    assert read_report(path).steps == 4
    (line,) = said
    assert "after 4 noised steps" in line and str(path) in line


def test_a_resumed_run_replaces_its_report_and_another_run_does_not(fit, saved, tmp_path):
    first, checkpoint = saved
    again = fit(checkpoint, max_steps=20, default_root_dir=tmp_path)
    other = fit()

    reports = {path.name: path for path in (tmp_path / "privacy").glob("*.json")}
    assert len(reports) == 2
    assert read_report(reports[f"privacy_report-{first.id}.json"]).steps == 20
    assert again.id == first.id != other.id
    assert read_report(reports[f"privacy_report-{other.id}.json"]).steps == 12


def test_a_full_disk_leaves_the_old_report_whole(fit, tmp_path, monkeypatch, said):
    files = PrivacyReportFiles()
    fitted, path = fit(callbacks=(files,)), tmp_path / "saved" / "last.ckpt"
    (report,) = fitted.reports
    before = report.read_bytes()
    files._written = None  # what is written already would not be written again

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_dp._files.os.fsync", full)
    with pytest.warns(PrivacyWarning, match="No space left on device"):
        fitted.trainer.save_checkpoint(path)

    assert report.read_bytes() == before
    assert torch.load(path, weights_only=True)["lightning_dp"]["report"]["steps"] == 12
    assert [p.name for p in report.parent.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_holds_the_report(fit, tmp_path, weights_only):
    saving = ModelCheckpoint(tmp_path, filename="c", save_weights_only=weights_only)
    fitted = fit(callbacks=(saving,))

    record = torch.load(tmp_path / "c.ckpt", weights_only=True)["lightning_dp"]

    report = from_checkpoint(record)
    assert report is not None
    assert (report.steps, report.epsilon) == (12, fitted.privacy.epsilon)
    assert report.events == fitted.privacy.report().events
    assert (report.ledger_id, report.journal) == (fitted.id, str(fitted.journal))
    assert "events" not in record["report"]  # the ledger has them


@pytest.mark.parametrize("other", ["add_remove", "replace_one", "zero_out"])
def test_a_budget_is_added_under_the_relation_of_the_sum(tmp_path, report_of, other):
    budget = report_of(claims_budget=True, epsilon=3.0)
    events = Charges({"b" * 16: [(PoissonGaussian(1.1, 0.02), 50)]})
    spent = epsilon(events.history(), 1e-5, other)
    fixed = report_of(ledger_id="f" * 16, epsilon=spent, relation=other, events=events)
    earlier = replace(budget, epsilon=2.5, target_epsilon=2.5)  # of a fit with less
    paths = [
        write_report(each, tmp_path / name)
        for each, name in ((budget, "a"), (earlier, "b"), (fixed, "c"))
    ]
    together = total([check(read_document(path), None) for path in paths], (), None, "add_remove")
    assert together is not None and together.relation == other
    # Another record is one less and one more: (2 ε, (1 + e^ε) δ).
    is_twice = other == "replace_one"
    assert together.epsilon == pytest.approx(spent + (6.0 if is_twice else 3.0), rel=1e-3)
    growth = 1 + math.exp(3.0) if is_twice else 1.0
    assert together.delta == pytest.approx((1 + growth) * 1e-5)
