"""Every checkpoint holds the report, as plain types and at little cost."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dp.report.files import from_checkpoint


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


def test_a_checkpoint_of_a_version_without_reports_resumes(fit, saved, edit_checkpoint):
    _, path = saved
    edit_checkpoint(path, lambda record: record.pop("report"))

    assert fit(path, max_steps=20).privacy.steps == 20


def test_epsilon_is_computed_once_for_each_step_that_is_saved(fit, saved, monkeypatch):
    fitted, path = saved
    asked = []
    accountant = type(fitted.privacy.config.accountant)
    compute = accountant.epsilon

    def counting(self, history, *arguments):
        asked.append(history)
        return compute(self, history, *arguments)

    monkeypatch.setattr(accountant, "epsilon", counting)
    fitted.trainer.save_checkpoint(path)
    fitted.privacy.report()

    assert asked == []
