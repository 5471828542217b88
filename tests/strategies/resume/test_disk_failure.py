"""A charge that cannot be written ends training before the data of its step is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dp.accounting.journal import JournalError


class Watch(L.Callback):
    """Keeps the weights as they were before each batch, and counts the batches that were used."""

    def __init__(self) -> None:
        self.weights: torch.Tensor | None = None
        self.started = 0

    def flat(self, module: L.LightningModule) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()

    def on_fit_start(self, trainer: Any, module: L.LightningModule) -> None:
        self.weights, self.module = self.flat(module), module

    def on_train_batch_start(self, *_: Any) -> None:
        self.started += 1

    def nothing_moved(self) -> bool:
        return self.weights is not None and torch.equal(self.weights, self.flat(self.module))


def test_folder_that_cannot_be_made_ends_the_fit_before_the_first_batch(
    fit: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    watch = Watch()
    with pytest.raises(JournalError, match=r"file.*ledger_dir"):
        fit(privacy={"ledger_dir": str(tmp_path / "file" / "ledger")}, callbacks=(watch,))
    assert watch.started == 0 and watch.nothing_moved()


def test_journal_that_is_deleted_during_the_run_ends_it_and_is_missed_at_resume(
    fit: Any, save_at: Any, tmp_path: Path
) -> None:
    class Delete(L.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:
                next((tmp_path / "privacy").glob("*.journal")).unlink()

    watch = Watch()
    with pytest.raises(JournalError, match=r"is gone .* while this run charges it"):
        fit(callbacks=(save_at(tmp_path / "a.ckpt", 0, 3), Delete(), watch), max_steps=6)
    assert watch.started == 4 + 1  # the fifth batch began, and was refused
    with pytest.raises(JournalError, match="is missing"):
        fit(tmp_path / "a.ckpt")


def test_failing_fsync_reaches_the_user_before_training_step(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
                self.weights = torch.nn.utils.parameters_to_vector(module.parameters()).clone()
                monkeypatch.setattr("os.fsync", self.fail)

        @staticmethod
        def fail(_: int) -> None:
            raise OSError(5, "Input/output error")

    fit.classifier = Counting
    broken, model = Break(), {}

    class Keep(L.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            model["module"] = module

    with pytest.raises(OSError, match="Input/output error"):
        # The probe runs the model, too.
        fit(callbacks=(broken, Keep()), privacy={"isolation_probe": False})
    assert used == [0, 1, 2]
    after = torch.nn.utils.parameters_to_vector(model["module"].parameters())
    torch.testing.assert_close(after, broken.weights, rtol=0, atol=0)
