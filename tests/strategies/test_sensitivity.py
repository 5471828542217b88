"""Adding or removing one record moves the released sum by at most C, through a whole Trainer."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.functional import real

C = 0.7
N = 31


def ordinary(dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 6, generator=generator, dtype=torch.float64).to(dtype)


RECORDS = {
    "small": [0.01] * 6,
    "ordinary": [1.0, -2.0, 0.5, 3.0, 0.0, -1.0],
    "huge": [1e20, -1e20, 0.0, 1e20, 1.0, 1.0],
    "overflowing": [1e38, 1e38, -1e38, 1e38, 1e38, 1e38],
    "nan": [math.nan, 1.0, 1.0, 1.0, 1.0, 1.0],
    "inf": [math.inf, 1.0, 1.0, 1.0, 1.0, 1.0],
    "all nan": [math.nan] * 6,
    "minus inf": [1.0, 1.0, 1.0, 1.0, 1.0, -math.inf],
}
NOT_FINITE = [name for name in RECORDS if "nan" in name or "inf" in name]


class Regression(L.LightningModule):
    def __init__(self, net, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.net = net().to(dtype)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def linear():
    return nn.Linear(6, 3)


def two_layers():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))


class Magnitudes(nn.Module):
    """Complex weights; the length of each output is what the loss sees."""

    def __init__(self, outputs=3):
        super().__init__()
        self.outputs = outputs

    def to(self, dtype):
        self.weight = nn.Parameter(torch.randn(6, self.outputs, dtype=dtype.to_complex()))
        return self

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


@pytest.fixture
def released_sum(make_trainer, weights):
    """lr = 1 and q = 1, so one update times B = N is the released sum."""

    def run(x, net, dtype, y=None, engine="auto", noise_multiplier=0.0):
        model = Regression(net, dtype)
        before = weights(model)
        privacy = DifferentialPrivacy(
            noise_multiplier=noise_multiplier,
            max_grad_norm=C,
            target_delta=1e-5,
            sampling=FullBatch(),
            engine=engine,
            isolation_probe=False,
            spot_checks=False,
        )
        trainer = make_trainer(max_epochs=1, callbacks=[privacy])
        data = TensorDataset(x, torch.arange(len(x)) % 3 if y is None else y)
        trainer.fit(model, DataLoader(data, batch_size=8))
        assert trainer.global_step == 1
        return real(before - weights(model)).flatten().double() * len(x)

    return run


def with_record(x, name):
    return torch.cat([x, torch.tensor([RECORDS[name]], dtype=torch.float64).to(x.dtype)])


@pytest.mark.parametrize("net", [linear, two_layers, Magnitudes])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECORDS)
def test_one_more_record_moves_the_sum_by_at_most_c(name, dtype, net, released_sum):
    x = ordinary(dtype)

    difference = released_sum(with_record(x, name), net, dtype) - released_sum(x, net, dtype)

    rounding = 1e-12 if dtype == torch.float64 else 1e-4
    assert float(difference.norm()) <= C + rounding


@pytest.mark.parametrize("net", [linear, two_layers, Magnitudes])
@pytest.mark.parametrize("name", sorted(set(RECORDS) - {"overflowing"}))
def test_the_sum_is_that_of_records_that_run_alone(name, net, released_sum):
    """Book-keeping leaves records out whose factors overflow float32, also where products do not."""
    x = with_record(ordinary(torch.float64), name)

    together = released_sum(x, net, torch.float64)
    alone = released_sum(x, net, torch.float64, engine="one_by_one")

    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_record_that_is_not_finite_contributes_nothing(name, released_sum):
    x = ordinary(torch.float64)

    without = released_sum(x, two_layers, torch.float64)
    with_it = released_sum(with_record(x, name), two_layers, torch.float64)

    assert bool(without.isfinite().all())
    torch.testing.assert_close(with_it, without, rtol=0, atol=1e-13)


@pytest.mark.parametrize("net", [linear, Magnitudes])
@pytest.mark.parametrize("name", ["ordinary", "huge"])
def test_a_record_with_a_large_gradient_contributes_exactly_c(name, net, released_sum):
    """The bound is reached: a clip norm twice too small or too large would show."""
    x = ordinary(torch.float64)

    difference = released_sum(with_record(x, name), net, torch.float64) - released_sum(
        x, net, torch.float64
    )

    assert float(difference.norm()) == pytest.approx(C, rel=1e-9)


@pytest.mark.parametrize("position", [0, 7, 8, N - 1])
def test_removing_any_record_moves_the_sum_by_at_most_c(position, released_sum):
    x, y = ordinary(torch.float64), torch.arange(N) % 3
    kept = torch.arange(N) != position

    difference = released_sum(x, two_layers, torch.float64, y) - released_sum(
        x[kept], two_layers, torch.float64, y[kept]
    )

    assert 0 < float(difference.norm()) <= C + 1e-12


def test_both_parts_of_complex_weights_get_the_noise_of_a_real_one(released_sum):
    z = 1e3  # records add up to N C at most

    def wide():
        return Magnitudes(1000)

    released = released_sum(ordinary(torch.float64), wide, torch.float64, noise_multiplier=z)

    for part in released.view(-1, 2).unbind(1):
        assert float(part.std()) == pytest.approx(z * C, rel=0.1)
