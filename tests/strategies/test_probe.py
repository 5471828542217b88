"""A loss that divides by the number of its targets, and a real batch in which some are ignored."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy

pytestmark = pytest.mark.filterwarnings("ignore:The loss divides")
CLASSES, IGNORED = 9, -100


class Tagger(L.LightningModule):
    """Labels for each of five tokens."""

    def __init__(self, loss: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES))
        self.loss = loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), *batch[1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def mean(output, y):
    return F.cross_entropy(output.transpose(1, 2), y)


def own_index(output, y):
    y = y.masked_fill(y == IGNORED, 255)
    return nn.CrossEntropyLoss(ignore_index=255)(output.flatten(0, 1), y.flatten())


def nll(output, y):
    return F.nll_loss(output.log_softmax(2).transpose(1, 2), y)


def smoothed(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), label_smoothing=0.1)


def shifted(output, y):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def padded(output, y):
    """As causal language models do it: the last token has no next one, and ignores its target."""
    return F.cross_entropy(output.flatten(0, 1), F.pad(y, (0, 1), value=IGNORED)[:, 1:].flatten())


def by_hand(output, y):
    losses = F.cross_entropy(output.transpose(1, 2), y, reduction="none")
    return losses.sum() / (y != IGNORED).sum()


DIVIDE = [mean, own_index, nll, smoothed, shifted, padded, by_hand]


def record_by_record(output, y):
    losses = F.cross_entropy(output.transpose(1, 2), y, reduction="none", label_smoothing=0.1)
    return (losses.sum(1) / (y != IGNORED).sum(1).clamp(min=1)).mean()


def one_call_for_each(output, y):
    return torch.stack([F.cross_entropy(o, t) for o, t in zip(output, y, strict=True)]).mean()


def fixed_sum(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum") / y.numel()


APART = [record_by_record, one_call_for_each, fixed_sum]


def records(ignored: bool) -> TensorDataset:
    """40 records; one of them ignores two of its targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(CLASSES, (40, 5), generator=generator)
    y = (x + 1) % CLASSES
    if ignored:
        y[17, 2:4] = IGNORED
    return TensorDataset(x, y)


def fit(make_trainer, loss, *, ignored: bool, **settings) -> DifferentialPrivacy:
    settings = {"spot_checks": False, **settings}  # which see it too, at some steps
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5, **settings)
    trainer = make_trainer(max_epochs=6, callbacks=[privacy])
    try:
        trainer.fit(Tagger(loss), DataLoader(records(ignored), batch_size=20))
    finally:
        privacy.model = trainer.lightning_module
    return privacy


@pytest.mark.parametrize("loss", DIVIDE)
def test_an_ignored_target_ends_the_run_at_its_batch(loss, make_trainer):
    with pytest.raises(VoidedRunError, match=r"Tagger: .*ignore_index.*reduction='none'") as error:
        fit(make_trainer, loss, ignored=True)

    assert "17" not in str(error.value)


@pytest.mark.parametrize("loss", DIVIDE)
def test_without_one_it_trains(loss, make_trainer):
    privacy = fit(make_trainer, loss, ignored=False)

    assert privacy.steps == 12
    assert math.isfinite(privacy.epsilon)
    assert "every batch is watched for ignored targets" in str(privacy.report())


@pytest.mark.parametrize("loss", APART)
def test_ignored_targets_of_losses_of_single_records_are_no_matter(loss, make_trainer):
    assert math.isfinite(fit(make_trainer, loss, ignored=True).epsilon)


def test_targets_made_in_training_step_are_watched(make_trainer):
    def masked(output, y):
        return mean(output, y.masked_fill(y == 3, IGNORED))

    with pytest.raises(VoidedRunError, match="ignore_index"):
        fit(make_trainer, masked, ignored=False)


def test_real_numbers_may_be_anything(make_trainer):
    data = TensorDataset(
        torch.randint(CLASSES, (40, 5)), torch.ones(40, 5).long(), torch.full((40,), -100.0)
    )
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)

    make_trainer(max_steps=3, callbacks=[privacy]).fit(
        Tagger(lambda o, y, z: mean(o, y) + (0 * z).mean()), DataLoader(data, batch_size=20)
    )

    assert math.isfinite(privacy.epsilon)


def test_without_the_probe_nothing_is_watched(make_trainer):
    privacy = fit(make_trainer, mean, ignored=True, isolation_probe=False)

    assert privacy.report().isolation == "opted out"


def test_class_weights_beyond_the_classes_tried_are_refused(make_trainer):
    weights = torch.ones(CLASSES)
    weights[-1] = 7.0

    with pytest.raises(Exception, match=r"class weights.*isolation_probe=False"):
        fit(
            make_trainer, lambda o, y: F.cross_entropy(o.transpose(1, 2), y, weights), ignored=False
        )


def test_the_first_batch_says_it_where_targets_are_many(make_trainer):
    with pytest.warns(PrivacyWarning, match="the run ends at the first batch that has one"):
        fit(make_trainer, mean, ignored=False)
