"""Other releases of the data in a real fit: durable, in the budget, in the report, resumed."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_dp import DifferentialPrivacy, FullBatch
from lightning_dp.accounting import ZCDP, ApproximateDP, epsilon, sweep_history
from lightning_dp.report.__main__ import main
from tests.zoo import private

TABLE = ApproximateDP(0.5, 1e-7, relation="add_remove", what="table of ages, 2026-03")
CENSUS = ZCDP(0.01, relation="add_remove", what="the census")


class Model(BoringModel):
    def train_dataloader(self):
        return DataLoader(torch.randn(64, 32), batch_size=16)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()


def fit(folder, releases, ckpt=None, steps=3, **arguments):
    privacy = private(**{"target_epsilon": 3.0, "other_releases": releases, **arguments})
    trainer = Trainer(
        default_root_dir=folder,
        max_steps=steps,
        callbacks=[privacy],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), ckpt_path=ckpt)
    return privacy, trainer


def test_it_counts_is_kept_and_is_named(tmp_path, capsys):
    privacy, trainer = fit(tmp_path, [TABLE, CENSUS])
    ledger = sweep_history(tmp_path / "privacy")
    assert dict(ledger)[TABLE] == dict(ledger)[CENSUS] == 1 and len(ledger) == 3
    assert privacy.epsilon == pytest.approx(epsilon(ledger, delta=1e-5))
    assert 2.99 < privacy.epsilon <= 3.0 and privacy.steps == 3
    report = privacy.report()
    assert report.steps == 3
    for text in (str(report), report.markdown()):
        assert TABLE.what in text and CENSUS.what in text and "not checked" in text
    assert dict(report.events.external) == {TABLE: 1, CENSUS: 1}
    # Resumed without saying it again: the checkpoint and the journal know.
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed, _ = fit(tmp_path, [], tmp_path / "last.ckpt", steps=3)
    assert dict(resumed.report().events.external) == {TABLE: 1, CENSUS: 1}
    assert main([str(tmp_path / "last.ckpt")]) == 0
    assert TABLE.what in capsys.readouterr().out


def test_before_a_fit_it_is_spent_already():
    privacy = DifferentialPrivacy(3.0, target_delta=1e-5, other_releases=[TABLE])
    assert privacy.epsilon == epsilon(TABLE, delta=1e-5) > 0.49 and privacy.steps == 0


def test_two_trainings_that_declare_one_release_count_it_once(tmp_path):
    for _ in range(2):
        fit(tmp_path, [TABLE], noise_multiplier=5.0, target_epsilon=None)
    assert dict(sweep_history(tmp_path / "privacy"))[TABLE] == 1


def test_full_batches_have_another_guard(tmp_path):
    for releases in ([], [TABLE]):
        privacy, _ = fit(tmp_path / str(len(releases)), releases, sampling=FullBatch())
        assert privacy.report().guard.startswith("fixed" if releases else "gdp")
        assert 2.9 < privacy.epsilon <= 3.0


@pytest.mark.parametrize(
    ("releases", "error", "match"),
    [
        ([TABLE, TABLE], ValueError, "a release is identified by its words"),
        (["a table"], TypeError, "other_releases holds 'a table'"),
        (TABLE, TypeError, "must be a list"),
        (
            [ZCDP(0.1, relation="replace_one", what="counts")],
            ValueError,
            "holds for replacing a record only",
        ),
    ],
    ids=["twice", "words", "no list", "relation"],
)
def test_what_cannot_be_counted_is_refused(releases, error, match):
    with pytest.raises(error, match=match):
        DifferentialPrivacy(3.0, target_delta=1e-5, other_releases=releases)


def test_a_release_that_takes_all_of_delta_leaves_nothing(tmp_path):
    taken = ApproximateDP(0.1, 1e-5, relation="add_remove", what="takes it all")
    with pytest.raises(ValueError, match="takes all of delta"):
        fit(tmp_path, [taken])
