"""Everything that a fit prints, in every state of a run: right, short, and each thing once."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, Subset

from lightning_dp import About, Checks, UserLevel
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.plan.advice import before
from lightning_dp.report import run_report
from lightning_dp.schedules import Exponential


@dataclass
class Fit:
    """A fit that is over, and what it printed.

    Args:
        lines: of this package, each with its place.
        warned: the texts of its warnings.
    """

    privacy: DifferentialPrivacy
    trainer: L.Trainer
    lines: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join([*self.lines, *self.warned])

    @property
    def first_line(self) -> str:
        return str(self.privacy.report()).splitlines()[0]


@pytest.fixture
def train(
    classifier: Any, mlp: Any, loader: Any, make_trainer: Any, caplog: Any, monkeypatch: Any
) -> Callable[..., Fit]:
    """Fits a new model of 240 records, 24 in a batch, for 2 epochs, as if in a process of its own."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        caplog.set_level(logging.INFO, logger=name)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)

    def run(
        *,
        privacy: DifferentialPrivacy | None = None,
        model: Any = None,
        data: Any = None,
        callbacks: tuple[L.Callback, ...] = (),
        ckpt_path: Any = None,
        max_epochs: int = 2,
        **options: Any,
    ) -> Fit:
        monkeypatch.setattr(run_report, "_process", run_report._Process())
        arguments = {"target_delta": 1e-5, "checks": Checks(dry_run=False), **options}
        privacy = privacy or DifferentialPrivacy(**arguments)
        fit = Fit(privacy, make_trainer(max_epochs=max_epochs, callbacks=[privacy, *callbacks]))
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = loader if data is None else data
            model = classifier(mlp()) if model is None else model
            fit.trainer.fit(model, data, loader, ckpt_path=ckpt_path, weights_only=False)
        messages = [record.getMessage() for record in caplog.records]
        ours = [each for each in messages if each.startswith("privacy")]
        fit.lines = [line for message in ours for line in message.splitlines()]
        fit.warned = [str(w.message) for w in caught if issubclass(w.category, PrivacyWarning)]
        return fit

    return run


# -- the states --------------------------------------------------------------------------------


def resumed(train, classifier, mlp, tmp_path):
    train(noise_multiplier=2.0).trainer.save_checkpoint(tmp_path / "a.ckpt")
    return train(noise_multiplier=2.0, ckpt_path=tmp_path / "a.ckpt", max_epochs=3)


def resumed_for_longer_than_its_plan(train, classifier, mlp, tmp_path):
    train(target_epsilon=3.0).trainer.save_checkpoint(tmp_path / "a.ckpt")
    return train(target_epsilon=3.0, ckpt_path=tmp_path / "a.ckpt", max_epochs=4)


def spent_by_an_earlier_fit(train, *_):
    return train(privacy=train(target_epsilon=3.0).privacy)


def with_a_one_cycle_schedule(train, classifier, mlp, tmp_path):
    class Cycled(classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters())
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    return train(target_epsilon=3.0, model=Cycled(mlp()))


