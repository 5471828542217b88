"""A joint budget: shares that add up, crashes, restarts, other processes, Optuna."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_dp import Checks, DifferentialPrivacy, FullBatch
from lightning_dp._refusals import Refusal
from lightning_dp.accounting import ApproximateDP, Gaussian, PoissonGaussian, epsilon, sweep_history
from lightning_dp.accounting.pld import EnvelopeAccountant
from lightning_dp.accounting.rdp import OneOrderAccountant
from lightning_dp.report.__main__ import main
from lightning_dp.search import Search

BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-5}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Model(BoringModel):
    def __init__(self, batch_size=16, lr=0.1):
        super().__init__()
        self.batch_size, self.lr = batch_size, lr

    def train_dataloader(self):
        return DataLoader(torch.randn(64, 32), batch_size=self.batch_size)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(trial, folder, steps=3, model=None, **arguments):
    privacy = DifferentialPrivacy(
        **trial.share(), **arguments, checks=Checks(dry_run=False, comparisons=False)
    )
    Trainer(default_root_dir=folder, max_steps=steps, callbacks=[privacy], **QUIET).fit(
        Model() if model is None else model
    )
    return privacy


# -- shares ------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_trials_of_any_kind_cost_the_budget_together(tmp_path, relation):
    search = Search(trials=3, **BUDGET, folder=tmp_path, relation=relation)
    batches = ((4, 9, {}), (16, 3, {}), (8, 2, {"sampling": FullBatch()}))
    for trial, (batch_size, steps, more) in zip(search, batches, strict=True):
        privacy = fit(trial, tmp_path, steps, Model(batch_size), **more)
        assert privacy.steps == steps
    history = sweep_history(tmp_path)
    one_order = OneOrderAccountant(7.1)
    assert 2.98 < one_order.epsilon(history, 1e-5, relation) <= 3.0
    assert 2.0 < epsilon(history, 1e-5, relation) < 2.95
    assert search.left == 0 and search.epsilon == 3.0
    with pytest.raises(Refusal, match="All 3 trials"):
        search.trial()


def test_trials_alike_cost_the_budget_exactly(tmp_path):
    search = Search(trials=4, **BUDGET, folder=tmp_path, steps=5, sample_rate=0.25)
    for trial in search:
        assert fit(trial, tmp_path, steps=9).steps == 5  # and no more, whatever the Trainer says
    assert 2.99 < epsilon(sweep_history(tmp_path), 1e-5) <= 3.0


@pytest.mark.filterwarnings("ignore:No training step was made")
def test_a_trial_cannot_use_a_larger_rate_than_was_declared(tmp_path):
    search = Search(trials=4, **BUDGET, folder=tmp_path, steps=5, sample_rate=0.25)
    assert fit(search.trial(), tmp_path, steps=1, model=Model(32)).steps == 0
    assert fit(search.trial(), tmp_path, steps=9, model=Model(8)).steps == 5


def test_a_share_is_taken_once_and_a_trial_gets_no_second_one(tmp_path):
    trial = Search(trials=2, **BUDGET, folder=tmp_path).trial()
    privacy = fit(trial, tmp_path)
    with pytest.raises(Refusal, match="two trainings would spend it"):
        trial.share()
    spent = privacy.steps
    with pytest.warns(UserWarning, match="No training step was made"):
        Trainer(default_root_dir=tmp_path, max_steps=3, callbacks=[privacy], **QUIET).fit(Model())
    assert privacy.steps == spent


@pytest.mark.parametrize("plan", [{}, {"steps": 5, "sample_rate": 0.25}], ids=["any", "alike"])
def test_what_was_spent_before_leaves_less(tmp_path, plan):
    spent = [(ApproximateDP(0.5, 1e-6, relation="add_remove", what="a table"), 1)]
    without = Search(trials=2, **BUDGET, folder=tmp_path / "a", **plan)
    search = Search(trials=2, **BUDGET, folder=tmp_path / "b", **plan, spent=spent)
    assert 0.4 < search.epsilon < 0.5 and without.epsilon == 0.0
    noises = [fit(each.trial(), tmp_path / "x").noise_multiplier for each in (without, search)]
    assert noises[1] > 1.05 * noises[0]
    everything = [(ApproximateDP(0.5, 1e-5, relation="add_remove", what="a table"), 1)]
    with pytest.raises(Refusal, match=r"leaves nothing|takes all of delta"):
        Search(trials=2, **BUDGET, folder=tmp_path / "c", **plan, spent=everything)


def test_an_envelope_holds_what_costs_less_and_nothing_else():
    envelope = EnvelopeAccountant(1.0, 0.1, 10)
    inside = [(PoissonGaussian(1.0, 0.1), 4), (PoissonGaussian(2.0, 0.05), 6)]
    assert envelope.epsilon(inside, 1e-5) == epsilon(inside, 1e-5)
    beyond = [(PoissonGaussian(0.99, 0.1), 1), (PoissonGaussian(5.0, 0.11), 1), (Gaussian(9.0), 1)]
    for entry in [*beyond, (PoissonGaussian(1.0, 0.1), 11)]:
        assert envelope.epsilon([entry], 1e-5) == float("inf")
        assert envelope.delta([entry], 1.0) == 1.0


# -- crashes and restarts ----------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{}", '{"format": "x", "begun": 0}', "[1]"])
def test_a_damaged_state_is_refused(tmp_path, content):
    Search(trials=3, **BUDGET, folder=tmp_path).trial()
    (tmp_path / "search.json").write_text(content)
    with pytest.raises(Refusal, match="cannot be read"):
        Search(trials=3, **BUDGET, folder=tmp_path)


def test_a_trial_declares_no_other_release(tmp_path):
    # Rényi divergences of trials add up; of two trials that lose 0.6 δ each nothing would be left.
    table = ApproximateDP(0.1, 0.6e-5, "add_remove", "a table")
    share = Search(trials=2, **BUDGET, folder=tmp_path).trial().share()
    with pytest.raises(ValueError, match=r"Give them to Search\(spent="):
        DifferentialPrivacy(**share, other_releases=[table])
    spent = Search(trials=2, **BUDGET, folder=tmp_path / "other", spent=[(table, 1)])
    assert spent.trial().share()["target_epsilon"] < share["target_epsilon"]


KILLED = """
    import os, sys
    sys.path.insert(0, {here!r})
    from test_joint import BUDGET, Model, QUIET, Search
    from lightning.pytorch import Callback, Trainer
    from lightning_dp import Checks, DifferentialPrivacy

    class Kill(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                os.kill(os.getpid(), 9)

    search = Search(trials=3, **BUDGET, folder={folder!r})
    privacy = DifferentialPrivacy(
        **search.trial().share(), checks=Checks(dry_run=False, comparisons=False)
    )
    trainer = Trainer(default_root_dir={folder!r}, max_steps=9, callbacks=[privacy, Kill()], **QUIET)
    trainer.fit(Model())
"""


@pytest.mark.slow
def test_a_trial_that_is_killed_half_way_counts(tmp_path):
    script = textwrap.dedent(KILLED.format(here=os.path.dirname(__file__), folder=str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-500:]
    assert sum(count for _, count in sweep_history(tmp_path)) == 2
    search = Search(trials=3, **BUDGET, folder=tmp_path)
    assert search.left == 2
    for trial in search:
        fit(trial, tmp_path, steps=9)
    history = sweep_history(tmp_path)
    assert sum(count for _, count in history) == 2 + 9 + 9
    assert OneOrderAccountant(7.1).epsilon(history, 1e-5) <= 3.0


def begin_trials(folder):
    return [trial.number for trial in Search(trials=20, **BUDGET, folder=folder)]


@pytest.mark.slow
def test_processes_share_the_trials(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        numbers = pool.map(begin_trials, [tmp_path] * 2)
    assert sorted([*numbers[0], *numbers[1]]) == list(range(20))


def test_the_report_of_the_folder_tells_of_the_search(tmp_path, capsys):
    search = Search(trials=3, **BUDGET, folder=tmp_path)
    for lr, trial in zip((0.1, 0.2), search, strict=False):
        fit(trial, tmp_path, model=Model(lr=lr))
    assert main([str(tmp_path), "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out
    assert out.count("== total of 2 ledgers") == 1
    assert "a search of 3 trials, 2 of them begun: ε = 3 at δ = 1e-05 for all of them" in out
    assert main([str(tmp_path), "--delta", "1e-5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["ledgers"] == 2


# -- Optuna ------------------------------------------------------------------------------------


def test_optuna_searches_within_the_budget(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = Search(trials=4, **BUDGET, folder=tmp_path)
    public = torch.randn(32, 32)

    def objective(suggest):
        model = Model(
            suggest.suggest_categorical("batch", [8, 16]), suggest.suggest_float("lr", 0.01, 1)
        )
        fit(search.trial(), tmp_path, suggest.suggest_int("steps", 2, 4), model)
        if suggest.number == 1:
            raise optuna.TrialPruned
        return float(model.layer(public).square().mean())

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=2))
    study.optimize(objective, n_trials=search.left)
    assert len(study.trials) == 4 and search.left == 0
    assert OneOrderAccountant(7.1).epsilon(sweep_history(tmp_path), 1e-5) <= 3.0
    with pytest.raises(Refusal, match="All 4 trials"):
        study.optimize(objective, n_trials=1)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_state_that_was_lost_or_is_an_old_copy_gives_no_trial_twice(is_lost, tmp_path):
    search = Search(trials=3, folder=tmp_path, **BUDGET)
    state, before = tmp_path / "search.json", (tmp_path / "search.json").read_bytes()
    fit(search.trial(), tmp_path)
    if is_lost:
        state.unlink()
    else:
        state.write_bytes(before)
    with pytest.raises(RuntimeError, match=r"1 trainings have their journals.*sweep_history"):
        Search(trials=3, folder=tmp_path, **BUDGET).trial()
    spent = sweep_history(tmp_path)  # the cure works
    Search(trials=3, folder=tmp_path / "new", spent=spent, **BUDGET).trial()
