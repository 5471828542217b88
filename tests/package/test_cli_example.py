"""One configuration file for each method runs, learns, keeps to its budget and can be run again."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_dp.callbacks import DifferentialPrivacy

FOLDER = Path(__file__).parents[2] / "examples" / "cli"
METHODS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
QUICK = {"cubic_newton", "diff2", "full_batch"}  # the others run in the slow tests
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.max_epochs=2"]
CALLBACK = "--trainer.callbacks.init_args"
UNCHECKED = [*QUIET, f"{CALLBACK}.checks.dry_run=false", f"{CALLBACK}.checks.comparisons=false"]


@pytest.fixture
def train(monkeypatch, tmp_path):
    """``main`` of the script, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    threads = torch.get_num_threads()
    yield runpy.run_path(str(FOLDER / "train.py"))["main"]
    torch.set_num_threads(threads)


def privacy_of(cli):
    (privacy,) = (c for c in cli.trainer.callbacks if isinstance(c, DifferentialPrivacy))
    return privacy


def init_args(config):
    (privacy,) = config["trainer"]["callbacks"]
    assert privacy["class_path"] == "lightning_dp.callbacks.DifferentialPrivacy"
    return privacy["init_args"]


@pytest.mark.filterwarnings("ignore:Diff2. the noise", "ignore:.*log_every_n_steps")
@pytest.mark.parametrize(
    "method",
    [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
)
def test_it_spends_its_budget_and_no_more(method, train, capsys):
    cli = train(["fit", "--config", str(FOLDER / f"{method}.yaml"), *UNCHECKED])

    privacy = privacy_of(cli)
    assert 0.99 * 3.0 < privacy.epsilon <= 3.0
    assert privacy.steps == cli.trainer.global_step == (2 if method == "full_batch" else 12)
    text = capsys.readouterr().out
    assert re.search(r"test accuracy \(360 images\): [\d.]+%", text)
    for name in re.findall(
        r"class_path: lightning_dp\.\w+\.(\w+)", (FOLDER / f"{method}.yaml").read_text()
    ):
        assert name == "DifferentialPrivacy" or name == "PLDAccountant" or f"{name}(" in text


def test_the_saved_configuration_runs_again_as_it_ran(train):
    config = str(FOLDER / "laplacian_smoothing.yaml")
    first = train(["fit", "--config", config, *UNCHECKED])
    saved = Path(first.trainer.log_dir) / "config.yaml"

    second = train(["fit", "--config", str(saved)])

    assert second.trainer.log_dir != first.trainer.log_dir
    assert privacy_of(second).config == privacy_of(first).config
    assert privacy_of(second).epsilon == privacy_of(first).epsilon


def test_the_help_of_the_callback_names_every_argument_and_what_can_be_put_there(train, capsys):
    name = "lightning_dp.callbacks.DifferentialPrivacy"

    with pytest.raises(SystemExit) as end:
        train(["fit", "--trainer.callbacks.help", name])

    assert end.value.code == 0
    text = capsys.readouterr().out
    for argument in inspect.signature(DifferentialPrivacy).parameters:
        assert f"--trainer.callbacks.{argument} " in text
    words = ["Exponential", "Diff2", "LaplacianSmoothing", "FullBatch", "PLDAccountant"]
    if sys.version_info < (3, 11):  # where jsonargparse names no classes in sequences
        words.remove("LaplacianSmoothing")
    for word in words:
        assert re.search(rf"\blightning_dp\.[\w.]*{word}\b", text)


CONFIGURABLE = [
    getattr(importlib.import_module(f"lightning_dp.{package}"), name)
    for package in ("schedules", "estimators", "postprocessing", "sampling")
    for name in importlib.import_module(f"lightning_dp.{package}").__all__
    if not name.startswith("Abstract")
]
CONFIGURABLE += [
    thing
    for package in ("callbacks", "accounting")
    for thing in vars(importlib.import_module(f"lightning_dp.{package}")).values()
    if inspect.isclass(thing) and re.search("Accountant$|Privacy$|Iterate$", thing.__name__)
]


def test_every_argument_has_a_help_text_and_a_type():
    for thing in (c for c in CONFIGURABLE if inspect.isclass(c) and not inspect.isabstract(c)):
        parser = ArgumentParser()
        parser.add_class_arguments(thing, "it")
        for argument in inspect.signature(thing).parameters.values():
            (action,) = (a for a in parser._actions if a.dest == f"it.{argument.name}")
            assert action.help, f"{thing.__name__}.{argument.name}: no text for --help"
            assert argument.annotation is not inspect.Parameter.empty


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("method", METHODS)
def test_it_learns(method, train):
    cli = train(["fit", "--config", str(FOLDER / f"{method}.yaml"), QUIET[0]])
    assert privacy_of(cli).epsilon <= 3.0
    assert cli.trainer.callback_metrics["accuracy"] > 0.85
