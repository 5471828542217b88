"""The report is on the disk, beside the checkpoints, however the fit ended."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report import read_report
from lightning_dp.warnings import PrivacyWarning


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
    monkeypatch.setattr("lightning_dp.strategies.fit_reports.rank_zero_info", lines.append)
    return lines


def test_it_is_beside_the_checkpoints_and_reads_back_as_the_run_tells_it(fit, tmp_path):
    saving = (
        ModelCheckpoint(tmp_path / "a"),
        ModelCheckpoint(tmp_path / "b", every_n_train_steps=5),
    )
    fitted = fit(callbacks=saving)

    assert [path.parent.name for path in fitted.reports] == ["a", "b"]
    for path in fitted.reports:
        assert path.name == f"privacy_report-{fitted.id}.json"
        assert read_report(path) == fitted.privacy.report()
        page = path.with_suffix(".md").read_text("utf-8")
        assert f"(ε, δ) = ({fitted.privacy.epsilon:.4g}, 1e-05)" in page
        assert "12 × PoissonGaussian(noise_multiplier=1.5, sample_rate=0.1)" in page
        assert fitted.id in page and "clip norm `max_grad_norm`: 1" in page
        assert "validation on private data" in page


def test_it_is_in_the_loggers_folder_without_checkpoints(fit, tmp_path):
    fitted = fit(logger=CSVLogger(tmp_path, name="logs"))

    assert [path.parent for path in fitted.reports] == [tmp_path / "logs" / "version_0"]


def test_it_is_beside_the_journal_without_checkpoints_and_loggers(fit, tmp_path):
    fitted = fit(logger=False, enable_checkpointing=False)

    assert [path.parent for path in fitted.reports] == [tmp_path / "privacy"]


def test_a_fast_dev_run_charges_and_leaves_no_report(fit, said):
    fitted = fit(fast_dev_run=True)

    assert fitted.privacy.steps == 1 and fitted.journal.exists()
    assert fitted.reports == []
    (line,) = said
    assert line.endswith("after 1 noised step; report: none in a fast_dev_run")


def test_a_checkpoint_by_hand_gets_a_report_beside_it(saved):
    fitted, path = saved

    assert path.with_name(f"privacy_report-{fitted.id}.json") in fitted.reports


def test_the_report_is_never_older_than_the_checkpoint_beside_it(fit, tmp_path):
    steps = []

    class Compare(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            saved = torch.load(filepath, weights_only=True)["lightning_dp"]["report"]["steps"]
            (beside,) = (tmp_path / "a").glob("*.json")
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


def test_one_line_at_the_end_tells_epsilon_and_the_file(fit, said):
    privacy = DifferentialPrivacy(
        target_epsilon=1.0, noise_multiplier=2.0, target_delta=1e-5, isolation_probe=False
    )
    fitted = fit(privacy=privacy, max_steps=-1, max_epochs=50)

    (path,) = fitted.reports
    assert said == [
        f"privacy: ε = {privacy.epsilon:.4g} of 1 at δ = 1e-05 (add_remove) after {privacy.steps} "
        f"noised steps; privacy budget reached; report: {path}"
    ]


def test_the_line_of_a_seeded_run_says_that_it_is_not_private(fit, said):
    privacy = DifferentialPrivacy(
        noise_multiplier=2.0, target_delta=1e-5, seed=0, isolation_probe=False
    )
    fit(privacy=privacy)

    assert said[0].startswith("privacy: NOT PRIVATE (a seed was set): ε = ")


def test_a_file_that_cannot_be_written_is_said_and_training_goes_on(fit, tmp_path, said):
    privacy = DifferentialPrivacy(noise_multiplier=1.5, target_delta=1e-5, isolation_probe=False)
    in_the_way = tmp_path / "privacy" / f"privacy_report-{privacy.report().ledger_id}.json"
    in_the_way.mkdir(parents=True)

    with pytest.warns(PrivacyWarning, match="could not be written into .* Training goes on"):
        fit(privacy=privacy)

    assert privacy.steps == 12
    assert "after 12 noised steps; report: could not be written into" in said[0]


def test_a_full_disk_leaves_the_old_report_whole(fit, saved, monkeypatch, said):
    fitted, path = saved
    report = path.with_name(f"privacy_report-{fitted.id}.json")
    before = report.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_dp.report.files.os.fsync", full)
    with pytest.warns(PrivacyWarning, match="No space left on device"):
        fitted.trainer.save_checkpoint(path)

    assert report.read_bytes() == before
    assert torch.load(path, weights_only=True)["lightning_dp"]["report"]["steps"] == 12
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_infinite_epsilon_is_legal_json(fit):
    privacy = DifferentialPrivacy(noise_multiplier=0.0, target_delta=1e-5, isolation_probe=False)
    fitted = fit(privacy=privacy)

    (path,) = fitted.reports

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    assert content["epsilon"] == "inf" and content["private"] is False
    assert read_report(path) == privacy.report()
    assert "NOT PRIVATE (no noise)" in path.with_suffix(".md").read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": "two"}, "epsilon='two' must be a number"),
        ({"steps": 2.5}, "steps=2.5 must be of type int"),
        ({"format": "other"}, "not a privacy report of this version"),
        ({"more": 1}, r"missing or unknown: \['more'\]"),
        ({"relation": "x"}, "relation must be"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_its_field(fit, edit_json, change, message):
    (path,) = fit().reports
    edit_json(path, lambda content: content.update(change))

    with pytest.raises(ValueError, match=message):
        read_report(path)


def test_nothing_is_written_before_a_step_was_charged(fit):
    fitted = fit(max_epochs=0, max_steps=-1)

    assert fitted.reports == []
