"""Private runs whose reports are on the disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.accounting.journal import Charges
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report import PrivacyReport
from lightning_dp.report.__main__ import main
from lightning_dp.schedules import AbstractAdaptiveSchedule
from tests.zoo import private


@dataclass
class Fitted:
    """A fit that is over, or broke off."""

    folder: Path
    trainer: L.Trainer
    privacy: DifferentialPrivacy

    @property
    def id(self) -> str:
        return self.privacy.report().ledger_id

    @property
    def journal(self) -> Path:
        return Path(self.privacy.report().journal or "")

    @property
    def reports(self) -> list[Path]:
        return sorted(self.folder.rglob("privacy_report-*.json"))


@pytest.fixture
def fit(
    classifier: Any, mlp: Any, loader: Any, make_trainer: Any, tmp_path: Path
) -> Callable[..., Fitted]:
    """Fits a fresh model; a fit that raises is given back, too, with ``raises``."""

    def run(
        ckpt_path: Any = None,
        *,
        privacy: DifferentialPrivacy | None = None,
        callbacks: tuple[L.Callback, ...] = (),
        raises: type[BaseException] | None = None,
        **trainer: Any,
    ) -> Fitted:
        if privacy is None:
            privacy = private(noise_multiplier=1.5)
        saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        arguments = {"max_steps": 12, "enable_checkpointing": saves, **trainer}
        arguments["callbacks"] = [privacy, *callbacks]
        fitted = Fitted(tmp_path, make_trainer(**arguments), privacy)
        with pytest.raises(raises) if raises else contextlib.nullcontext():
            fitted.trainer.fit(classifier(mlp()), loader, ckpt_path=ckpt_path)
        return fitted

    return run


@pytest.fixture
def saved(fit: Callable[..., Fitted], tmp_path: Path) -> tuple[Fitted, Path]:
    """A fit of 12 steps and a checkpoint of it in ``tmp_path/saved``; its report is elsewhere."""
    fitted = fit()
    path = tmp_path / "saved" / "last.ckpt"
    fitted.trainer.save_checkpoint(path)
    return fitted, path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The exit status and the output of ``python -m lightning_dp.report``."""

    def run(*arguments: Any) -> tuple[int, str]:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, "".join(capsys.readouterr())

    return run


@dataclass(frozen=True)
class AtRunTime(AbstractAdaptiveSchedule):
    """Chooses the noise at run time."""

    def init(self) -> dict[str, Any]:
        return {}

    def __call__(self, step: int) -> float:
        return 1.0

    def now(self, state: Any, step: int) -> float:
        return 1.0 + step / 100

    def observe(self, state: Any, released: Any) -> Any:
        return state


@pytest.fixture
def at_run_time() -> AtRunTime:
    return AtRunTime()


EVENTS = [(PoissonGaussian(1.2, 0.0465), 129)]
ID = "0123456789abcdef"


@pytest.fixture
def report_of() -> Callable[..., PrivacyReport]:
    """A report of 129 steps on 22,000 records."""

    def make(**changes: Any) -> PrivacyReport:
        return PrivacyReport(
            **{
                "epsilon": epsilon(EVENTS, 1e-5),
                "delta": 1e-5,
                "relation": "add_remove",
                "steps": 129,
                "target_epsilon": 3.0,
                "private": True,
                "seeded": False,
                "accountant": "PLD",
                "num_records": 22_000,
                "ledger_id": ID,
                "journal": f"/home/alice/private/{ID}.journal",
                "events": Charges({"a" * 16: EVENTS}),
                **changes,
            }
        )

    return make


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[Any], None]], None]:
    """Changes a report file in place."""

    def edit(path: Path, change: Callable[[Any], None]) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")

    return edit


@pytest.fixture
def edit_checkpoint() -> Callable[[Path, Callable[[Any], None]], None]:
    """Changes the privacy record of a checkpoint in place."""

    def edit(path: Path, change: Callable[[Any], None]) -> None:
        content = torch.load(path, weights_only=True)
        change(content["lightning_dp"])
        torch.save(content, path)

    return edit
