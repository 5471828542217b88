"""Each noised step is one Poisson batch, however the Trainer cuts its epochs."""

from __future__ import annotations

import itertools
import math

import lightning as L
import numpy as np
import pytest
from scipy import stats
from torch.utils.data import DataLoader

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.callbacks import DifferentialPrivacy

N = 240


def private():
    return DifferentialPrivacy(
        noise_multiplier=1.0, target_delta=1e-5, isolation_probe=False, spot_checks=False
    )


def assert_poisson(batches, sample_rate):
    """Distinct records in each batch, each with probability q, independently."""
    counts = np.zeros(N)
    for batch in batches:
        assert len(set(batch)) == len(batch)
        counts[batch] += 1
    expected = len(batches) * sample_rate
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - sample_rate))
    # Too even (a fixed batch size, a shuffled epoch) is as wrong as too uneven.
    assert 1e-6 < stats.chi2.cdf(statistic, df=N) < 1 - 1e-6
    sizes = np.array([len(batch) for batch in batches])
    spread = ((sizes - N * sample_rate) ** 2).sum() / (N * sample_rate * (1 - sample_rate))
    assert 1e-6 < stats.chi2.cdf(spread, df=len(sizes)) < 1 - 1e-6


def sampled_rates(events):
    return {event.sample_rate for event in events}


