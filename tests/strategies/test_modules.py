"""Modules with metrics, unused, frozen or own parameters, and compiled ones."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp import FullBatch
from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import private

DELTA = 1e-5


def test_torchmetrics_in_the_module(privacy, classifier, mlp, loader, make_trainer):
    class Metrics(classifier):
        rows = 0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
            self.seen = torchmetrics.SumMetric()

        def training_step(self, batch, batch_idx):
            x, y = batch
            scores = self(x)
            self.accuracy(scores, y)
            self.seen(len(y))
            self.rows += len(y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            return nn.functional.cross_entropy(scores, y)

    model = Metrics(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    trainer.fit(model, loader)

    assert float(trainer.callback_metrics["seen"]) == model.rows
    assert 0.4 < float(trainer.callback_metrics["accuracy"]) <= 1


def test_unused_parameters_get_noise_only(privacy, classifier, mlp, loader, make_trainer):
    class Unused(classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.never_called = nn.Linear(40, 40)

    model = Unused(mlp(), lambda params: torch.optim.SGD(params, lr=1.0))
    before = model.never_called.weight.detach().clone()

    make_trainer(max_steps=1, callbacks=[privacy]).fit(model, loader)

    moved = (model.never_called.weight - before).detach()
    assert float(moved.std()) == pytest.approx(0.5 * 1.0 / 24, rel=0.15)


def test_frozen_layers_do_not_move_and_take_no_part_of_the_norm(
    classifier, mlp, loader, make_trainer, weights
):
    silent = private(noise_multiplier=0.0, max_grad_norm=1e-3, sampling=FullBatch())
    net = mlp()
    net[0].requires_grad_(False)
    model = classifier(net, lambda params: torch.optim.SGD(params, lr=1.0))
    trainer = make_trainer(max_steps=1, callbacks=[silent])

    trainer.fit(model, DataLoader(loader.dataset, batch_size=240))

    assert weights(net[0]).equal(weights(mlp()[0]))
    # Every record is clipped; were frozen gradients in the norm, the rest would be shorter.
    x, y = loader.dataset.tensors
    head, total = mlp(), 0.0
    for i in range(240):
        loss = nn.functional.cross_entropy(head(x[i : i + 1]), y[i : i + 1])
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(head[2].parameters()))]
        )
        total = total + gradient * min(1.0, 1e-3 / float(gradient.norm()))
    torch.testing.assert_close(
        weights(mlp()[2]) - weights(net[2]), total / 240, rtol=1e-3, atol=1e-8
    )


class Direct(L.LightningModule):
    """Parameters directly on the LightningModule."""

    def __init__(self, through_self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 6) * 0.1)
        self.bias = nn.Parameter(torch.zeros(3))
        self.through_self = through_self

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x) if self.through_self else self.forward(x)
        return nn.functional.cross_entropy(scores, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_parts_in_eval_mode_are_trained_as_they_are(classifier, loader, make_trainer):
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    net[:2].eval()
    x, y = loader.dataset.tensors
    mean = torch.zeros(sum(param.numel() for param in net.parameters()))
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        row = torch.cat([p.flatten() for p in torch.autograd.grad(loss, [*net.parameters()])])
        mean += row * (0.1 / row.norm()).clamp(max=1) / len(x)
    expected = nn.utils.parameters_to_vector(net.parameters()).detach() - mean
    silent = DifferentialPrivacy(
        noise_multiplier=0.0, max_grad_norm=0.1, target_delta=DELTA, sampling=FullBatch()
    )
    trainer = make_trainer(max_steps=1, callbacks=[silent])

    model = classifier(net, lambda params: torch.optim.SGD(params, lr=1.0))
    trainer.fit(model, DataLoader(loader.dataset, batch_size=240))

    torch.testing.assert_close(
        nn.utils.parameters_to_vector(net.parameters()).detach(), expected, rtol=0, atol=1e-5
    )
    assert [part.training for part in net] == [False, False, True]


@pytest.mark.parametrize("through_self", [True, False])
def test_parameters_on_the_module_itself_are_trained(
    through_self, privacy, loader, make_trainer, assert_trained
):
    model = Direct(through_self)
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert_trained(trainer, model, privacy, loader, Direct(through_self), steps=20)
