"""The comparison of all methods, on something tiny: equal effort, resuming, the runs and the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy


@pytest.fixture
def common(import_paper: Callable[[str], Any]) -> Any:
    return import_paper("common")


@pytest.fixture
def script(import_paper: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with one tiny problem; its data are made up."""
    script = import_paper("all_methods")
    tiny = replace(
        script.PROBLEMS["digits"],
        make=lambda: nn.Linear(4, 2),
        epochs=2,
        batches=(20, 40, 60),
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 4, generator=generator)
    y = (x.sum(1) > 0).long()
    data = script.Data((x[:90], y[:90]), (x[90:120], y[90:120]), (x[120:], y[120:]))
    monkeypatch.setitem(script.PROBLEMS, "digits", tiny)
    monkeypatch.setattr(script, "data_of", lambda name, folder: data)
    return script


def made_up(common: Any) -> Callable[[Any], Any]:
    """Outcomes in which the setting decides, and the noise a little."""

    def execute(run: Any) -> Any:
        accuracy = 0.5 + 0.01 * ((7 * run.setting) % 18) + 1e-4 * (run.seed % 7)
        if run.method == "noise":
            accuracy += 0.02 + 1e-3 * (run.seed % 3)
        return common.Outcome((1 - accuracy, accuracy), (1 - accuracy, accuracy), 1.0, 2.0, 0.1)

    return execute


def test_every_method_is_tuned_with_equally_many_runs_and_resumes(script, common, tmp_path):
    order, execute = script.work(["digits"], [1.0, 3.0], noises=7), made_up(common)
    whole = common.run_all(
        common.Agenda(order, script.score).following, execute, tmp_path / "whole"
    )
    effort = Counter((run.method, run.epsilon) for run in whole if run.seed >= common.TUNING_SEED)
    assert set(effort.values()) == {script.TUNING_RUNS}
    in_table = Counter((run.method, run.epsilon) for run in whole if run.seed < common.TUNING_SEED)
    assert len(in_table) == 2 * len(script.METHODS)
    assert set(in_table.values()) == {7}
    winners = {run.setting for run in whole if run.seed < common.TUNING_SEED}
    assert winners == {max(range(18), key=lambda setting: (7 * setting) % 18)}

    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "cut").write_text("".join(lines[:300]) + lines[300][:40])
    made: list[Any] = []
    again = common.run_all(
        common.Agenda(order, script.score).following,
        lambda run: made.append(run) or execute(run),
        tmp_path / "cut",
    )
    assert again == whole == common.load(tmp_path / "cut")
    assert len(made) == len(set(made)) == len(whole) - 300


def test_every_method_keeps_to_its_budget(script, common):
    for name in script.METHODS:
        run = common.Run("digits", name, 1.0, 4, 0)
        found = script.execute(run)
        assert 0.99 < found.spent <= 1, name
        assert found.passes > 1
        assert math.isfinite(found.test[0])
        assert found == replace(script.execute(run), seconds=found.seconds), name


@pytest.mark.parametrize("name", ["sgd", "storm", "adamw"])
def test_the_bare_loop_is_the_trainers_run(script, name, tmp_path):
    data, problem, method = script.data_of("digits", ""), script.PROBLEMS["digits"], script.METHODS
    setting = {**script.settings_of(problem, method[name])[0], "batch": 30, "decays": False}
    plan = method[name].plan(setting, 6, 10)

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = problem.make()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return plan.optimizer(self.parameters(), lr=plan.learning_rate)

    model = Model()
    privacy = DifferentialPrivacy(
        2.0,
        target_delta=script.DELTA,
        estimator=plan.estimator,
        noise_schedule=plan.schedule,
        postprocessing=plan.postprocessing,
        seed=3,
    )
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[privacy],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, DataLoader(TensorDataset(*data.train), batch_size=30, shuffle=True))
    torch.manual_seed(5)
    trainee = script.Trainee(problem.make(), *data.train)
    spent = script.train(trainee, plan, 30, 2, 2.0, seed=3)
    trainee.passes.detach()
    assert spent == pytest.approx(privacy.epsilon, rel=1e-9)
    for ours, trainers in zip(trainee.params, model.net.parameters(), strict=True):
        torch.testing.assert_close(ours, trainers, rtol=0, atol=0)