@pytest.mark.parametrize(
    ("accumulate", "num_workers"),
    [
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(4, 0, marks=pytest.mark.slow),
        (4, 2),
    ],
)
def test_batches_are_poisson_over_epochs(
    accumulate, num_workers, numbered, recording, mlp, make_trainer, charges
):
    model, privacy = recording(mlp()), private()
    loader = DataLoader(
        numbered(),
        batch_size=6,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    trainer = make_trainer(
        max_epochs=4 * accumulate, accumulate_grad_batches=accumulate, callbacks=[privacy]
    )

    trainer.fit(model, loader)

    planned = 4 * 40
    assert len(model.batches) == trainer.global_step == privacy.steps == planned
    assert set(model.chunk_counts) == {accumulate}
    sample_rate = 6 * accumulate / N
    assert len(charges()) == planned
    assert sampled_rates(charges()) == {sample_rate}
    assert_poisson(model.batches, sample_rate)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("limits", "chunks_of_steps"),
    [
        ({"limit_train_batches": 10}, [4, 4, 2]),
        ({"limit_train_batches": 3}, [3]),
        ({"limit_train_batches": 0.26}, [4, 4, 2]),
        pytest.param({"limit_train_batches": 1.0}, [4] * 10, marks=pytest.mark.slow),
    ],
)
def test_a_limited_epoch_makes_whole_poisson_batches(
    num_workers, limits, chunks_of_steps, numbered, recording, mlp, make_trainer
):
    epochs = 20 if num_workers == 0 else 3
    model, privacy = recording(mlp()), private()
    loader = DataLoader(
        numbered(),
        batch_size=6,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    trainer = make_trainer(
        max_epochs=epochs, accumulate_grad_batches=4, callbacks=[privacy], **limits
    )

    trainer.fit(model, loader)

    assert model.chunk_counts == chunks_of_steps * epochs
    assert len(model.batches) == trainer.global_step == privacy.steps
    assert_poisson(model.batches, 24 / N)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_max_steps_counts_noised_steps(accumulate, numbered, recording, mlp, make_trainer):
    model, privacy = recording(mlp()), private()
    trainer = make_trainer(
        max_steps=57, max_epochs=-1, accumulate_grad_batches=accumulate, callbacks=[privacy]
    )

    trainer.fit(model, DataLoader(numbered(), batch_size=12))

    assert len(model.batches) == trainer.global_step == privacy.steps == 57
    assert_poisson(model.batches, 12 * accumulate / N)


class StopAfter(L.Callback):
    """An early stop by anything else than the budget."""

    def __init__(self, chunks):
        self.chunks = chunks

    def on_train_batch_end(self, trainer, *args, **kwargs):
        self.chunks -= 1
        trainer.should_stop = trainer.should_stop or self.chunks <= 0


def test_an_early_stop_after_a_step_leaves_nothing_charged_in_vain(
    numbered, recording, mlp, make_trainer
):
    model, privacy = recording(mlp()), private()
    trainer = make_trainer(
        max_epochs=5, accumulate_grad_batches=2, callbacks=[privacy, StopAfter(chunks=34)]
    )

    trainer.fit(model, DataLoader(numbered(), batch_size=6))

    assert len(model.batches) == trainer.global_step == privacy.steps == 17
    assert_poisson(model.batches, 12 / N)


def test_an_early_stop_inside_a_batch_charges_the_batch_that_was_looked_at(
    numbered, recording, mlp, make_trainer
):
    model, privacy = recording(mlp()), private()
    trainer = make_trainer(
        max_epochs=5, accumulate_grad_batches=2, callbacks=[privacy, StopAfter(chunks=35)]
    )

    trainer.fit(model, DataLoader(numbered(), batch_size=6))

    assert trainer.global_step == 17
    assert len(model.batches) == privacy.steps == 18


def test_mostly_empty_batches_are_noised_and_charged_every_one(
    numbered, recording, mlp, make_trainer, charges, weights, at_each_step
):
    model, privacy = recording(mlp()), private()
    moves = [weights(model)]
    trainer = make_trainer(
        max_epochs=1,
        callbacks=[privacy, at_each_step(lambda _, module: moves.append(weights(module)))],
        limit_train_batches=150,
    )

    trainer.fit(model, DataLoader(numbered(), batch_size=1))

    empty = sum(not batch for batch in model.batches)
    assert trainer.global_step == privacy.steps == len(charges()) == 150
    assert 20 < empty < 95  # 150 / e on average
    assert_poisson(model.batches, 1 / N)
    assert all(not before.equal(after) for before, after in itertools.pairwise(moves))


def test_a_stand_in_record_leaves_no_trace_in_the_update(
    numbered, recording, mlp, make_trainer, weights
):
    """Without noise, the step of an empty batch does not move the weights at all."""
    moved = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            self.before = weights(pl_module)

        def on_train_batch_end(self, trainer, pl_module, *args):
            moved.append(not self.before.equal(weights(pl_module)))

    model = recording(mlp())
    silent = DifferentialPrivacy(
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        target_delta=1e-5,
        isolation_probe=False,
        spot_checks=False,
    )
    trainer = make_trainer(max_epochs=1, limit_train_batches=100, callbacks=[silent, Watch()])

    trainer.fit(model, DataLoader(numbered(), batch_size=1))

    assert moved == [bool(batch) for batch in model.batches]
    assert 0 < sum(moved) < len(moved)


def test_a_batch_size_beyond_the_data_set_is_a_full_batch(
    numbered, recording, mlp, make_trainer, charges
):
    model, privacy = recording(mlp()), private()

    with pytest.warns(PrivacyWarning, match="each step uses all of them"):
        make_trainer(max_epochs=3, callbacks=[privacy]).fit(
            model, DataLoader(numbered(), batch_size=1000)
        )

    assert [sorted(batch) for batch in model.batches] == [list(range(N))] * 3
    assert [event.pair for event in charges()] == [(1.0, 1.0)] * 3


def test_the_chi_square_test_rejects_shuffled_epochs_and_a_wrong_rate():
    rng = np.random.default_rng(0)
    shuffled = [list(part) for _ in range(4) for part in np.array_split(rng.permutation(N), 40)]
    doubled = [list(np.flatnonzero(rng.random(N) < 2 * 6 / N)) for _ in range(160)]
    for batches in (shuffled, doubled):
        with pytest.raises(AssertionError):
            assert_poisson(batches, 6 / N)
    assert math.isclose(np.mean([len(batch) for batch in doubled]), 12, rel_tol=0.2)
