"""LightningCLI builds everything from a configuration."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp.callbacks import DifferentialPrivacy

DELTA = 1e-5


class CLIModel(L.LightningModule):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CLIData(L.LightningDataModule):
    def __init__(self, batch_size: int = 24) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, torch.arange(240) % 3)
        return DataLoader(data, batch_size=self.batch_size)


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_lightning_cli_builds_the_callback_from_a_configuration(tmp_path):
    schedule = {
        "class_path": "lightning_dp.schedules.Exponential",
        "init_args": {"rate": 0.05},
    }
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "callbacks": [
                {
                    "class_path": "lightning_dp.callbacks.DifferentialPrivacy",
                    "init_args": {
                        "target_epsilon": 2.0,
                        "target_delta": DELTA,
                        "noise_schedule": schedule,
                        "estimator": {
                            "class_path": "lightning_dp.estimators.Diff2",
                            "init_args": {"restart_every": 2, "max_grad_norm": 0.5, "split": 2.0},
                        },
                        "postprocessing": [
                            {
                                "class_path": "lightning_dp.postprocessing.Momentum",
                                "init_args": {"beta": 0.9},
                            },
                            {
                                "class_path": "lightning_dp.postprocessing.LaplacianSmoothing",
                                "init_args": {"sigma": 1.0},
                            },
                        ],
                        "sampling": {"class_path": "lightning_dp.sampling.Poisson"},
                        "relation": "replace_one",
                    },
                }
            ],
        },
        "model": {"hidden": 5},
        "data": {"batch_size": 48},
    }

    cli = LightningCLI(CLIModel, CLIData, args={"fit": config, "subcommand": "fit"})

    (privacy,) = [c for c in cli.trainer.callbacks if isinstance(c, DifferentialPrivacy)]
    report = privacy.report()
    assert cli.trainer.global_step == privacy.steps == 10
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0
    assert report.relation == "replace_one"
    assert report.mechanism == {
        "estimator": "Diff2(restart_every=2, max_grad_norm=0.5, diff_norm=1.0, split=2.0, "
        "step_length=None, restart_rate=1.0)",
        "noise schedule": "Exponential(rate=0.05)",
        "post-processing": "[Momentum(beta=0.9), LaplacianSmoothing(sigma=1.0, "
        "per_parameter=False)]",
        "sampling": "Poisson()",
        "gradient engine": "layers",
        "random numbers": "PCG64, seeded by the operating system; on other devices than the CPU, theirs",
    }
    assert (tmp_path / "config.yaml").read_text().count("Momentum") == 1
