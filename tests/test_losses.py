"""The loss of each record, against one position at a time, and in a private training."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_dp import DifferentialPrivacy, losses_of_records

CLASSES = 7
IGNORED = -100


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Four records of 5 positions; ignored labels at the end, in the middle, everywhere, and nowhere."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 5, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (4, 5), generator=generator)
    labels[0, 3:] = labels[1, 1:3] = labels[2] = IGNORED
    return logits.requires_grad_(), labels


def slowly(logits: Tensor, labels: Tensor, shift: int, divisor: float | None) -> list[Tensor]:
    losses = []
    for scores, row in zip(logits, labels, strict=True):
        terms = [
            scores[t].exp().sum().log() - scores[t, row[t + shift]]
            for t in range(len(row) - shift)
            if row[t + shift] != IGNORED
        ]
        losses.append(sum(terms) / (divisor or max(len(terms), 1)) + 0 * scores.sum())
    return losses


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("divisor", [None, 2.5])
def test_it_is_the_loss_of_each_record_alone(shift, divisor):
    logits, labels = batch()
    losses = losses_of_records(logits, labels, shift=shift, tokens_per_record=divisor)
    expected = slowly(logits, labels, shift, divisor)
    torch.testing.assert_close(losses, torch.stack(expected))
    for loss, other in zip(losses, expected, strict=True):
        found, right = (
            torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, other)
        )
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("shift", [False, True])
def test_of_equally_many_labels_it_is_the_mean_over_all_tokens(shift):
    logits, labels = batch()
    labels = labels.clamp(min=0)
    kept = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    plain = nn.functional.cross_entropy(kept[0].flatten(0, 1), kept[1].flatten())
    torch.testing.assert_close(losses_of_records(logits, labels, shift=shift).mean(), plain)


def test_a_record_without_labels_counts_as_nothing():
    logits, labels = batch()
    losses = losses_of_records(logits, labels, shift=False)
    losses.mean().backward()
    assert losses[2].item() == 0
    assert logits.grad is not None
    assert not logits.grad[2].any()
    assert logits.grad.isfinite().all()


def test_half_precision_is_added_up_in_float32():
    logits = torch.zeros(1, 3000, 5, dtype=torch.bfloat16)
    (loss,) = losses_of_records(logits, torch.zeros(1, 3000, dtype=torch.int64), shift=False)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log(5), rel=1e-5)


@pytest.mark.parametrize("divisor", [0, -1.0, math.nan, math.inf])
def test_a_divisor_is_a_number_above_0(divisor):
    with pytest.raises(ValueError, match="tokens_per_record="):
        losses_of_records(*batch(), shift=False, tokens_per_record=divisor)


class NextToken(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch["tokens"])
        return losses_of_records(logits, batch["labels"], shift=True).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TokenMean(NextToken):
    """The mean over all tokens, as language models return it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch["tokens"])[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())


def padded(sequences: list[Tensor]) -> dict[str, Tensor]:
    return {
        "tokens": pad_sequence(sequences, batch_first=True),
        "labels": pad_sequence(sequences, batch_first=True, padding_value=IGNORED),
    }


@pytest.fixture
def sequences() -> DataLoader[Tensor]:
    """60 sequences of 1 to 6 tokens; those of one token have no next one."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(CLASSES, (1 + i % 6,), generator=generator) for i in range(60)]
    return DataLoader(rows, 12, collate_fn=padded)  # type: ignore[arg-type]


def test_it_passes_every_check_of_a_private_run(make_trainer, sequences):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    trainer = make_trainer(max_steps=12, max_epochs=-1, callbacks=[privacy])
    trainer.fit(NextToken(), sequences)
    run = trainer.strategy.private_run
    assert run.engine == "layers"
    assert run.isolation == "compared on synthetic samples"
    assert run.spot_checks > 2
    assert privacy.steps == 12


@pytest.mark.filterwarnings("ignore::lightning_dp._refusals.PrivacyWarning")
def test_the_mean_over_all_tokens_is_refused_and_it_is_named(make_trainer, sequences):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    trainer = make_trainer(max_steps=12, max_epochs=-1, callbacks=[privacy])
    with pytest.raises(
        Exception, match=r"lightning_dp\.losses_of_records\(output\.logits, labels, shift="
    ):
        trainer.fit(TokenMean(), sequences)
