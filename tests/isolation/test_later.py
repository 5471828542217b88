"""Terms that begin at a later epoch, step, batch or count are found before the first charge."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation import later
from lightning_dp.isolation.phases import Phases


class Later(L.LightningModule):
    """A classifier; where ``begins`` says so, records are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def begins(self, batch_idx: int) -> bool:
        return False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        return loss + torch.cdist(out, out).mean() if self.begins(batch_idx) else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AtAnEpoch(Later):
    def begins(self, batch_idx):
        return self.current_epoch >= 1


class InTheSecondHalf(Later):
    def begins(self, batch_idx):
        return self.current_epoch > self.trainer.max_epochs // 2


class InAWindowOfSteps(Later):
    def begins(self, batch_idx):
        return 23 <= self.global_step < 25


class AtAnEpochOnceStepsWereMade(Later):
    """Asks for the epoch only after many steps."""

    def begins(self, batch_idx):
        return self.global_step >= 5 and self.current_epoch >= 1


class AtAnEpochByItsOwnOptimizerStep(Later):
    """Is told the epoch by the Trainer, and asks for none."""

    epoch = 0

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.epoch = epoch
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def begins(self, batch_idx):
        return self.epoch == 2


class AfterWarmUp(Later):
    def __init__(self):
        super().__init__()
        self.warm_up = 37

    def begins(self, batch_idx):
        return self.warm_up == self.trainer.global_step


class AtABatch(Later):
    def begins(self, batch_idx):
        return batch_idx % 7 == 6


class AfterOwnSteps(Later):
    count = 0

    def begins(self, batch_idx):
        self.count += 1
        return self.count > 12


class AfterCountsInABuffer(Later):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def begins(self, batch_idx):
        self.count += 1
        return bool(self.count > 50)


class PhaseSetInAHook(Later):
    phase = "warm"

    def on_train_epoch_start(self):
        self.phase = "warm" if self.current_epoch < 4 else "joint"

    def begins(self, batch_idx):
        return self.phase == "joint"


class WeightOfATerm(Later):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        weight = max(0.0, self.current_epoch - 2) / 10
        return F.cross_entropy(out, batch[1]) + weight * torch.cdist(out, out).mean()


class MixUpLater(Later):
    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.current_epoch >= 3:
            x = 0.5 * x + 0.5 * x.flip(0)
        return F.cross_entropy(self.net(x), y)


class QueueLater(Later):
    queue = None

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if self.queue is not None:
            loss = loss + (out @ self.queue.T).logsumexp(1).mean()
        if self.current_epoch >= 2:
            self.queue = out.detach()
        return loss


BAD = [
    AtAnEpoch,
    InTheSecondHalf,
    InAWindowOfSteps,
    AtAnEpochOnceStepsWereMade,
    AtAnEpochByItsOwnOptimizerStep,
    AfterWarmUp,
    AtABatch,
    AfterOwnSteps,
    AfterCountsInABuffer,
    PhaseSetInAHook,
    WeightOfATerm,
    MixUpLater,
    QueueLater,
]


class LogsAtABatch(Later):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 50 == 49:
            self.log("norm", self.net[0].weight.norm())
        return loss


class ReadsNothing(Later):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


class DistilsLater(Later):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        return loss + out.square().mean() if self.current_epoch >= 3 else loss


class CyclicalWeight(Later):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        beta = min(1.0, (self.global_step % 40) / 20)
        return F.cross_entropy(out, batch[1]) + beta * out.square().mean()


class NoiseByCount(Later):
    count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        x = batch[0] + torch.randn_like(batch[0]) / self.count
        return F.cross_entropy(self.net(x), batch[1])


class ErrorsAtPretendedEpochs(Later):
    weights = (1.0, 0.5)

    def training_step(self, batch, batch_idx):
        return self.weights[self.current_epoch] * super().training_step(batch, batch_idx)


GOOD = [Later, LogsAtABatch, DistilsLater, CyclicalWeight, NoiseByCount, ErrorsAtPretendedEpochs]


@pytest.fixture
def fit(make_trainer):
    def fit(model, *callbacks, max_steps=2):
        data = TensorDataset(torch.rand(32, 6), torch.arange(32) % 3)
        privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
        trainer = make_trainer(max_epochs=20, max_steps=max_steps, callbacks=[privacy, *callbacks])
        trainer.fit(model, DataLoader(data, batch_size=8))
        return privacy

    return fit


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
def test_a_term_that_begins_later_is_refused_before_the_first_charge(kind, fit):
    with pytest.raises(Exception, match=r"\(seen with .* = \d+\)|compares records"):
        fit(kind(), max_steps=60)


@pytest.mark.parametrize(("kind", "more"), [(ReadsNothing, False), (DistilsLater, True)])
def test_moments_are_tried_where_the_model_reads_what_they_are_told_by(
    kind, more, fit, monkeypatch
):
    looks, look = [], later._look
    monkeypatch.setattr(later, "_look", lambda *args: looks.append(args) or look(*args))

    fit(kind())

    assert (len(looks) > 2) == more  # now, and at the last epoch
    assert len(looks) >= 2


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_schedules_pass(kind, fit):
    assert fit(kind()).steps == 2


class Told(Later):
    phase = "warm"

    def begins(self, batch_idx):
        return self.phase == "joint"


class TellsAtTheThirdBatch(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if isinstance(trainer, L.Trainer) and trainer.global_step == 2:
            pl_module.phase = "joint"


def test_a_phase_that_begins_in_the_run_ends_it(fit):
    with pytest.raises(Exception, match="since its attributes changed"):
        fit(Told(), TellsAtTheThirdBatch(), max_steps=5)


def test_attributes_that_come_in_another_order_with_each_others_values_are_new():
    module = nn.Linear(2, 2)
    module.first, module.second = "a", "b"
    phases = Phases(module)
    del module.first, module.second
    module.second, module.first = "a", "b"
    assert phases.is_new()
    assert not phases.is_new()


def test_numbers_are_new_at_powers_of_two_and_texts_once():
    module = nn.Linear(2, 2)
    module.count, module.phase = 0, "a"
    phases = Phases(module)
    due = []
    for step in range(1, 20):
        module.count = step
        if phases.is_new():
            due.append(step)
    assert due == [1, 2, 4, 8, 16]
    module.phase = "b"
    assert phases.is_new()
    module.phase = "a"
    assert not phases.is_new()
