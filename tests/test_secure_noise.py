"""``secure_noise=True``: bits of a cipher, and low bits of a release that tell nothing of the sum."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Poisson, RandomAllocation
from lightning_dp._noise import CipherStream, NoiseSource, random_generator
from lightning_dp._refusals import RefusedSetting
from lightning_dp._world import World
from lightning_dp.boundary import BoundedSum, Query, Term, add_noise, begin_with_noise
from lightning_dp.help import entries
from tests.zoo import Classifier, flat, private, records

# NIST SP 800-38A, F.5.5 (CTR-AES256.Encrypt): key, first counter; plaintext and ciphertext.
KEY = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
COUNTER = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
PLAIN = "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
SECRET = "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"


def known() -> CipherStream:
    return CipherStream(bytes.fromhex(KEY + COUNTER))


def test_the_stream_is_that_of_the_standard():
    expected = np.bitwise_xor(*(np.frombuffer(bytes.fromhex(x), "u8") for x in (PLAIN, SECRET)))
    stream = known()
    np.testing.assert_array_equal(stream.bits(1), expected[:1])
    np.testing.assert_array_equal(stream.bits(3), expected[1:])


def test_uniform_numbers_and_numpy_read_the_stream():
    words = known().bits(4).copy()
    uniform = np.empty(4)
    known().random(out=uniform)
    np.testing.assert_array_equal(uniform, (words >> 12) * 2.0**-52)
    drawn = np.random.Generator(known()).integers(2**64, size=4, dtype=np.uint64)
    np.testing.assert_array_equal(drawn, words)
    np.testing.assert_array_equal(np.random.Generator(known()).random(4), (words >> 11) * 2.0**-53)


def secure(size: int, **options: int) -> Tensor:
    values = torch.zeros(size, dtype=torch.float64)
    NoiseSource(secure=True, **options).add_normal(values, 1.0)
    return values


def test_values_follow_the_normal_law():
    """Each test fails by chance once in a million runs."""
    values = secure(400_001).numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert abs(values.mean()) < 5 / math.sqrt(len(values))
    assert abs((values**2).mean() - 1) < 5 * math.sqrt(2 / len(values))
    assert abs(stats.kurtosis(values)) < 5 * math.sqrt(24 / len(values))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(len(values))


def test_no_two_sources_draw_the_same():
    """Two runs, the ranks of one, copies, and the two parts of a vector."""
    one = NoiseSource(secure=True)
    sources = [one, NoiseSource(secure=True, rank=1), copy.deepcopy(one)]
    sources.append(pickle.loads(pickle.dumps(one)))
    assert all(source.is_secure for source in sources)
    drawn = torch.zeros(4, 2, 40_000, dtype=torch.float64)
    for values, source in zip(drawn, sources, strict=True):
        source.add_normal(values.view(-1), 1.0)
    alike = torch.corrcoef(drawn.flatten(0, 1)) - torch.eye(8)
    assert float(alike.abs().max()) < 5 / math.sqrt(40_000)


def test_batches_are_sampled_from_the_stream():
    rng = random_generator(None, secure=True)
    counts = np.array([rng.binomial(1000, 0.1) for _ in range(2000)])
    assert abs(counts.mean() - 100) < 5 * math.sqrt(90 / 2000)
    places = np.bincount(
        np.concatenate([rng.choice(50, 10, replace=False, shuffle=False) for _ in range(2000)])
    )
    assert len(places) == 50 and stats.chisquare(places).pvalue > 1e-6
    other = random_generator(None, secure=True)
    assert not np.array_equal(rng.integers(2**60, size=9), other.integers(2**60, size=9))


# -- what low bits tell ----------------------------------------------------------------------------

SIZE = 1 << 18
SUMS = {"zero": 0.0, "one record more": 0.7437}  # at noise 1


def unprotected(total: Tensor, source: NoiseSource) -> Tensor:
    """Box and Muller in float32, added in float32."""
    u, v = torch.rand(2, len(total), dtype=torch.float32)
    return total + (-2 * (1 - u).log()).sqrt() * (2 * math.pi * v).cos()


def inverse_cdf(total: Tensor, source: NoiseSource) -> Tensor:
    """The quantile of a uniform float32 number, added in float32."""
    return total + torch.special.ndtri(torch.rand(len(total)) * (1 - 2**-20) + 2**-24)


def released(total: Tensor, source: NoiseSource) -> Tensor:
    """By the one function that adds noise."""
    asked = Query((Term(),), 1.0, 1.0)
    return add_noise(BoundedSum.received(total, asked), 1.0, source, World()).value


def is_possible(values: Tensor, total: float) -> float:
    """The share of results, of an attacker's choice, that float32 noise can make from a sum.

    A sum of 0.74 and noise of about -0.74 are both multiples of 2^-24, and so is what they make;
    of 0 and small noise, which has digits of its own, hardly anything is.
    """
    near_0 = values[values.abs() < 2.0**-6].double()
    assert len(near_0) > 500
    moved = near_0 - float(torch.tensor(total)) * (total != 0)
    on_grid = (moved * 2.0**24) % 1 == 0
    return float(on_grid.double().mean())


def tells_sums_apart(draw: Callable[[Tensor, NoiseSource], Tensor], source: NoiseSource) -> bool:
    """One look at the digits behind 2^-24 of results near 0."""
    shares = [is_possible(draw(torch.full((SIZE,), s), source), s) for s in SUMS.values()]
    return abs(shares[0] - shares[1]) > 0.1


def test_low_bits_tell_sums_apart_where_nothing_is_done():
    """The default source too: its float32 addition is as ``docs`` say, no protection."""
    for draw in (unprotected, inverse_cdf, released):
        assert tells_sums_apart(draw, NoiseSource())


def test_low_bits_of_a_secure_release_tell_nothing():
    source = NoiseSource(secure=True)
    assert not tells_sums_apart(released, source)
    low_bits = []
    for total in SUMS.values():
        steps = released(torch.full((SIZE,), total), source).double() * 2.0**20
        assert bool((steps == steps.round()).all())
        digits = torch.bincount((steps % 16).long(), minlength=16).numpy()
        assert stats.chisquare(digits).pvalue > 1e-6
        low_bits.append(digits)
    assert stats.chi2_contingency(low_bits).pvalue > 1e-6


def test_a_protected_release_has_the_noise_that_was_charged():
    for size, std in ((40_001, 3.0), (999, 1e-4)):
        asked = Query((Term(),), std, 1.0)
        total = BoundedSum.received(torch.ones(size) * std, asked)
        found = add_noise(total, 1.0, NoiseSource(secure=True), World())
        assert found.noise_std == std and found.value.dtype == torch.float32
        assert stats.kstest(found.value.double().numpy() / std - 1, "norm").pvalue > 1e-6


def test_noise_drawn_in_the_background_meets_the_sum_in_float64():
    params, asked = [nn.Parameter(torch.zeros(200, 400))], Query((Term(),), 1.0, 1.0)
    source = NoiseSource(secure=True)
    total = begin_with_noise(asked, params, source, World())()
    assert total.value.dtype == torch.float64
    total.value.add_(0.7437)
    found = add_noise(total, 1.0, source, World()).value
    steps = found.double() * 2.0**20
    assert bool((steps == steps.round()).all())
    assert stats.kstest(found.double().numpy() - 0.7437, "norm").pvalue > 1e-6


class Ranks(World):
    """The parts that two ranks add up."""

    def all_reduce(self, vector: Tensor) -> Tensor:
        assert vector.dtype == torch.float64
        return vector + 0.1 + 2.0**-40


def test_the_sum_over_ranks_is_rounded_after_all_were_added():
    asked = Query((Term(),), 1.0, 1.0)
    total = BoundedSum.received(torch.zeros(5000), asked)
    found = add_noise(total, 1.0, NoiseSource(secure=True), Ranks(0, 2)).value.double() * 2.0**20
    assert bool((found == found.round()).all())


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["layers", "records", "ghost", "one_by_one"])
def test_a_private_fit_with_secure_noise(make_trainer, engine):
    x, y = records(60)
    model = Classifier(nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3)))
    privacy = private(secure_noise=True, engine=engine)
    make_trainer(callbacks=[privacy], max_steps=4).fit(model, DataLoader(TensorDataset(x, y), 12))
    assert privacy.steps == 4 and bool(flat(model).isfinite().all())
    report = privacy.report()
    assert report.private and "AES-256" in report.mechanism["random numbers"]


@pytest.mark.parametrize("sampling", [Poisson(), RandomAllocation()])
def test_batches_of_a_fit_come_from_the_cipher_too(make_trainer, monkeypatch, sampling):
    """It runs without the generator that is seeded."""
    monkeypatch.setattr(np.random, "PCG64DXSM", None)
    loader = DataLoader(TensorDataset(*records(60)), 12)
    for is_secure in (True, False):
        privacy, model = (
            private(secure_noise=is_secure, sampling=sampling),
            Classifier(nn.Linear(6, 3)),
        )
        trainer = make_trainer(callbacks=[privacy], max_steps=4)
        with contextlib.nullcontext() if is_secure else pytest.raises(TypeError):
            trainer.fit(model, loader)


@pytest.mark.parametrize("secure_noise", [False, True])
def test_weights_without_a_gradient_get_the_noise_that_was_charged(make_trainer, secure_noise):
    """Noise of so many weights is drawn in the background; secure noise on its grid."""
    net = nn.Linear(200, 300, bias=False)
    x = torch.zeros(40, 200)
    model = Classifier(net, partial(torch.optim.SGD, lr=1.0))
    before = flat(model)
    privacy = private(secure_noise=secure_noise, noise_multiplier=1.0)
    loader = DataLoader(TensorDataset(x, torch.zeros(40).long()), 8)
    make_trainer(callbacks=[privacy], max_steps=1).fit(model, loader)
    noise = 8 * (before - flat(model)).double().numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-6


def test_a_seed_contradicts_it():
    with pytest.raises(ValueError, match=r"secure_noise=True.*seed=3"):
        private(secure_noise=True, seed=3)


def test_a_missing_cipher_is_told_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(RefusedSetting, match=r"pip install 'lightning-dp\[secure\]'") as refusal:
        private(secure_noise=True)
    assert refusal.value.topic in entries()
