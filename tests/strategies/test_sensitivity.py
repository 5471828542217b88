"""Adding or removing one record moves the released sum by at most C, through a whole Trainer."""

from __future__ import annotations

import math
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from lightning_dp.functional import real
from tests.zoo import Classifier, flat, private

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


class Sums:
    """``sums(x, net, ...)``: the sum that one step releases, fitted once for the same arguments.

    lr = 1 and q = 1, so one update times B = N is the released sum.
    """

    def __init__(self, folder):
        self.folder, self.known = folder, {}

    def __call__(self, x, net, y=None, engine="auto", noise_multiplier=0.0):
        y = torch.arange(len(x)) % 3 if y is None else y
        key = (x.numpy().tobytes(), x.dtype, y.numpy().tobytes(), net, engine, noise_multiplier)
        if key not in self.known:
            self.known[key] = self.fit(x, net, y, engine, noise_multiplier)
        return self.known[key]

    def fit(self, x, net, y, engine, noise_multiplier):
        torch.manual_seed(0)
        model = Classifier(net().to(x.dtype), lambda params: torch.optim.SGD(params, lr=1.0))
        before, settings = flat(model), {"max_grad_norm": C, "sampling": FullBatch()}
        privacy = private(noise_multiplier=noise_multiplier, engine=engine, **settings)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            max_steps=1, callbacks=[privacy], accelerator="cpu", default_root_dir=self.folder,
            enable_model_summary=False, **quiet,
        )  # fmt: skip
        trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=16))
        assert trainer.global_step == 1
        return real(before - flat(model)).flatten().double() * len(x)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return Sums(tmp_path_factory.mktemp("sums"))


def with_record(x, name):
    return torch.cat([x, torch.tensor([RECORDS[name]], dtype=torch.float64).to(x.dtype)])


NETS = [linear, two_layers, Magnitudes]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_more_record_moves_the_sum_by_at_most_c(dtype, net, sums):
    x, rounding = ordinary(dtype), 1e-12 if dtype == torch.float64 else 1e-4
    for name in RECORDS:
        difference = sums(with_record(x, name), net) - sums(x, net)
        assert float(difference.norm()) <= C + rounding, name


@pytest.mark.parametrize("net", NETS)
def test_the_sum_is_that_of_records_that_run_alone(net, sums):
    """Book-keeping leaves records out whose factors overflow float32, also where products do not."""
    for name in ("small", "huge", "nan", "minus inf"):
        x = with_record(ordinary(torch.float64), name)
        alone = sums(x, net, engine="one_by_one")
        torch.testing.assert_close(sums(x, net), alone, rtol=0, atol=1e-9)


def test_a_record_that_is_not_finite_contributes_nothing(sums):
    x = ordinary(torch.float64)
    without = sums(x, two_layers)
    assert bool(without.isfinite().all())
    for name in NOT_FINITE:
        torch.testing.assert_close(
            sums(with_record(x, name), two_layers), without, rtol=0, atol=1e-13
        )


@pytest.mark.parametrize("net", [linear, Magnitudes])
def test_a_record_with_a_large_gradient_contributes_exactly_c(net, sums):
    """The bound is reached: a clip norm twice too small or too large would show."""
    x = ordinary(torch.float64)
    for name in ("ordinary", "huge"):
        difference = sums(with_record(x, name), net) - sums(x, net)
        assert float(difference.norm()) == pytest.approx(C, rel=1e-9)


def test_removing_any_record_moves_the_sum_by_at_most_c(sums):
    x, y = ordinary(torch.float64), torch.arange(N) % 3
    for position in (0, 7, 8, N - 1):
        others = torch.arange(N) != position
        difference = sums(x, two_layers) - sums(x[others], two_layers, y[others])
        assert 0 < float(difference.norm()) <= C + 1e-12


def test_both_parts_of_complex_weights_get_the_noise_of_a_real_one(sums):
    z = 1e3  # records add up to N C at most
    released = sums(ordinary(torch.float64), partial(Magnitudes, 1000), noise_multiplier=z)
    for part in released.view(-1, 2).unbind(1):
        assert float(part.std()) == pytest.approx(z * C, rel=0.1)
