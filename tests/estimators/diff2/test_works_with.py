"""DIFF2 beside what else is in a training run: dropout, metrics, logs, schedules, averaging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import Diff2, FullBatch, Momentum
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.schedules import Exponential

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")


def private(**options: Any) -> DifferentialPrivacy:
    return DifferentialPrivacy(
        **{
            "target_delta": 1e-5,
            "noise_multiplier": 1.0,
            "estimator": Diff2(3),
            "sampling": FullBatch(),
            "isolation_probe": False,
            "spot_checks": False,
            **options,
        }
    )


def test_dropout_is_the_same_at_both_points_and_records_count_once(classifier, blobs, make_trainer):
    masks: list[Tensor] = []  # outside of the module, whose second passes leave no trace in it

    class Counting(classifier):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
            self.seen: list[int] = []
            self.net[1].register_forward_hook(lambda m, i, o: masks.append((o != 0) | (i[0] == 0)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.accuracy(torch.zeros(len(batch[1]), 3), batch[1])
            self.log("accuracy", self.accuracy, on_step=True)
            self.log("train_loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen.append(int(self.accuracy.tp.sum() + self.accuracy.fn.sum()))

    model = Counting()
    privacy = private(isolation_probe=False)  # its passes would be seen by the hook, too
    make_trainer(max_epochs=6, callbacks=[privacy]).fit(model, DataLoader(blobs, 240))

    # Steps 0 and 3 look once, the others twice.
    assert len(masks) == 10
    for first, second in ((1, 2), (3, 4), (6, 7), (8, 9)):
        assert torch.equal(masks[first], masks[second])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[4], masks[5])
    assert model.seen == [240] * 6


def test_noise_schedule_and_momentum_compose_with_it(classifier, mlp, blobs, make_trainer):
    """z_t is the schedule's times the kind of step's; momentum averages the estimates."""
    privacy = private(noise_schedule=Exponential(rate=0.5), postprocessing=[Momentum(0.9)])
    make_trainer(max_epochs=4, callbacks=[privacy]).fit(classifier(mlp()), DataLoader(blobs, 240))
    ratio = Diff2(3).relative_noise(1)
    charged = [event.noise_multiplier for event, _ in privacy._run.ledger.history()]
    shape = [torch.tensor(-0.5 * t).double().exp().item() for t in range(4)]
    expected = [shape[0], ratio * shape[1], ratio * shape[2], shape[3]]
    assert charged == pytest.approx(expected, rel=1e-6)


def test_averaged_iterates_are_lightnings_own_callback(classifier, mlp, blobs, make_trainer):
    """The mean of the iterates, a function of released values: private as they are."""
    model = classifier(mlp())
    iterates: list[Tensor] = []

    class Keep(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            iterates.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            return result

    model.make_optimizer = lambda params: Keep(params, lr=0.1)
    trainer = make_trainer(max_epochs=5, callbacks=[private(), WeightAveraging()])
    trainer.fit(model, DataLoader(blobs, 240))
    final = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(final, torch.stack(iterates).mean(0), rtol=0, atol=1e-6)


def test_bfloat16_autocast(classifier, mlp, blobs, make_trainer):
    privacy = private(noise_multiplier=0.0)
    model, exact = classifier(mlp()), classifier(mlp())
    options = {"max_epochs": 5}
    make_trainer(callbacks=[privacy], precision="bf16-mixed", **options).fit(
        model, DataLoader(blobs, 240)
    )
    make_trainer(callbacks=[private(noise_multiplier=0.0)], **options).fit(
        exact, DataLoader(blobs, 240)
    )
    for rough, fine in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(rough, fine, rtol=0, atol=0.02)