def with_a_loss_of_nan(train, classifier, mlp, tmp_path):
    class Broken(classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * torch.nan

    return train(target_epsilon=3.0, model=Broken(mlp()), max_epochs=4)


CHANGES = r"try: batch_size=\d+ \(or batch_size × accumulate_grad_batches\), max_epochs=\d+"
CLAIM = r"ε = ([\d.]+|inf) at δ = 1e-05 \(add_remove\), {} steps"

# State; what is printed; what is not; the first line of the report.
STATES = [
    (
        "fresh",
        lambda train, *_: train(target_epsilon=3.0),
        ["20 steps (2 epochs)", CHANGES],
        ["plan"],
        CLAIM.format(20) + ", target ε = 3$",
    ),
    ("resumed", resumed, [r"resumed after 20 of 30 steps"], ["try:"], CLAIM.format(30) + "$"),
    (
        "resumed_for_longer_than_its_plan",
        resumed_for_longer_than_its_plan,
        ["No training step was made"],
        ["advice", "try:"],
        CLAIM.format(20),
    ),
    (
        "ended_by_its_budget",
        lambda train, *_: train(target_epsilon=1.0, noise_multiplier=2.0, max_epochs=50),
        [r"the budget ends after \d+ of 500 steps; leave noise_multiplier out", "budget reached"],
        ["try: batch_size.*\n.*try: batch_size", "too few"],
        r"target ε = 1$",
    ),
    (
        "after_a_fit_that_spent_the_budget",
        lambda train, *_: train(privacy=train(target_epsilon=3.0).privacy),
        ["No training step was made"],
        ["advice", "try:", "noise_multiplier out"],
        CLAIM.format(20),
    ),
    (
        "after_a_fit_that_spent_a_part",
        lambda train, *_: train(privacy=train(target_epsilon=3.0, noise_multiplier=3.0).privacy),
        ["advice"],
        ["try:", "full batches"],
        CLAIM.format(40),
    ),
    (
        "stopped_by_a_result",
        lambda train, *_: train(
            target_epsilon=3.0,
            callbacks=(EarlyStopping("val_loss", min_delta=1e9, patience=2),),
            max_epochs=10,
        ),
        [
            r"ε = [\d.]+ of 3 at .* after 30 noised steps; ε = 2.99\d for the whole plan, to be claimed"
        ],
        [],
        r"^ε = 2.99\d at .*, 30 steps of a plan that counts whole if a result .*; else ε = 1",
    ),
    (
        "spent_by_an_earlier_fit",
        spent_by_an_earlier_fit,
        ["No training step was made.* leaves nothing to calibrate noise for"],
        ["advice", "inf"],
        CLAIM.format(20),
    ),
    (
        "with_a_noise_schedule",
        lambda train, *_: train(target_epsilon=3.0, noise_schedule=Exponential(0.1)),
        ["20 steps (2 epochs)"],
        [],
        CLAIM.format(20),
    ),
    (
        "with_a_large_delta",
        lambda train, *_: train(target_epsilon=3.0, target_delta=0.05),
        ["target_delta=0.05 is not below 1/N"],
        ["sample rate", "batch_size="],
        r"at δ = 0.05 \(add_remove\), 20 steps",
    ),
    ("with_a_one_cycle_schedule", with_a_one_cycle_schedule, [CHANGES], ["lr="], CLAIM.format(20)),
    (
        "with_a_loss_of_nan",
        with_a_loss_of_nan,
        ["No gradient signal above the noise", "Check that the loss is a finite number"],
        ["try: batch_size.*\n(.*\n)*.*try: batch_size"],
        CLAIM.format(40),
    ),
    (
        "without_noise",
        lambda train, *_: train(noise_multiplier=0.0),
        [r"noise multiplier z = 0, ", r"privacy: NOT PRIVATE \(no noise\): ε = inf at"],
        ["try:", "full batches"],
        r"^NOT PRIVATE \(no noise\): ε = inf",
    ),
    (
        "with_an_epsilon_of_millions",
        lambda train, *_: train(target_epsilon=4e6),
        [
            r"ε = 4e\+06 promises next to nothing",
            r"after .*; so large an ε promises next to nothing",
        ],
        [],
        "so large an ε promises next to nothing$",
    ),
    (
        "with_hardly_any_noise",
        lambda train, *_: train(noise_multiplier=1e-3),
        ["after 20 noised steps; so large an ε promises next to nothing"],
        [],
        "so large an ε promises next to nothing$",
    ),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("state", "printed", "absent", "claim"),
    [each[1:] for each in STATES],
    ids=[s[0] for s in STATES],
)
def test_a_fit_prints_what_is_right_in_its_state(
    state, printed, absent, claim, train, classifier, mlp, tmp_path
):
    fit = state(train, classifier, mlp, tmp_path)

    for pattern in printed:
        pattern = pattern.replace("(2 epochs)", r"\(2 epochs\)")
        assert re.search(pattern, fit.text), (pattern, fit.text)
    for pattern in absent:
        assert not re.search(pattern, fit.text), (pattern, fit.text)
    assert len(fit.lines) + len(fit.warned) <= 6, fit.text
    assert len({*fit.lines}) == len(fit.lines)  # each thing once
    assert re.search(claim, fit.first_line), fit.first_line
    report = fit.privacy.report()
    assert len(str(report).splitlines()) == 9
    assert not re.search(r"\d\.\d{7}", fit.text + str(report))
    assert "z = inf" not in str(report)
    assert (" at the latest step" in str(report)) == (len(report.events.history()) > 1)


def test_two_processes_read_their_part_of_a_batch(train):
    setting = train(target_epsilon=3.0).privacy._run.setting
    (alone,) = re.findall(r"batch_size=(\d+)", before(setting)[-1])
    words = before(replace(setting, processes=2))[-1]
    (each,) = re.findall(r"batch_size=(\d+) on each of 2 processes", words)
    assert 2 * int(each) == int(alone)


# -- other journals ----------------------------------------------------------------------------


@pytest.fixture
def about_others(train) -> Callable[..., str]:
    def lines(**options: Any) -> str:
        fit = train(noise_multiplier=3.0, **options)
        return "\n".join(line for line in fit.lines if "other journal" in line)

    return lines


def test_journals_of_refused_fits_are_not_counted(about_others, train, classifier, mlp):
    class Refused(classifier):
        def on_train_start(self):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        train(noise_multiplier=3.0, model=Refused(mlp()))
    assert about_others() == ""


def test_a_run_without_noise_does_not_spoil_the_sum_for_ever(about_others, train):
    train(noise_multiplier=0.0)
    train(noise_multiplier=3.0)
    start, end = about_others().splitlines()
    for line in (start, end):
        assert "2 other journals" in line and re.search(r"ε = \d", line)
        assert "1 without noise" in line
    assert "ε = inf" not in end


def test_journals_are_compared_by_the_name_and_the_number_of_records(about_others, blobs):
    def part(number: int) -> DataLoader[Any]:
        return DataLoader(Subset(blobs, range(number)), batch_size=24)

    other = "1 of other data (another name, or number of records)"
    about_others()
    assert other in about_others(data=part(120))
    one, two = (About(data_set=name) for name in ("visits", "pictures"))
    assert "2 of other data" not in about_others(about=one)  # only the part has another size
    assert "ε = " in (found := about_others(about=one, data=part(96))) and "2 of other" in found
    assert "4 of other data" in about_others(about=two, data=part(72))


@pytest.mark.few(1)
@pytest.mark.parametrize("about", [None, About(data_set="visits")])
def test_users_are_added_up_with_users_and_not_with_records(about_others, about):
    unit = UserLevel(ids=lambda data: [*range(len(data))], most_rows=1)
    about_others(about=about)
    assert "1 of other data" in about_others(about=about, unit=unit)
    found = about_others(about=about, unit=unit)
    assert "ε = " in found and "1 of other data" in found
