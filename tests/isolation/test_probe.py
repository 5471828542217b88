"""The isolation probe names what couples records, lets the rest pass, and leaves no trace."""

from __future__ import annotations

import copy
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation import check_isolation, probe_isolation

SLOW = pytest.mark.slow


@pytest.mark.parametrize("engine", ["auto", pytest.param("hooks", marks=SLOW)])
def test_what_couples_records_is_named(coupled, engine):
    model, batch, words, module = coupled

    found = probe_isolation(model, batch, engine=engine)

    assert found.outcome == "coupled"
    sees_rows_alone = "number of rows" in found.reason  # then no module is named
    assert found.modules == ((module,) if module and not sees_rows_alone else ())
    with pytest.raises(AssertionError, match=f"(?s){words}"):
        raise AssertionError(found.reason)


@pytest.mark.parametrize(
    "engine",
    ["auto", pytest.param("hooks", marks=SLOW)],
)
def test_what_keeps_records_apart_passes(isolated, engine):
    model, batch = isolated

    assert probe_isolation(model, batch, engine=engine).outcome == "isolated"


def test_a_fit_refuses_it_before_anything_is_charged(coupled, make_trainer):
    model, batch, words, _ = coupled
    data = TensorDataset(*(torch.cat([leaf] * 8) for leaf in batch))
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(Exception, match=f"(?s){words}.*isolation_probe=False"):
        make_trainer(max_steps=2, callbacks=[privacy]).fit(model, DataLoader(data, batch_size=8))

    assert privacy.steps == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "probed, FAILED" in str(privacy.report())


def test_the_check_may_be_left_out(class_weighted, loader, make_trainer):
    privacy = DifferentialPrivacy(
        noise_multiplier=1.0, target_delta=1e-5, isolation_probe=False, spot_checks=False
    )

    make_trainer(max_steps=2, callbacks=[privacy]).fit(class_weighted, loader)

    assert privacy.steps == 2
    assert "isolation: opted out" in str(privacy.report())


def test_the_report_says_that_it_was_probed(model_class, make_network, loader, make_trainer):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    assert privacy.report().isolation == "not probed (no batch yet)"

    make_trainer(max_steps=1, callbacks=[privacy]).fit(
        model_class(make_network(), lambda o, y: o.square().mean()), loader
    )

    assert privacy.report().isolation == "probed, isolated"


def test_ignored_targets_are_a_condition(model_class, make_network):
    model = model_class(make_network(), F.cross_entropy)
    batch = torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)

    found = probe_isolation(model, batch)

    assert found.condition == "provided that no target is ignored (ignore_index=-100)"
    assert not found.is_doubtful


def test_several_targets_that_may_be_ignored_are_warned_of(language_model, make_trainer):
    data = TensorDataset(torch.zeros(32, 7).long(), torch.zeros(32, 7).long())
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)

    with pytest.warns(PrivacyWarning, match="targets that are not ignored"):
        make_trainer(max_steps=1, callbacks=[privacy]).fit(
            language_model, DataLoader(data, batch_size=8)
        )

    assert privacy.report().isolation.endswith("(ignore_index=-100)")


def test_a_real_batch_shows_what_synthetic_ones_do_not(language_model):
    x = torch.arange(56).view(8, 7) % 9
    y = x.clone()
    assert check_isolation(language_model, (x, y)).outcome == "isolated"
    y[1, 2:] = -100

    found = check_isolation(language_model, (x, y))

    assert found.outcome == "coupled"
    assert "ignore_index" in found.reason


def test_four_records_are_enough_and_three_are_not(class_weighted):
    batch = torch.randn(4, 6), torch.tensor([0, 2, 2, 0])

    assert check_isolation(class_weighted, batch).outcome == "coupled"
    few = check_isolation(class_weighted, (batch[0][:3], batch[1][:3]))
    assert str(few) == "not probed (the batch has 3 records; at least 4 are needed)"


def test_no_value_of_the_batch_has_a_part_in_it(class_weighted):
    poison = torch.full((5, 6), float("nan")), torch.full((5,), 10**9)

    found = probe_isolation(class_weighted, poison)

    assert found == probe_isolation(class_weighted, (torch.zeros(3, 6), torch.zeros(3).long()))
    assert found.outcome == "coupled"


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ((torch.zeros(4, 6), ["secret"] * 4), "the model raised TypeError"),
        ((torch.zeros(4, 6), torch.zeros(3).long()), "without one row for each record"),
        ({}, "the batch holds no tensor"),
    ],
)
def test_a_batch_that_cannot_be_imitated_is_not_probed(batch, why, class_weighted):
    found = probe_isolation(class_weighted, batch)

    assert found.outcome == "not probed"
    assert why in str(found)
    assert "secret" not in str(found)


