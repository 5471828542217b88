"""Each noised step is one Poisson batch, however the Trainer cuts its epochs and makes its loaders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from opacus.layers import DPMultiheadAttention
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Poisson
from lightning_dp._refusals import PrivacyWarning
from tests.gradients.models import Net
from tests.zoo import flat, private

N = 240


def assert_poisson(batches, sample_rate):
    """Distinct records in each batch, each with probability q, independently."""
    counts = np.zeros(N)
    for batch in batches:
        assert len(set(batch)) == len(batch)
        counts[batch] += 1
    sizes = np.array([len(batch) for batch in batches])
    # Too even (a fixed batch size, a shuffled epoch) is as wrong as too uneven.
    assert 1e-6 < chance_of_spread(counts, len(batches), sample_rate) < 1 - 1e-6
    assert 1e-6 < chance_of_spread(sizes, N, sample_rate) < 1 - 1e-6


def chance_of_spread(counts, trials, rate):
    """Return the chance of at most this spread around the mean of binomial counts.

    By a gamma distribution with its mean and variance: of rare events chi-square has too light a tail.
    """
    law = stats.binom(trials, rate)
    spread = ((counts - law.mean()) ** 2).sum() / law.var()
    variance = len(counts) * (float(law.stats("k")) + 2)
    return stats.gamma.cdf(spread, len(counts) ** 2 / variance, scale=variance / len(counts))


def test_the_chi_square_test_rejects_shuffled_epochs_and_a_wrong_rate():
    rng = np.random.default_rng(0)
    for rate, steps in ((6 / N, 160), (24 / N, 40)):
        parts = round(1 / rate)
        epochs = [np.array_split(rng.permutation(N), parts) for _ in range(steps // parts)]
        shuffled = [list(part) for epoch in epochs for part in epoch]
        doubled = [list(np.flatnonzero(rng.random(N) < 2 * rate)) for _ in range(steps)]
        for batches in (shuffled, doubled):
            with pytest.raises(AssertionError):
                assert_poisson(batches, rate)


@pytest.fixture
def model(recording):
    return recording()


@pytest.fixture
def loaded(numbered):
    """A loader of the 240 numbered records."""

    def make(batch_size, workers=0):
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        return DataLoader(numbered(), batch_size=batch_size, shuffle=True, **options)

    return make


@pytest.mark.parametrize(
    ("accumulate", "workers"),
    [
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(4, 0, marks=pytest.mark.slow),
        (4, 2),
    ],
)
def test_batches_are_poisson_over_epochs(accumulate, workers, model, loaded, fit, charges):
    privacy = private()
    options = {"max_epochs": 4, "accumulate_grad_batches": accumulate}
    trainer = fit(model, privacy, loaded(6, workers), **options)

    planned = 4 * 40 // accumulate
    assert len(model.batches) == trainer.global_step == privacy.steps == planned
    assert set(model.chunk_counts) == {accumulate}
    sample_rate = 6 * accumulate / N
    assert [event.sample_rate for event in charges()] == [sample_rate] * planned
    assert_poisson(model.batches, sample_rate)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("limits", "chunks_of_steps"),
    [
        ({"limit_train_batches": 10}, [4, 4, 2]),
        ({"limit_train_batches": 3}, [3]),
        pytest.param({"limit_train_batches": 0.26}, [4, 4, 2], marks=pytest.mark.slow),
        pytest.param({"limit_train_batches": 1.0}, [4] * 10, marks=pytest.mark.slow),
    ],
)
def test_a_limited_epoch_makes_whole_poisson_batches(
    workers, limits, chunks_of_steps, model, loaded, fit
):
    epochs, privacy = (8 if workers == 0 else 3), private()
    options = {"max_epochs": epochs, "accumulate_grad_batches": 4}
    trainer = fit(model, privacy, loaded(6, workers), **options, **limits)

    assert model.chunk_counts == chunks_of_steps * epochs
    assert len(model.batches) == trainer.global_step == privacy.steps
    assert_poisson(model.batches, 24 / N)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_max_steps_counts_noised_steps(accumulate, model, loaded, fit):
    privacy = private()
    options = {"max_steps": 25, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    trainer = fit(model, privacy, loaded(12), **options)

    assert len(model.batches) == trainer.global_step == privacy.steps == 25
    assert_poisson(model.batches, 12 * accumulate / N)


@pytest.mark.parametrize(("chunks", "made", "charged"), [(34, 17, 17), (35, 17, 18)])
def test_an_early_stop_charges_the_batches_that_were_looked_at(
    chunks, made, charged, model, loaded, fit, at_each_step
):
    def stop(trainer, module):
        trainer.should_stop = sum(model.chunk_counts) >= chunks

    privacy = private()
    options = {"max_epochs": 5, "accumulate_grad_batches": 2}
    trainer = fit(model, privacy, loaded(6), callbacks=[at_each_step(stop)], **options)

    assert trainer.global_step == made
    assert len(model.batches) == privacy.steps == charged
    assert_poisson(model.batches[:made], 12 / N)


@pytest.mark.parametrize("noise_multiplier", [1.0, 0.0])
def test_mostly_empty_batches_are_charged_and_noised_every_one(
    noise_multiplier, model, loaded, fit, charges, weights, at_each_step
):
    """Without noise, the step of a stand-in record does not move the weights at all."""
    privacy, moves = private(noise_multiplier=noise_multiplier), [weights(model)]
    watch = at_each_step(lambda _, module: moves.append(weights(module)))
    trainer = fit(model, privacy, loaded(1), callbacks=[watch], max_steps=60)

    empty = sum(not batch for batch in model.batches)
    assert trainer.global_step == privacy.steps == len(charges()) == 60
    assert 5 < empty < 45  # 60 / e on average
    assert_poisson(model.batches, 1 / N)
    moved = [not before.equal(after) for before, after in itertools.pairwise(moves)]
    assert moved == [noise_multiplier > 0 or bool(batch) for batch in model.batches]


class Nobody(Poisson):
    """Poisson batches that all came out empty."""

    def draw(self, shard_size, sample_rate, rng):
        return np.arange(0)


def tied_embedding():
    words, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = words.weight
    return Net(lambda m, x: m.head(m.words(x).mean(1)), words=words, head=head)


def attention():
    parts = {"words": nn.Embedding(7, 4), "attention": DPMultiheadAttention(4, 2, batch_first=True)}
    return Net(lambda m, x: m.attention(h := m.words(x), h, h)[0].mean(1), **parts)


def convolution():
    return Net(lambda m, x: m.conv(x[:, None].float()).mean(2), conv=nn.Conv1d(1, 7, 3))


@pytest.mark.parametrize(
    "engine",
    ["auto", *(pytest.param(e, marks=pytest.mark.slow) for e in ("ghost", "hooks", "one_by_one"))],
)
@pytest.mark.parametrize("make", [tied_embedding, attention, convolution])
@pytest.mark.parametrize("noise_multiplier", [1.0, 0.0])
def test_layers_that_take_no_empty_batch_make_a_charged_step_of_noise(
    noise_multiplier, make, engine, classifier, fit, charges
):
    words = torch.randint(4, (40, 5))
    model = classifier(make())
    before = flat(model)
    privacy = private(noise_multiplier=noise_multiplier, sampling=Nobody(), engine=engine)
    trainer = fit(model, privacy, DataLoader(TensorDataset(words, words[:, 0]), 4), max_steps=3)
    assert trainer.global_step == len(charges()) == 3
    assert before.equal(flat(model)) is (noise_multiplier == 0)


def test_a_batch_size_beyond_the_data_set_is_a_full_batch(model, loaded, fit, charges):
    with pytest.warns(PrivacyWarning, match="each step uses all of them"):
        fit(model, private(), loaded(1000), max_epochs=3)

    assert [sorted(batch) for batch in model.batches] == [list(range(N))] * 3
    assert [event.pair for event in charges()] == [(1.0, 1.0)] * 3
