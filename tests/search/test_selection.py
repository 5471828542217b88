"""Of a random number of trainings only the best is seen."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dp import DifferentialPrivacy, FullBatch
from lightning_dp._refusals import Refusal
from lightning_dp.accounting import StreamingRDPAccountant, sweep_history
from lightning_dp.report.command import main
from lightning_dp.search import Selection, selection

SETTINGS = {
    "mean": 4,
    "shape": 1,
    "target_epsilon": 6.0,
    "target_delta": 1e-5,
    "steps": 3,
    "sample_rate": 1.0,  # whose divergence is a formula
}


class Model(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(32, 2), lr

    def train_dataloader(self):
        return DataLoader(torch.randn(64, 32), batch_size=16)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_the_whole_search_is_charged_before_a_record_is_seen(tmp_path):
    search = Selection(**SETTINGS, folder=tmp_path)
    seen = []

    def train(attempt):
        ((event, count),) = sweep_history(tmp_path)
        seen.append((event, count))
        return 0.0, None

    search.best(train)
    assert set(seen) == {(search.event, 1)}
    spent = StreamingRDPAccountant().epsilon(sweep_history(tmp_path), 1e-5)
    assert 0.999 * 6.0 <= spent <= 6.0


def test_a_real_search_leaves_nothing_but_the_best(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(selection, "draw_number_of_runs", lambda mean, shape: 3)
    folders, steps = [], []

    def train(attempt):
        model = Model(lr=0.1 * (1 + len(folders)))
        privacy = DifferentialPrivacy(
            **attempt.privacy, sampling=FullBatch(), isolation_probe=False, spot_checks=False
        )
        trainer = Trainer(**attempt.quiet, max_steps=9, callbacks=[privacy], accelerator="cpu")
        trainer.fit(model)
        steps.append(privacy.steps)
        folders.append(Path(attempt.quiet["default_root_dir"]))
        print("a training is over")
        print("a training is over", file=sys.stderr)
        logging.getLogger("mine").error("a training is over")
        warnings.warn("a training is over", stacklevel=1)
        return [0.2, 0.9, math.nan][len(folders) - 1], model.lr

    assert Selection(**SETTINGS, folder=tmp_path / "search").best(train) == pytest.approx(0.2)
    assert steps == [3, 3, 3]  # the envelope's, not the Trainer's
    assert not any(folder.exists() for folder in folders)
    assert capsys.readouterr() == ("", "")
    kept = [path.suffix for path in (tmp_path / "search").iterdir()]
    assert sorted(kept) in ([".journal"], [".journal", ".lock"])
    assert main([str(tmp_path / "search"), "--delta", "1e-5"]) == 0
    assert "RepeatAndSelect" in capsys.readouterr().out


def test_a_failure_does_not_say_which_training_it_was(tmp_path):
    calls = []

    def train(attempt):
        calls.append(1)
        raise KeyError(f"training {len(calls)}")

    with pytest.raises(Refusal, match="A training of the search failed with KeyError") as refused:
        Selection(**SETTINGS, folder=tmp_path).best(train)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__
    assert len(sweep_history(tmp_path)) == 1  # and it was charged
    assert logging.root.manager.disable == logging.NOTSET


def test_the_number_of_trainings_is_random(tmp_path):
    counts, search = [], Selection(**SETTINGS, folder=tmp_path)
    for _ in range(12):
        calls = []
        search.best(lambda attempt, c=calls: (c.append(1) or 0.0, 0))
        counts.append(len(calls))
    assert len(set(counts)) > 1 and min(counts) >= 1
    assert sweep_history(tmp_path)[0][1] == 12


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"shape": math.inf}, "shape=inf"),
        ({"shape": -1.0}, "shape=-1.0"),
        ({"mean": 0.5}, "mean=0.5"),
        ({"steps": 0}, "steps=0"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan"),
    ],
    ids=str,
)
def test_what_makes_no_search_is_refused(tmp_path, changed, match):
    with pytest.raises(ValueError, match=match):
        Selection(**{**SETTINGS, **changed}, folder=tmp_path)
