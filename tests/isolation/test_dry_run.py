"""The dry run on synthetic samples: no real value, few calls, no verdict about what raises on them."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy
from lightning_dp._refusals import Refusal
from lightning_dp.isolation.dry_run import DryRun, find_layout
from tests.isolation.conftest import BatchStatistics, Model, network, records

REFUSALS = (MisconfigurationException, Refusal)


@pytest.fixture
def fit(make_trainer):
    """Fit a module on batches of four, and return its privacy."""

    def run(module, **arguments):
        x, y = map(torch.stack, zip(*records(16), strict=True))
        privacy = DifferentialPrivacy(noise_multiplier=2.0, target_delta=1e-5, **arguments)
        trainer = make_trainer(callbacks=[privacy], max_steps=2, max_epochs=-1)
        trainer.fit(module, DataLoader(TensorDataset(x, y), 4))
        return privacy

    return run


# -- synthetic samples -------------------------------------------------------------------------------

SECRET = 7.25
REAL = {
    "x": torch.full((3, 2), SECRET), "array": np.full(4, SECRET), "number": SECRET, "whole": 725,
    "text": "secret", "bytes": b"secret", "list": [SECRET, SECRET], "nested": ({"y": torch.tensor(725)},),
    "flag": torch.tensor([True]), "half": torch.full((2,), SECRET, dtype=torch.bfloat16),
}  # fmt: skip


def leaves(sample):
    if isinstance(sample, dict):
        return [leaf for each in sample.values() for leaf in leaves(each)]
    if isinstance(sample, list | tuple):
        return [leaf for each in sample for leaf in leaves(each)]
    return [sample]


def test_made_up_samples_have_types_and_shapes_and_no_value():
    before = copy.deepcopy(REAL)
    for made in DryRun(REAL).samples(4, are_longer=False):
        for leaf, real in zip(leaves(made), leaves(REAL), strict=True):
            assert type(leaf) is type(real)
            if isinstance(leaf, str | bytes):
                assert "secret" not in str(leaf)
                continue
            assert torch.as_tensor(leaf).dtype == torch.as_tensor(real).dtype
            if torch.as_tensor(leaf).dtype != torch.bool:
                assert not (torch.as_tensor(leaf) == torch.as_tensor(real)).any()
    assert str(REAL) == str(before)


def test_made_up_samples_do_not_follow_the_values_of_the_real_one():
    other = {**REAL, "x": torch.zeros(3, 2), "text": "another", "list": [1.0, 2.0], "number": 1.0}
    assert str(DryRun(REAL).samples(4)) == str(DryRun(other).samples(4))


def test_made_up_samples_differ_from_each_other_and_one_is_longer():
    samples = DryRun((torch.zeros(5, 3), torch.zeros((), dtype=torch.int64))).samples(4)
    assert [len(x) for x, _ in samples] == [5, 5, 10, 5]
    assert not torch.equal(samples[0][0], samples[1][0])
    assert {int(y) for _, y in samples} == {0, 1}
    assert [len(x) for x, _ in DryRun((torch.zeros(5, 3), 1), have_lengths=False).samples(3)] == [
        5
    ] * 3


def test_without_a_sample_there_is_no_layout_and_no_error():
    assert find_layout(DryRun(None), list) == find_layout(None, list)


# -- in a fit --------------------------------------------------------------------------------------


class Raises(Model):
    """Does not take values between 0 and 1."""

    def training_step(self, batch, batch_idx):
        if batch[0].min() >= 0 and batch[0].max() <= 1:
            raise ValueError("features are not scaled")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["auto", "layers", "records"])
def test_a_model_that_raises_on_made_up_samples_trains_and_its_error_is_told(fit, engine):
    privacy = fit(Raises(network(), F.cross_entropy), engine=engine)

    assert privacy.steps == 2
    assert "since" not in privacy.report().mechanism["gradient engine"]  # none is ruled out by it
    if engine == "layers":
        assert "ValueError: features are not scaled" in str(privacy.report())


def contrastive(output, y):
    output = F.normalize(output)
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def standardised(output, y):
    return F.cross_entropy(output - output.mean(0), y)


def noisy_total(output, y):
    return F.cross_entropy(output + 0.01 * torch.randn_like(output), y, reduction="sum")


@pytest.mark.parametrize("loss", [contrastive, standardised])
@pytest.mark.parametrize("engine", ["auto", "layers", "records", "one_by_one"])
def test_a_loss_that_is_constant_for_one_record_is_refused(fit, loss, engine):
    ledger = []
    with pytest.raises(REFUSALS) as refusal:
        ledger.append(fit(Model(network(), loss), engine=engine))

    assert not ledger
    assert "record" in str(refusal.value)
    alone = engine in ("records", "one_by_one")
    assert not alone or "alone in its batch" in str(refusal.value)  # by the dry run


def test_a_sum_is_refused_under_random_numbers(fit):
    with pytest.raises(REFUSALS, match="reduction='mean', not 'sum'"):
        fit(Model(network(), noisy_total), engine="layers", max_grad_norm=100.0)


class Encoder(Model):
    """A variational autoencoder, whose loss is a mean or a sum over the batch."""

    def __init__(self, of):
        super().__init__(nn.Linear(6, 4), None)
        self.decoder, self.of = nn.Linear(2, 6), of

    def training_step(self, batch, batch_idx):
        x, _ = batch
        mean, log = self.net(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log / 2).exp()
        loss = (self.decoder(z) - x) ** 2
        return self.of(loss.sum(1) + 0.5 * (mean**2 + log.exp() - log - 1).sum(1))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_the_sum_of_an_autoencoder_is_refused_and_its_mean_is_not(fit, seed):
    torch.manual_seed(seed)
    with pytest.raises(REFUSALS, match="reduction='mean', not 'sum'"):
        fit(Encoder(torch.sum), engine="layers")
    fit(Encoder(torch.mean), engine="layers")


class Mixup(Model):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 0.7 * x + 0.3 * x[self.order(len(x))], y


@pytest.mark.parametrize(
    "order", [torch.randperm, lambda n: torch.from_numpy(np.random.permutation(n))]
)
def test_mixup_is_refused_before_a_charge(fit, order):
    model, ledger = Mixup(network(), F.cross_entropy), []
    model.order = order
    with pytest.raises(REFUSALS, match="synthetic samples"):
        ledger.append(fit(model))
    assert not ledger


def test_what_always_couples_is_refused_before_a_charge(make_trainer):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5, engine="layers")
    x, y = map(torch.stack, zip(*records(16), strict=True))
    model = Model(network(BatchStatistics()), F.cross_entropy)
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(REFUSALS, match=r"(?s)couples the records.*dry_run=False"):
        make_trainer(callbacks=[privacy], max_steps=2).fit(
            model, DataLoader(TensorDataset(x, y), 4)
        )

    assert privacy.steps == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_made_up_samples_that_were_not_compared_are_told_with_the_reason(fit):
    turns = []

    def otherwise(output, y):  # each time it runs, and nothing puts a closure back
        turns.append(1)
        return F.cross_entropy(output * (1 + 4 * (0.618 * len(turns) % 1)), y)

    privacy = fit(Model(network(), otherwise), engine="layers")

    assert "the same records give other gradients" in str(privacy.report())
    assert privacy.steps == 2


CTC = """
import sys, torch, lightning as L
from torch import nn
from lightning_dp.audit import check_isolation
class Speech(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.ctc = nn.Linear(5, 6), nn.CTCLoss(blank=5)
    def training_step(self, batch, batch_idx):
        x, y, lengths, target_lengths = batch
        y = torch.cat([row[:n] for row, n in zip(y, target_lengths)]) if len(sys.argv) > 1 else y
        return self.ctc(self.net(x).log_softmax(2).transpose(0, 1), y, lengths, target_lengths)
from lightning_dp.isolation.dry_run import DryRun
real = torch.zeros(9, 5), torch.zeros(3).long(), torch.tensor(9), torch.tensor(3)
try:
    print(check_isolation(Speech(), DryRun(real).samples(4, are_longer=False), engine="one_by_one"))
except Exception as error:
    print(type(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), ("concatenated",)])
def test_ctc_on_made_up_lengths_does_not_end_the_process(kind):
    done = subprocess.run(
        [sys.executable, "-c", CTC, *kind], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