class Raises(nn.Module):
    def forward(self, x):
        raise LookupError(f"the value {x[0, 0].item()} is secret")


def test_a_model_that_raises_is_not_probed_and_its_message_stays_inside(model_class):
    model = model_class(nn.Sequential(nn.Linear(6, 3), Raises()), F.cross_entropy)

    found = probe_isolation(model, (torch.zeros(4, 6), torch.zeros(4).long()))

    assert str(found) == "not probed (the model raised LookupError)"


def test_gradients_that_are_not_finite_are_no_verdict(model_class, make_network):
    model = model_class(make_network(), lambda o, y: (o - o).log().mean())

    found = probe_isolation(model, (torch.zeros(4, 6), torch.zeros(4).long()))

    assert found.outcome == "not probed"


def test_manual_optimization_is_not_probed(class_weighted):
    class_weighted.automatic_optimization = False
    batch = torch.zeros(4, 6), torch.zeros(4).long()

    assert "manual optimization" in str(probe_isolation(class_weighted, batch))


class Busy(nn.Module):
    """A module that changes its buffers, attributes and metrics, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.history: list[float] = []

    def forward(self, x):
        self.seen += 1
        self.history.append(float(x.sum()))
        random.random()
        np.random.rand()
        return self.layer(x) + torch.rand(3)


def test_it_leaves_no_trace(model_class):
    class Measured(model_class):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.accuracy(self.net(batch[0]), batch[1])
            return super().training_step(batch, batch_idx)

    model = Measured(Busy(), F.cross_entropy)
    model.accuracy = Accuracy("multiclass", num_classes=3)
    model.net.register_forward_hook(lambda *_: None)
    batch = torch.rand(4, 6), torch.zeros(4).long()
    hooks = len(model.net._forward_hooks)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)

    assert probe_isolation(model, batch).outcome == "isolated"

    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert model.net.seen == 0
    assert model.net.history == []
    assert len(model.net._forward_hooks) == hooks
    assert all(p.grad is None for p in model.parameters())
    assert "log" not in vars(model)
    assert model.accuracy.update_count == 0


class Speaks(nn.Module):
    def forward(self, x):
        print("said")
        return x


def test_nothing_is_logged_or_printed(
    model_class, make_network, loader, make_trainer, capsys, tmp_path
):
    from lightning.pytorch.loggers import CSVLogger

    class Logs(model_class):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            if self.logger is not None:
                self.logger.log_metrics({"direct": float(loss)})
            return loss

    class Memory(CSVLogger):
        logged: ClassVar[list[str]] = []

        def log_metrics(self, metrics, step=None):
            self.logged += [name for name in metrics if name == "direct"]

    trainer = make_trainer(
        max_steps=3,
        callbacks=[DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)],
        logger=Memory(str(tmp_path)),
    )
    trainer.fit(Logs(make_network(Speaks()), F.cross_entropy), loader)

    assert Memory.logged == ["direct"] * 3
    assert capsys.readouterr().out.count("said") == 3


def test_half_precision_is_probed_in_float32(model_class, make_network):
    model = model_class(make_network().bfloat16(), F.cross_entropy)
    batch = torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4).long()

    assert probe_isolation(model, batch).outcome == "isolated"


class HalvesOnly(nn.Module):
    """A comparison of the first half with the second: runs on even numbers of records only."""

    def forward(self, x):
        first, second = x.view(2, len(x) // 2, -1)
        return torch.cat([first - second, second - first])


def test_a_model_for_even_batches_is_probed_by_replacement(model_class, make_network):
    model = model_class(make_network(HalvesOnly()), F.cross_entropy)

    found = probe_isolation(model, (torch.zeros(4, 6), torch.zeros(4).long()))

    assert (found.outcome, found.modules) == ("coupled", ("net.1",))


class Wired(nn.Module):
    """Record i sees record i - 1, but only a record at this place of the batch."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x):
        x = x.clone()
        x[self.place - 1] = x[self.place - 1] + x[self.place]
        return x


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_position_is_tried(place, model_class, make_network):
    model = model_class(make_network(Wired(place)), F.cross_entropy)

    assert probe_isolation(model, (torch.zeros(4, 6), torch.zeros(4).long())).modules == ("net.1",)
