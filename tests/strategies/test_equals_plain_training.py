"""Without noise private training is plain training; with clipping and noise it is DP-SGD."""

from __future__ import annotations

import itertools
import math

import lightning as L
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from tests.zoo import private


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def scheduled(make_optimizer):
    """The result of configure_optimizers for an optimizer and a scheduler that steps every step."""

    def configure(params):
        optimizer = make_optimizer(params)
        scheduler = {"scheduler": halving(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return configure


def no_privacy(**arguments):
    return private(noise_multiplier=0.0, max_grad_norm=math.inf, **arguments)


def replay(net, dataset, batches, expected_batch_size, make_optimizer, gradient):
    """A plain loop over recorded batches."""
    optimizer = make_optimizer(net.parameters())
    scheduler = halving(optimizer)
    for batch in batches:
        optimizer.zero_grad()
        for param, total in zip(net.parameters(), gradient(net, dataset, batch), strict=True):
            param.grad = total / expected_batch_size
        optimizer.step()
        scheduler.step()
    return net


def plain_sum(net, dataset, batch):
    """The gradient of the summed loss."""
    x, y, _ = dataset[batch]
    loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
    return torch.autograd.grad(loss, list(net.parameters()))


def clipped_sum(clip_norm):
    """DP-SGD's sum, one record at a time."""

    def gradient(net, dataset, batch):
        total = [torch.zeros_like(p) for p in net.parameters()]
        for i in batch:
            parts = plain_sum(net, dataset, [i])
            norm = math.sqrt(sum(float((part**2).sum()) for part in parts))
            for whole, part in zip(total, parts, strict=True):
                whole += part * min(1.0, clip_norm / norm)
        return total

    return gradient


@pytest.mark.parametrize(("make_optimizer", "accumulate"), [(sgd, 1), (adamw, 4)])
def test_no_noise_and_infinite_clip_equal_plain_training(
    make_optimizer, accumulate, numbered, recording, mlp, fit, weights
):
    data = numbered(dtype=torch.float64)
    model = recording(mlp().double(), scheduled(make_optimizer))
    loader = DataLoader(data, batch_size=12, shuffle=True)
    trainer = fit(model, no_privacy(), loader, max_epochs=1, accumulate_grad_batches=accumulate)

    assert trainer.global_step == len(model.batches) == 20 / accumulate
    plain = replay(mlp().double(), data, model.batches, 12 * accumulate, make_optimizer, plain_sum)
    assert not torch.allclose(weights(mlp().double()), weights(plain), atol=1e-2)  # it did train
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("make_optimizer", "chunks"), [(sgd, 4), (adamw, 1)])
def test_no_noise_and_full_batches_equal_an_unmodified_trainer(
    make_optimizer, chunks, numbered, classifier, mlp, make_trainer, weights
):
    x, y, _ = numbered(dtype=torch.float64).tensors
    trained = []
    for arguments in (
        {"callbacks": [no_privacy(sampling=FullBatch())]},
        {"accumulate_grad_batches": chunks},
    ):
        model = classifier(mlp().double(), scheduled(make_optimizer))
        trainer = make_trainer(max_epochs=6, **arguments)
        trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=240 // chunks))
        assert trainer.global_step == 6
        trained.append(weights(model))

    torch.testing.assert_close(trained[0], trained[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_finite_clip_equals_a_loop_over_single_records(
    accumulate, numbered, recording, mlp, fit, weights
):
    data = numbered(dtype=torch.float64)
    model = recording(mlp().double(), scheduled(sgd))
    privacy = private(noise_multiplier=0.0, max_grad_norm=0.5)
    options = {"max_epochs": 1, "accumulate_grad_batches": accumulate}
    fit(model, privacy, DataLoader(data, batch_size=12), **options)

    slow = replay(mlp().double(), data, model.batches, 12 * accumulate, sgd, clipped_sum(0.5))
    torch.testing.assert_close(weights(model), weights(slow), rtol=1e-9, atol=1e-11)


class Wide(L.LightningModule):
    """Thousands of coordinates, so that the noise can be told well."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(1000, 3).double()
        self.batches = []

    def training_step(self, batch, batch_idx):
        x, y, number = batch
        self.batches.append(number.tolist() if self.trainer.train_dataloader.current.size else [])
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def wide_data():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(240, 1000, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(240) % 3, torch.arange(240))


def test_noise_of_the_first_update_has_standard_deviation_z_c_over_b(fit, weights):
    noise_multiplier, clip_norm, expected_batch_size = 1.7, 0.6, 24
    model, data = Wide(), wide_data()
    privacy = private(noise_multiplier=noise_multiplier, max_grad_norm=clip_norm)
    fit(model, privacy, DataLoader(data, batch_size=expected_batch_size), max_steps=1)

    update = weights(Wide()) - weights(model)
    total = clipped_sum(clip_norm)(Wide().net, data, model.batches[0])
    noise = update - torch.cat([part.flatten() for part in total]) / expected_batch_size
    std = noise_multiplier * clip_norm / expected_batch_size
    assert stats.kstest(noise.numpy(), stats.norm(scale=std).cdf).pvalue > 1e-6
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise.numpy(), stats.norm(scale=wrong * std).cdf).pvalue < 1e-6


@pytest.mark.parametrize("seed", [None, 5])
def test_a_seed_of_the_callback_alone_repeats_noise_and_batches(seed, fit, weights):
    runs = []
    for _ in range(2):
        L.seed_everything(0, workers=True, verbose=False)
        model = Wide()
        loader = DataLoader(wide_data(), batch_size=24, shuffle=True)
        fit(model, private(seed=seed), loader, max_steps=3)
        runs.append((model.batches, weights(model) - weights(Wide())))

    if seed is not None:
        assert runs[0][0] == runs[1][0]
        assert torch.equal(runs[0][1], runs[1][1])
        return
    for first, second in itertools.product(runs[0][0], runs[1][0]):
        assert set(first) != set(second)
    correlation = torch.corrcoef(torch.stack([runs[0][1], runs[1][1]]))[0, 1]
    assert abs(float(correlation)) < 0.3  # independent: about 0.02, plus the common gradient
