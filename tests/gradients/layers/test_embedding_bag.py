"""``nn.EmbeddingBag``: bags of any length, in every mode, against one bag at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp import rows_of_records
from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bookkeeping import Bookkeeping

TOKENS = torch.tensor([1, 1, 4, 2, 2, 6, 3, 4, 0, 0, 1])
OFFSETS = torch.tensor([0, 3, 3, 4, 8])  # the second bag has no token
ENDS = torch.tensor([3, 3, 4, 8, 11])


class Texts(nn.Module):
    """Classifies bags of words."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(7, 4, **options), nn.Linear(4, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.head(torch.tanh(self.words(*args, **kwargs)))


@pytest.fixture
def engine() -> Iterator[Bookkeeping]:
    torch.manual_seed(0)
    engine = Bookkeeping()
    yield engine
    engine.detach()


def losses(output: Tensor) -> Tensor:
    return (output - 1).square().sum(1)


def one_by_one(model: Texts, weights: Tensor | None) -> Tensor:
    found = []
    for start, end in zip(OFFSETS, ENDS, strict=True):
        own, offsets = TOKENS[start:end], torch.tensor([0])
        if model.words.include_last_offset:
            offsets = torch.tensor([0, len(own)])
        of_own = None if weights is None else weights[start:end].double()
        loss = losses(model(own, offsets, of_own)).sum()
        parts = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


def check(engine: Bookkeeping, loss: Tensor, expected: Tensor) -> None:
    engine.backward(loss)
    found = engine.take(1.0, {})
    assert found.count == len(expected)
    norms = expected.norm(dim=1)
    torch.testing.assert_close(found.norms(), norms, rtol=1e-5, atol=1e-9)
    clip_norm = float(norms.median())
    factors = (clip_norm / norms).clamp(max=1)
    total = bounded_sum(found, clip_norm).value.double()
    assert (total - factors @ expected).norm() <= 1e-5 * (factors @ expected).norm()


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 1, -3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weights"])
def test_bags_with_offsets_equal_one_at_a_time(engine, mode, padding, last, by_name):
    kind = "sum" if mode == "weights" else mode
    model = Texts(mode=kind, padding_idx=padding, include_last_offset=last).double()
    weights = torch.randn(len(TOKENS)) if mode == "weights" else None
    expected = one_by_one(model, weights)
    model.float()
    engine.attach(model, list(model.parameters()))
    offsets = torch.cat([OFFSETS, ENDS[-1:]]) if last else OFFSETS
    if by_name:
        output = model(input=TOKENS, offsets=offsets, per_sample_weights=weights)
    else:
        output = model(TOKENS, offsets, weights)
    check(engine, losses(output).mean(), expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ties_go_to_the_row_that_torch_takes(engine, mode):
    model = Texts(mode=mode)
    nn.init.constant_(model.words.weight, 0.1)
    expected = one_by_one(model.double(), None)
    model.float()
    engine.attach(model, list(model.parameters()))
    check(engine, losses(model(TOKENS, OFFSETS)).mean(), expected)


def test_bags_of_one_length_with_weights(engine):
    model, tokens, weights = Texts(mode="sum"), torch.randint(7, (3, 5)), torch.randn(3, 5)
    engine.attach(model, list(model.parameters()))
    rows = []
    for own in zip(tokens, weights, strict=True):
        loss = losses(model(own[0][None], per_sample_weights=own[1][None])).sum()
        parts = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]).double())
    engine.drop()
    output = model(tokens, None, per_sample_weights=weights)
    check(engine, losses(output).mean(), torch.stack(rows))


def test_several_bags_of_a_record_by_a_hint(engine):
    """Two sentences for each of two records, and three for the last one."""
    model = Texts(mode="mean").double()
    owners = torch.tensor([0, 0, 1, 1, 1])
    expected = one_by_one(model, None)
    expected = torch.zeros(2, expected.shape[1]).double().index_add(0, owners, expected)
    model.float()
    engine.attach(model, list(model.parameters()))
    with rows_of_records(owners, 2):
        output = model(TOKENS, OFFSETS)
    check(engine, losses(output).sum() / 2, expected)


def test_offsets_that_end_too_early_are_refused(engine):
    model = Texts(mode="sum", include_last_offset=True)
    engine.attach(model, list(model.parameters()))
    loss = losses(model(TOKENS, OFFSETS)).mean()
    with pytest.raises(UnsupportedModelError, match=r"words: .*End the offsets with that length"):
        engine.backward(loss)


@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True)])
def test_options_that_bring_records_together_are_refused(engine, option, value):
    model = Texts(mode="sum", **{option: value})
    with pytest.raises(UnsupportedModelError, match=f"words .EmbeddingBag. has {option} set"):
        engine.attach(model, list(model.parameters()))
