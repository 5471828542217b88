"""Models that read the padding of a batch are told from those that do not."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from lightning_dp.isolation.collation import try_collate
from lightning_dp.isolation.padding import compare_lengths
from lightning_dp.isolation.passes import Passes

SAMPLE = torch.zeros(7, 3), 1


def on_the_right(samples: list[Any]) -> Any:
    x = pad_sequence([x for x, _ in samples], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in samples])
    return x, lengths, torch.tensor([y for _, y in samples])


def on_the_left(samples: list[Any]) -> Any:
    x, lengths, y = on_the_right([(x.flip(0), y) for x, y in samples])
    return x.flip(1), lengths, y


def masked_at_random(samples: list[Any]) -> Any:
    x, lengths, y = on_the_right(samples)
    return x * (torch.rand(x.shape[:2]) < 0.8)[..., None], lengths, y


def to_a_multiple(samples: list[Any]) -> Any:
    """Pad as tokenizers do with pad_to_multiple_of=64."""
    x, lengths, y = on_the_right(samples)
    return F.pad(x, (0, 0, 0, -x.shape[1] % 64)), lengths, y


def to_one_length(samples: list[Any]) -> Any:
    x, lengths, y = on_the_right([(F.pad(x, (0, 0, 0, 40 - len(x))), y) for x, y in samples])
    return x, lengths, y


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.into(x))

    def mask(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.arange(x.shape[1]) < lengths[:, None]

    def mean(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.mean(self.hidden(x), self.mask(x, lengths))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        return F.cross_entropy(self.out(self.pooled(x, lengths)), y)


class MeanOfAll(Model):
    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.hidden(x).mean(1)


class SumOfAll(Model):
    """Zeros as padding, but the layer has a bias."""

    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.hidden(x).sum(1)


class MeanByBatch(Model):
    """Divides by the longest length."""

    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().pooled(x, lengths) * lengths[:, None] / lengths.max()


class Attends(Model):
    is_masked = True

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        mask = ~self.valid if self.is_masked else None
        return self.attention(hidden, hidden, hidden, key_padding_mask=mask)[0]

    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.valid = self.mask(x, lengths)
        pooled = super().pooled(x, lengths)
        del self.valid
        return pooled


class AttendsToAll(Attends):
    is_masked = False


class Places(Model):
    """Absolute positions, counted from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, 4)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.into(x) + self.places(torch.arange(x.shape[1])))

    def mask(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = super().mask(x, lengths)
        return mask.flip(1) if bool((x[:, 0] == 0).all(1).any()) else mask


class Recurrent(Model):
    is_packed = True

    def __init__(self) -> None:
        super().__init__()
        from opacus.layers import DPLSTM

        self.lstm = DPLSTM(3, 4, batch_first=True)

    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        if not self.is_packed:
            return self.lstm(x)[0][:, -1]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.lstm(packed)[1][0][0]


class LastOfAll(Recurrent):
    is_packed = False


class Noisy(Model):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + torch.randn_like(x[..., :1])


class DroppingByFunction(Model):
    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(super().hidden(x), training=self.training)


class DroppingAMean(DroppingByFunction, MeanOfAll):
    pass


class Dropping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(super().hidden(x))


class Tagging(Model):
    """A mean over tokens, of which the padding is ignored: watched for in each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        targets = y[:, None].expand(x.shape[:2]).masked_fill(~self.mask(x, lengths), -100)
        return F.cross_entropy(self.out(self.hidden(x)).flatten(0, 1), targets.flatten())


class Fussy(Model):
    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert bool((lengths == 7).all())
        return super().pooled(x, lengths)


def compared(model: Model, collate: Any = on_the_right, sample: Any = SAMPLE) -> Any:
    names = [name for name, _ in model.named_parameters()]
    passes = Passes(model, "auto", names, None, made_up=True)
    return compare_lengths(passes, lambda: collate, sample)


HIDE_PADDING = [Model, Attends, Places, Recurrent, Dropping, DroppingByFunction]
READ_PADDING = [MeanOfAll, SumOfAll, MeanByBatch, AttendsToAll, LastOfAll, DroppingAMean]


@pytest.mark.parametrize("model", HIDE_PADDING)
def test_models_that_mask_the_padding_are_isolated(model: type[Model]) -> None:
    assert compared(model()).outcome == "isolated"


@pytest.mark.parametrize("model", READ_PADDING)
def test_models_that_read_the_padding_are_coupled(model: type[Model]) -> None:
    net = model()
    net.out.eval()
    found = compared(net)
    assert found.outcome == "coupled" and found.reason
    assert [part.training for part in net.modules()].count(False) == 1  # as it was


@pytest.mark.parametrize("length", [2, 7, 40, 70])
def test_padding_to_a_multiple_of_a_length_is_padding(length: int) -> None:
    sample = torch.zeros(length, 3), 1
    assert try_collate(lambda: to_a_multiple, sample, 8).pads
    assert not try_collate(lambda: to_one_length, sample, 8).pads
    assert compared(MeanOfAll(), to_a_multiple, sample).outcome == "coupled"
    assert compared(Model(), to_a_multiple, sample).outcome == "isolated"


def test_places_behind_padding_on_the_left_are_coupled() -> None:
    assert compared(Places(), on_the_left).outcome == "coupled"


@pytest.mark.parametrize(
    ("model", "collate", "why"),
    [
        (Noisy, on_the_right, "random numbers"),
        (Model, masked_at_random, "no samples of other lengths"),
        (MeanOfAll, to_one_length, "no samples of other lengths"),
        (Tagging, on_the_right, "ignored targets"),
        (Fussy, on_the_right, "AssertionError"),
    ],
)
def test_it_is_told_why_nothing_was_compared(model: type[Model], collate: Any, why: str) -> None:
    found = compared(model(), collate)
    assert found.outcome == "not probed" and why in found.reason


def test_long_samples_are_made_shorter_and_texts_have_more_words() -> None:
    lengths: list[int] = []

    def noting(samples: list[Any]) -> Any:
        lengths.extend(len(x) for x, _ in samples)
        return on_the_right(samples)

    assert compared(MeanOfAll(), noting, (torch.zeros(60, 3), 1)).outcome == "coupled"
    assert set(lengths) == {60, 31, 32, 33}  # what half of the length adds is no little part

    def of_texts(samples: list[Any]) -> Any:
        table = torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
        return on_the_right([(table[[ord(c) for c in text]], y) for text, y in samples])

    assert compared(MeanOfAll(), of_texts, ("a text", 1)).outcome == "coupled"
    assert compared(Model(), of_texts, ("a text", 1)).outcome == "isolated"
