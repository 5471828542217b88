"""DP-FCRN makes the steps of the paper, with the package's rules for noise, clipping and samples."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message


@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize("keep", [3, None])
def test_without_noise_and_clipping_it_is_the_papers_federation(federation, keep, whole_steps):
    run = federation.but(
        **{"keep": keep, "max_grad_norm": 1e9, "max_hessian_norm": 1e9},
        **{"noise_multiplier": 0.0, "sample_rate": 1.0, "whole_steps": whole_steps},
    )
    end = run.in_turn()
    np.testing.assert_allclose(end.numpy(), run.by_hand(), rtol=0, atol=1e-12)
    assert float((end - run.start).norm()) > 0.1


@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize("fresh_batches", [False, True])
@pytest.mark.parametrize("sample_rate", [0.5, 1.0])
def test_noise_clipping_and_samples_are_those_of_the_rules(
    federation, sample_rate, fresh_batches, whole_steps
):
    run = federation.but(
        sample_rate=sample_rate, fresh_batches=fresh_batches, whole_steps=whole_steps
    )
    np.testing.assert_allclose(run.in_turn().numpy(), run.by_hand(), rtol=0, atol=1e-12)


class Logistic(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1, bias=False, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.layer(x)[:, 0], y)


def test_an_ordinary_module_and_its_data_make_the_same_updates(federation):
    """Hessian-vector products are the gradient engine's."""
    request = federation.server().request(1)
    expected = Message.from_bytes(federation.client(1).answer(request)).tensor("update")
    data = federation.client(1).records
    records = LocalRecords(Logistic(), TensorDataset(data.x, data.y), chunk_size=5)
    elsewhere = federation.but(folder=federation.folder / "elsewhere")
    found = Message.from_bytes(elsewhere.client(1, records).answer(request)).tensor("update")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_one_inner_step_is_fed_sgd(federation):
    run = federation.but(
        **{"inner_steps": 1, "max_grad_norm": 1e9, "max_step_size": 0.3, "keep": None, "box": None},
        **{"weight_decay": 0.0, "strong_convexity": 0.001, "noise_multiplier": 0.0},
        **{"sample_rate": 1.0, "step_scale": 2.0, "rounds": 4},
    )
    x = run.start.clone()
    for _ in range(4):
        slopes = []
        for client in range(3):
            generator = torch.Generator().manual_seed(client)
            a = torch.randn(12, 5, generator=generator, dtype=torch.float64)
            slopes.append(((torch.sigmoid(a @ x) - (a[:, 0] > 0).double())[:, None] * a).mean(0))
        x = x - 0.6 * sum(slopes) / 3
    torch.testing.assert_close(run.in_turn(), x, rtol=0, atol=1e-12)


def test_clients_have_sets_and_noise_of_their_own(federation):
    plan = federation.plan
    step = torch.arange(1.0, 6.0)
    sent = [plan.move(torch.zeros(5), 0, plan.update(step, 0, c), c).nonzero() for c in range(3)]
    assert len({tuple(places.flatten().tolist()) for places in sent}) > 1
    request = federation.server().request(0)
    updates = [
        Message.from_bytes(
            federation.but(seed=None, folder=federation.folder / name).client(0).answer(request)
        )
        for name in ("one", "other")
    ]
    assert not torch.equal(*(update.tensor("update") for update in updates))


def test_a_mean_of_sparse_steps_is_what_the_server_adds(federation):
    """(α/n) Σ_i S_i(u_i), S unbiased: over many rounds' sets, the mean of the whole steps."""
    plan = federation.but(keep=2, clients=2).plan
    steps = torch.arange(1.0, 11.0, dtype=torch.float64).reshape(2, 5)
    total, count = torch.zeros(5, dtype=torch.float64), 1500
    for t in range(count):
        for client, step in enumerate(steps):
            total = plan.move(total, t, plan.update(step, t, client), client)
    torch.testing.assert_close(total / count, 0.7 * steps.mean(0), rtol=0.05, atol=0)


def test_the_uplink_is_k_values_and_a_short_header(federation):
    """d = 1e5: what is sent of a step."""
    plan = federation.but(keep=10_000).plan
    update = plan.update(torch.zeros(100_000), 0, 0)
    message = Message("update", {"round": 123, "counter": 123}, {"update": update})
    assert len(message.to_bytes()) < 40_100
