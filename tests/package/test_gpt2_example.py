"""The example of GPT-2 with adapters: it spends its budget, and what it saves can be loaded."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="an example of the library transformers")
pytest.importorskip("peft", reason="adapters of the library peft")

FOLDER = Path(__file__).parents[2] / "examples" / "gpt2"
COMMAND = ["fit", "--config", str(FOLDER / "lora.yaml"), "--trainer.enable_progress_bar=false"]
CALLBACK = "--trainer.callbacks.init_args"
UNCHECKED = [
    f"{CALLBACK}.checks.dry_run=false",
    f"{CALLBACK}.checks.comparisons=false",
]  # the slow test has them
SHORT = [*UNCHECKED, "--data.records=96", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1"]


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The script, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    threads = torch.get_num_threads()
    yield runpy.run_path(str(FOLDER / "train.py"))
    torch.set_num_threads(threads)


def adapters(net):
    return {n: p.detach() for n, p in net.named_parameters() if "lora_" in n}


def test_it_spends_its_budget_logs_it_and_saves_what_it_trained(example, capsys):
    cli = example["main"]([*COMMAND, *SHORT])

    (privacy,) = (c for c in cli.trainer.callbacks if hasattr(c, "epsilon"))
    assert 7.9 < privacy.epsilon <= 8.0
    assert "gradient engine: layers" in capsys.readouterr().out
    folder = Path(cli.trainer.log_dir)
    with (folder / "metrics.csv").open() as file:
        logged = [row["privacy/epsilon"] for row in csv.DictReader(file)]
    assert float([each for each in logged if each][-1]) == pytest.approx(privacy.epsilon)
    checkpoint = cli.trainer.checkpoint_callback.best_model_path
    again = example["LanguageModel"].load_from_checkpoint(checkpoint)
    trained = adapters(again.net)
    assert trained.keys() == adapters(cli.model.net).keys() and len(trained) == 16
    assert all(torch.equal(p, adapters(cli.model.net)[n]) for n, p in trained.items())
    assert any(p.abs().max() > 0 for n, p in trained.items() if "lora_B" in n)


def test_a_record_counts_alike_however_long_the_others_are(example):
    model = example["LanguageModel"]().eval()
    short, long = torch.arange(8), torch.arange(20)

    together = model.losses(example["padded"]([short, long]))

    alone = [model.losses(example["padded"]([each])) for each in (short, long)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_it_learns_as_printed(example):
    cli = example["main"](COMMAND)
    assert float(cli.trainer.callback_metrics["val_loss"]) < 4.0  # log 64 = 4.16 at the start
