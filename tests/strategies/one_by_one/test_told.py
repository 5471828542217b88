"""Records that run alone are told of together: in logs, metrics, hooks and the report."""

from __future__ import annotations

from typing import Any

import lightning as L
import torchmetrics
from torch.nn import functional as F

from lightning_dp import FullBatch
from tests.strategies.one_by_one.models import Base, N


def test_what_is_logged_and_counted_is_that_of_the_batch(fit):
    class Logs(Base):
        def build(self) -> None:
            super().build()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            output = self.net(x)
            loss = F.cross_entropy(output, y)
            self.accuracy(output, y)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log_dict({"loss": loss, "count": len(x)}, on_step=True, on_epoch=True)
            self.log("total", float(len(x)), reduce_fx="sum", batch_size=len(x))
            return {"loss": loss, "output": output.detach()}

    seen = []
    for engine in ("layers", "one_by_one"):
        trainer, _ = fit(Logs(), engine=engine, sampling=FullBatch(), batch_size=N)
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if "privacy" not in k}
        seen.append({k: round(v, 5) for k, v in metrics.items() if "count" not in k})
    assert seen[0] == seen[1]
    assert {"accuracy_step", "accuracy_epoch", "loss_step", "total"} <= set(seen[0])


def test_hooks_see_the_batch_and_one_output(fit):
    seen: list[Any] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((len(batch[0]), outputs))

    class Outputs(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "size": len(batch[0])}

    fit(Outputs(), batch_size=N, callbacks=[Watch()])
    ((size, outputs),) = seen
    assert size == N and outputs["size"] == [1] * N
    assert outputs["loss"].shape == () and not outputs["loss"].requires_grad


def test_the_report_says_that_records_run_alone(fit):
    _, privacy = fit(Base(), isolation_probe=False)
    report = privacy.report()
    assert report.isolation.startswith("by construction: each record runs alone")
    assert report.mechanism["gradient engine"] == "one_by_one"
    assert "not checked" not in report.summary()
