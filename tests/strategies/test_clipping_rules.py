"""Clipping rules in a Trainer: checks, charges, logs, and a clip norm that moves and goes on."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import (
    AdaptiveQuantile,
    Automatic,
    Checks,
    FullBatch,
    PerGroup,
)
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from tests.zoo import Classifier, clipped, flat, gradient_rows, private, records

GROUPS = PerGroup({"*0.weight": 0.3, "*0.bias": 0.1, "*": 0.2})
RULES = {"automatic": Automatic(), "groups": GROUPS, "adaptive": AdaptiveQuantile(rate=0.4)}
N = 30


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))


class EachNorm(L.Callback):
    """Writes down C of the next step, after each step."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, *_):
        self.found.append(trainer.strategy.private_run.mechanism.clip_norm)


@pytest.mark.few(3)
@pytest.mark.parametrize("engine", ["layers", "hooks"])
@pytest.mark.parametrize("rule", RULES)
def test_the_dry_run_compares_under_every_rule(rule, engine, fit, ends):
    class Coupled(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x - x.mean(0), y), batch_idx)

    options = {"clipping": RULES[rule], "engine": engine}
    ends(Coupled(network()), "couples the records", privacy=options)
    privacy = private(checks=Checks(), **options)
    fit(Classifier(network()), privacy, max_steps=1)
    report = privacy.report()
    assert report.isolation == "compared on synthetic samples"
    assert report.mechanism["clipping"] == repr(RULES[rule])


def test_without_noise_the_clip_norm_is_the_recursion_on_exact_shares(make_trainer):
    x, y = records(N)
    model, norms = Classifier(network()), EachNorm()
    rule = AdaptiveQuantile(target=0.3, rate=0.5, least=0.1, most=3.0)
    privacy = private(noise_multiplier=0.0, clipping=rule, max_grad_norm=2.0, sampling=FullBatch())
    make_trainer(max_steps=8, max_epochs=-1, callbacks=[privacy, norms]).fit(
        model, DataLoader(TensorDataset(x, y), batch_size=N)
    )
    net, clip_norm, found = network(), 2.0, []
    for _ in range(8):
        rows = gradient_rows(net, x, y)
        moved = flat(net) - 0.1 * clipped(rows, clip_norm) / N
        nn.utils.vector_to_parameters(moved, net.parameters())
        within = float((rows.norm(dim=1) <= clip_norm).double().mean())
        clip_norm = min(3.0, max(0.1, clip_norm * math.exp(-0.5 * (within - 0.3))))
        found.append(clip_norm)
    assert norms.found == pytest.approx(found, rel=1e-6)
    torch.testing.assert_close(flat(model), flat(net), rtol=0, atol=1e-5)


def fitted(make_trainer, folder, *, steps, path=None, **options):
    x, y = records(240)
    norms, logger = EachNorm(), CSVLogger(folder)
    privacy = private(noise_multiplier=1.0, clipping=AdaptiveQuantile(rate=0.4), **options)
    trainer = make_trainer(
        max_steps=steps, max_epochs=-1, callbacks=[privacy, norms], logger=logger,
        log_every_n_steps=1,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x, y), batch_size=24)
    trainer.fit(Classifier(network()), loader, ckpt_path=path, weights_only=False)
    return trainer, privacy, norms.found, logger


def test_a_clip_norm_that_moves_is_charged_once_logged_reported_and_resumed(make_trainer, tmp_path):
    trainer, privacy, norms, logger = fitted(make_trainer, tmp_path, steps=12)

    assert len(set(norms)) == 12
    assert privacy.epsilon == PLDAccountant().epsilon([(PoissonGaussian(1.0, 0.1), 12)], 1e-5)
    clip_norms = [1.0, *norms]
    for i, each in enumerate(privacy._run.signal.stretches):
        # 63 entries, with the noise of the bound of that step.
        assert each.noise_norm == pytest.approx(clip_norms[i] * math.sqrt(63 * 1.01) / 24)
        share = each.share  # of that release alone
        moved = clip_norms[i] * math.exp(-0.4 * (1 - share - 0.5))
        assert clip_norms[i + 1] == pytest.approx(moved, rel=1e-9)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["privacy/clip_norm"]]
    assert [float(row["privacy/clip_norm"]) for row in rows] == pytest.approx(norms)
    report = privacy.report()
    assert report.clip_norms == {"max_grad_norm": 1.0, "latest": norms[-1]}
    assert report.mechanism["clipping"] == repr(AdaptiveQuantile(rate=0.4))
    assert f"latest = {norms[-1]:g}" in str(report)

    trainer.save_checkpoint(path := tmp_path / "last.ckpt")
    _, resumed, more, _ = fitted(make_trainer, tmp_path / "again", steps=13, path=path)
    stretch = resumed._run.signal.stretches[-1]
    assert stretch.noise_norm == pytest.approx(norms[-1] * math.sqrt(63 * 1.01) / 24)
    assert more == [pytest.approx(norms[-1] * math.exp(-0.4 * (1 - stretch.share - 0.5)))]
    with pytest.raises(ValueError, match="clipping differs"):
        make_trainer(max_steps=13, callbacks=[private(clipping=Automatic())]).fit(
            Classifier(network()), trainer.train_dataloader, ckpt_path=path, weights_only=False
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", ["groups", "adaptive"])
def test_a_rule_learns_with_all_checks(rule, make_trainer):
    x, y = records(240)
    rate = {"groups": 2.0, "adaptive": 0.5}[rule]
    model = Classifier(network(), lambda params: torch.optim.SGD(params, lr=rate))
    privacy = private(noise_multiplier=0.3, clipping=RULES[rule], checks=Checks())
    make_trainer(max_epochs=6, callbacks=[privacy]).fit(
        model, DataLoader(TensorDataset(x, y), batch_size=24)
    )
    assert float((model(x).argmax(1) == y).double().mean()) > 0.6
    assert privacy.report().mechanism["clipping"] == repr(RULES[rule])


def test_a_parameter_without_a_group_is_named_before_anything_is_charged(ends, tmp_path):
    rule = {"clipping": PerGroup({"*.weight": 1.0}), "ledger_dir": str(tmp_path / "journal")}
    ends(Classifier(network()), r"matches the trained parameter 'net\.0\.bias'", privacy=rule)
    assert not (tmp_path / "journal").exists()
