"""The budget as a metric: the accountant's number, kept like any metric's state."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp.accounting import Gaussian, PoissonGaussian, epsilon
from lightning_dp.metrics import PrivacyBudget


def test_epsilon_is_the_accountants():
    budget = PrivacyBudget(target_delta=1e-6)
    budget.update(1.0, 0.01, steps=300)
    budget.update(1.0, 0.01, steps=200)
    budget.update(4.0, 1.0)

    history = [(PoissonGaussian(1.0, 0.01), 500), (Gaussian(4.0), 1)]
    assert float(budget.compute()) == pytest.approx(epsilon(history, 1e-6), rel=1e-9)
    assert len(budget.counts) == 2


def test_nothing_spent_is_zero_and_no_noise_is_infinite():
    budget = PrivacyBudget(target_delta=1e-5)
    assert float(budget.compute()) == 0
    budget.update(0.0, 0.5)
    assert float(budget.compute()) == float("inf")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_logged_budget_in_a_module_of_any_precision_forgets_no_step(precision):
    class Logs(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.budget, self.shown = nn.Linear(1, 1), PrivacyBudget(1e-5), []

        def training_step(self, batch, batch_idx):
            self.shown.append(float(self.budget(1.07, 0.013)))
            self.log("epsilon", self.budget, on_step=True, on_epoch=True)
            return self.layer(batch.to(self.layer.weight.dtype)).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Logs()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", precision=precision, enable_model_summary=False, **quiet
    )
    trainer.fit(module, DataLoader(torch.ones(200, 1)))

    assert float(module.budget.compute()) == module.shown[-1]
    assert module.shown[-1] == pytest.approx(epsilon([(PoissonGaussian(1.07, 0.013), 400)], 1e-5))


def test_state_survives_a_checkpoint(tmp_path):
    budget = PrivacyBudget(target_delta=1e-5)
    budget.update(2.0, 0.1, steps=10)
    torch.save(budget.state_dict(), tmp_path / "state.pt")
    other = PrivacyBudget(target_delta=1e-5)
    assert float(other.compute()) == 0
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert float(other.compute()) == float(budget.compute()) > 0
    other.update(2.0, 0.1)
    budget.update(2.0, 0.1)
    assert float(other.compute()) == float(budget.compute()) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((float("nan"), 0.1), "noise_multiplier"),
        ((-1.0, 0.1), "noise_multiplier"),
        ((1.0, 1.5), "sample_rate"),
        ((1.0, 0.1, -1), "steps"),
    ],
)
def test_bad_steps_are_refused_and_change_nothing(arguments, message):
    budget = PrivacyBudget(target_delta=1e-5)
    with pytest.raises(ValueError, match=message):
        budget.update(*arguments)
    assert float(budget.compute()) == 0
