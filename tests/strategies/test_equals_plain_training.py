"""Without noise private training is plain training; with clipping it is a loop over records."""

from __future__ import annotations

import itertools
import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from tests.zoo import clipped, flat, gradient_rows, private


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


@pytest.mark.parametrize(
    ("make_optimizer", "accumulate", "clip_norm"),
    [(sgd, 1, math.inf), (adamw, 4, math.inf), (sgd, 1, 0.5), (sgd, 4, 0.5)],
)
def test_without_noise_it_is_a_plain_loop_over_the_batches(
    make_optimizer, accumulate, clip_norm, numbered, recording, mlp, fit
):
    data = numbered(dtype=torch.float64)
    model = recording(mlp().double(), scheduled(make_optimizer))
    privacy = private(noise_multiplier=0.0, max_grad_norm=clip_norm)
    loader = DataLoader(data, batch_size=12, shuffle=True)
    trainer = fit(model, privacy, loader, max_epochs=1, accumulate_grad_batches=accumulate)

    net = mlp().double()
    optimizer = make_optimizer(net.parameters())
    scheduler = halving(optimizer)
    for batch in model.batches:
        x, y, _ = data[batch]
        total = clipped(gradient_rows(net, x, y), clip_norm) / (12 * accumulate)
        parts = total.split([param.numel() for param in net.parameters()])
        for param, part in zip(net.parameters(), parts, strict=True):
            param.grad = part.view_as(param)
        optimizer.step()
        scheduler.step()
    assert trainer.global_step == len(model.batches) == 20 / accumulate
    assert not torch.allclose(flat(mlp().double()), flat(net), atol=1e-2)  # it did train
    torch.testing.assert_close(flat(model), flat(net), rtol=1e-9, atol=1e-11)


@pytest.fixture
def manual(classifier):
    class Manual(classifier):
        automatic_optimization = False
        arguments = {}  # noqa: RUF012

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx), **self.arguments)
            self.optimizers().step()
            if (schedulers := self.lr_schedulers()) is not None:
                schedulers.step()

    return Manual


@pytest.mark.parametrize(
    ("make_optimizer", "chunks", "engine", "arguments"),
    [
        (sgd, 4, "auto", None),
        (adamw, 1, "auto", None),
        (sgd, 1, "one_by_one", None),
        *((sgd, 1, engine, {}) for engine in ("auto", "ghost", "hooks")),  # by hand
        *((sgd, 1, engine, {"retain_graph": True}) for engine in ("auto", "hooks")),
    ],
)
def test_full_batches_without_noise_equal_an_unmodified_trainer(
    make_optimizer, chunks, engine, arguments, numbered, classifier, manual, mlp, fit
):
    x, y, _ = numbered(dtype=torch.float64).tensors
    private_one = private(
        noise_multiplier=0.0, max_grad_norm=math.inf, sampling=FullBatch(), engine=engine
    )
    trained = []
    for kind, privacy, options in (
        (classifier if arguments is None else manual, private_one, {}),
        (classifier, None, {"accumulate_grad_batches": chunks}),
    ):
        model = kind(mlp().double(), scheduled(make_optimizer))
        model.arguments = arguments
        loader = DataLoader(TensorDataset(x, y), batch_size=240 // chunks)
        assert fit(model, privacy, loader, max_epochs=6, **options).global_step == 6
        trained.append(flat(model))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_seed_of_the_callback_alone_repeats_noise_and_batches(seed, numbered, recording, fit):
    runs = []
    for _ in range(2):
        L.seed_everything(0, workers=True, verbose=False)
        model = recording(nn.Linear(6, 500), lambda params: torch.optim.SGD(params, lr=1.0))
        before = flat(model)
        fit(model, private(seed=seed), DataLoader(numbered(), 24, shuffle=True), max_steps=3)
        runs.append((model.batches, flat(model) - before))

    if seed is not None:
        assert runs[0][0] == runs[1][0]
        assert torch.equal(runs[0][1], runs[1][1])
        return
    for first, second in itertools.product(runs[0][0], runs[1][0]):
        assert set(first) != set(second)
    correlation = torch.corrcoef(torch.stack([runs[0][1], runs[1][1]]))[0, 1]
    assert abs(float(correlation)) < 0.3  # independent: about 0.02, plus the common gradient
